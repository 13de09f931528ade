"""Number by number against what the authors' code computes from the same weights."""

import pytest
import torch
from safetensors.torch import load_file
from treeflash_eagle3.drafter import Eagle3
from treeflash_eagle3.unrolling import Roots, unroll

from treeflash.components.selectors.opt_tree import OptTree
from treeflash.packed_text import PackedText
from treeflash.types import Limits

BUDGET, BEAM, DEPTH = 30, 6, 5


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def tables(golden):
    return load_file(golden / "eagle3.safetensors")


@pytest.fixture
def drafter(golden, tiny_target):
    # Their depth counts the levels behind the first.
    made = Eagle3.from_checkpoint(golden / "tiny-eagle3", tiny_target, children=BEAM, max_depth=DEPTH + 1)
    made.bind(tiny_target)
    return made


def ids(tables, name):
    return tables[name].long()[None]


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def paths(tables, call):
    """The stored tree as a set of token paths; a parent comes before its children."""
    spelled = []
    tokens, parents = (tables[f"{call}.tree.{name}"].tolist() for name in ("token_ids", "parents"))
    for token, parent in zip(tokens, parents, strict=True):
        spelled.append(() if parent < 0 else (*spelled[parent], token))
    return set(spelled[1:])


def drafted(drafter, state, recent, depth=DEPTH + 1):
    limits = Limits(BUDGET, depth)
    return OptTree(BUDGET, depth=depth, beam=BEAM).select(drafter.propose(state, recent, limits), limits)


def test_states_and_logits_at_every_position(drafter, tables):
    token_ids, features = ids(tables, "input_ids"), tables["features"]
    state = drafter.start(1, 32)
    for place in range(len(features)):
        drafter.extend(
            state, token_ids[:, place : place + 1], features[None, place : place + 1], torch.ones(1).long()
        )
        draft = drafter.propose(state, token_ids[:, place : place + 2], Limits(BUDGET, 1))
        output = draft.outputs[0, 0]
        close(output, tables["hidden"][place])
        close(draft.head.logits(drafter.network.norm(output)), tables["logits"][place])


def test_states_and_logits_as_training_computes_them(drafter, tables, tiny_target):
    token_ids, features = ids(tables, "input_ids")[0], tables["features"]
    text = PackedText.pack([(token_ids[:1].tolist(), token_ids[1:].tolist())])
    roots = Roots(text, range(1, len(token_ids)), 1)
    # The last token has no state of the target's; nothing looks at it.
    taps = torch.cat([features, torch.zeros(1, features.shape[1])])
    outputs = unroll(drafter.network, tiny_target.embed(token_ids), drafter.network.fc(taps), roots)[:, 0]
    close(outputs, tables["hidden"])
    close(drafter.network.lm_head(drafter.network.norm(outputs)), tables["logits"])


@pytest.mark.parametrize("depth", [DEPTH, DEPTH + 1])
def test_trees_of_both_calls(drafter, tables, depth):
    first, second = ids(tables, "input_ids"), ids(tables, "second.input_ids")
    state = drafter.start(1, 32)
    drafter.extend(state, first[:, :-1], tables["features"][None], torch.tensor([24]))
    tree = drafted(drafter, state, first[:, -2:], depth)
    assert set(tree.paths()) == paths(tables, "first")
    assert int(tree.num_nodes) == 31
    drafter.extend(state, second[:, 24:27], tables["second.features"][None], torch.tensor([3]))
    assert set(drafted(drafter, state, second[:, -2:], depth).paths()) == paths(tables, "second")


def test_first_level_has_the_stored_distribution(drafter, tables):
    token_ids = ids(tables, "input_ids")
    state = drafter.start(1, 32)
    drafter.extend(state, token_ids[:, :-1], tables["features"][None], torch.tensor([24]))
    draft = drafter.propose(state, token_ids[:, -2:], Limits(BUDGET, 2))
    children = draft.children(1, draft.root())
    best = tables["logits"][-1].log_softmax(dim=-1).topk(BEAM)
    close(children.log_probs[0, 0], best.values)
    assert children.token_ids[0, 0].tolist() == drafter.network.target_ids()[best.indices].tolist()

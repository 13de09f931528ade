"""What a draft model says of every node is what the model itself says behind that node's path."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treeflash.types import Limits

from .draft_model_helpers import VOCAB, drafter_of, extend, propose, row

# The window of gemma3's sliding layers is 5: shorter than texts and drafts.
FAMILIES = ["llama", "gemma3", "gpt2"]
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-5}  # log-probabilities are float32
# The device does not change between examples.
fixed_device = settings(
    derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
tokens = st.integers(0, VOCAB - 1)


@torch.no_grad()
def expected_log_probs(drafter, text):
    """By the model's own forward over the whole text: no cache, no mask, no positions given."""
    model = drafter.model.model
    logits = model(input_ids=row(text, model.device), use_cache=False).logits[0, -1]
    return (logits.double() / drafter.temperature).log_softmax(dim=-1)


def check_children(drafter, text, token_ids, log_probs):
    expected = expected_log_probs(drafter, text)
    tolerance = TOLERANCE[drafter.model.dtype]
    torch.testing.assert_close(log_probs.double(), expected[token_ids], atol=tolerance, rtol=0)
    best = expected.topk(len(token_ids)).values
    torch.testing.assert_close(log_probs.double(), best, atol=tolerance, rtol=0)


@torch.inference_mode()
def explore(drafter, proposal, text, choose):
    """Goes down the levels and compares every node that is reached.

    Args:
        drafter: The drafter.
        proposal: Its draft behind the text.
        text: The text.
        choose: From a level's handles and paths to the indices to go on from; -1 for a slot that is none.

    Returns:
        The paths that were read.
    """
    handles, paths, read = proposal.root(), [()], []
    for depth in range(1, proposal.depth + 1):
        children = proposal.children(depth, handles)
        below = []
        for slot, path in enumerate(paths):
            if path is None:
                continue
            read.append(path)
            ids = children.token_ids[0, slot]
            check_children(drafter, [*text, *path], ids, children.log_probs[0, slot])
            below += [
                (handle, (*path, token))
                for handle, token in zip(children.handles[0, slot].tolist(), ids.tolist(), strict=True)
            ]
        if depth == proposal.depth:
            assert bool((children.handles == -1).all())
            break
        chosen = [(-1, None) if index < 0 else below[index] for index in choose(len(below))]
        handles = torch.tensor([[handle for handle, _ in chosen]], device=children.handles.device)
        paths = [path for _, path in chosen]
    return read


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "fp64"])
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(fixed_device, max_examples=10)
def test_every_path_has_the_models_own_distribution(data, family, dtype, device):
    drafter = drafter_of(family, dtype, device, depth=7, children=3)
    text = data.draw(st.lists(tokens, min_size=1, max_size=14))

    def choose(count):
        # In any order, with slots that hold no node between them, as on a GPU.
        index = st.integers(-1, count - 1)
        chosen = data.draw(
            st.lists(index, min_size=1, max_size=4, unique_by=lambda i: i if i >= 0 else object())
        )
        return chosen

    state = drafter.start(1, 64)
    extend(drafter, state, text[:-1])
    explore(drafter, propose(drafter, state, text, Limits(4, 7)), text, choose)


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(fixed_device, max_examples=12)
def test_after_any_steps_the_distributions_are_those_of_the_text(data, family, device):
    """Some of a draft is accepted, or none, or text is taken back: rows that are kept are the text's."""
    drafter = drafter_of(family, torch.float64, device, depth=4, children=3)
    text = data.draw(st.lists(tokens, min_size=1, max_size=8))
    state = drafter.start(1, 64)
    extend(drafter, state, text[:-1])
    for _ in range(data.draw(st.integers(2, 5))):
        proposal = propose(drafter, state, text, Limits(3, data.draw(st.integers(1, 4))))
        read = explore(
            drafter,
            proposal,
            text,
            lambda count: data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True)),
        )
        path = data.draw(st.sampled_from(read))
        path = path[: data.draw(st.integers(0, len(path)))]
        bonus = data.draw(st.lists(tokens, min_size=1, max_size=2))
        extend(drafter, state, [text[-1], *path, *bonus[:-1]])
        text = [*text, *path, *bonus]
        if data.draw(st.booleans()):
            length = data.draw(st.integers(0, len(text) - 1))
            drafter.rewind(state, torch.tensor([length]))
            text = text[: length + 1]
    explore(drafter, propose(drafter, state, text, Limits(3, 4)), text, lambda count: [0])


def test_a_step_without_a_draft_keeps_nothing_of_the_one_before(device):
    drafter = drafter_of("llama", torch.float64, device, depth=3, children=3)
    state = drafter.start(1, 32)
    extend(drafter, state, [3, 1])
    explore(drafter, propose(drafter, state, [3, 1, 4], Limits(2, 3)), [3, 1, 4], lambda count: [0, 1])
    # The anchor's token comes again, and this time it was not drafted.
    for _ in range(2):
        extend(drafter, state, [4])
    text = [3, 1, 4, 4, 2]
    explore(drafter, propose(drafter, state, text, Limits(2, 3)), text, lambda count: [0, 1])


def test_what_is_taken_back_behind_a_draft_takes_the_draft_with_it(device):
    drafter = drafter_of("llama", torch.float64, device, depth=3, children=3)
    state = drafter.start(1, 32)
    extend(drafter, state, [3, 1, 5])
    explore(drafter, propose(drafter, state, [3, 1, 5, 4], Limits(2, 3)), [3, 1, 5, 4], lambda count: [0, 1])
    drafter.rewind(state, torch.tensor([1]))
    # The anchor's token again, at another position.
    extend(drafter, state, [4])
    explore(drafter, propose(drafter, state, [3, 4, 2], Limits(2, 3)), [3, 4, 2], lambda count: [0, 1])


def test_a_slot_that_holds_no_node_is_not_taken_for_the_anchor(device):
    drafter = drafter_of("llama", torch.float64, device, depth=3, children=3)
    state = drafter.start(1, 32)
    extend(drafter, state, [3, 1])
    # What such a slot is read as has token 0 and no parent, as this anchor has.
    explore(drafter, propose(drafter, state, [3, 1, 0], Limits(2, 3)), [3, 1, 0], lambda count: [0, -1])
    extend(drafter, state, [0])
    explore(drafter, propose(drafter, state, [3, 1, 0, 2], Limits(2, 3)), [3, 1, 0, 2], lambda count: [0, 1])


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_temperature_divides_the_logits(temperature, device):
    drafter = drafter_of("llama", torch.float64, device, temperature=temperature)
    state = drafter.start(1, 16)
    extend(drafter, state, [3, 1, 4])
    explore(drafter, propose(drafter, state, [3, 1, 4, 1], Limits(2, 3)), [3, 1, 4, 1], lambda count: [0, 1])

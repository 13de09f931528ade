"""Weights that change in ways that torch does not count: the next text is of the model as it is now."""

import copy

import attrs
import pytest
import torch
from torch.nn import functional

from treeflash.components.builders.top_m import TopM
from treeflash.components.drafters.dflash import DFlash
from treeflash.components.refiners.swiglu import SwiGlu
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.target import load_target, wrap_model
from treeflash.testing.families import tiny_model
from treeflash.testing.reference import reference_text
from treeflash.tree import TokenTree

from .target_helpers import BROAD, BROAD_PROMPT, row

PROMPT = [2, *b"Ana has 7 coins. Ana"]


def read(target):
    """Logits of a prompt's end and of a tree behind it, at the beginning of a text."""
    tree = TokenTree.from_lists(*BROAD, device=target.device)
    with torch.inference_mode():
        state = target.start(1, 100, ())
        last = target.prefill(state, row(BROAD_PROMPT, target.device)).logits[0]
        return torch.cat([last, target.verify(state, tree).logits[0]]).float()


def zero_a_row(model):
    model.get_output_embeddings().weight.data[7].zero_()


def swap_two_rows(model):
    weight = model.get_output_embeddings().weight.data
    weight[[7, 9]] = weight[[9, 7]]


def move_a_value(model):
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] += 4


def merge(model):
    """As adapters are."""
    model.model.layers[0].mlp.down_proj.weight.data.mul_(-1)


def set_memory(model):
    weight = model.model.layers[1].self_attn.v_proj.weight
    with torch.no_grad():
        weight.set_(weight.flip(0).clone())


def through_numpy(model):
    model.model.layers[1].self_attn.q_proj.weight.data.view(torch.int16).numpy()[::2] ^= -32768


EDITS = [zero_a_row, swap_two_rows, move_a_value, merge, set_memory, through_numpy]


@pytest.mark.parametrize("edit", EDITS)
def test_the_next_text_is_of_the_model_as_it_is(edit):
    model = tiny_model("llama", dtype=torch.bfloat16)
    target = wrap_model(model)
    before, laid_out = read(target), target.lean.head.made
    assert torch.equal(read(target), before)
    assert target.lean.head.made is laid_out
    edit(model)
    after = read(target)
    assert not torch.equal(after, before)
    assert torch.equal(after, read(wrap_model(model)))


def test_weights_made_while_inferring():
    """torch counts no change of these."""
    with torch.inference_mode():
        model = tiny_model("llama", dtype=torch.bfloat16)
        target = wrap_model(model)
        before = read(target)
        model.lm_head.weight[5].zero_()
        assert not torch.equal(read(target), before)
        assert torch.equal(read(target), read(wrap_model(model)))


@pytest.mark.parametrize("edit", [zero_a_row, move_a_value])
def test_compiled_passes_are_made_anew(edit, monkeypatch):
    monkeypatch.setattr("torch.compile", lambda function, **options: function)
    model = tiny_model("llama")
    target = wrap_model(model, compiled=True)
    read(target)
    made = target.compiled._pass
    read(target)
    assert target.compiled._pass is made
    edit(model)
    read(target)
    assert target.compiled._pass is not made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("edit", [zero_a_row, swap_two_rows])
def test_gathered_rows_of_the_head(family, dtype, edit, device):
    """Of each drafter's, whatever reads the target."""
    model = tiny_model(family, dtype=dtype, device=device)
    target = wrap_model(model)
    several = [torch.tensor([1, 7, 9]), torch.tensor([7, 30]), None]
    heads = [target.head(columns, target.dtype) for columns in several]
    states = torch.linspace(-1, 1, target.hidden_size, device=device)[None].to(dtype)

    def found():
        with torch.inference_mode():
            return [head(states) for head in heads]

    first = found()
    edit(model)
    target.start(1, 9, ())
    weight = model.get_output_embeddings().weight.detach()
    for columns, head, before in zip(several, found(), first, strict=True):
        rows = weight if columns is None else weight[columns.to(device)]
        torch.testing.assert_close(head, functional.linear(states, rows), rtol=1e-2, atol=1e-2)
        assert not torch.equal(head, before)


def test_parts_follow_their_own_weights(models):
    """What stale weights cost are drafts, and no error tells."""
    target = load_target(models / "tiny-target", dtype="bfloat16", device="cpu")
    drafter, refiner = (kind.from_checkpoint(models / "tiny-treeflash", target) for kind in (DFlash, SwiGlu))

    def trees(*parts):
        """The scores that a decoder of these parts drafts by."""
        stream = Decoder(target, parts[0], TopM(), parts[1], OptTree(15)).stream(PROMPT)
        return [next(stream).tree for _ in range(3)][-1].log_weights

    attention = drafter.network.layers[0].self_attn
    edited = {
        "alone": drafter.network.layers[-1].mlp.down_proj,
        "joined for the context": attention.v_proj,
        "joined for the block": attention.q_proj,
        "in columns": next(part for part in refiner.network.modules() if isinstance(part, torch.nn.Linear)),
    }
    for name, part in edited.items():
        before = trees(drafter, refiner)
        part.weight.data.mul_(-3)
        after = trees(drafter, refiner)
        assert not torch.equal(after, before), name
        # Copies are without what was made of the weights.
        fresh = [attrs.evolve(each, network=copy.deepcopy(each.network)) for each in (drafter, refiner)]
        assert torch.equal(after, trees(*fresh)), name


def test_text_after_an_edit(models):
    target = load_target(models / "tiny-target", dtype="float32", device="cpu")
    decoder = Decoder(target)
    decoder.generate(PROMPT, max_new_tokens=4)
    target.model.get_output_embeddings().weight.data[32].zero_()
    found = decoder.generate(PROMPT, max_new_tokens=12).token_ids
    assert list(found) == reference_text(target.model, PROMPT, 12)

"""Compiled passes: the same as those that are not, and given up where compiling fails."""

import functools

import pytest
import torch

from treeflash.components.builders.marginal import Marginal
from treeflash.components.refiners.none import NoRefiner
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.target import wrap_model
from treeflash.testing.families import tiny_model
from treeflash.testing.oracle import Oracle
from treeflash.testing.reference import reference_text

PROMPT = [5, 3, 8, 1, 9]


def count_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


# The compiler's own.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_passes_write_the_same_text():
    """Two graphs serve every length of the text and every size of the tree."""
    model = tiny_model("llama", num_hidden_layers=1)
    target = wrap_model(model, compiled=True)
    before = count_graphs()
    for prompt in (PROMPT, PROMPT * 3):
        expected = reference_text(model, prompt, 30)
        drafter = Oracle([*prompt, *expected], [0.7] * 4)
        assert list(Decoder(target).generate(prompt, max_new_tokens=30).token_ids) == expected
        for budget in (3, 9):
            decoder = Decoder(target, drafter, Marginal(), NoRefiner(), OptTree(budget))
            assert list(decoder.generate(prompt, max_new_tokens=30).token_ids) == expected
    assert count_graphs() - before == 2
    assert not target.compiled.failed


def test_changed_weights_are_compiled_anew(monkeypatch):
    """Graphs on a CPU hold them."""
    made = []

    def compiled(lean, taps):
        made.append(taps)
        return functools.partial(lean, tap_layers=taps, last_logits=False)

    monkeypatch.setattr("treeflash.target.compiled._compiled", compiled)
    model = tiny_model("llama", num_hidden_layers=1)
    decoder = Decoder(wrap_model(model, compiled=True))
    for _ in range(2):
        decoder.generate(PROMPT, max_new_tokens=5)
    assert made == [()]
    with torch.no_grad():
        model.lm_head.weight.neg_()
    decoder.generate(PROMPT, max_new_tokens=5)
    assert made == [(), ()]


def fail(*args, **kwargs):
    raise RuntimeError("no compiler here\nat all")


def test_where_compiling_fails_passes_are_taken_as_they_are(monkeypatch):
    """After one warning."""
    model = tiny_model("llama", num_hidden_layers=1)
    target = wrap_model(model, compiled=True)
    monkeypatch.setattr("torch._dynamo.convert_frame.compile_frame", fail)
    with pytest.warns(RuntimeWarning, match="target.compile: .*no compiler here") as found:
        result = Decoder(target).generate(PROMPT, max_new_tokens=10)
    assert len(found) == 1
    assert list(result.token_ids) == reference_text(model, PROMPT, 10)
    assert target.compiled.failed


def test_other_families_are_not_compiled():
    with pytest.warns(RuntimeWarning, match=r"target\.compile: Gemma3ForCausalLM is read by its own forward"):
        target = wrap_model(tiny_model("gemma3"), compiled=True)
    assert target.compiled is None

"""Compiled passes: the same as those that are not, and given up where compiling fails.

But for one test, which `pytest -m slow` runs, the compiler is cut off: behind its reading of the code, or
altogether.
"""

import gc
import os
import shutil
import subprocess
import sys
import weakref
from functools import partial

import pytest
import torch

from treeflash import room
from treeflash.components.builders.marginal import Marginal
from treeflash.components.refiners.none import NoRefiner
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.costs import PassCosts
from treeflash.engine import Decoder
from treeflash.evaluation.work import count_work
from treeflash.plugins import Registry
from treeflash.recipe import Recipe
from treeflash.target import wrap_model
from treeflash.testing.families import tiny_model
from treeflash.testing.oracle import Oracle
from treeflash.testing.reference import reference_text
from treeflash.tree import TokenTree

PROMPT = [5, 3, 8, 1, 9]
# As many heads of keys as the passes that graphs are made along have rows.
WINDOWED = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_hidden_layers": 2,
    "use_sliding_window": True,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
# Rows of a pass that are as many as something else is: heads, the width of a head, ...
BUDGETS = (1, 3, 7, 9)


def count_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def check_texts(target, expected_by_prompt):
    for prompt, expected in expected_by_prompt.items():
        assert list(Decoder(target).generate(prompt, max_new_tokens=30).token_ids) == expected
        for budget in BUDGETS:
            drafter = Oracle([*prompt, *expected], [0.7] * 4)
            decoder = Decoder(target, drafter, Marginal(), NoRefiner(), OptTree(budget))
            assert list(decoder.generate(prompt, max_new_tokens=30).token_ids) == expected


def texts(model):
    return {prompt: reference_text(model, prompt, 30) for prompt in (tuple(PROMPT), tuple(PROMPT * 3))}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_compiled_passes_write_the_same_text(tmp_path):
    """In earnest, in a process of its own: what the compiler imports can fail behind other tests."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "error::RuntimeWarning", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "the same by 2 graphs\n"), done.stderr


def compile_in_earnest() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    target = wrap_model(model, compiled=True)
    check_texts(target, texts(model))
    print(f"the same by {count_graphs()} graphs")


@pytest.fixture
def traced(monkeypatch):
    """Graphs are taken down, and run as they are."""
    monkeypatch.setattr("torch.compile", partial(torch.compile, backend="eager"))


@pytest.fixture
def untraced(monkeypatch):
    """What would be compiled is called as it is."""
    monkeypatch.setattr("torch.compile", lambda function, **options: function)


@pytest.mark.slow
def test_windows_of_some_layers(traced, monkeypatch):
    """They are seen by masks, which a single row has too. The same graphs read a cache that has grown."""
    monkeypatch.setattr(room, "_BLOCK", 4)
    model = tiny_model("qwen3", dtype=torch.float64, **WINDOWED)
    target, before = wrap_model(model, compiled=True), count_graphs()
    assert len(target.windows) == 2
    check_texts(target, texts(model))
    assert (count_graphs() - before, target.compiled.failed) == (2, False)
    # The code that graphs are kept by holds no weights of a target that is gone.
    weight = weakref.ref(model.lm_head.weight)
    del model, target
    gc.collect()
    assert weight() is None


@pytest.mark.slow
def test_outputs_are_those_of_the_pass(traced):
    """In a dtype whose weights are laid out in blocks where nothing is compiled; of any layers."""
    model = tiny_model("qwen2", dtype=torch.bfloat16)
    tree = TokenTree.from_lists([7, 1, 2, 3], [-1, 0, 0, 1])
    lean, compiled = (wrap_model(model, compiled=compiled) for compiled in (False, True))
    for taps in ((), (1,), (0, 1), (1, 0)):
        found = []
        for target in (lean, compiled):
            with torch.inference_mode():
                state = target.start(1, 20, taps)
                target.prefill(state, torch.tensor([PROMPT]))
                found.append(target.verify(state, tree))
        spread = found[0].logits.std()
        assert float((found[0].logits - found[1].logits).abs().max() / spread) < 0.05
        assert [out.taps is None for out in found] == [not taps] * 2
        if taps:
            torch.testing.assert_close(found[0].taps, found[1].taps, atol=0.1, rtol=0.05)
    # A counter of operations sees the pass as it is, but for the outputs of all layers side by side.
    work = [count_work(Decoder(target), PROMPT, max_new_tokens=5)["verify"] for target in (lean, compiled)]
    assert (work[0].flops, work[0].calls + 1) == (work[1].flops, work[1].calls)
    assert not compiled.compiled.failed


def test_what_is_not_compiled(untraced):
    """Prompts, large trees, and passes that may be differentiated through."""
    model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=1024)
    target, calls = wrap_model(model, compiled=True), []
    target.start(1, 600, ())
    graph = target.compiled._pass
    target.compiled._pass = lambda *inputs: calls.append(inputs[0].shape[1]) or graph(*inputs)
    trees = [TokenTree.from_lists([0] * size, list(range(-1, size - 1))) for size in (256, 257, 2)]
    with torch.inference_mode():
        state = target.start(1, 600, ())
        target.prefill(state, torch.tensor([PROMPT]))
        for tree in trees[:2]:
            target.verify(state, tree)
    state = target.start(1, 600, ())
    target.prefill(state, torch.tensor([PROMPT]))
    target.verify(state, trees[2])
    assert calls == [256]


def test_changed_weights_are_compiled_anew(untraced):
    """Graphs on a CPU hold them."""
    model = tiny_model("llama", num_hidden_layers=1)
    target = wrap_model(model, compiled=True)
    decoder = Decoder(target)
    first = list(decoder.generate(PROMPT, max_new_tokens=8).token_ids)
    graph = target.compiled._pass
    decoder.generate(PROMPT, max_new_tokens=8)
    assert target.compiled._pass is graph
    for change in ("in place", "replaced"):
        with torch.no_grad():
            if change == "in place":
                model.lm_head.weight.neg_()
            else:
                model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight)
        expected = reference_text(model, PROMPT, 8)
        assert list(decoder.generate(PROMPT, max_new_tokens=8).token_ids) == expected
        assert (expected == first) == (change == "replaced")
        assert target.compiled._pass is not graph
        graph = target.compiled._pass


def test_a_hook_ends_it(untraced):
    model = tiny_model("llama", num_hidden_layers=1)
    target = wrap_model(model, compiled=True)
    Decoder(target).generate(PROMPT, max_new_tokens=3)
    graph = target.compiled._pass
    handle = model.lm_head.register_forward_hook(lambda module, inputs, output: -output)
    assert list(Decoder(target).generate(PROMPT, max_new_tokens=9).token_ids) == reference_text(
        model, PROMPT, 9
    )
    assert target.compiled is None
    # Until the hook is gone.
    handle.remove()
    Decoder(target).generate(PROMPT, max_new_tokens=3)
    assert target.compiled._pass is graph


def test_from_a_recipe(untraced):
    registry = Registry.load()
    decoder = Recipe.load("tiny-plain", registry, {"target": {"compile": True}}).build(registry)
    assert decoder.target.compiled is not None


def fail(*args, **kwargs):
    raise RuntimeError("no compiler here\nat all")


def test_where_compiling_fails_passes_are_taken_as_they_are(monkeypatch, tmp_path):
    """After one warning; and what they cost is not kept for those that are compiled."""
    monkeypatch.setenv("TREEFLASH_CACHE", str(tmp_path))
    monkeypatch.setattr("torch.compile", lambda *args, **kwargs: fail)
    model = tiny_model("llama", num_hidden_layers=1)
    target = wrap_model(model, compiled=True)
    with pytest.warns(RuntimeWarning, match="target.compile: .*no compiler here"):
        costs = PassCosts.of_target(target, 5)
    # A second warning would be an error.
    result = Decoder(target).generate(PROMPT, max_new_tokens=10)
    assert list(result.token_ids) == reference_text(model, PROMPT, 10)
    assert target.compiled.failed
    assert len(costs.seconds) == 2
    assert not list(tmp_path.rglob("*.json"))


def test_other_families_are_not_compiled():
    with pytest.warns(RuntimeWarning, match=r"target\.compile: Gemma3ForCausalLM is read by its own forward"):
        target = wrap_model(tiny_model("gemma3"), compiled=True)
    assert target.compiled is None


if __name__ == "__main__":
    compile_in_earnest()

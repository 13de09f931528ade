"""Threads that decode one model at once: each writes what it would write alone."""

import copy
import functools
import pickle
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from treeflash.target import HuggingFaceTarget, wrap_model
from treeflash.testing.families import tiny_model
from treeflash.tree import TokenTree

from .target_helpers import BROAD_PROMPT, row

THREADS = 3


def at_once(work, *arguments):
    """Runs in as many threads as there are arguments, begun together."""
    begin = threading.Barrier(len(arguments))

    def run(argument):
        begin.wait()
        return work(argument)

    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(run, arguments))


def read(target, prompt, layers):
    """Logits and taps of a few passes, side by side."""
    tree = TokenTree.from_lists([1, 2, 3, 4], [-1, 0, 0, 2], device=target.device)
    with torch.inference_mode():
        state = target.start(1, 40, layers)
        outputs = [target.prefill(state, row(prompt, target.device))]
        for _ in range(3):
            outputs.append(target.verify(state, tree))
            target.commit(state, [[0, 2, 3]])
    return torch.cat([part.flatten() for output in outputs for part in (output.logits, output.taps)])


def slow(monkeypatch, model):
    """Lets other threads run in the midst of a pass, and counts how many passes are under way at once."""
    forward, inside, most = type(model).forward, [], []

    @functools.wraps(forward)
    def spy(self, **inputs):
        inside.append(None)
        most.append(len(inside))
        time.sleep(0.002)
        try:
            return forward(self, **inputs)
        finally:
            inside.pop()

    # Not in the model itself, where it would be taken for the owner's.
    monkeypatch.setattr(type(model), "forward", spy)
    return most


@pytest.mark.parametrize("shared", [True, False], ids=["one target", "a target each"])
@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_threads_read_what_each_reads_alone(monkeypatch, family, shared):
    """A model in training mode, whose dropout one thread must not switch on under another; and taps."""
    dropout = {"gpt2": {"resid_pdrop": 0.5, "embd_pdrop": 0.5}, "gemma3": {"attention_dropout": 0.5}}
    model = tiny_model(family, dtype=torch.float64, **dropout[family]).train()
    targets = [wrap_model(model) for _ in range(THREADS)]
    if shared:
        targets = targets[:1] * THREADS
    jobs = [
        (target, BROAD_PROMPT[: 4 + 2 * number], layers)
        for number, (target, layers) in enumerate(zip(targets, [(0,), (1, 0), (0, 1)], strict=True))
    ]
    expected = [read(*job) for job in jobs]
    passes = slow(monkeypatch, model)
    found = at_once(lambda job: read(*job), *jobs)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert max(passes) == 1
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_is_wrapped_while_other_threads_do_so_too(monkeypatch):
    """The check narrows the config's windows meanwhile."""
    model = tiny_model("gemma3")
    windows = wrap_model(model).windows
    assert any(windows.values())
    slow(monkeypatch, model)
    for target in at_once(lambda model: wrap_model(model, lean=False), *[model] * THREADS):
        assert target.windows == windows
    assert model.config.sliding_window == 5


def test_the_hooks_of_another_threads_pass_are_not_the_owners(monkeypatch):
    model = tiny_model("llama")
    target, plain = wrap_model(model), wrap_model(model, lean=False)
    slow(monkeypatch, model)
    ended = threading.Event()

    def keep_reading():
        while not ended.is_set():
            read(plain, BROAD_PROMPT, (0, 1))

    def look():
        try:
            found = [wrap_model(model).lean for _ in range(5)]
            for _ in range(20):
                target.start(1, 9, ())
                found.append(target.lean)
            return found
        finally:
            ended.set()

    _, found = at_once(lambda work: work(), keep_reading, look)
    assert None not in found


def test_threads_share_weights_that_are_laid_out():
    model = tiny_model("llama", dtype=torch.bfloat16)
    target = wrap_model(model)
    prompts = [BROAD_PROMPT[: 3 + number] for number in range(THREADS)]
    expected = [read(wrap_model(model), prompt, (0, 1)) for prompt in prompts]
    for one, other in zip(
        at_once(lambda prompt: read(target, prompt, (0, 1)), *prompts), expected, strict=True
    ):
        assert torch.equal(one, other)


def test_a_lock_is_no_part_of_a_model_or_target():
    """Both can be copied and written."""
    model = tiny_model("gpt2")
    target = wrap_model(model)
    assert target.loan.lock is HuggingFaceTarget(model).loan.lock
    assert wrap_model(tiny_model("gpt2")).loan.lock is not target.loan.lock
    pickle.dumps(model)
    again = copy.deepcopy(target)
    assert again.loan.lock is not target.loan.lock
    assert torch.equal(read(again, BROAD_PROMPT, (0,)), read(target, BROAD_PROMPT, (0,)))


def test_heads_may_be_asked_for_while_a_text_begins(monkeypatch):
    """A text looks through all heads that were gathered, and one more may be asked for meanwhile."""
    target, failed = wrap_model(tiny_model("llama")), []
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def ask():
        heads = []
        while begins.is_alive():
            heads.append(target.head(torch.arange(len(heads) % 40 + 1), torch.float64))
            if len(heads) > 300:
                heads.clear()

    def begin():
        try:
            for _ in range(200):
                target.start(1, 10, ())
        except RuntimeError as error:
            failed.append(error)

    begins = threading.Thread(target=begin)
    try:
        begins.start()
        ask()
        begins.join()
    finally:
        sys.setswitchinterval(before)
    assert failed == []

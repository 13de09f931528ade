"""A part decodes for one target at a time: no decoder takes over another's."""

import copy

import attrs
import pytest

from treeflash.components.builders.marginal import Marginal
from treeflash.components.builders.top_m import TopM
from treeflash.components.drafters.dflash import DFlash
from treeflash.components.refiners.none import NoRefiner
from treeflash.components.refiners.swiglu import SwiGlu
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.engine.audit import audited
from treeflash.errors import CompositionError, UnsupportedTargetError
from treeflash.target import load_target, wrap_model
from treeflash.testing.oracle import Oracle

PROMPT = [2, *b"Ana has 7 coins. Ana"]


@pytest.fixture(scope="module")
def targets(models):
    """Two models of one kind."""
    return [load_target(models / "tiny-target", device="cpu") for _ in range(2)]


@pytest.fixture
def parts(models, targets):
    return [kind.from_checkpoint(models / "tiny-treeflash", targets[0]) for kind in (DFlash, SwiGlu)]


def test_a_part_of_another_decoder_is_not_taken_over(targets, parts):
    """It was, and the first decoder lost its drafts without a word."""
    dflash, swiglu = parts
    first = Decoder(targets[0], dflash, TopM(), swiglu, OptTree(15))
    steps = len(first.generate(PROMPT, max_new_tokens=60).statistics.steps)
    for kind, name, taken in [
        ("drafter", "DFlash", {"drafter": dflash, "builder": Marginal(), "refiner": NoRefiner()}),
        ("refiner", "SwiGlu", {"drafter": Oracle([], [1.0]), "builder": TopM(), "refiner": swiglu}),
    ]:
        with pytest.raises(
            CompositionError, match=f"{kind}: this {name} is bound to another target, .*load another"
        ):
            Decoder(targets[1], **taken)
    with pytest.raises(CompositionError, match="drafter: this DFlash is bound to another target"):
        attrs.evolve(first, target=targets[1])
    assert len(first.generate(PROMPT, max_new_tokens=60).statistics.steps) == steps


def test_nothing_is_bound_when_one_part_cannot_be(targets, parts):
    dflash, swiglu = parts
    first = Decoder(targets[0], Oracle([], [1.0]), TopM(), swiglu)
    with pytest.raises(CompositionError, match="refiner"):
        Decoder(targets[1], dflash, TopM(), swiglu)
    assert Decoder(targets[0], dflash, TopM(), first.refiner).drafter is dflash


def test_decoders_of_one_model_share_parts(targets, parts):
    """However often it was wrapped, as cells of a notebook that run again do."""
    dflash, swiglu = parts
    decoders = [Decoder(targets[0], dflash, TopM(), swiglu, OptTree(budget)) for budget in (3, 15)]
    again = wrap_model(targets[0].model)
    decoders.append(Decoder(again, dflash, TopM(), swiglu, OptTree(15)))
    counts = [len(one.generate(PROMPT, max_new_tokens=60).statistics.steps) for one in decoders]
    assert counts[0] > counts[1] == counts[2]


def test_a_part_is_free_when_its_decoder_is_gone(targets, parts):
    dflash, swiglu = parts
    decoder = Decoder(targets[0], dflash, TopM(), swiglu, OptTree(15))
    steps = len(decoder.generate(PROMPT, max_new_tokens=60).statistics.steps)
    del decoder
    decoder = Decoder(targets[1], dflash, TopM(), swiglu, OptTree(15))
    assert len(decoder.generate(PROMPT, max_new_tokens=60).statistics.steps) == steps


def test_what_stands_for_a_target_is_no_other(targets, parts):
    """Audits put a stand-in into the target's place; a target of any class can be audited."""

    class Own:
        def __getattr__(self, name):
            if name == "identity":
                raise AttributeError(name)
            return getattr(targets[0], name)

    dflash, swiglu = parts
    decoder = Decoder(Own(), dflash, TopM(), swiglu, OptTree(15))
    _, audit = audited(decoder, PROMPT, max_new_tokens=10)
    assert audit.identical
    with pytest.raises(CompositionError, match="another target"):
        Decoder(targets[0], dflash, TopM(), swiglu)


def test_what_keeps_nothing_of_a_target_is_free_and_so_are_copies(targets, parts):
    shared = NoRefiner()
    decoders = [
        Decoder(target, drafter, Marginal(), shared, OptTree(3))
        for target, drafter in zip(targets, (parts[0], copy.deepcopy(parts[0])), strict=True)
    ]
    copied = copy.deepcopy(decoders[0])
    assert attrs.evolve(copied, selector=OptTree(2)).drafter is copied.drafter


def test_a_decoder_that_is_refused_keeps_no_part(targets, models, monkeypatch):
    """Not even as long as somebody keeps the error, as a notebook does."""
    drafter = DFlash.from_checkpoint(models / "tiny-treeflash", targets[0])

    def refuse(layers):
        raise UnsupportedTargetError("its states cannot be read")

    with monkeypatch.context() as patch:
        patch.setattr(targets[0], "check_taps", refuse)
        with pytest.raises(UnsupportedTargetError) as kept:
            Decoder(targets[0], drafter, Marginal(), NoRefiner())
    assert Decoder(targets[1], drafter, Marginal(), NoRefiner()).drafter is drafter
    assert kept.value is not None

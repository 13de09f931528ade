"""Models that are refused before anything is read through them."""

from torch import Tensor, nn
from transformers import PreTrainedModel

from treeflash.errors import UnsupportedTargetError

# Layers that torch's quantisation puts in place of a model's own, dynamic and static.
_QUANTISED = ("torch.ao.nn.quantized", "torch.nn.quantized")


def check_model(model: nn.Module) -> None:
    """Refuses what is no model of transformers, wraps one, or holds weights that cannot be read.

    Args:
        model: The model that was given.

    Raises:
        UnsupportedTargetError: Naming the reason, and what to wrap instead.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedTargetError(_not_a_model(model))
    empty = [name for name, weight in model.named_parameters() if weight.is_meta]
    if empty:
        raise UnsupportedTargetError(
            f"{len(empty)} of its weights are on the meta device, which stores no numbers (the first is "
            f"{empty[0]}): load the weights onto a CPU or GPU first"
        )
    for name, module in model.named_modules():
        if type(module).__module__.startswith(_QUANTISED):
            raise UnsupportedTargetError(
                f"torch quantised it: {name} is a {_path(module)}, which scales its inputs by all rows of a "
                "pass, so that the nodes of a tree change one another; wrap the model as it was before"
            )
    parts = {"embedding": model.get_input_embeddings(), "output head": model.get_output_embeddings()}
    for called, part in parts.items():
        if part is None:
            raise UnsupportedTargetError(
                "it has no output head that gives logits"
                if called == "output head"
                else f"it has no {called}"
            )
        if not isinstance(getattr(part, "weight", None), Tensor):
            raise UnsupportedTargetError(f"its {called} is a {_path(part)}, which has no weight tensor")


def _not_a_model(model: nn.Module) -> str:
    """Says what was found in place of a model, and the model inside it if there is one."""
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            return f"it is a wrapper around {type(module).__name__}: wrap that model, here model.{name}"
    return f"expected a Hugging Face causal language model, found a {_path(model)}"


def _path(thing: object) -> str:
    """The class of a thing, with its module."""
    kind = type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"

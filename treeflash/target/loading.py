"""From a name or a model to a target that has been checked."""

import reprlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from treeflash.errors import InputError, UnsupportedTargetError, first_line
from treeflash.ranges import DTYPE_NAMES
from treeflash.target.compiled import CompiledDecoder
from treeflash.target.hugging_face import HuggingFaceTarget
from treeflash.target.lean import LeanDecoder
from treeflash.target.probe import probe

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}


def wrap_model(
    model: PreTrainedModel, tokenizer: Any = None, *, lean: bool = True, compiled: bool = False
) -> HuggingFaceTarget:
    """Makes a target of a model after checking, on a tiny tree, that it can be verified in trees.

    Args:
        model: The model, on its device in its dtype. It is borrowed for each pass and left as it was. Threads
            may share it: passes through its own forward wait for one another. Once it is cast, moved or
            resized, texts are refused.
        tokenizer: Its tokenizer, for text; token ids do without.
        lean: Whether to read it by a pass of our own where its family is known (`treeflash.target.lean`);
            without, its own forward is called, hooks that are added to it later included.
        compiled: Whether to compile that pass, before the first text (`treeflash.target.compiled`).

    Returns:
        The target, with the first attention implementation that passes.

    Raises:
        UnsupportedTargetError: When none does; the message says why.
    """
    if not isinstance(model, nn.Module):
        hint = f"; load_target({str(model)!r}) loads one" if isinstance(model, str | Path) else ""
        raise UnsupportedTargetError(
            f"expected a Hugging Face causal language model, found {reprlib.repr(model)}{hint}"
        )
    if tokenizer is not None and not hasattr(tokenizer, "decode"):
        raise UnsupportedTargetError(
            f"expected a Hugging Face tokenizer or None, found {reprlib.repr(tokenizer)}"
        )
    name, reasons = type(model).__name__, list[str]()
    for attention in ("sdpa", "eager"):
        try:
            target = HuggingFaceTarget(model, tokenizer, attention=attention)
            reason = probe(target)
        except UnsupportedTargetError as error:
            reason = str(error)
        if reason is None:
            if lean:
                _read_leanly(target)
            if compiled and target.lean is not None:
                target.compiled = CompiledDecoder(target.lean)
            elif compiled:
                told = f"target.compile: {name} is read by its own forward, which is not compiled"
                warnings.warn(told, RuntimeWarning, stacklevel=2)
            return target
        if reason not in reasons:
            reasons.append(reason)
    raise UnsupportedTargetError(f"{name} cannot be verified in trees: {'; '.join(reasons)}")


def _read_leanly(target: HuggingFaceTarget) -> None:
    """Sets the pass of our own, when the model's family is known and it gives what the model does."""
    with target.loan.lock:  # hooks of another thread's pass would be taken for the owner's
        target.lean = LeanDecoder.of(target.model)
        if target.lean is not None:
            # Made anew if it is right: whoever never decodes shall not hold the weights twice.
            target.lean = LeanDecoder.of(target.model) if probe(target) is None else None


def load_target(
    name: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    lean: bool = True,
    compiled: bool = False,
    called: str = "target",
) -> HuggingFaceTarget:
    """Loads a model and its tokenizer, and checks that it can be verified in trees.

    Args:
        name: Folder or hub name.
        dtype: "auto" takes the model's own; otherwise "float32", "bfloat16", ...
        device: "auto" takes a GPU when there is one; otherwise "cpu", "cuda:1", ...
        lean: As in `wrap_model`.
        compiled: As in `wrap_model`.
        called: What messages call it.

    Returns:
        The target.

    Raises:
        InputError: When the model, dtype or device is not to be had.
        UnsupportedTargetError: When it cannot be verified in trees.
    """
    wanted, place = torch_dtype(dtype), torch_device(device)
    with _quiet_loading():
        try:
            model, report = AutoModelForCausalLM.from_pretrained(name, dtype=wanted, output_loading_info=True)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            reason = first_line(error)
            raise InputError(f"{called} {str(name)!r} cannot be loaded: {reason}") from error
        tokenizer, fault = _tokenizer(name)
    missing = sorted(report["missing_keys"])
    if missing:
        # The library fills them with random numbers.
        raise InputError(
            f"{called} {str(name)!r} cannot be loaded: tensors are missing: {', '.join(missing)}"
        )
    target = wrap_model(model.to(place).eval(), tokenizer, lean=lean, compiled=compiled)
    target.text_fault = fault
    return target


def torch_dtype(name: str) -> torch.dtype | str:
    """Reads a floating dtype's name; "auto" stays as it is.

    Args:
        name: The name.

    Returns:
        The dtype.

    Raises:
        InputError: For any other name.
    """
    if name == "auto":
        return name
    if name not in DTYPES:
        *others, last = DTYPES
        raise InputError(f"target.dtype: expected auto, {', '.join(others)} or {last}, found {name!r}")
    return DTYPES[name]


def torch_device(name: str) -> torch.device:
    """Reads a device's name; "auto" is a GPU when there is one.

    Args:
        name: The name.

    Returns:
        The device.

    Raises:
        InputError: When there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        sample = torch.zeros(1, device=name)
        sample.tolist()  # a device that holds no numbers fails here
        return sample.device
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error).partition(", ")[0]  # which goes on to list all kinds there are
        gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        present = ", ".join(["cpu", *gpus])
        raise InputError(
            f"target.device: expected auto or a device that is present ({present}), found {name!r} ({reason})"
        ) from None


def _tokenizer(name: str | Path) -> tuple[Any, str | None]:
    """A model's tokenizer; or None, and what came of the attempt to load it."""
    folder = Path(name)
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        # A target of token ids alone; for some families the library would make up an empty one.
        return None, None
    try:
        return AutoTokenizer.from_pretrained(name), None
    except (OSError, ValueError, ImportError, RecursionError) as error:
        return None, first_line(error)


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Keeps the loader's progress bar out of the output, not that of a download; puts the setting back."""
    shown, downloads_hidden = logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    logging.disable_progress_bar()
    _show_downloads(not downloads_hidden)
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
        _show_downloads(not downloads_hidden)


def _show_downloads(wanted: bool) -> None:
    """The loader's switch moves the hub's too."""
    if wanted == are_progress_bars_disabled():
        (enable_progress_bars if wanted else disable_progress_bars)()

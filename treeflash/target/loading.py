"""From a name or a model to a target that has been checked."""

import os
import reprlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from treeflash.errors import InputError, TreeflashError, UnsupportedTargetError, first_line
from treeflash.hardware import instructions, multiplies_bfloat16
from treeflash.json_files import read_json
from treeflash.ranges import AUTO, DTYPE_NAMES, FASTEST
from treeflash.target.compiled import CompiledDecoder
from treeflash.target.hugging_face import HuggingFaceTarget
from treeflash.target.lean import LeanDecoder
from treeflash.target.model_files import check_folder, check_hub, check_report
from treeflash.target.probe import probe

_log = getLogger(__name__)
# What a library says in a sentence of its own; of others, a KeyError for instance, the kind has to be told.
_SENTENCES = (OSError, ValueError, RuntimeError, ImportError, SafetensorError, StrictDataclassError)
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
# That read trees, the faster one first; each model has the last.
ATTENTIONS = ("sdpa", "eager")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}


def wrap_model(
    model: PreTrainedModel, tokenizer: Any = None, *, lean: bool = True, compiled: bool = False
) -> HuggingFaceTarget:
    """Makes a target of a model after checking, on a tiny tree, that it can be verified in trees.

    Args:
        model: The model, on its device in its dtype. It is borrowed for each pass and left as it was. Threads
            may share it: passes through its own forward wait for one another. Each text is of the weights
            that the model has when it begins; once the model is cast, moved or resized, texts are refused.
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
    for attention in ATTENTIONS:
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
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> HuggingFaceTarget:
    """Loads a model and its tokenizer, and checks that it can be verified in trees.

    Args:
        name: Folder or hub name.
        dtype: "auto" takes the model's own; "fastest" takes bfloat16, or float32 where the device emulates
            products in bfloat16, which is logged; otherwise "float32", "bfloat16", ...
        device: "auto" takes a GPU when there is one; otherwise "cpu", "cuda:1", ...
        lean: As in `wrap_model`.
        compiled: As in `wrap_model`.
        called: What messages call it.
        trust_remote_code: Whether code that comes with the model may run.
        revision: Branch, tag or commit on the hub.

    Returns:
        The target.

    Raises:
        InputError: When the model, dtype or device is not to be had: one line for whatever a library raises
            while it loads.
        UnsupportedTargetError: When it cannot be verified in trees.
    """
    place = torch_device(device)
    wanted = torch_dtype(dtype, place)
    origin: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
    with _quiet_loading(), _one_error(f"{called} {str(name)!r}"):
        model = _load_model(name, wanted, origin)
        tokenizer, fault = _tokenizer(name, origin)
        target = wrap_model(model.to(place).eval(), tokenizer, lean=lean, compiled=compiled)
    target.text_fault = fault
    return target


def _load_model(name: str | Path, dtype: torch.dtype | str, origin: Mapping[str, Any]) -> PreTrainedModel:
    """Loads a model from safetensors alone, after a look at its files."""
    folder = Path(name) if os.path.isdir(name) else None
    if folder is None and (isinstance(name, Path) or name.startswith((".", "/", "~"))):
        raise InputError("there is no such folder")
    if folder is not None and origin["revision"] is not None:
        raise InputError(f"revision: expected none for a folder, found {origin['revision']!r}")
    if folder is not None:
        check_folder(folder)
    with _blamed("config.json"):
        config = AutoConfig.from_pretrained(name, **origin)
    if config._attn_implementation not in (None, *ATTENTIONS):
        config._attn_implementation = ATTENTIONS[-1]  # others read no trees, and some are code from the hub
    if folder is None:
        check_hub(str(name), config, origin["revision"])
    if folder is not None and (folder / "generation_config.json").is_file():
        with _blamed("generation_config.json"):  # one that fails is passed over by what follows
            GenerationConfig.from_pretrained(folder)
    model, report = AutoModelForCausalLM.from_pretrained(
        name,
        config=config,
        dtype=dtype,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # to be told of them
        output_loading_info=True,
        **origin,
    )
    check_report(report)
    return model


def torch_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """Reads a floating dtype's name.

    Args:
        name: The name; "auto" stays as it is, "fastest" depends on the device.
        device: Where the model goes.

    Returns:
        The dtype.

    Raises:
        InputError: For any other name.
    """
    if name == AUTO:
        return name
    if name == FASTEST:
        if multiplies_bfloat16(device):
            return torch.bfloat16
        told = instructions() if device.type == "cpu" else device
        _log.warning(
            "%s has no products in bfloat16: the target is read in float32 (--dtype bfloat16 insists)", told
        )
        return torch.float32
    if name not in DTYPES:
        *others, last = DTYPES
        raise InputError(
            f"target.dtype: expected {AUTO}, {FASTEST}, {', '.join(others)} or {last}, found {name!r}"
        )
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


def _tokenizer(name: str | Path, origin: Mapping[str, Any]) -> tuple[Any, str | None]:
    """A model's tokenizer; or None, and what came of the attempt to load it."""
    folder = Path(name)
    if os.path.isdir(folder) and not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        # A target of token ids alone; for some families the library would make up an empty one.
        return None, None
    try:
        for file in folder.glob("*token*.json"):
            read_json(file, InputError)
        return AutoTokenizer.from_pretrained(name, **origin), None
    except Exception as error:  # tokenizers raise anything
        return None, _reason(error)


@contextmanager
def _one_error(model: str) -> Iterator[None]:
    """Makes one error that names the model of whatever is raised while it is loaded."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except UnsupportedTargetError as error:
        raise UnsupportedTargetError(f"{model}: {error}") from error
    except Exception as error:  # configs, tokenizers and models raise anything, a library that is missing too
        raise InputError(f"{model} cannot be loaded: {_reason(error)}") from error


@contextmanager
def _blamed(file: str) -> Iterator[None]:
    """Puts a file's name before what is wrong with it."""
    try:
        yield
    except Exception as error:
        raise InputError(f"{file}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """What a library says, in one line."""
    line = first_line(error)
    if "trust_remote_code" in str(error):
        return (
            "it needs code of its own, which may do anything; read it, then set trust_remote_code = true "
            "beside the model's name to run it"
        )
    known = isinstance(error, (*_SENTENCES, TreeflashError)) or type(error) is Exception
    return line if known else f"{type(error).__name__}: {line}"


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

"""From a GGUF file to a folder that transformers loads by itself."""

import contextlib
import copy
import io
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Writes a model and its tokenizer as safetensors in float32, dequantized and otherwise unchanged.

    Args:
        gguf: The file.
        folder: Where the model goes; made when missing.

    Raises:
        OSError: When the folder cannot be written.
        SafetensorError: When the tensors cannot be.
    """
    with _quiet():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # A model that was read from GGUF counts as quantized and refuses to be saved: its tensors move into
        # a fresh one. That one starts on "meta", so nothing is drawn from the caller's random generator.
        config = copy.deepcopy(loaded.config)
        vars(config).pop("quantization_config", None)
        with torch.device("meta"):
            model = type(loaded)(config)
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.tie_weights()
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the loader's bars and remarks to itself, and puts every setting back."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        # The bars are made by several libraries, each with a switch of its own; all write to stderr.
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)

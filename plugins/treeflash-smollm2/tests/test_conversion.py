import io
import json
import warnings
from logging import StreamHandler

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from treeflash_smollm2.conversion import _quiet, convert_gguf

TEXT = "Hello abc 123 <|im_start|>été\n"


@pytest.fixture(scope="module")
def folder(tiny_gguf, tmp_path_factory):
    target = tmp_path_factory.mktemp("converted") / "model"
    convert_gguf(tiny_gguf, target)
    return target


def test_every_tensor_is_the_one_in_the_file(tiny_gguf, folder):
    with _quiet():
        before = AutoModelForCausalLM.from_pretrained(
            tiny_gguf.parent, gguf_file=tiny_gguf.name, dtype=torch.float32
        )
        after = AutoModelForCausalLM.from_pretrained(folder)
    expected, found = before.state_dict(), after.state_dict()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor), name
    ids = torch.arange(10)[None]
    assert torch.equal(before(ids).logits, after(ids).logits)


def test_nothing_in_the_folder_asks_for_gguf(folder):
    assert "gguf" not in (folder / "config.json").read_text()


def test_tokenizer_and_chat_template_survive(tiny_gguf, folder):
    before = AutoTokenizer.from_pretrained(tiny_gguf.parent, gguf_file=tiny_gguf.name)
    after = AutoTokenizer.from_pretrained(folder)
    assert after.encode(TEXT) == before.encode(TEXT)
    assert after.decode(after.encode(TEXT)) == TEXT
    assert after.chat_template == before.chat_template != ""


def test_generation_stops_at_the_tokenizers_end(folder):
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


@pytest.fixture
def remarks():
    """What transformers logs, at a level that conversion does not use: a forgotten restore shows."""
    level, stream = logging.get_verbosity(), io.StringIO()
    handler = StreamHandler(stream)
    logging.set_verbosity_info()
    logging.add_handler(handler)
    yield stream
    logging.remove_handler(handler)
    logging.set_verbosity(level)


def test_conversion_is_silent_and_leaves_no_setting_behind(tiny_gguf, tmp_path, capfd, remarks):
    def settings() -> tuple[object, ...]:
        return logging.get_verbosity(), logging.is_progress_bar_enabled(), warnings.filters[:]

    before, random = settings(), torch.get_rng_state()
    convert_gguf(tiny_gguf, tmp_path / "model")
    shown = capfd.readouterr()
    assert (shown.out, shown.err, remarks.getvalue()) == ("", "", "")
    assert settings() == before
    assert torch.equal(torch.get_rng_state(), random)

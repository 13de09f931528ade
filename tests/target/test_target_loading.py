"""From a name to a target, and what is said when there is none."""

import json
import shutil

import pytest
import torch
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from treeflash.errors import InputError, TreeflashError, UnsupportedTargetError
from treeflash.target import HuggingFaceTarget, load_target
from treeflash.target.loading import torch_device, torch_dtype
from treeflash.testing.families import tiny_model


@pytest.fixture
def tiny_folder(models, tmp_path):
    """A copy of the tiny target, to be broken."""
    return shutil.copytree(models / "tiny-target", tmp_path / "target")


@pytest.fixture(autouse=True)
def progress_bars():
    shown = logging.is_progress_bar_enabled()
    hub_shown = not are_progress_bars_disabled()
    yield
    (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
    (enable_progress_bars if hub_shown else disable_progress_bars)()


def test_a_folder_becomes_a_target(models, device):
    target = load_target(models / "tiny-target", device=device)
    assert isinstance(target, HuggingFaceTarget)
    assert target.device.type == target.model.device.type == device
    assert not any(module.training for module in target.model.modules())
    assert target.text is not None
    assert target.text.encode_raw("The")
    assert target.stop_ids


def test_a_name_may_be_text(models):
    assert load_target(str(models / "tiny-target"), device="cpu").num_layers > 0


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_dtype_asked_for_is_the_dtype_given(models, dtype, device):
    target = load_target(models / "tiny-target", dtype=dtype, device=device)
    wanted = getattr(torch, dtype)
    assert target.dtype == wanted
    assert {weight.dtype for weight in target.model.parameters()} == {wanted}
    state = target.start(1, 4, (0,))
    with torch.no_grad():
        output = target.prefill(state, torch.tensor([[1, 2]], device=device))
    assert output.logits.dtype == output.taps.dtype == state.cache.layers[0].keys.dtype == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_dtype_is_the_models_own_unless_asked(tmp_path, dtype):
    tiny_model("llama", dtype=dtype).save_pretrained(tmp_path)
    assert load_target(tmp_path, device="cpu").dtype == dtype


def test_auto_takes_a_gpu_when_there_is_one():
    assert torch_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["foo", "cuda:63", "", "mps:9"])
def test_a_device_that_is_absent_is_named(models, name):
    with pytest.raises(
        InputError, match=r"device: expected auto or a device that is present \(cpu.*\), found"
    ) as caught:
        load_target(models / "tiny-target", device=name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["foo", "int8", "complex64", "Tensor", "float_32", "", "__name__"])
def test_a_dtype_that_is_none_is_answered_with_the_choices(models, name):
    choices = "dtype: expected auto, float32, float64, bfloat16 or float16, found"
    with pytest.raises(InputError, match=choices) as caught:
        load_target(models / "tiny-target", dtype=name)
    assert repr(name) in str(caught.value)


def test_a_dtypes_name_is_the_dtypes():
    assert torch_dtype("bfloat16") == torch.bfloat16
    assert torch_dtype("auto") == "auto"


def test_a_dtype_that_no_model_computes_in_is_refused():
    with pytest.raises(InputError):
        torch_dtype("float8_e4m3fn")


def test_a_device_without_numbers_is_refused():
    with pytest.raises(InputError):
        torch_device("meta")


def test_a_bad_setting_is_found_before_the_model_is_loaded(tmp_path):
    with pytest.raises(InputError, match="dtype"):
        load_target(tmp_path / "absent", dtype="foo")
    with pytest.raises(InputError, match="device"):
        load_target(tmp_path / "absent", device="foo")


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(InputError, match="cannot be loaded") as caught:
        load_target(tmp_path / "absent")
    assert repr(str(tmp_path / "absent")) in str(caught.value)
    assert isinstance(caught.value, TreeflashError)


def remove(file):
    return lambda folder: (folder / file).unlink()


def write(file, content):
    return lambda folder: (folder / file).write_bytes(content)


def other_width(folder):
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] += 8
    (folder / "config.json").write_text(json.dumps(config))


def lost_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors[min(name for name in tensors if "mlp" in name)]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "damage",
    [
        remove("config.json"),
        remove("model.safetensors"),
        write("config.json", b"{"),
        write("config.json", b'{"model_type": "unheard-of"}'),
        write("config.json", b'{"model_type": "t5"}'),
        write("model.safetensors", b"nothing of the kind" * 9),
        other_width,
        lost_tensor,
    ],
    ids=[
        "no-config",
        "no-weights",
        "not-json",
        "unknown-kind",
        "no-decoder",
        "not-weights",
        "other-shapes",
        "lost-tensor",
    ],
)
def test_a_damaged_folder_is_an_input_error(tiny_folder, damage):
    damage(tiny_folder)
    with pytest.raises(InputError, match="cannot be loaded") as caught:
        load_target(tiny_folder)
    assert str(tiny_folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_that_cannot_be_read_in_trees_is_refused_by_name(tmp_path):
    from transformers import BloomConfig

    AutoModelForCausalLM.from_config(
        BloomConfig(vocab_size=40, hidden_size=32, n_layer=1, n_head=4)
    ).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedTargetError, match="BloomForCausalLM cannot be verified in trees"):
        load_target(tmp_path, device="cpu")


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "mistral",
        "qwen3",
        "gpt2",
        "gemma3",
    ],
)
def test_without_a_tokenizer_there_is_no_text(tmp_path, family):
    tiny_model(family).save_pretrained(tmp_path)
    target = load_target(tmp_path, device="cpu")
    assert target.text is None
    state = target.start(1, 4, ())
    with torch.no_grad():  # token ids do without
        assert target.prefill(state, torch.tensor([[1, 2]])).logits.shape == (1, 1, 40)


@pytest.mark.parametrize("shown", [True, False], ids=["shown", "hidden"])
def test_the_progress_bar_setting_is_put_back(models, capfd, shown):
    (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
    load_target(models / "tiny-target", device="cpu")
    assert logging.is_progress_bar_enabled() == shown
    assert capfd.readouterr() == ("", "")  # and nothing was shown meanwhile


def test_the_progress_bar_setting_is_put_back_after_a_failure(tmp_path):
    logging.enable_progress_bar()
    with pytest.raises(InputError):
        load_target(tmp_path / "absent")
    assert logging.is_progress_bar_enabled()


@pytest.mark.parametrize(("shown", "hub_shown"), [(True, False), (False, True)])
def test_the_hubs_progress_bar_setting_is_put_back(models, shown, hub_shown):
    (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
    (enable_progress_bars if hub_shown else disable_progress_bars)()
    load_target(models / "tiny-target", device="cpu")
    assert logging.is_progress_bar_enabled() == shown
    assert are_progress_bars_disabled() != hub_shown


def test_why_a_tokenizer_cannot_be_loaded_is_said(tiny_folder, monkeypatch):
    def fail(name):
        raise ImportError("this one needs sentencepiece\nand more")

    monkeypatch.setattr("treeflash.target.loading.AutoTokenizer.from_pretrained", fail)
    target = load_target(tiny_folder, device="cpu")
    with pytest.raises(InputError, match=r"none could be loaded: this one needs sentencepiece\)$"):
        target.require_text()


def test_a_lack_of_memory_is_not_the_models_fault(tiny_folder, monkeypatch):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(HuggingFaceTarget, "verify", fail)
    with pytest.raises(torch.OutOfMemoryError):
        load_target(tiny_folder, device="cpu")


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_nested_too_deep_is_a_reason_too(tiny_folder, file):
    (tiny_folder / file).write_text("[" * 100_000 + "]" * 100_000)
    target = load_target(tiny_folder, device="cpu")
    with pytest.raises(InputError, match="none could be loaded: maximum recursion depth"):
        target.require_text()

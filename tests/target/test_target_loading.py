"""From a name to a target, and what is said when there is none."""

import json
import shutil
import sys

import pytest
import torch
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging

import treeflash
from treeflash.errors import InputError, TreeflashError, UnsupportedTargetError
from treeflash.hardware import instructions, multiplies_bfloat16
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
    choices = "dtype: expected auto, fastest, float32, float64, bfloat16 or float16, found"
    with pytest.raises(InputError, match=choices) as caught:
        load_target(models / "tiny-target", dtype=name)
    assert repr(name) in str(caught.value)


CPU = torch.device("cpu")


def test_a_dtypes_name_is_the_dtypes():
    assert torch_dtype("bfloat16", CPU) == torch.bfloat16
    assert torch_dtype("auto", CPU) == "auto"


@pytest.mark.parametrize("multiplies", [False, True])
def test_the_fastest_dtype_goes_by_the_processor(multiplies, monkeypatch, caplog):
    """Where products in bfloat16 are emulated, float32 is faster, and it is said how to insist."""
    monkeypatch.setattr("treeflash.target.loading.multiplies_bfloat16", lambda device: multiplies)
    assert torch_dtype("fastest", CPU) == (torch.bfloat16 if multiplies else torch.float32)
    assert caplog.text.count("--dtype bfloat16 insists") == (not multiplies)


@pytest.mark.parametrize(
    ("onednn", "found", "expected"),
    [
        (False, {"architecture": "x86_64", "avx512_bf16": True}, False),  # left unused
        (True, {"architecture": "x86_64", "avx512_f": True}, False),  # emulated
        (True, {"architecture": "x86_64", "avx512_bf16": True}, True),
        (True, {"architecture": "x86_64", "amx_bf16": True}, True),
        (True, {"architecture": "aarch64"}, True),
    ],
)
def test_what_multiplies_bfloat16(onednn, found, expected, monkeypatch):
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: onednn)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: found)
    assert multiplies_bfloat16(CPU) == expected
    assert ("bfloat16" in instructions()) == expected


def test_a_dtype_that_no_model_computes_in_is_refused():
    with pytest.raises(InputError):
        torch_dtype("float8_e4m3fn", CPU)


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


def changed(folder, file="config.json", **changes):
    config = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "optimum"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}, "gptqmodel"),
        (
            {"num_hidden_layers": "four"},
            "config.json: Validation error for field 'num_hidden_layers': TypeError",
        ),
        ({"hidden_act": "gelu-ish"}, "KeyError: 'gelu-ish'"),
        (
            {"intermediate_size": 100},
            r"down_proj.weight: expected shape \[64, 100\] by config.json, found \[64, 192",
        ),
        (
            {"num_hidden_layers": 2**31, "layer_types": None},
            "config.json: num_hidden_layers: expected at most",
        ),
        ({"text_config": {"n_layer": 2**31}}, "config.json: n_layer: expected at most"),
        ({"max_position_embeddings": 2**31}, "config.json: max_position_embeddings: expected at most"),
        ({"vocab_size": 2**40}, "config.json: vocab_size: expected at most .* found 1099511627776"),
        (
            {"transformers_weights": "adapter_model.bin"},
            "transformers_weights: expected model.safetensors, found",
        ),
    ],
    ids=[
        "gptq",
        "awq",
        "wrong-type",
        "unknown-name",
        "shapes",
        "layers",
        "inner-layers",
        "positions",
        "tokens",
        "other-file",
    ],
)
def test_what_a_library_raises_is_one_error(tiny_folder, changes, reason):
    with pytest.raises(InputError, match=reason) as caught:
        load_target(changed(tiny_folder, **changes), device="cpu")
    message = str(caught.value)
    assert message.startswith(f"target {str(tiny_folder)!r} cannot be loaded: ")
    assert "\n" not in message


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"3", b"[]", b"{", b"\xff", b""])
def test_a_config_that_is_no_object_is_named(tiny_folder, file, content):
    (tiny_folder / file).write_bytes(content)
    with pytest.raises(
        InputError, match=f"{tiny_folder / file}: (expected a JSON object|not valid JSON|line 1 is not UTF-8)"
    ):
        load_target(tiny_folder, device="cpu")


@pytest.mark.parametrize(
    "name", ["../else/model.safetensors", "/else.safetensors", "C:\\x.safetensors", "", 3]
)
def test_an_index_cannot_name_a_file_outside(tiny_folder, name, monkeypatch):
    opened = []
    monkeypatch.setattr("treeflash.checkpoints.reader.safe_open", lambda *given, **also: opened.append(given))
    (tiny_folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"model.norm.weight": name}}
    (tiny_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"index\.json: expected names of files inside the folder, found"):
        load_target(tiny_folder, device="cpu")
    assert not opened


def test_shards_are_read(tiny_folder, models):
    tensors = load_file(tiny_folder / "model.safetensors")
    (tiny_folder / "model.safetensors").unlink()
    (tiny_folder / "shards").mkdir()
    files = {name: f"shards/{number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        held = {name: tensors[name] for name in tensors if files[name] == file}
        save_file(held, tiny_folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (tiny_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found, expected = (load_target(folder, device="cpu") for folder in (tiny_folder, models / "tiny-target"))
    assert found.digest() == expected.digest()


def test_pickled_weights_are_not_opened(tiny_folder, monkeypatch):
    monkeypatch.setattr("torch.load", None)
    (tiny_folder / "model.safetensors").unlink()
    torch.save({}, tiny_folder / "pytorch_model.bin")
    with pytest.raises(
        InputError, match=r"found pytorch_model\.bin; .*write them again with save_pretrained"
    ):
        load_target(tiny_folder, device="cpu")


def test_a_hub_model_without_safetensors_is_refused(monkeypatch):
    def absent(name, file, revision):
        raise OSError(f"{name} does not appear to have a file named {file}\nand more")

    monkeypatch.setattr("treeflash.target.model_files.cached_file", absent)
    monkeypatch.setattr(
        "treeflash.target.loading.AutoConfig.from_pretrained", lambda *given, **also: Qwen3Config()
    )
    with pytest.raises(
        InputError, match=r"a file named .*index.json \(weights are read from safetensors alone\)$"
    ):
        load_target("some/where")


@pytest.fixture
def with_code(tiny_folder, tmp_path, monkeypatch):
    """A model that brings its own code, which leaves a trace when it is run."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("builtins.input", None)
    (tiny_folder / "own.py").write_text(
        "import pathlib, transformers\n"
        f"pathlib.Path({str(tmp_path / 'run')!r}).touch()\n"
        "class Config(transformers.Qwen3Config):\n    model_type = 'own'\n"
        "class Model(transformers.Qwen3ForCausalLM):\n    config_class = Config\n"
    )
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    return changed(tiny_folder, model_type="own", auto_map=own)


def test_code_of_a_models_own_is_not_run_unasked(with_code, tmp_path):
    with pytest.raises(InputError, match=r"set trust_remote_code = true beside the model's name to run it$"):
        load_target(with_code, device="cpu")
    assert not (tmp_path / "run").exists()


def test_code_of_a_models_own_is_run_when_trusted(with_code, tmp_path):
    target = load_target(with_code, device="cpu", trust_remote_code=True)
    assert (tmp_path / "run").exists()
    assert type(target.model).__name__ == "Model"


@pytest.mark.parametrize("table", ["target", "drafter"])
def test_a_recipe_says_whether_code_may_run(with_code, table, tmp_path):
    overrides = {table: {"model": str(with_code)}}
    with pytest.raises(InputError, match="trust_remote_code"):
        treeflash.load("tiny-draft-model", **overrides)
    overrides[table]["trust_remote_code"] = True
    assert treeflash.load("tiny-draft-model", **overrides).generate([2, 65], max_new_tokens=2).token_ids


@pytest.mark.parametrize("implementation", ["some/kernel", "flash_attention_2"])
def test_other_attention_is_not_even_loaded(tiny_folder, implementation):
    target = load_target(changed(tiny_folder, attn_implementation=implementation), device="cpu")
    assert target.attention == "sdpa"


def test_a_folder_has_no_revisions(tiny_folder):
    with pytest.raises(InputError, match="revision: expected none for a folder, found 'v1'"):
        load_target(tiny_folder, revision="v1")


def test_a_revision_is_asked_for(monkeypatch):
    asked = {}

    def config(name, **origin):
        asked.update(origin)
        raise OSError("not to be had")

    monkeypatch.setattr("treeflash.target.loading.AutoConfig.from_pretrained", config)
    with pytest.raises(
        InputError, match=r"^.*target \'some/where\' cannot be loaded: config\.json: not to be"
    ):
        treeflash.load("tiny-plain", target={"model": "some/where", "revision": "v1"})
    assert asked == {"revision": "v1", "trust_remote_code": False}


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
    def fail(name, **origin):
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
    with pytest.raises(InputError, match=rf"none could be loaded: .*{file}: not valid JSON \(nested"):
        target.require_text()

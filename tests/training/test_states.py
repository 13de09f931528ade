"""The target's states: on disk what they would be computed anew, or a clear word why not."""

from collections import namedtuple

import pytest
import torch

from treeflash.errors import InputError
from treeflash.training import states as states_module
from treeflash.training.corpus import Corpus
from treeflash.training.states import CachedStates, ComputedStates
from treeflash.training.texts import pack

TAPS = (0, 2)
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def corpus(data, cpu_target):
    return Corpus.read([data], cpu_target.digest(), 512, 32)


@pytest.fixture
def cached(corpus, cpu_target, tmp_path):
    return CachedStates(ComputedStates(cpu_target, TAPS), tmp_path / "states", corpus.texts)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_alike(one, other):
    assert torch.allclose(one.taps, other.taps, rtol=0, atol=2e-5)
    assert torch.allclose(one.normed, other.normed, rtol=0, atol=2e-5)


def test_computed_states_are_the_prefill(corpus, cpu_target):
    """Texts in one row do not see each other."""
    texts = corpus.texts[:3]
    read = ComputedStates(cpu_target, TAPS).read((0, 1, 2), pack(texts))
    for text, begin, end in zip(texts, read.text.bounds, read.text.bounds[1:], strict=False):
        ids = torch.cat([text.prompt_ids, text.answer_ids])[None].long()
        output = cpu_target.prefill(cpu_target.start(1, ids.shape[1], TAPS), ids)
        assert torch.allclose(read.taps[begin:end], output.taps[0], atol=2e-5)
        head = cpu_target.head(None, cpu_target.dtype)
        logits = cpu_target.finish(head(read.normed[end - 1 : end]))
        assert torch.allclose(logits, output.logits[0, -1:], atol=2e-4)


def test_cached_states_are_the_computed_ones(cached, corpus):
    assert cached.missing() == [0, 1]
    assert sum(cached.fill()) == sum(text.length for text in corpus.texts)
    assert cached.missing() == []
    assert sorted(files(cached.folder)) == ["states-00000.safetensors", "states-00001.safetensors"]
    for numbers in ([0], [31, 32], [39, 3, 17], list(range(8))):
        row = pack([corpus.texts[number] for number in numbers])
        assert_alike(cached.read(numbers, row), cached.computed.read(numbers, row))


def test_their_size(cached):
    list(cached.fill())
    written = sum(len(content) for content in files(cached.folder).values())
    assert cached.size() < written < cached.size() * 1.05


def test_a_missing_file_is_made_again(cached):
    list(cached.fill())
    before = files(cached.folder)
    (cached.folder / "states-00001.safetensors").unlink()
    assert cached.missing() == [1]
    list(cached.fill())
    assert files(cached.folder) == before


def test_a_late_process_writes_its_share(corpus, cpu_target, tmp_path):
    texts = corpus.texts + corpus.texts + corpus.texts
    one, other = (CachedStates(ComputedStates(cpu_target, ()), tmp_path, texts) for _ in range(2))
    list(one.fill(0, 2))
    list(other.fill(1, 2))
    assert one.missing() == []


@pytest.mark.parametrize("content", [b"", b"broken", None])
def test_a_broken_file_is_named(cached, corpus, content):
    list(cached.fill())
    path = cached.folder / "states-00000.safetensors"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(InputError, match=r"states-00000\.safetensors: cannot be read .*delete it"):
        cached.read([3], pack(corpus.texts[3:4]))


def test_a_file_cut_short_is_named(cached, corpus):
    list(cached.fill())
    path = cached.folder / "states-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(InputError, match=r"states-00000\.safetensors: cannot be read .*delete it"):
        cached.read([31], pack(corpus.texts[31:32]))


def test_a_changed_number_is_named(cached, corpus):
    list(cached.fill())
    path = cached.folder / "states-00001.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    numbers = range(32, len(corpus.texts))
    with pytest.raises(InputError, match=r"states-00001\.safetensors: cannot be read .*not what was written"):
        cached.read(numbers, pack(corpus.texts[32:]))


def test_a_disk_too_small(run, tmp_path, monkeypatch):
    monkeypatch.setattr(states_module.shutil, "disk_usage", lambda place: Usage(2e9, 1e9, 1e9))
    with pytest.raises(InputError) as error:
        run(tmp_path, data={"states": "cache"})
    message = str(error.value)
    assert message.startswith(f"{tmp_path / 'states'}: the target's states need 0.0 GB, and 1.0 GB are free")
    assert 'data.states = "compute"' in message
    assert not list(tmp_path.rglob("*.safetensors*"))


def test_a_disk_too_small_and_the_advice_taken(run, tmp_path, monkeypatch):
    monkeypatch.setattr(states_module.shutil, "disk_usage", lambda place: Usage(2e9, 1e9, 1e9))
    with pytest.raises(InputError, match=r"or data\.states"):
        run(tmp_path, data={"states": "cache"})
    run(tmp_path, data={"states": "compute"})


def test_room_is_asked_for_what_is_missing(cached, monkeypatch):
    spare = 1 << 30
    free = spare + cached.size() - 1
    monkeypatch.setattr(states_module.shutil, "disk_usage", lambda place: Usage(0, 0, free))
    with pytest.raises(InputError):
        cached.check_room()
    list(cached.fill())
    (cached.folder / "states-00001.safetensors").unlink()
    cached.check_room()


def test_a_disk_that_fills(cached, monkeypatch):
    write = states_module.write_tensors

    def write_tensors(tensors, path, metadata):
        path.write_bytes(b"half")
        if "00001" in path.name:
            raise OSError(28, "No space left on device")
        write(tensors, path, metadata)

    monkeypatch.setattr(states_module, "write_tensors", write_tensors)
    with pytest.raises(InputError, match=r"states-00001\.safetensors: cannot be written .*No space left"):
        list(cached.fill())
    assert list(files(cached.folder)) == ["states-00000.safetensors"]
    monkeypatch.undo()
    list(cached.fill())
    assert cached.missing() == []


def test_a_folder_that_cannot_be(cached):
    cached.folder.write_text("a file")
    with pytest.raises(InputError, match="states: cannot be made"):
        list(cached.fill())

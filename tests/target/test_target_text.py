"""Between text and token ids: special tokens once, and never half a character."""

import functools
import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from treeflash.errors import InputError
from treeflash.prompts import Prompt
from treeflash.target.text import TextCodec, TextStream

BOS, EOS = 256, 257
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_tokenizer(adds_bos: bool = True, template: str | None = TEMPLATE, bos: str | None = "<s>"):
    """A token per byte, no merges; a character of n bytes is n tokens."""
    symbols = pre_tokenizers.ByteLevel.alphabet()
    # Token ids are the bytes themselves, to be read in the tests.
    vocab = {symbol: _byte(symbol) for symbol in symbols}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<s>", "</s>"])
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token="</s>")
    wrapped.chat_template = template
    return wrapped


@functools.cache
def _bytes_by_symbol() -> dict[str, int]:
    # The byte-level alphabet writes printable Latin-1 bytes as themselves and the rest, in order, as
    # the characters from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte(symbol: str) -> int:
    return _bytes_by_symbol()[symbol]


def word_tokenizer():
    """Words that carry their leading space, as SentencePiece has them: a text's first one is dropped."""
    words = ["<unk>", "<s>", "</s>", "▁Hello", "▁world", "ly", "▁"]
    core = Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>")
    )
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


BYTES = TextCodec(byte_tokenizer())
WORDS = TextCodec(word_tokenizer())


def chunked(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """Cuts a list into pieces of the sizes given, over and over, to the end."""
    pieces, rest = [], list(ids)
    for size in itertools.cycle([*sizes, 1]):
        if not rest:
            return pieces
        pieces.append(rest[:size])
        rest = rest[size:]


def streamed(codec: TextCodec, pieces: list[list[int]]) -> list[str]:
    stream = TextStream(codec)
    return [*(stream.push(piece) for piece in pieces), stream.close()]


def test_tokens_of_the_test_are_bytes():
    assert BYTES.encode_raw("a€") == [BOS, *"a€".encode()]
    assert BYTES.decode([BOS, *"a€".encode(), EOS]) == "a€"


@given(st.text(max_size=12))
def test_a_raw_prompt_gets_the_tokenizers_special_tokens_once(text):
    ids = [BOS, *text.encode()]
    assert BYTES.encode_raw(text) == ids
    assert BYTES.encode_raw("<s>" + text) == ids


@pytest.mark.parametrize("bos", ["<s>", None])
def test_a_tokenizer_that_adds_none_is_left_at_that(bos):
    codec = TextCodec(byte_tokenizer(adds_bos=False, bos=bos))
    assert codec.encode_raw("ab") == [97, 98]
    assert codec.encode_raw("<s>ab") == [BOS, 97, 98]


def test_only_a_text_that_begins_with_it_has_its_beginning():
    assert BYTES.encode_raw("a<s>") == [BOS, 97, BOS]


@given(st.text(max_size=12))
def test_a_chat_has_the_templates_special_tokens_once(text):
    expected = [BOS, *f"[user]{text}".encode(), EOS, *b"[assistant]"]
    assert BYTES.encode_chat(text) == expected


def test_a_template_without_special_tokens_gets_none():
    codec = TextCodec(byte_tokenizer(template="{{ messages[0].content }}"))
    assert codec.encode_chat("ab") == [97, 98]


def test_thinking_is_off():
    template = "{% if enable_thinking is defined and enable_thinking is false %}!{% endif %}"
    codec = TextCodec(byte_tokenizer(template=template + "{{ messages[0].content }}"))
    assert codec.encode_chat("ab") == [*b"!ab"]


def test_a_chat_needs_a_template():
    with pytest.raises(InputError, match=r"no chat template.*--raw"):
        TextCodec(byte_tokenizer(template=None)).encode_chat("a")


@pytest.mark.parametrize("encode", [BYTES.encode_raw, BYTES.encode_chat])
def test_bytes_of_another_encoding_are_an_error(encode):
    """As a shell passes them on."""
    with pytest.raises(InputError, match=r"UTF-8, found 'caf.udce9'"):
        encode("caf\udce9")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('Only tools here') }}", "TemplateError: Only tools here"),
        ("{% if %}", "TemplateSyntaxError: "),
        ("{{ messages[7].content }}", "UndefinedError: "),
        ("{{ 1 / 0 }}", "ZeroDivisionError: "),
        (
            {"tool_use": TEMPLATE, "rag": TEMPLATE},
            r"templates \(tool_use, rag\), expected one called default",
        ),
    ],
    ids=["raises", "broken", "undefined", "divides", "no-default"],
)
def test_a_template_that_fails_is_one_error(template, reason):
    with pytest.raises(InputError, match=reason) as caught:
        TextCodec(byte_tokenizer(template=template)).encode_chat("Ana has 7 apples.")
    message = str(caught.value)
    assert message.startswith("the target's ")
    assert message.endswith("`treeflash generate --raw` takes a prompt as it is")
    assert "\n" not in message


def test_a_template_called_default_is_taken():
    templates = {"tool_use": "{{ 1 / 0 }}", "default": TEMPLATE}
    assert TextCodec(byte_tokenizer(template=templates)).encode_chat("a") == BYTES.encode_chat("a")


def test_a_tokenizer_that_fails_is_one_error(monkeypatch):
    def fail(text, add_special_tokens):
        raise Exception("WordPiece error: Missing [UNK] token")

    codec = TextCodec(byte_tokenizer())
    monkeypatch.setattr(codec.tokenizer, "encode", fail)
    for encode in (codec.encode_raw, codec.encode_chat):
        with pytest.raises(
            InputError, match=r"tokenizer fails for .*WordPiece error: Missing \[UNK\] token\)$"
        ):
            encode("Ana has 7 apples, and gives three of them to Ben, and then one more.")


@pytest.mark.parametrize(
    ("turns", "found"),
    [
        (("\udc80", "a", "b"), r"UTF-8, found '.udc80'$"),
        (("a", "b", 7), r"found 7 \(int\)$"),
        (([{"role": "user", "content": "a"}],), r"found \[\{.* \(list\)$"),
        ((b"a",), r"found b'a' \(bytes\)$"),
        ((None,), r"found None \(NoneType\)$"),
        ((), "at least one turn of a conversation, found none"),
    ],
)
def test_the_turn_that_is_no_text_is_named(turns, found):
    with pytest.raises(InputError, match=found):
        BYTES.encode_chat(*turns)


def test_a_prompt_leaves_room_for_a_token_at_least():
    prompts = [Prompt(("ab", "is not read")), Prompt(("abc",))]
    lengths = [len(BYTES.encode_chat(prompt.turns[0])) for prompt in prompts]
    for limit in (None, lengths[1] + 1):
        assert BYTES.first_lengths(prompts, limit, "too long") == lengths
    with pytest.raises(InputError, match=rf"^too long: 'abc' has {lengths[1]} tokens, expected fewer than"):
        BYTES.first_lengths(prompts, lengths[1], "too long")


def test_nothing_to_decode_from_is_an_error():
    codec = TextCodec(byte_tokenizer(adds_bos=False, template="{{ messages[0].content }}"))
    for encode in (codec.encode_raw, codec.encode_chat):
        with pytest.raises(InputError, match="the prompt is empty: expected at least one token"):
            encode("")
    # A beginning-of-text token is something.
    assert BYTES.encode_raw("") == [BOS]


def test_decoding_leaves_special_tokens_out():
    assert BYTES.decode([BOS, 97, EOS, 98, BOS]) == "ab"
    assert BYTES.decode([]) == ""
    assert BYTES.decode((97,)) == "a"


@given(text=st.text(max_size=12), sizes=st.lists(st.integers(0, 4), max_size=4))
@example(text="a€é😀b", sizes=[])
@example(text="e\u0301", sizes=[])  # two characters, though one is seen
def test_a_stream_gives_whole_characters_as_soon_as_they_are(text, sizes):
    pieces = chunked(list(text.encode()), sizes)
    shown = streamed(BYTES, pieces)
    assert "".join(shown) == text
    read = b""
    for count, piece in enumerate(pieces, start=1):
        read += bytes(piece)
        so_far = "".join(shown[:count])
        assert text.startswith(so_far)
        whole = read.decode(errors="ignore")
        # U+FFFD itself cannot be told from half a character until something follows.
        if whole.encode() == read and not whole.endswith("\N{REPLACEMENT CHARACTER}"):
            assert so_far == whole


@given(
    ids=st.lists(st.integers(0, 257), max_size=12),
    sizes=st.lists(st.integers(0, 4), max_size=4),
)
@example(ids=[0xE2, 0x82, EOS, 0xAC, 97], sizes=[])  # a character around a special token
@example(ids=[0xE2, 0x82, 97], sizes=[])  # half of one that never comes
@example(ids=[97, 0xE2, 0x82], sizes=[])  # the text ends in mid-character
def test_all_of_a_stream_is_the_text_of_all_tokens(ids, sizes):
    # Whatever the bytes: a model may write some that are no text.
    shown = streamed(BYTES, chunked(ids, sizes))
    assert "".join(shown) == BYTES.decode(ids)
    # What was shown before the end never ends in half a character.
    assert not any(part.endswith("\N{REPLACEMENT CHARACTER}") for part in shown[:-1])


def test_the_end_gives_what_is_left_half_or_not():
    stream = TextStream(BYTES)
    assert stream.push([97, 0xE2, 0x82]) == ""
    assert stream.close() == "a\N{REPLACEMENT CHARACTER}"
    assert TextStream(BYTES).close() == ""


@given(ids=st.lists(st.sampled_from([3, 4, 5, 6]), max_size=8), sizes=st.lists(st.integers(1, 3), max_size=4))
def test_a_words_leading_space_is_kept_but_for_the_first(ids, sizes):
    assert "".join(streamed(WORDS, chunked(ids, sizes))) == WORDS.decode(ids)


@pytest.mark.parametrize("pieces", [[[3], [2], [4]], [[3], [], [4]], [[3], [2, 1], [], [4, 5]]], ids=str)
def test_a_piece_without_text_does_not_lose_the_next_space(pieces):
    ids = list(itertools.chain(*pieces))
    assert "".join(streamed(WORDS, pieces)) == WORDS.decode(ids)


def test_a_step_costs_the_same_late_in_the_text(monkeypatch):
    stream, lengths = TextStream(BYTES), []
    decode = TextCodec.decode
    monkeypatch.setattr(
        TextCodec, "decode", lambda self, ids: (lengths.append(len(ids)), decode(self, ids))[1]
    )
    for _ in range(50):
        stream.push([97, 98, 99])
    assert max(lengths) <= 6


def test_the_tiny_targets_text_survives_its_tokens(tiny_target):
    text = "The cafe costs 3 dollars."
    ids = tiny_target.text.encode_raw(text)
    assert tiny_target.text.decode(ids) == text
    assert "".join(streamed(tiny_target.text, [[token] for token in ids])) == text

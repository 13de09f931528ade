"""Words in, words out."""

import pytest

import treeflash
from treeflash.engine.answering import text_pieces
from treeflash.errors import InputError


@pytest.fixture(scope="module")
def decoder():
    return treeflash.load("tiny-treeflash", target={"device": "cpu"})


def test_an_answer_is_the_text_of_what_is_generated(decoder):
    codec = decoder.target.text
    result = decoder.generate(codec.encode_chat("Ana has 7 apples."), max_new_tokens=30)
    assert decoder.answer("Ana has 7 apples.", max_new_tokens=30) == codec.decode(result.token_ids)


def test_an_answer_comes_in_pieces(decoder):
    pieces = list(decoder.answer_stream("Ana has 7 apples.", max_new_tokens=30))
    assert len(pieces) > 1
    assert "".join(pieces) == decoder.answer("Ana has 7 apples.", max_new_tokens=30)


def test_a_conversation_has_several_turns(decoder):
    turns = ("Ana has 7 apples.", "Ana gets 2.", "Ben has 3 plums.")
    expected = decoder.generate(decoder.target.text.encode_chat(*turns), max_new_tokens=20)
    assert decoder.answer(*turns, max_new_tokens=20) == decoder.target.text.decode(expected.token_ids)


def test_raw_text_is_continued(decoder):
    codec = decoder.target.text
    expected = decoder.generate(codec.encode_raw("Ana has"), max_new_tokens=20)
    assert decoder.answer("Ana has", raw=True, max_new_tokens=20) == codec.decode(expected.token_ids)
    with pytest.raises(InputError, match="raw: expected one text to continue, found 2 turns"):
        decoder.answer("Ana", "Ben", raw=True)


def test_a_target_without_words_is_refused():
    with pytest.raises(InputError, match=r"expected a target with a tokenizer.*give token ids to generate"):
        list(text_pieces(object(), iter, "Ana", raw=False))

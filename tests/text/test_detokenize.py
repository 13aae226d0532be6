"""Streamed text: nothing printed too early, nothing lost, whatever the cuts between tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import InputError
from sluice.text.detokenize import StreamDecoder
from sluice.text.tokenizer import Tokenizer

# One token per byte, then a control token, then a few longer pieces.
_PIECES = ["ab", "abc", "STOP", "Ġthe"]
_CONTROL = 256


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    alphabet = [chr(b) if b in printable else chr(next(others)) for b in range(256)]
    tokens = [*alphabet, "<|im_end|>", *_PIECES]
    return Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.token_type": [1] * 256 + [3] + [1] * len(_PIECES),
        }
    )


def run(decoder: StreamDecoder, ids: list[int]) -> str:
    return "".join(map(decoder.push, ids)) + decoder.finish()


def before_first_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """What remains of `text` read one character at a time until a stop string has appeared."""
    for end in range(len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(map(len, met))], True
    return text, False


@given(ids=st.lists(st.integers(0, 260), max_size=60))
def test_all_bytes_come_out_and_never_half_a_character(tokenizer: Tokenizer, ids: list[int]) -> None:
    decoder = StreamDecoder(tokenizer)
    want = b"".join(tokenizer.token_bytes(i) for i in ids if i != _CONTROL).decode("utf-8", "replace")
    out = ""
    for i in ids:
        out += decoder.push(i)
        assert want.startswith(out)
    assert out + decoder.finish() == want
    assert decoder.finish() == ""


@given(
    text=st.text("abcST OP é世😀", max_size=40),
    stops=st.lists(st.text("abcSTOP é世", min_size=1, max_size=5), max_size=4),
    cuts=st.data(),
)
def test_stop_strings_wherever_tokens_are_cut(
    tokenizer: Tokenizer, text: str, stops: list[str], cuts: st.DataObject
) -> None:
    data, ids = text.encode(), []
    while data:
        fits = [256 + 1 + k for k, p in enumerate(_PIECES) if data.startswith(p.replace("Ġ", " ").encode())]
        i = cuts.draw(st.sampled_from([data[0], *fits]))
        ids.append(i)
        data = data[len(tokenizer.token_bytes(i)) :]
    decoder = StreamDecoder(tokenizer, stops)
    want, stopped = before_first_stop(text, stops)
    out = ""
    for i in ids:
        out += decoder.push(i)
        assert want.startswith(out), "nothing may have to be taken back"
    out += decoder.finish()
    assert (out, decoder.stopped) == (want, stopped)
    assert decoder.push(ord("a")) == "" or not stopped


@given(text=st.text("xyz", max_size=30), stops=st.lists(st.text("abc", min_size=1), max_size=3))
def test_text_that_begins_no_stop_is_not_held(tokenizer: Tokenizer, text: str, stops: list[str]) -> None:
    decoder = StreamDecoder(tokenizer, stops)
    assert [decoder.push(ord(c)) for c in text] == list(text)


def test_a_split_character_is_held_until_it_is_whole(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(b) for b in "é😀".encode()] == ["", "é", "", "", "", "😀"]


def test_an_unfinished_character_ends_as_a_replacement(tokenizer: Tokenizer) -> None:
    assert run(StreamDecoder(tokenizer), [ord("a"), 0xF0, 0x9F]) == "a\ufffd"


def test_broken_bytes_do_not_swallow_what_follows(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(b) for b in (0xE4, ord("a"), 0xFF)] == ["", "\ufffda", "\ufffd"]


def test_a_stop_string_split_over_tokens(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer, ["STOP"])
    assert [decoder.push(ord(c)) for c in "xSTyST"] == ["x", "", "", "STy", "", ""]
    assert not decoder.stopped
    assert [decoder.push(ord(c)) for c in "OPz"] == ["", "", ""]
    assert decoder.stopped and decoder.finish() == ""


def test_a_stop_string_inside_one_token_cuts_it(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer, ["b"])
    assert run(decoder, [258, ord("x")]) == "a" and decoder.stopped


def test_a_stop_completed_by_a_replacement_character(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer, ["\ufffd"])
    assert run(decoder, [ord("a"), 0xF0]) == "a" and decoder.stopped


def test_control_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    assert run(StreamDecoder(tokenizer), [ord("a"), _CONTROL, ord("b")]) == "ab"


def test_an_empty_stop_string_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="empty"):
        StreamDecoder(tokenizer, ["x", ""])

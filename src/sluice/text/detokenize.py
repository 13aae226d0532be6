"""Text from a stream of token ids, printable as it comes. It knows a tokenizer, and nothing of models or terminals."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import SupportsIndex

from sluice.errors import InputError
from sluice.text.tokenizer import Tokenizer


class StreamDecoder:
    """Turns ids, pushed one by one, into text that will not have to be taken back.

    Held back: the bytes of an unfinished UTF-8 character, and text that a stop string may begin with. Bytes that can't
    become UTF-8 turn into U+FFFD. Control tokens have no text. `stopped` is set when a stop string has appeared: the
    text before it has been given out, the stop string and all after it never is. The stop that ends first counts, the
    longest of those that end together, so the outcome does not depend on how the text was cut into tokens.
    Raises InputError for an empty stop string, and for ids outside the vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        if any(not text for text in stop):
            raise InputError("a stop string is empty; give at least one character")
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

    def push(self, token: SupportsIndex) -> str:
        """Takes one token in and returns the text, perhaps none, that can be printed now."""
        if self.stopped or self._tokenizer.is_control(token):
            return ""
        return self._release(self._characters.decode(self._tokenizer.token_bytes(token)))

    def finish(self) -> str:
        """Returns what is still held; an unfinished character comes out as U+FFFD. Nothing may be pushed afterwards."""
        if self.stopped:
            return ""
        text = self._release(self._characters.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _release(self, new: str) -> str:
        text = self._held + new
        ends = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped = True
            self._held = ""
            return text[: min(ends)[1]]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, the whole of `stop` excepted."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

"""Text that arrives in pieces, read from left to right by generators. It knows JSON's outline and no tool calls.

A reading function is a generator: it yields where it needs more text, and is resumed when more has come or the end is
known. What it reads and returns never depends on how the text was cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Sink = Callable[[str], object]

_SPACES = 64  # white space that may stand between two parts; more is no format's habit
_SPACE = " \t\r\n"
_OUTSIDE_STRINGS = frozenset("{}[]:,+-.0123456789truefalsnEe" + _SPACE)  # characters of JSON


class Reader:
    """A cursor over text that is still arriving: `feed` and `close` by the one who has it, the rest by its readers.

    From `mark()` to `commit()` the text read is kept, and `rewind()` gives it back as text that was never read.
    """

    def __init__(self) -> None:
        self.closed = False
        self._text = ""
        self._at = 0
        self._mark: int | None = None

    def feed(self, text: str) -> None:
        cut = self._at if self._mark is None else self._mark
        self._text = self._text[cut:] + text
        self._at -= cut
        if self._mark is not None:
            self._mark = 0

    def close(self) -> None:
        """No more text will come."""
        self.closed = True

    def mark(self) -> None:
        self._mark = self._at

    def commit(self) -> None:
        self._mark = None

    def taken(self) -> str:
        """What has been read since the mark, which is lifted."""
        start = self._at if self._mark is None else self._mark
        self._mark = None
        return self._text[start : self._at]

    def rewind(self) -> bool:
        """Back to the mark, which is lifted; False if there is none any more."""
        if self._mark is None:
            return False
        self._at, self._mark = self._mark, None
        return True

    def more(self) -> Reading[bool]:
        """Waits for more text; False at the end."""
        had = len(self._text) - self._at
        while len(self._text) - self._at == had and not self.closed:
            yield
        return len(self._text) - self._at > had

    def until(self, markers: Sequence[str], sink: Sink) -> Reading[str | None]:
        """Passes text on up to the first of `markers` and returns that, unread; None at the end.

        What a marker may begin with is held back. Of markers in the same place the longest counts.
        """
        while True:
            found = [(at, -len(marker), marker) for marker in markers if (at := self._text.find(marker, self._at)) >= 0]
            if found:
                at, _, marker = min(found)
                self._pass(at, sink)
                return marker
            keep = max((_overlap(self._text, self._at, marker) for marker in markers), default=0)
            self._pass(len(self._text) - keep, sink)
            if not (yield from self.more()):
                self._pass(len(self._text), sink)
                return None

    def accept(self, *literals: str, space: bool = True) -> Reading[str | None]:
        """Reads the literal that comes next, after white space if `space`; None, and nothing read, if none does.

        No literal may begin with another one.
        """
        while True:
            at = self._at
            if space:
                limit = min(len(self._text), at + _SPACES)
                while at < limit and self._text[at] in _SPACE:
                    at += 1
            for literal in literals:
                if self._text.startswith(literal, at):
                    self._at = at + len(literal)
                    return literal
            rest = self._text[at : at + 256]
            if not any(literal.startswith(rest) for literal in literals) or not (yield from self.more()):
                return None

    def expect(self, *literals: str, space: bool = True) -> Reading[str]:
        """As `accept`; raises Unexpected if none comes."""
        found = yield from self.accept(*literals, space=space)
        if found is None:
            raise Unexpected
        return found

    def skip_space(self) -> Reading[None]:
        for _ in range(_SPACES):
            if (yield from self.peek()) not in _SPACE or not self.left:
                return
            self._at += 1

    @property
    def left(self) -> bool:
        """Whether text that has come is still unread."""
        return self._at < len(self._text)

    def peek(self) -> Reading[str]:
        """The next character, unread; "" at the end."""
        if not self.left:
            yield from self.more()
        return self._text[self._at : self._at + 1]

    def step(self, sink: Sink) -> Reading[None]:
        """Passes the next character on."""
        yield from self.peek()
        self._pass(min(self._at + 1, len(self._text)), sink)

    def ahead(self) -> Reading[str]:
        """The next character that is no white space, unread like all before it; "" at the end, or for too much."""
        at = self._at
        while at - self._at < _SPACES:
            if at == len(self._text):
                offset = at - self._at
                if not (yield from self.more()):
                    return ""
                at = self._at + offset
            elif self._text[at] in _SPACE:
                at += 1
            else:
                return self._text[at]
        return ""

    def run(self, characters: re.Pattern[str], limit: int) -> Reading[str]:
        """The longest run, up to `limit`, of characters that each match."""
        out: list[str] = []
        while len(out) < limit:
            character = yield from self.peek()
            if not character or not characters.match(character):
                break
            out.append(character)
            self._at += 1
        return "".join(out)

    def value(self, sink: Sink) -> Reading[bool]:
        """Passes on one JSON value, as it is written, up to where it closes; whether it does.

        It is read by its outline: brackets, strings, and no character outside strings that JSON does not have.
        """
        depth, string, escaped, empty = 0, False, False, True
        while True:
            for at in range(self._at, len(self._text)):
                c = self._text[at]
                end = None  # where the value ends, and whether well
                if string:
                    if escaped:
                        escaped = False
                    elif c == "\\":
                        escaped = True
                    elif c == '"':
                        string = False
                        end = None if depth else (at + 1, True)
                elif c == '"':
                    string = True
                    end = None if depth or empty else (at, True)
                elif c in "{[":
                    end = None if depth or empty else (at, True)
                    depth += 1
                elif c in "}]":
                    depth -= 1
                    end = (at + 1, True) if depth == 0 else (at, not empty) if depth < 0 else None
                elif c not in _OUTSIDE_STRINGS or (not depth and (c in ",:" or c in _SPACE)):
                    end = (at, not empty and not depth)
                if end is not None:
                    self._pass(end[0], sink)
                    return end[1]
                empty = False
            self._pass(len(self._text), sink)
            if not (yield from self.more()):
                return not (depth or string or empty)

    def string(self) -> Reading[str | None]:
        """A JSON string, read and decoded; None, with what looked like one read, if there is none."""
        if (yield from self.peek()) != '"':
            return None
        out: list[str] = []
        whole = yield from self.value(out.append)
        return decoded("".join(out)) if whole else None

    def _pass(self, end: int, sink: Sink) -> None:
        if end > self._at:
            sink(self._text[self._at : end])
            self._at = end


class Unexpected(Exception):
    """The text is not what its beginning promised."""


def decoded(text: str) -> str | None:
    """The string that JSON `text` stands for; None if it stands for something else, or nothing."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def _overlap(text: str, start: int, marker: str) -> int:
    """Length of the longest end of `text[start:]` that `marker` begins with."""
    lengths: Iterable[int] = range(min(len(text) - start, len(marker) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(marker[:n])), 0)

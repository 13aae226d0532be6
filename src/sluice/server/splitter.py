"""Tells apart what a model writes while it comes: reasoning, content, tool calls. It knows no templates and no HTTP.

What comes out does not depend on how the text was cut. Half a marker is never given out as content; what only looked
like a call is content, as it was written. White space between the parts of a reply is dropped.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

from sluice.server.reader import Reader, Reading, Sink, Unexpected
from sluice.server.thinking import Block
from sluice.server.tools import NAME, Syntax, Tool

_ID_CHARACTERS = string.ascii_letters + string.digits
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")


class Delta(NamedTuple):
    """A piece of a reply: "content" and "reasoning" `text`; "name" begins call number `call`, which has an `id` and is
    of the function `text`; "arguments" is the next piece of that call's JSON."""

    kind: Literal["content", "reasoning", "name", "arguments"]
    text: str
    call: int = 0
    id: str = ""


def call_id(length: int | None = None) -> str:
    """A fresh id for a call; `length`: letters and digits alone, as Mistral's templates demand."""
    if length is None:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(length))


class Splitter:
    """Splits one reply: `push` what comes, `finish` at its end. `called`: whether it has called a function.

    `block` is how reasoning is marked off, `opened` whether the prompt ends within it; `syntax` how calls are written,
    None where none are expected; `shown` the texts of control tokens that belong to either.
    """

    def __init__(
        self, *, block: Block | None, opened: bool, syntax: Syntax | None, tools: Sequence[Tool],
        shown: Mapping[int, str], new_id: Callable[[], str] = call_id,
    ) -> None:  # fmt: skip
        self.called = False
        self.tools = {tool.name: tool for tool in tools}
        self._block, self._opened, self._syntax = block, opened, syntax
        self._shown = shown
        self._new_id = new_id
        self._index = -1
        self._known_only = False  # whether a call must name a function on offer to be one
        self._out: list[Delta] = []
        self._texts: dict[str, _Trimmed] = {
            "content": _Trimmed(lambda text: self._emit(Delta("content", text))),
            "reasoning": _Trimmed(lambda text: self._emit(Delta("reasoning", text)), fresh=True),
        }
        self._reader = Reader()
        self._reading = self._read()
        next(self._reading, None)

    def push(self, text: str, id: int | None = None) -> list[Delta]:
        """Takes in text, and the token it came with: a control token of the format, which has no text, counts."""
        text += self._shown.get(id, "") if id is not None else ""
        if text:
            self._reader.feed(text)
            next(self._reading, None)
        return self._drain()

    def finish(self) -> list[Delta]:
        """What was held back. Nothing may be pushed afterwards."""
        self._reader.close()
        for _ in self._reading:
            pass
        self._texts["content"].finish()
        return self._drain()

    # what a Syntax tells of the calls it reads

    def begin(self, name: str, id: str = "") -> None:
        if not name or (self._known_only and name not in self.tools):
            raise Unexpected
        self._reader.commit()
        for text in self._texts.values():
            text.drop()
        self.called = True
        self._index += 1
        self._emit(Delta("name", name, self._index, id or self._new_id()))

    def arguments(self, text: str) -> None:
        if text:
            self._emit(Delta("arguments", text, self._index))

    # reading

    def _read(self) -> Reading[None]:
        reader, block, syntax = self._reader, self._block, self._syntax
        content = self._texts["content"].push
        frame_end = None
        if block is not None:
            if self._opened or (yield from reader.accept(block.open)):
                yield from self._reason(block)
                self._texts["content"].drop()
            if block.answer and (yield from reader.accept(block.answer[0])):
                frame_end = block.answer[1]
                self._texts["content"].drop()
        if syntax is not None and syntax.bare and (yield from reader.ahead()) == "{":
            self._known_only = True
            yield from self._call(syntax, content)
        self._known_only = False
        openers = syntax.openers if syntax else ()
        markers = openers if frame_end is None else (*openers, frame_end)
        while (found := (yield from reader.until(markers, content))) is not None:
            if found == frame_end:
                yield from reader.accept(found)
                self._texts["content"].drop()
            elif syntax is not None:
                yield from self._call(syntax, content)

    def _reason(self, block: Block) -> Reading[None]:
        """Reads reasoning to its end: its marker, or a call of a function on offer, which some don't end it for."""
        syntax, reasoning = self._syntax, self._texts["reasoning"]
        markers = (block.close, *(syntax.openers if syntax else ()))
        while (found := (yield from self._reader.until(markers, reasoning.push))) is not None:
            if found == block.close:
                yield from self._reader.accept(found, space=False)
                break
            self._known_only = True
            if syntax is not None and (yield from self._call(syntax, reasoning.push)):
                break
        self._known_only = False
        reasoning.drop()

    def _call(self, syntax: Syntax, otherwise: Sink) -> Reading[bool]:
        """Reads calls; whether there were any. If not, what was read goes `otherwise`."""
        before, reader = self._index, self._reader
        reader.mark()
        with suppress(Unexpected):
            yield from syntax.read(reader, self)
        if self._index > before:
            reader.commit()
            return True
        if text := reader.taken():
            otherwise(text)
        else:  # never twice at the same place
            yield from reader.step(otherwise)
        return False

    def _emit(self, delta: Delta) -> None:
        last = self._out[-1] if self._out else None
        if last is not None and delta.kind != "name" and (last.kind, last.call) == (delta.kind, delta.call):
            self._out[-1] = last._replace(text=last.text + delta.text)
        else:
            self._out.append(delta)

    def _drain(self) -> list[Delta]:
        out, self._out = self._out, []
        return out


class HarmonySplitter(Splitter):
    """Splits what gpt-oss writes: messages, each with a channel and perhaps a recipient in its header.

    `analysis` is reasoning; a message to a function is a call; everything else is content.
    """

    def __init__(self, prompt_tail: str, tools: Sequence[Tool], shown: Mapping[int, str]) -> None:
        self._header = ""  # what the prompt has begun
        start = prompt_tail.rfind("<|start|>")
        if start >= 0 and "<|end|>" not in prompt_tail[start:]:
            head, within, _ = prompt_tail[start:].partition("<|message|>")
            self._header = head + within
        super().__init__(block=None, opened=False, syntax=None, tools=tools, shown=shown)

    def _read(self) -> Reading[None]:
        reader = self._reader
        reader.feed(self._header)
        n_messages = {"content": 0, "reasoning": 0}
        given = len(self._header)
        while True:
            parts: list[str] = []
            if (yield from reader.until(("<|message|>",), parts.append)) is None:
                if rest := "".join(parts)[given:].strip():
                    self._texts["content"].push(rest)  # no message at all
                return
            given = 0
            yield from reader.accept("<|message|>", space=False)
            header = "".join(parts)
            to = re.search(rf"to=(?:functions\.)?((?:{NAME.pattern}){{1,128}})", header)
            channel = re.search(r"<\|channel\|>\s*(\w+)", header)
            if to is not None and (to[0].startswith("to=functions.") or to[1] in self.tools):
                self.begin(to[1])
                sink: Sink = self.arguments
            else:
                kind = "reasoning" if channel is not None and channel[1] == "analysis" else "content"
                text = self._texts[kind]
                text.drop()
                if n_messages[kind]:
                    self._emit(Delta(kind, "\n\n"))
                n_messages[kind] += 1
                sink = text.push
            found = yield from reader.until(("<|end|>", "<|call|>", "<|return|>", "<|start|>"), sink)
            if found is None:
                return
            if found != "<|start|>":
                yield from reader.accept(found, space=False)


class _Trimmed:
    """Passes text on without the white space around it: `fresh` text begins, `drop` ends it and begins another."""

    def __init__(self, sink: Sink, fresh: bool = False) -> None:
        self._sink = sink
        self._fresh = fresh
        self._held = ""

    def push(self, text: str) -> None:
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        text = self._held + text
        kept = text.rstrip()
        self._held = text[len(kept) :]
        if kept:
            self._sink(kept)

    def drop(self) -> None:
        self._held, self._fresh = "", True

    def finish(self) -> None:
        if self._held:
            self._sink(self._held)
        self._held = ""

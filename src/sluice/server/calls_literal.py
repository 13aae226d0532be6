"""Tool calls whose arguments are literals of a language: LFM2 writes Python's calls, Gemma 4 a shorthand of its own.

A block of calls is read to its end and then understood as a whole, or not at all. It knows no templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.server.reader import Reader, Reading, Unexpected
from sluice.server.structured import Grammar
from sluice.server.tools import Calls, Tool, kinds_of

_QUOTE = '<|"|>'  # Gemma's, on either side of a string
_WORD = re.compile(r"[\w.:/$-]+")
_KEY = re.compile(r"[\w.$-]+")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_MAX_DEPTH = 64

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class LiteralCalls:
    """`opener` calls `closer`. `python`: these are `[name(key=value, …), …]`, else one `call:name{key:value, …}`."""

    opener: str
    closer: str
    python: bool
    bare: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        return (self.opener,)

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opener, self.closer, _QUOTE)

    def read(self, reader: Reader, calls: Calls) -> Reading[None]:
        yield from reader.expect(self.opener)
        parts: list[str] = []
        found = yield from reader.until((self.closer, self.opener), parts.append)
        if found == self.opener:
            raise Unexpected
        if found:
            yield from reader.accept(found)
        text = "".join(parts)
        for name, arguments in _from_json(text) or _Literals(text).calls(self.python):
            calls.begin(name)
            calls.arguments(json.dumps(arguments, ensure_ascii=False))

    def grammar(self, g: Grammar, tools: Sequence[Tool], many: bool) -> str:
        open, close = g.marker(self.opener), g.marker(self.closer)
        if not self.python:
            shorthand = _Shorthand(g)
            each = [
                f'{g.text(f"call:{tool.name}{{")} {_arguments(g, tool, ",", ":", shorthand.value)} "}}"'
                for tool in tools
            ]
            return f"({open} ({' | '.join(each)}) {close}){'+' if many else ''}"
        each = [f'{g.text(tool.name + "(")} {_arguments(g, tool, ", ", "=", _json_in(g))} ")"' for tool in tools]
        call = g.rule(" | ".join(each))
        more = f'(", " {call})*' if many else ""
        return f'{open} "[" {call} {more} "]" {close}'


def _json_in(g: Grammar) -> Callable[[Any], str]:
    return lambda schema: g.json(schema, fallback=True)


def _arguments(g: Grammar, tool: Tool, comma: str, equals: str, value: Callable[[Any], str]) -> str:
    """The tool's arguments in their order, with commas between those that are there."""
    first = later = '""'  # what may follow before any argument was written, and after one
    for key, required in reversed([(key, needed) for key, needed in tool.keys.items() if _WORD.fullmatch(key)]):
        schema = tool.schema(key)
        here = g.rule(f"{g.text(key + equals)} {value({} if schema is None else schema)} {later}")
        first = here if required else g.rule(f"{here} | {first}")
        later = g.rule(f"{g.text(comma)} {here}" + ("" if required else f" | {later}"))
    return first


class _Shorthand:
    """Values as Gemma writes them: strings between its quotes, keys without any."""

    def __init__(self, g: Grammar) -> None:
        self._g = g
        self._any: str | None = None

    def value(self, schema: Any) -> str:
        kinds = kinds_of(schema)
        options = schema.get("enum") if isinstance(schema, dict) else None
        if kinds == {"string"} and isinstance(options, list) and options:
            quote = self._g.marker(_QUOTE)
            return f"{quote} ({' | '.join(map(self._g.text, options))}) {quote}"
        if kinds == {"string"}:
            return self._string()
        if kinds is not None and kinds <= {"number", "integer", "boolean", "null"}:
            return self._g.json(schema, fallback=True)
        if self._any is None:
            self._any = self._g.recursive(self._body)
        return self._any

    def _string(self) -> str:
        return f"({self._g.marker(_QUOTE)} {self._g.until(_QUOTE)})"

    def _body(self, own: str) -> str:
        number = r"/-?[0-9]{1,15}(\.[0-9]{1,15})?/"
        pair = rf'/\w{{1,64}}/ ":" {own}'
        return (
            f'{self._string()} | {number} | "true" | "false" | "null" | "[" ({own} ("," {own})*)? "]" '
            f'| "{{" ({pair} ("," {pair})*)? "}}"'
        )


def _from_json(text: str) -> list[Call]:
    """The calls of a block that is JSON after all; none if it isn't."""
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return []
    out: list[Call] = []
    for each in found if isinstance(found, list) else [found]:
        arguments = each.get("arguments", each.get("parameters", {})) if isinstance(each, dict) else None
        if not isinstance(arguments, dict) or not isinstance(each.get("name"), str):
            return []
        out.append((each["name"], arguments))
    return out


class _Literals:
    """Reads literals from a whole text. Raises Unexpected where it is none."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def calls(self, python: bool) -> list[Call]:
        """All calls of a block, which must hold nothing else."""
        out: list[Call] = []
        listed = python and self._take("[")
        while True:
            out.append(self._python_call() if python else self._shorthand_call())
            if not python or not self._take(","):
                break
        if (listed and not self._take("]")) or self._next():
            raise Unexpected
        return out

    def _python_call(self) -> Call:
        name, arguments = self._word(), {}
        self._must("(")
        while not self._take(")"):
            key = self._word()
            self._must("=")
            arguments[key] = self._value(0)
            if not self._take(","):
                self._must(")")
                break
        return name, arguments

    def _shorthand_call(self) -> Call:
        self._must("call:")
        name = self._word()
        if self._next() != "{":
            raise Unexpected
        return name, self._value(0)

    def _value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise Unexpected
        if self._take(_QUOTE):
            return self._up_to(_QUOTE)
        c = self._next()
        if c in ("'", '"'):
            return self._string(c)
        if self._take("["):
            return self._series("]", depth)
        if self._take("("):
            return self._series(")", depth)
        if self._take("{"):
            return self._mapping(depth)
        number = _NUMBER.match(self._text, self._at)
        if number:
            self._at = number.end()
            try:
                return json.loads(number[0].lstrip("+"))
            except ValueError:  # not as JSON has it, .5 or 1.
                return float(number[0])
        word = self._word()
        if word not in _WORDS:
            raise Unexpected
        return _WORDS[word]

    def _series(self, close: str, depth: int) -> list[Any]:
        out: list[Any] = []
        while not self._take(close):
            out.append(self._value(depth + 1))
            if not self._take(","):
                self._must(close)
                break
        return out

    def _mapping(self, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        while not self._take("}"):
            quoted = self._next() in ("'", '"') or self._text.startswith(_QUOTE, self._at)
            key = self._value(depth + 1) if quoted else self._word(_KEY)
            self._must(":")
            if not isinstance(key, str):
                raise Unexpected
            out[key] = self._value(depth + 1)
            if not self._take(","):
                self._must("}")
                break
        return out

    def _string(self, quote: str) -> str:
        end = self._at + 1
        while end < len(self._text) and self._text[end] != quote:
            end += 2 if self._text[end] == "\\" else 1
        if end >= len(self._text):
            raise Unexpected
        inner = self._text[self._at + 1 : end]
        self._at = end + 1
        return _ESCAPE.sub(_meant, inner)

    def _up_to(self, close: str) -> str:
        end = self._text.find(close, self._at)
        if end < 0:
            raise Unexpected
        inner = self._text[self._at : end]
        self._at = end + len(close)
        return inner

    def _word(self, form: re.Pattern[str] = _WORD) -> str:
        self._next()
        found = form.match(self._text, self._at)
        if not found:
            raise Unexpected
        self._at = found.end()
        return found[0]

    def _next(self) -> str:
        """The next character that is no white space; "" at the end."""
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        return self._text[self._at : self._at + 1]

    def _take(self, mark: str) -> bool:
        self._next()
        found = self._text.startswith(mark, self._at)
        self._at += len(mark) if found else 0
        return found

    def _must(self, mark: str) -> None:
        if not self._take(mark):
            raise Unexpected


def _meant(escape: re.Match[str]) -> str:
    what = escape[1]
    if len(what) > 1:
        return chr(int(what[1:], 16))
    return _ESCAPED.get(what, what if what in "\\'\"/" else "\\" + what)

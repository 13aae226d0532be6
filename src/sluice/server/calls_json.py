"""Tool calls whose arguments are JSON: whole objects between markers, or a name, a marker and the arguments.

It knows how Hermes, Qwen, Granite, Hunyuan, Llama, Cohere, Mistral, DeepSeek V3 and Kimi write, and no templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from sluice.server.reader import Reader, Reading, Unexpected
from sluice.server.structured import Grammar
from sluice.server.tools import LINE, NAME, NAME_LIMIT, Calls, Sectioned, Tool, arguments_of, began

_NAMES, _ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters")


@dataclass(frozen=True)
class JsonCalls:
    """JSON objects with a name and arguments, such as `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

    `layout`: what stands between opener and closer: one object, a list of them, or one object a line.
    """

    opener: str
    closer: str = ""
    layout: str = "one"
    keys: tuple[str, str] = ("name", "arguments")
    bare: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        return (self.opener,)

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opener, self.closer)

    def read(self, reader: Reader, calls: Calls) -> Reading[None]:
        if (yield from reader.accept(self.opener)) is None and not self.bare:
            raise Unexpected
        listed = yield from reader.accept("[")
        yield from _json_call(reader, calls)
        while True:
            if listed and (yield from reader.accept("]")):
                break
            if self.layout == "one" and not listed:
                break
            if not (yield from began(reader, _next_json_call(reader, calls))):
                break
        if self.closer:
            yield from reader.accept(self.closer)

    def grammar(self, g: Grammar, tools: Sequence[Tool], many: bool) -> str:
        name, arguments = self.keys
        heads = [g.text(f'{{"{name}": "{tool.name}", "{arguments}": ') for tool in tools]
        each = [f'{head} {arguments_of(g, tool)} "}}"' for head, tool in zip(heads, tools, strict=True)]
        call = g.rule(" | ".join(each))
        open, close = g.marker(self.opener) if self.opener else "", g.marker(self.closer) if self.closer else ""
        if self.bare:
            return call
        if self.layout == "list":
            more = f'(", " {call})*' if many else ""
            return f'{open} "[" {call} {more} "]" {close}'
        if self.layout == "lines":
            more = f'("\\n" {call})*' if many else ""
            return f'{open} "\\n" {call} {more} "\\n" {close}'
        one = g.rule(f'{open} "\\n" {call} "\\n" {close}')
        return f'{one} ("\\n" {one})*' if many else one


@dataclass(frozen=True)
class MarkedCalls(Sectioned):
    """A name, a marker and the arguments' JSON, as DeepSeek V3, Kimi K2 and newer Mistral models write.

    A call is `call[0]` name `arguments_open` JSON `call[1]`. `fenced`: as DeepSeek V3 and R1, `function` stands where
    the name should, and the name before JSON in a code fence. `numbered`: the name is `functions.NAME:0`, which is also
    the call's id. `listed`: what follows `call[0]` may instead be a JSON list of calls.
    """

    call: tuple[str, str]
    arguments_open: str
    section: tuple[str, str] = ("", "")
    id_open: str = ""
    fenced: bool = False
    numbered: bool = False
    listed: bool = False
    bare: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.section, *self.call, self.arguments_open, self.id_open)

    def _call(self, reader: Reader, calls: Calls) -> Reading[None]:
        yield from reader.expect(self.call[0])
        if self.listed and (yield from reader.ahead()) in ("[", "{"):
            yield from JsonCalls("", layout="list", bare=True).read(reader, calls)
            return
        yield from reader.skip_space()
        name, id = (yield from reader.run(NAME, NAME_LIMIT)), ""
        if self.numbered:
            id = name
            name = re.sub(r":\d+$", "", name.removeprefix("functions."))
        if self.id_open and (yield from reader.accept(self.id_open)):
            id = yield from reader.run(NAME, NAME_LIMIT)
        yield from reader.expect(self.arguments_open)
        if (yield from reader.ahead()) != "{":
            yield from reader.skip_space()
            fenced = yield from reader.run(NAME, NAME_LIMIT)
            name = fenced or name
            yield from reader.expect("```json")
        calls.begin(name, id)
        yield from reader.skip_space()
        yield from reader.value(calls.arguments)
        yield from reader.accept("```")
        if self.call[1]:
            yield from reader.accept(self.call[1])

    def grammar(self, g: Grammar, tools: Sequence[Tool], many: bool) -> str:
        call = g.rule(" | ".join(self._call_grammar(g, tool) for tool in tools))
        open, close = (g.marker(text) if text else "" for text in self.section)
        return f"{open} {call} {f'({LINE} {call})*' if many else ''} {close}"

    def _call_grammar(self, g: Grammar, tool: Tool) -> str:
        open, close = (g.marker(text) if text else "" for text in self.call)
        arguments = arguments_of(g, tool)
        if self.fenced:
            fence = f"{tool.name}\n```json\n"
            return f'{open} "function" {g.marker(self.arguments_open)} {g.text(fence)} {arguments} "\\n```" {close}'
        name = g.text(f"functions.{tool.name}:") + " /[0-9]{1,2}/" if self.numbered else g.text(tool.name)
        id = f"({g.marker(self.id_open)} /[A-Za-z0-9]{{9}}/)?" if self.id_open else ""
        return f"{open} {name} {id} {g.marker(self.arguments_open)} {arguments} {close}"


def _next_json_call(reader: Reader, calls: Calls) -> Reading[None]:
    yield from reader.accept(",", ";")
    yield from _json_call(reader, calls)


def _json_call(reader: Reader, calls: Calls, depth: int = 0) -> Reading[None]:
    """A JSON object with a name and arguments, in either order; what else it holds is left out.

    The arguments are passed on as they are written as soon as the name is known. Those written as a string of JSON are
    passed on as that JSON. Raises Unexpected before a call has begun.
    """
    yield from reader.expect("{")
    name: str | None = None
    pending: list[str] = []
    begun, closed, id = False, False, ""
    while not (closed := (yield from reader.accept("}")) is not None):
        yield from reader.skip_space()
        key = yield from reader.string()
        if key is None or (yield from reader.accept(":")) is None:
            break
        yield from reader.skip_space()
        parts: list[str] = []
        if key in _NAMES and name is None:
            name = yield from reader.string()
            if name is None:
                raise Unexpected
        elif key in _ARGUMENTS and not begun:
            quoted = (yield from reader.peek()) == '"'
            if name is not None:
                calls.begin(name, id)
                begun = True
            if quoted or not begun:
                yield from reader.value(pending.append)
            else:
                yield from reader.value(calls.arguments)
            if quoted:
                pending = [_unquoted("".join(pending))]
            if begun:
                for text in pending:
                    calls.arguments(text)
        elif key == "function" and (yield from reader.peek()) == "{" and not depth:
            yield from _json_call(reader, calls, depth + 1)
            begun = True
        elif not (yield from reader.value(parts.append)):
            break
        if key in ("id", "tool_call_id", "call_id"):
            id = _unquoted("".join(parts))
        yield from reader.accept(",")
    if not begun:
        if name is None or not (closed or pending):
            raise Unexpected
        calls.begin(name, id)
        calls.arguments("".join(pending) or "{}")


def _unquoted(text: str) -> str:
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, str) else text

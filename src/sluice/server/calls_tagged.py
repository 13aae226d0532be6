"""Tool calls whose arguments stand one by one between tags, strings as they are.

It knows how Qwen3-Coder, Seed-OSS, MiniMax-M2, DeepSeek V3.2, GLM, Ling 3 and Hunyuan write, and no templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sluice.server.reader import Reader, Reading, Unexpected
from sluice.server.structured import Grammar
from sluice.server.tools import KINDS, LINE, NAME, NAME_LIMIT, Calls, Sectioned, Tool, arguments_of, kinds_of

_KEY = re.compile(r"[^<>\"\n]")
_KEY_LIMIT = 256


@dataclass(frozen=True)
class TaggedCalls(Sectioned):
    """Arguments one by one between tags, as Qwen3-Coder, Seed-OSS, MiniMax-M2, DeepSeek V3.2, GLM and Hunyuan write.

    A call is `call[0]` name `name_end` arguments `call[1]`, an argument `key_open` key (one of `key_ends`) `value_open`
    value `value_end`. `section`: what stands around calls, if anything.
    """

    call: tuple[str, str]
    name_end: str
    key_open: str
    key_ends: tuple[str, ...]
    value_end: str
    value_open: str = ""
    section: tuple[str, str] = ("", "")
    bare: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        key = (self.key_open, *self.key_ends, self.value_open, self.value_end)
        return (*self.section, *self.call, self.name_end, *key)

    def _call(self, reader: Reader, calls: Calls) -> Reading[None]:
        yield from reader.expect(self.call[0])
        name = yield from reader.run(NAME, NAME_LIMIT)
        if self.name_end:
            yield from reader.expect(self.name_end)
        elif (yield from reader.ahead()) != "<":
            raise Unexpected
        calls.begin(name)
        if (yield from reader.ahead()) == "{":  # some write all arguments as one JSON object
            yield from reader.skip_space()
            yield from reader.value(calls.arguments)
            yield from reader.accept(self.call[1])
            return
        between = "{"
        while True:
            found = yield from reader.accept(*filter(None, (self.key_open, self.call[1])))
            if found != self.key_open:
                break
            key = (yield from reader.run(_KEY, _KEY_LIMIT)).strip()
            end = yield from reader.accept(*self.key_ends)
            if end is None or (self.value_open and (yield from reader.accept(self.value_open)) is None):
                break
            tool = calls.tools.get(name)
            kinds = kinds_of(tool.schema(key)) if tool else None
            if "string=" in end:  # DeepSeek says of each argument whether it is text
                kinds = frozenset(("string",)) if "true" in end else None
            calls.arguments(f"{between}{json.dumps(key, ensure_ascii=False)}: ")
            between = ", "
            if not (yield from self._value(reader, calls, kinds)):
                return  # cut short, and so are the arguments
        if reader.left or not reader.closed:
            calls.arguments("{}" if between == "{" else "}")

    def _value(self, reader: Reader, calls: Calls, kinds: frozenset[str] | None) -> Reading[bool]:
        """Passes a value on as JSON; whether its end came. One line break on either side belongs to the tags."""
        yield from reader.accept("\n", space=False)
        ends = ("\n" + self.value_end, self.value_end)
        if kinds == {"string"}:
            calls.arguments('"')
            end = yield from reader.until(ends, lambda text: calls.arguments(_escaped(text)))
            calls.arguments('"' if end else "")
        else:
            parts: list[str] = []
            end = yield from reader.until(ends, parts.append)
            calls.arguments(_as_json("".join(parts), kinds) if end else '"' + _escaped("".join(parts)))
        if end:
            yield from reader.accept(end, space=False)
        return end is not None

    def grammar(self, g: Grammar, tools: Sequence[Tool], many: bool) -> str:
        call = g.rule(" | ".join(self._call_grammar(g, tool) for tool in tools))
        if not self.section[0]:
            return f"{call} ({LINE} {call})*" if many else call
        open, close = map(g.marker, self.section)
        more = f"({LINE} {call})*" if many else ""
        return f"{open} {LINE} {call} {more} {LINE} {close}"

    def _call_grammar(self, g: Grammar, tool: Tool) -> str:
        open, close = map(g.marker, self.call)
        head = f"{open} {g.text(tool.name)} {g.marker(self.name_end) if self.name_end else ''} {LINE}"
        if not self.key_open:
            return f"{head} {arguments_of(g, tool)} {LINE} {close}"
        parts = [
            f"({self._argument_grammar(g, tool, key)}){'' if required else '?'}"
            for key, required in tool.keys.items()
            if re.fullmatch(rf"{_KEY.pattern}{{1,{_KEY_LIMIT}}}", key)
        ]
        return f"{head} {' '.join(parts)} {close}"

    def _argument_grammar(self, g: Grammar, tool: Tool, key: str) -> str:
        schema = tool.schema(key)
        kinds = kinds_of(schema)
        text = kinds == {"string"}
        end = self.key_ends[0]
        if len(self.key_ends) > 1:
            end = next(each for each in self.key_ends if ('"true"' if text else '"false"') in each)
        head = f"{g.marker(self.key_open)} {g.text(key)} {g.marker(end)}"
        if self.value_open:
            head += f" {LINE} {g.marker(self.value_open)}"
        close = g.marker(self.value_end)
        options = schema.get("enum") if isinstance(schema, Mapping) else None
        if text and isinstance(options, list) and options:
            value = f"{LINE} ({' | '.join(map(g.text, options))}) {LINE} {close}"
        elif kinds is None or "string" in kinds:
            value = g.until(self.value_end)
        else:
            value = f"{LINE} {g.json(schema, strict=tool.strict, fallback=not tool.strict)} {LINE} {close}"
        return f"{head} {value} {LINE}"


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


_WORDS = {"True": True, "False": False, "None": None}


def _as_json(text: str, kinds: frozenset[str] | None) -> str:
    """The JSON that a value written without quotes stands for: what it is if a type allows that, else a string."""
    try:
        value = _WORDS[text.strip()] if text.strip() in _WORDS else json.loads(text)
        kind = KINDS[type(value)]
        if kinds is None or "string" not in kinds or kind in kinds or (kind == "integer" and "number" in kinds):
            return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        pass
    return json.dumps(text, ensure_ascii=False)

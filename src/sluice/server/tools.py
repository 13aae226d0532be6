"""What is known of tools: which functions are on offer, and what reading and forcing their calls takes.

It knows OpenAI's shape of tools and no format; each way to write calls is a Syntax, in the `calls_*` modules.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sluice.errors import InputError
from sluice.server.reader import Reader, Reading, Unexpected
from sluice.server.structured import Grammar, check_schema

NAME = re.compile(r"[\w.:/-]")
NAME_LIMIT = 128
LINE = r"/\n?/"  # in grammars: a line break, or none


@dataclass(frozen=True)
class Tool:
    """A function that may be called; `parameters` is its arguments' JSON schema."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False

    @classmethod
    def of(cls, tool: Mapping[str, Any]) -> Tool:
        function = tool["function"]
        return cls(function["name"], function["parameters"], bool(function.get("strict")))

    def schema(self, key: str) -> Any:
        """The schema of argument `key`, with the definitions it may refer to; None where there is none."""
        properties = self.parameters.get("properties")
        found = properties.get(key) if isinstance(properties, Mapping) else None
        shared = {name: self.parameters[name] for name in ("$defs", "definitions") if name in self.parameters}
        return {**shared, **found} if isinstance(found, Mapping) else found

    @property
    def keys(self) -> Mapping[str, bool]:
        """The arguments that the schema names, in its order, and whether each must be given."""
        given = self.parameters.get("properties")
        properties = list(given) if isinstance(given, Mapping) else []
        return {key: key in self.required for key in dict.fromkeys([*properties, *self.required])}

    @property
    def required(self) -> Sequence[str]:
        found = self.parameters.get("required")
        return [key for key in found if isinstance(key, str)] if isinstance(found, list) else []


def check_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """A request's `tools` as templates expect them: with a description and parameters, though these may be empty.

    None for none. Raises InputError for what is no OpenAI function tool.
    """
    if not tools:
        return None
    out: list[dict[str, Any]] = []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping):
            raise InputError(f'tools[{i}] is no function; give {{"type": "function", "function": {{"name": …}}}}')
        name, description = function.get("name"), function.get("description")
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
            raise InputError(f"tools[{i}] has no usable name; give 1 to 64 letters, digits, underscores and dashes")
        if any(name == other["function"]["name"] for other in out):
            raise InputError(f"two tools are named {name!r}; give each its own name")
        if not isinstance(description, (str, type(None))):
            raise InputError(f"the description of tool {name!r} is no text; give a string")
        parameters = function.get("parameters")
        if parameters is None:
            parameters = {"type": "object", "properties": {}}
        if not isinstance(parameters, Mapping):
            raise InputError(f"the parameters of tool {name!r} are no JSON schema; give an object")
        check_schema(parameters, f"the schema of tool {name!r}")
        told = {**function, "description": description or "", "parameters": parameters}
        out.append({"type": "function", "function": told})
    return out


class Calls(Protocol):
    """What is told of calls as they are read."""

    @property
    def tools(self) -> Mapping[str, Tool]:
        """The functions on offer, by name."""
        ...

    def begin(self, name: str, id: str = "") -> None:
        """A call of `name` begins; from now on it is one. Raises Unexpected if there can be none of that name."""
        ...

    def arguments(self, text: str) -> None:
        """The next piece of its arguments' JSON."""
        ...


class Syntax(Protocol):
    """One way to write calls.

    `openers`: what calls begin with. `markers`: every text of the format that may be a control token. `bare`: a call
    may also be a whole reply, beginning with "{".
    """

    @property
    def openers(self) -> tuple[str, ...]: ...
    @property
    def markers(self) -> tuple[str, ...]: ...
    @property
    def bare(self) -> bool: ...

    def read(self, reader: Reader, calls: Calls) -> Reading[None]:
        """Reads what stands at an opener: one call, or several that belong together."""
        ...

    def grammar(self, g: Grammar, tools: Sequence[Tool], many: bool) -> str:
        """An expression for a call of one of `tools`, or, if `many`, for one or more of them."""
        ...


class Sectioned(ABC):
    """Calls one after the other, each opened by `call[0]`; `section` stands around them all, or ("", "")."""

    call: tuple[str, str]
    section: tuple[str, str]

    @property
    def openers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.section[0], self.call[0])))

    def read(self, reader: Reader, calls: Calls) -> Reading[None]:
        within = bool(self.section[0]) and (yield from reader.accept(self.section[0])) is not None
        yield from self._call(reader, calls)
        while (yield from began(reader, self._call(reader, calls))):
            pass
        if within:
            yield from reader.accept(self.section[1])

    @abstractmethod
    def _call(self, reader: Reader, calls: Calls) -> Reading[None]:
        """Read one call."""


def arguments_of(g: Grammar, tool: Tool) -> str:
    """An expression for the tool's arguments as a JSON object."""
    what = f"the schema of tool {tool.name!r}"
    return g.json(tool.parameters, strict=tool.strict, fallback=not tool.strict, what=what)


def began(reader: Reader, reading: Reading[None]) -> Reading[bool]:
    """Reads a further call; whether one began. If none did, nothing has been read."""
    reader.mark()
    try:
        yield from reading
    except Unexpected:
        return not reader.rewind()
    return not reader.rewind()


KINDS: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null",
}  # fmt: skip


def kinds_of(schema: Any, depth: int = 0) -> frozenset[str] | None:
    """JSON's types that `schema` allows, as far as it says so itself; None: it does not."""
    if not isinstance(schema, Mapping) or depth > 8:
        return None
    stated = schema.get("type")
    if isinstance(stated, str):
        return frozenset((stated,))
    if isinstance(stated, list) and all(isinstance(each, str) for each in stated):
        return frozenset(stated)
    if "const" in schema:
        return frozenset((KINDS.get(type(schema["const"]), "object"),))
    if isinstance(schema.get("enum"), list):
        return frozenset(KINDS.get(type(each), "object") for each in schema["enum"])
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            parts = [kinds_of(each, depth + 1) for each in schema[key]]
            return None if None in parts else frozenset().union(*filter(None, parts))
    return None

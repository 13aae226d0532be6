"""A Jinja environment in which a hostile template can use only so much time and memory. It knows nothing of chats.

Jinja's sandbox keeps templates away from Python's internals; it does not stop them from running for ever or filling
memory. Here every statement, loop turn and macro call ticks a meter, and everything that makes new strings or
containers is weighed, before where its size can be told from its arguments, and afterwards always:

- `+ * ** %` on strings, lists and numbers, and `~`; string methods and filters that grow text (join, replace, ljust,
  center, zfill, expandtabs, indent, format); captured output of `set` blocks and macros;
- lists, tuples and dicts, as trees: a list holding another twice counts it twice, so structures that are small in
  memory and endless when printed or compared can't be built;
- `range` (Jinja's own limit, 100,000); filters and functions with unbounded output that chat templates have no use for
  (lipsum, format, wordwrap, xmlattr, urlize, pprint, …) do not exist.

Limits hold per rendering: MAX_STEPS, MAX_SECONDS (looked at on ticks: a single step is short, its operands being
bounded), and MAX_BYTES plus a multiple of what the caller passed in, all bytes ever made counted, freed or not.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 2_000_000
MAX_SECONDS = 5.0
MAX_BYTES = 128 << 20
MAX_INPUT_COPIES = 200  # a template that gathers its output with `+` copies it once per message
MAX_INT_BITS = 4096
MAX_SOURCE = 1 << 17  # characters of a template; the longest known is under 50,000

_DROPPED_FILTERS = (
    "batch", "center", "filesizeformat", "forceescape", "format", "pprint", "random", "slice", "striptags", "truncate",
    "urlize", "wordwrap", "xmlattr",
)  # fmt: skip
_DEEP_FILTERS = ("tojson", "string", "escape", "e", "sort", "unique", "groupby", "min", "max", "dictsort")
_PICKING_FILTERS = ("first", "last", "attr", "default", "d", "min", "max")  # their results were there before
_WIDTH = re.compile(r"%[^a-zA-Z%]*(?:\d{4}|\*)")  # a printf-style field of 1,000 or more, or of a width given elsewhere


@dataclass
class Meter:
    """What one rendering has used, against its limits."""

    max_bytes: int = MAX_BYTES
    steps: int = 0
    n_bytes: int = 0
    deadline: float = field(default_factory=lambda: time.monotonic() + MAX_SECONDS)

    def tick(self, n_bytes: int = 0) -> None:
        """Counts one step that makes `n_bytes`. Raises SecurityError past a limit."""
        self.steps += 1
        self.n_bytes += n_bytes
        if self.n_bytes > self.max_bytes:
            raise SecurityError(f"it makes more than {self.max_bytes >> 20} MiB of text")
        if self.steps > MAX_STEPS or time.monotonic() > self.deadline:
            raise SecurityError(f"it takes more than {MAX_STEPS:,} steps or {MAX_SECONDS:g} s")

    def foresee(self, n_bytes: int) -> None:
        """Raises SecurityError if `n_bytes` more would be past the limit; counts nothing yet."""
        if self.n_bytes + n_bytes > self.max_bytes:
            self.tick(n_bytes)

    def weigh(self, value: Any) -> Any:
        """Counts a value just made, containers as trees, and returns it."""
        if isinstance(value, (str, bytes)):
            self.tick(sys.getsizeof(value))
        elif isinstance(value, int):
            if value.bit_length() > MAX_INT_BITS:
                raise SecurityError(f"a number has more than {MAX_INT_BITS} bits")
        elif isinstance(value, (list, tuple, dict, set, frozenset)):
            self.tick(sys.getsizeof(value))
            stack: list[Any] = [value]
            while stack:
                top = stack.pop()
                if isinstance(top, str):
                    self.tick(len(top))
                elif isinstance(top, dict):
                    stack += top
                    stack += top.values()
                elif isinstance(top, (list, tuple, set, frozenset)):
                    stack += top
                self.tick(8)
        return value


METER: ContextVar[Meter] = ContextVar("METER")


def _meter() -> Meter:
    meter = METER.get(None)
    return Meter() if meter is None else meter


class _Instrument(NodeTransformer):
    """Puts ticks before statements and into loop and macro bodies, and weighs containers and `~`."""

    def _tick(self, body: list[nodes.Node], lineno: int) -> nodes.Node:
        """A statement that counts the constant text of `body`, what lies in blocks with ticks of their own excepted."""
        texts = [data for node in body if isinstance(node, nodes.Output) for data in node.find_all(nodes.TemplateData)]
        size = 4 * sum(len(text.data) for text in texts)
        return nodes.ExprStmt(self._call("tick", [nodes.Const(size)])).set_lineno(lineno, override=False)

    def _call(self, name: str, args: list[nodes.Expr]) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)

    def _body(self, node: Any, *args: Any) -> nodes.Node:
        node = self.generic_visit(node)
        for body in (node.body, getattr(node, "else_", None)):
            if body:
                body.insert(0, self._tick(body, node.lineno))
        return node

    def _before(self, node: Any, *args: Any) -> list[nodes.Node]:
        return [self._tick([], node.lineno), self.generic_visit(node)]

    visit_Macro = visit_CallBlock = visit_FilterBlock = visit_If = visit_With = visit_Block = _body  # noqa: N815
    visit_Assign = _before  # noqa: N815

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:  # noqa: N802
        return [self._tick([], node.lineno), self._body(node)]

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> list[nodes.Node]:  # noqa: N802
        return [self._tick(node.body, node.lineno), self.generic_visit(node)]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        node = self.generic_visit(node)  # pyright: ignore[reportAssignmentType]
        return self._call("concatenated", node.nodes).set_lineno(node.lineno, override=False)

    def _weighed(self, node: Any, *args: Any) -> nodes.Node:
        node = self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":  # the left side of an assignment
            return node
        return self._call("weighed", [node]).set_lineno(node.lineno, override=False)

    visit_List = visit_Tuple = visit_Dict = _weighed  # noqa: N815

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = self._call("compared", [node.expr])
        for operand in node.ops:
            operand.expr = self._call("compared", [operand.expr])
        return node.set_lineno(node.lineno, override=False)


class _Generation(Extension):
    """`{% generation %}` marks the model's own words for training; here its content is simply content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Set up as transformers does for chat templates, with the limits above; render inside a METER."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            optimized=False,  # else constant expressions are worked out while compiling, outside any meter
            finalize=self._output,
        )
        for name in _DROPPED_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters = {name: self.guarded(name, function) for name, function in self.filters.items()}
        self.tests = {name: self._guarded_test(function) for name, function in self.tests.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Instrument().visit(super()._parse(source, name, filename))

    # What compiled templates call, by way of _Instrument.

    def tick(self, n_bytes: int = 0) -> None:
        _meter().tick(n_bytes)

    def weighed(self, value: Any) -> Any:
        return _meter().weigh(value)

    def compared(self, value: Any) -> Any:
        """Equality and order look through containers as trees, too; so does a hash."""
        return _meter().weigh(value) if isinstance(value, (list, tuple, dict)) else value

    def concatenated(self, *values: Any) -> str:
        texts = [self._text(value) for value in values]
        _meter().foresee(4 * sum(map(len, texts)))
        return _meter().weigh("".join(texts))

    def _output(self, value: Any) -> Any:
        if not isinstance(value, str):
            value = self._text(value)
        _meter().tick(4 * len(value))
        return value

    def _text(self, value: Any) -> str:
        if isinstance(value, (str, int, float, Undefined)) or value is None:
            return str(value)
        _meter().weigh(value)
        return _meter().weigh(str(value))

    # What the sandbox calls.

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter()
        if operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            meter.foresee(sys.getsizeof(left) + sys.getsizeof(right))
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, (str, bytes, list, tuple)) and isinstance(times, int):
                    meter.foresee(sys.getsizeof(many) * max(times, 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > MAX_INT_BITS:
                raise SecurityError(f"a number has more than {MAX_INT_BITS} bits")
        elif operator == "%" and isinstance(left, (str, bytes)):
            self._printf(left, right)
        return meter.weigh(super().call_binop(context, operator, left, right))

    def _printf(self, template: str | bytes, values: Any) -> None:
        if isinstance(template, bytes) or _WIDTH.search(template):
            raise SecurityError("a format has a width of 1,000 or more")
        parts = values if isinstance(values, tuple) else (values,)
        longest = max((len(self._text(part)) for part in parts), default=0)
        _meter().foresee(4 * (len(template) + template.count("%") * longest))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, (bytes, bytearray)) and attr != "decode":
            return False
        if (isinstance(obj, str) and attr == "translate") or (isinstance(obj, int) and attr == "to_bytes"):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        value = super().getitem(obj, self.compared(argument))
        return _meter().weigh(value) if isinstance(argument, slice) else value

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        template: str = value.__self__

        def bounded(*args: Any, **kwargs: Any) -> str:
            if ":" in template:
                raise SecurityError("format() with a format after a colon is not available")
            values = [*args, *kwargs.values()]
            longest = max((len(self._text(each)) for each in values), default=0)
            _meter().foresee(4 * (len(template) + template.count("{") * longest))
            return wrapped(*args, **kwargs)

        return bounded

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        meter = _meter()
        meter.tick()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str) and hasattr(__obj, "__name__"):
            args = __self._foresee_text(owner, __obj.__name__, args, kwargs)
        made = super().call(__context, __obj, *args, **kwargs)
        return made if isinstance(owner, dict) else meter.weigh(made)  # a dict gives out what was there before

    def _foresee_text(self, owner: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Weighs what a method of a string is about to make; an iterator among the arguments comes back as a list."""
        meter = _meter()
        size = next((a for a in (*args, *kwargs.values()) if isinstance(a, int)), 0)
        if name in ("ljust", "rjust", "center", "zfill"):
            meter.foresee(4 * size)
        elif name == "expandtabs":
            meter.foresee(4 * owner.count("\t") * size)
        elif name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
            meter.foresee(4 * (len(owner) + owner.count(args[0]) * len(args[1])))
        elif name == "join" and args and isinstance(args[0], Iterable):
            parts = self._gathered(args[0])
            meter.foresee(4 * sum(len(part) + len(owner) for part in parts if isinstance(part, str)))
            args = (parts, *args[1:])
        elif name in ("split", "rsplit", "splitlines"):
            cuts = owner.count(args[0]) if args and isinstance(args[0], str) and args[0] else len(owner)
            meter.foresee(64 * cuts)
        return args

    def _gathered(self, values: Iterable[Any]) -> list[Any]:
        meter, out = _meter(), []
        for value in values:
            meter.tick(8)
            out.append(value)
        return out

    def guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that weighs its result, and before it what its arguments say about that."""
        marker = getattr(function, "jinja_pass_arg", None)
        skip = 0 if marker is None else 1  # an environment or a context comes first

        def checked(*args: Any, **kwargs: Any) -> Any:
            meter = _meter()
            meter.tick()
            value, rest = args[skip], args[skip + 1 :]
            sizes = [each for each in (*rest, *kwargs.values()) if isinstance(each, int)]
            if name in ("tojson", "indent", "round") and any(size > 1000 for size in sizes):
                raise SecurityError(f"{name} is asked for a width of more than 1000")
            texts = [len(each) for each in (*rest, *kwargs.values()) if isinstance(each, str)]
            longest = max([*texts, *sizes, 1]) if name in ("join", "replace", "indent") else 1
            if isinstance(value, str):
                if name == "replace" and rest:
                    pieces = value.count(str(rest[0]))
                else:
                    pieces = value.count("\n") + 1 if name == "indent" else len(value)
                meter.foresee(4 * (len(value) + pieces * longest))
                if name == "list":
                    meter.foresee(64 * len(value))
            elif name == "join" and isinstance(value, Iterable):
                value = self._gathered(value)
                meter.foresee(4 * sum(len(self._text(each)) + longest for each in value))
            elif isinstance(value, (list, tuple, dict)) and name in _DEEP_FILTERS:
                meter.weigh(value)
            if name == "sum" and any(isinstance(each, (list, tuple)) for each in (*rest, *kwargs.values())):
                raise SecurityError("sum is for numbers")
            made = function(*args[:skip], value, *rest, **kwargs)
            return made if made is value or name in _PICKING_FILTERS else meter.weigh(made)

        if marker is not None:
            checked.jinja_pass_arg = marker  # pyright: ignore[reportFunctionMemberAccess]
        return checked

    def _guarded_test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any) -> Any:
            for each in args:
                self.compared(each)
            return function(*args)

        marker = getattr(function, "jinja_pass_arg", None)
        if marker is not None:
            checked.jinja_pass_arg = marker  # pyright: ignore[reportFunctionMemberAccess]
        return checked

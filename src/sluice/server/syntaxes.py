"""Which way of writing tool calls a chat template speaks of. It knows formats by markers, never by a model's name.

Sources: the chat templates that models ship with, and OpenAI's description of harmony.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from sluice.server.calls_json import JsonCalls, MarkedCalls
from sluice.server.calls_literal import LiteralCalls
from sluice.server.calls_tagged import TaggedCalls
from sluice.server.thinking import suffix
from sluice.server.tools import Syntax

HERMES = JsonCalls("<tool_call>", "</tool_call>")


def _hunyuan(t: str) -> Syntax:
    """Its tokens end in what the template calls by a variable, `:opensource` in published models."""
    s = suffix(t)
    return TaggedCalls(
        (f"<tool_call{s}>", f"</tool_call{s}>"), f"<tool_sep{s}>", f"<arg_key{s}>", (f"</arg_key{s}>",),
        f"</arg_value{s}>", f"<arg_value{s}>", (f"<tool_calls{s}>", f"</tool_calls{s}>"),
    )  # fmt: skip


def _glm(t: str) -> Syntax:
    call = ("<tool_call>", "</tool_call>")
    return TaggedCalls(call, "", "<arg_key>", ("</arg_key>",), "</arg_value>", "<arg_value>")


def _dsml(t: str) -> Syntax:
    d = "\uff5cDSML\uff5c"
    block = "function_calls" if "function_calls>" in t else "tool_calls"
    return TaggedCalls(
        (f'<{d}invoke name="', f"</{d}invoke>"), '">', f'<{d}parameter name="',
        ('" string="true">', '" string="false">'), f"</{d}parameter>", section=(f"<{d}{block}>", f"</{d}{block}>"),
    )  # fmt: skip


def _minimax(t: str) -> Syntax:
    return TaggedCalls(
        ('<invoke name="', "</invoke>"), '">', '<parameter name="', ('">',), "</parameter>",
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
    )  # fmt: skip


def _functions(t: str) -> Syntax:
    """Qwen3-Coder's tags, which others took over; Functionary has JSON in them instead."""
    block = "seed:tool_call" if "<seed:tool_call>" in t else "tool_call"
    section = (f"<{block}>", f"</{block}>") if f"<{block}>" in t else ("", "")
    key = "<parameter=" if "<parameter=" in t else ""
    return TaggedCalls(("<function=", "</function>"), ">", key, (">",), "</parameter>", section=section)


def _deepseek(t: str) -> Syntax:
    def token(name: str) -> str:
        return f"<\uff5ctool\u2581{name}\uff5c>"

    return MarkedCalls(
        (token("call\u2581begin"), token("call\u2581end")), token("sep"),
        (token("calls\u2581begin"), token("calls\u2581end")), fenced="```json" in t,
    )  # fmt: skip


def _kimi(t: str) -> Syntax:
    return MarkedCalls(
        ("<|tool_call_begin|>", "<|tool_call_end|>"), "<|tool_call_argument_begin|>",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), numbered=True,
    )  # fmt: skip


def _mistral(t: str) -> Syntax:
    if "[ARGS]" not in t:
        return JsonCalls("[TOOL_CALLS]", layout="list")
    return MarkedCalls(("[TOOL_CALLS]", ""), "[ARGS]", id_open="[CALL_ID]" if "[CALL_ID]" in t else "", listed=True)


def _listed(t: str) -> Syntax:
    lines = re.search(r"<tool_calls>(\\n|\s)*\{", t) is not None
    return JsonCalls("<tool_calls>", "</tool_calls>", layout="lines" if lines else "list")


# In this order; the first whose markers the template holds, all of them.
_FORMATS: tuple[tuple[str, tuple[str, ...], Callable[[str], Syntax]], ...] = (
    ("hunyuan", ("<tool_sep", "<arg_key"), _hunyuan),
    ("glm", ("<arg_key>",), _glm),
    ("dsml", ("\uff5cDSML\uff5c",), _dsml),
    ("minimax", ("<minimax:tool_call>", "<invoke name="), _minimax),
    ("functions", ("<function=",), _functions),
    ("deepseek", ("tool\u2581calls\u2581begin",), _deepseek),
    ("kimi", ("<|tool_calls_section_begin|>",), _kimi),
    ("mistral", ("[TOOL_CALLS]",), _mistral),
    ("lfm2", ("<|tool_call_start|>",), lambda t: LiteralCalls("<|tool_call_start|>", "<|tool_call_end|>", python=True)),
    ("lfm2", ("<|tool_list_start|>",), lambda t: LiteralCalls("<|tool_call_start|>", "<|tool_call_end|>", python=True)),
    ("gemma", ("<|tool_call>", "<tool_call|>"), lambda t: LiteralCalls("<|tool_call>", "<tool_call|>", python=False)),
    ("tool_calls", ("<tool_calls>", "</tool_calls>"), _listed),
    ("hermes", ("<tool_call>",), lambda t: HERMES),
    ("granite", ("<|tool_call|>",), lambda t: JsonCalls("<|tool_call|>", layout="list")),
    ("nemotron", ("<TOOLCALL>",), lambda t: JsonCalls("<TOOLCALL>", "</TOOLCALL>", layout="list")),
    (
        "cohere", ("<|START_ACTION|>",),
        lambda t: JsonCalls("<|START_ACTION|>", "<|END_ACTION|>", "list", ("tool_name", "parameters")),
    ),
    (
        "llama", ('"parameters": ', "<|start_header_id|>"),
        lambda t: JsonCalls("<|python_tag|>", "", "lines", ("name", "parameters"), True),
    ),
)  # fmt: skip


def syntax_of(template: str) -> tuple[str, Syntax]:
    """The format's name, for people, and its syntax. A template that shows none is taken to leave it to the model,
    which most likely learnt Hermes's."""
    for name, markers, make in _FORMATS:
        if all(marker in template for marker in markers):
            return name, make(template)
    return "unknown", HERMES

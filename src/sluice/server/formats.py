"""What a model's chat template says of how it writes: reasoning, tool calls, and what may be forced on it.

It knows a template's text, never a model's name, and nothing of HTTP. The server's use of it, per request:

    format = Format.of(tokenizer.chat_template)                       # cached
    tools = check_tools(tools)                                        # InputError; fills in what templates expect
    prompt = render(format.messages(messages), tools=tools,
                    **format.variables(reasoning_effort, enable_thinking), **chat_template_kwargs)
    job = Job(..., constraint=format.constraint(tokenizer, response_format, tools, tool_choice,
                                                prompt_tail=prompt, parallel=True))       # InputError; or None
    splitter = format.splitter(tokenizer, prompt_tail=prompt, tools=tools)   # tools=None where tool_choice is "none"
    for event in events:                                              # every TokenEvent, those without text too
        send(splitter.push(event.text, event.id))                     # a list of Delta
    send(splitter.finish())
    finish_reason = "tool_calls" if splitter.called and reason == "stop" else reason
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any

from sluice.errors import InputError, TemplateError
from sluice.server.splitter import HARMONY, Delta, HarmonySplitter, Splitter, call_id
from sluice.server.structured import Grammar, GrammarMask, TriggeredMask, single_token
from sluice.server.syntaxes import syntax_of
from sluice.server.thinking import block_of, variables, words
from sluice.server.tools import Tool, arguments_of, check_tools
from sluice.text.chat import render_chat
from sluice.text.tokenizer import Tokenizer

__all__ = ["Delta", "Format", "Splitter", "check_tools"]

_TAIL = 4096  # characters of a prompt that say what a reply continues
_NO_MARKER = r"([^<]|<+[^<|])*<*"  # text in which no harmony marker begins
_BLANKS = 8  # white space between reasoning and what a grammar forces
_TRAILING = 2  # and after calls, where some models break the line

Mask = GrammarMask | TriggeredMask


class Format:
    """How replies of the models of one chat template are built; see the module. `Format.of` makes and keeps them.

    `name`: of the way tool calls are written, for people. `takes_tools`: whether the template shows tools to the model.
    `block`: how reasoning is marked off, None where it isn't (harmony has channels instead).
    """

    def __init__(self, template: str) -> None:
        self._template = template
        self.harmony = all(marker in template for marker in ("<|start|>", "<|channel|>", "<|message|>"))
        self.name, self.syntax = ("harmony", None) if self.harmony else syntax_of(template)
        self.block = None if self.harmony else block_of(template)
        self.takes_tools = bool(words(template)[0] & {"tools", "custom_tools"})

    @classmethod
    def of(cls, chat_template: str | None) -> Format:
        """The format of a template; of none, plain text."""
        return _format(chat_template or "")

    @property
    def thinks(self) -> bool:
        """Whether replies may hold reasoning."""
        return self.harmony or self.block is not None

    def variables(self, reasoning_effort: str | None = None, enable_thinking: bool | None = None) -> dict[str, Any]:
        """Template variables for OpenAI's `reasoning_effort` and for thinking at all: those that the template reads."""
        return variables(self._template, reasoning_effort, enable_thinking)

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages in OpenAI's shape as this template expects them.

        Arguments of tool calls become objects (or stay text where the template joins them with text), reasoning gets
        the name that the template reads, and a missing content is empty. Raises InputError for arguments that are no
        JSON object.
        """
        out: list[dict[str, Any]] = []
        for message in messages:
            told = dict(message)
            if told.get("content") is None:
                told["content"] = ""
            reasoning = told.get("reasoning_content")
            if reasoning and "reasoning_content" not in self._template and "thinking" in self._template:
                told["thinking"] = reasoning
                if self.harmony and told.get("tool_calls"):
                    told["content"] = ""  # it refuses both in one message
            if calls := told.get("tool_calls"):
                told["tool_calls"] = [self._call(call) for call in calls]
            out.append(told)
        return out

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        arguments = function.get("arguments") or "{}"
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, dict):
            raise InputError(
                f"the arguments of a call of {str(function.get('name'))[:64]!r} are no JSON object: give one"
            )
        function["arguments"] = json.dumps(arguments, ensure_ascii=False) if self._wants_text else arguments
        return {**call, "function": function}

    @cached_property
    def _wants_text(self) -> bool:
        """Whether the template takes arguments as text and fails with an object, found by trying."""
        call = {"name": "f", "arguments": {"a": 1}}
        said: list[dict[str, Any]] = [
            {"role": "user", "content": "x"},
            {
                "role": "assistant", "content": "",
                "tool_calls": [{"id": "abcdefghi", "type": "function", "function": call}],
            },
        ]  # fmt: skip
        try:
            render_chat(self._template, said)
            return False
        except TemplateError:
            call["arguments"] = '{"a": 1}'  # type: ignore[assignment]
        try:
            render_chat(self._template, said)
            return True
        except TemplateError:
            return False

    # what comes back

    def splitter(self, tokenizer: Tokenizer, *, prompt_tail: str = "", tools: Sequence[Any] | None = None) -> Splitter:
        """Tells the parts of one reply apart. `prompt_tail`: the end of the prompt as text, control tokens included.

        `tools`: those of `check_tools`; None: nothing is taken for a call. Control tokens need not be in the text that
        is pushed: their ids are enough.
        """
        offered = [Tool.of(tool) for tool in tools or ()]
        shown = _shown(self, tokenizer)
        if self.harmony:
            return HarmonySplitter(prompt_tail[-_TAIL:], offered, shown)
        plain = "length != 9" in self._template or "|length != 9" in self._template
        return Splitter(
            block=self.block, opened=self.block is not None and self.block.opened(prompt_tail[-_TAIL:]),
            syntax=self.syntax if offered else None, tools=offered, shown=shown,
            new_id=partial(call_id, 9) if plain else call_id,
        )  # fmt: skip

    # what is forced

    def constraint(
        self, tokenizer: Tokenizer, response_format: Mapping[str, Any] | None = None,
        tools: Sequence[Any] | None = None, tool_choice: str | Mapping[str, Any] | None = None, *,
        prompt_tail: str = "", parallel: bool = True,
    ) -> Callable[[], Mask] | None:  # fmt: skip
        """What makes the masks (one for each choice) that keep a reply to what the request demands; None: nothing does.

        `response_format`: OpenAI's text, json_object or json_schema. `tool_choice`: "none", "auto", "required", one
        function, or allowed_tools. A required call is forced, in the model's own format and with arguments that fit the
        tool's schema; with "auto" the model chooses, and a call is held to the schema once the token that begins it has
        come (where one token does, so not in harmony and not without markers). Reasoning stays free. A tool's schema
        that can't be enforced counts as its type alone, unless the tool is strict; a response format's is refused.
        Raises InputError.
        """
        schema = _wanted(response_format)
        choice, offered = _chosen(tools, tool_choice)
        if offered and not self.takes_tools:
            raise InputError("this model's chat template takes no tools; leave tools out")
        tail = prompt_tail[-_TAIL:]
        if schema is None and choice == "none":
            return None
        if schema is None and choice == "auto":
            return self._triggered(tokenizer, offered, tail, parallel)
        g = Grammar(tokenizer)
        answer = None if schema is None or choice in ("required", "named") else g.json(schema[0], strict=schema[1])
        called = offered if choice != "none" else []
        many = parallel and choice != "named"
        if self.harmony:
            return g.compiled(_harmony_start(g, answer, called), "the grammar of this request")
        parts = [] if answer is None else [answer]
        if called and self.syntax is not None:
            parts.append(f"{g.rule(self.syntax.grammar(g, called, many))} {g.space(_TRAILING)}")
        start = f"{self._reasoning(g, tail)} ({' | '.join(parts)})"
        return g.compiled(start, "the grammar of this request")

    def _reasoning(self, g: Grammar, tail: str) -> str:
        """What may, or must, come before the reply proper."""
        block = self.block
        if block is None or block.closed(tail):
            return f"{g.space(_BLANKS)}" if block is not None else ""
        rest = f"{g.until(block.close)} {g.space(_BLANKS)}"
        return rest if block.opened(tail) else f"({g.marker(block.open)} {rest})?"

    def _triggered(
        self, tokenizer: Tokenizer, offered: Sequence[Tool], tail: str, parallel: bool
    ) -> Callable[[], Mask] | None:
        syntax = self.syntax
        trigger = single_token(tokenizer, syntax.openers[0]) if syntax and not syntax.bare else None
        if syntax is None or trigger is None:
            return None
        g = Grammar(tokenizer)
        calls = f"{syntax.grammar(g, offered, parallel)} {g.space(_TRAILING)}"
        start = g.compiled(calls, "the grammar of these tools")
        block = self.block
        reasoning: tuple[int | None, int | None, bool] = (None, None, False)
        if block is not None:
            open, close = single_token(tokenizer, block.open), single_token(tokenizer, block.close)
            reasoning = (open, close, block.opened(tail) and close is not None)
        return lambda: TriggeredMask(start, trigger, reasoning=reasoning)


@lru_cache(maxsize=8)
def _format(template: str) -> Format:
    return Format(template)


@lru_cache(maxsize=16)
def _shown(format: Format, tokenizer: Tokenizer) -> dict[int, str]:
    """The control tokens whose text a splitter needs."""
    texts: set[str] = set(HARMONY) if format.harmony else set()
    if format.syntax is not None:
        texts.update(format.syntax.markers)
    if format.block is not None:
        texts.update((*format.block.markers, *(format.block.answer or ())))
    found = {text: single_token(tokenizer, text) for text in texts}
    return {token: text for text, token in found.items() if token is not None and tokenizer.is_control(token)}


def _wanted(response_format: Mapping[str, Any] | None) -> tuple[Any, bool] | None:
    """The schema that a reply must fit, and whether all of it must be enforced; None for free text."""
    kind = "text" if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}, False
    if kind != "json_schema":
        raise InputError(f"response_format has type {str(kind)[:40]!r}; give text, json_object or json_schema")
    named = response_format.get("json_schema")
    if not isinstance(named, Mapping) or not isinstance(named.get("schema"), (Mapping, bool)):
        raise InputError('response_format holds no schema; give {"json_schema": {"name": …, "schema": {…}}}')
    return named["schema"], bool(named.get("strict"))


def _chosen(tools: Sequence[Any] | None, tool_choice: str | Mapping[str, Any] | None) -> tuple[str, list[Tool]]:
    """Which of "none", "auto", "required" and "named" is chosen, and the tools that may be called."""
    offered = [Tool.of(tool) for tool in tools or ()]
    if tool_choice is None:
        return ("auto" if offered else "none"), offered
    if tool_choice == "none" or (tool_choice == "auto" and not offered):
        return "none", []
    names: list[Any] | None = None
    mode: Any = tool_choice
    if isinstance(tool_choice, Mapping):
        kind = tool_choice.get("type")
        inner = tool_choice.get(kind) if kind in ("function", "allowed_tools") else None
        if not isinstance(inner, Mapping):
            raise InputError('tool_choice names no function; give {"type": "function", "function": {"name": …}}')
        if kind == "function":
            mode, names = "named", [inner.get("name")]
        else:
            mode = inner.get("mode", "auto")
            listed = inner.get("tools")
            if not isinstance(listed, (list, tuple)):
                raise InputError("tool_choice allows no list of tools; give the functions that may be called")
            functions = [each.get("function", {}) for each in listed if isinstance(each, Mapping)]
            names = [each.get("name") for each in functions if isinstance(each, Mapping)]
    if mode not in ("auto", "required", "named"):
        raise InputError(f"tool_choice is {str(mode)[:40]!r}; give none, auto, required, or a function")
    if names is not None:
        known = {tool.name: tool for tool in offered}
        if unknown := [name for name in names if not isinstance(name, str) or name not in known]:
            raise InputError(f"tool_choice names {str(unknown[0])[:64]!r}, which is not among the tools; add it there")
        offered = [known[name] for name in names]
    if not offered:
        raise InputError("tool_choice demands a call and there are no tools; give tools")
    return mode, offered


def _harmony_start(g: Grammar, answer: str | None, offered: Sequence[Tool]) -> str:
    """Harmony's messages from where prompts end, after the role: reasoning, then one call or the final answer."""
    message, channel = g.marker("<|message|>"), g.marker("<|channel|>")
    again = f'{g.marker("<|start|>")} "assistant"'
    thought = g.rule(f'{channel} "analysis" {message} {g.until("<|end|>", text=_NO_MARKER)} {again}')
    constrain = f'({g.marker("<|constrain|>")} "json")?'
    parts: list[str] = []
    if answer is not None:
        parts.append(f'{channel} "final" (" " {constrain})? {message} {answer}')
    each = [
        f"{channel} {g.text(f'commentary to=functions.{tool.name} ')} {constrain} {message} {arguments_of(g, tool)}"
        for tool in offered
    ]
    if each:
        parts.append(g.rule(" | ".join(each)))
    return f"{thought}* ({' | '.join(parts)})"

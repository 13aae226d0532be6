"""Renders a model's chat template. It knows messages as dicts and a template's text, nothing of files or tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.exceptions import TemplateError as _JinjaError
from jinja2.exceptions import TemplateSyntaxError

from sluice.errors import TemplateError, words_of
from sluice.text.template_sandbox import MAX_BYTES, MAX_INPUT_COPIES, MAX_SOURCE, METER, BoundedEnvironment, Meter

_REMEDY = "use --raw to send the prompt without it"


def render_chat(
    template: str,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: list[dict[str, Any]] | None = None,
    bos_token: str = "",
    eos_token: str = "",
    **extra: Any,
) -> str:
    """The prompt that `template` (Jinja, as in `tokenizer.chat_template`) makes of `messages`.

    The template sees what transformers gives it: the arguments above, `extra`, `raise_exception`, `strftime_now`,
    `tojson` that leaves non-ASCII and HTML characters alone, loop controls, and a `generation` block. It is untrusted:
    sluice.text.template_sandbox says what bounds its time and memory. Raises TemplateError, one line naming the
    template's line, when it does not compile, fails, refuses the messages or goes past those bounds.
    """
    context = {
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
        "tools": tools,
        "bos_token": bos_token,
        "eos_token": eos_token,
        **extra,
    }
    token = METER.set(Meter(max_bytes=MAX_BYTES + MAX_INPUT_COPIES * 4 * _length(context)))
    try:
        out: list[str] = []
        size, limit = 0, METER.get().max_bytes
        for piece in _compiled(template).generate(**context):
            size += 4 * len(piece)
            if size > limit:
                raise TemplateError(f"the chat template makes more than {limit >> 20} MiB of text; {_REMEDY}")
            out.append(piece)
        return "".join(out)
    except TemplateError:
        raise
    except Exception as error:  # a template can raise anything at all
        raise TemplateError(_describe(error)) from None
    finally:
        METER.reset(token)


def guard_messages(messages: list[dict[str, Any]], guard: Callable[[str], str]) -> list[dict[str, Any]]:
    """`messages` with `guard` over the text that others than the assistant wrote; a message is never changed in place.

    What the assistant wrote stays as it is: templates look into it for where its reasoning ends.
    """

    def part(one: Any) -> Any:
        return one | {"text": guard(one["text"])} if isinstance(one, dict) and isinstance(one.get("text"), str) else one

    def content(one: Any) -> Any:
        if isinstance(one, str):
            return guard(one)
        return [part(each) for each in one] if isinstance(one, list) else one

    return [
        message if not isinstance(message, dict) or message.get("role") == "assistant" or "content" not in message
        else message | {"content": content(message["content"])}
        for message in messages
    ]  # fmt: skip


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    if len(template) > MAX_SOURCE:
        raise TemplateError(f"the chat template is {len(template):,} characters long; {_REMEDY}")
    environment = BoundedEnvironment()
    environment.filters["tojson"] = environment.guarded("tojson", _tojson)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _JinjaError(message)


def _strftime_now(format: str) -> str:
    if re.search(r"%[^a-zA-Z%]*\d{3}", format):  # glibc takes field widths
        raise _JinjaError("strftime_now is asked for a width of 100 or more")
    return datetime.now().strftime(format)


def _length(value: Any) -> int:
    """About how many characters the caller passed in."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_length(each) for pair in value.items() for each in pair)
    if isinstance(value, (list, tuple)):
        return sum(map(_length, value))
    return 8


def _describe(error: Exception) -> str:
    line = error.lineno if isinstance(error, TemplateSyntaxError) else None
    trace = error.__traceback__
    while trace is not None and not isinstance(error, TemplateSyntaxError):
        if trace.tb_frame.f_code.co_filename == "<template>":  # Jinja has put the template's own lines there
            line = trace.tb_lineno
        trace = trace.tb_next
    where = "" if line is None else f" at line {line}"
    said = words_of(error, 200)
    if isinstance(error, RecursionError):
        said = "it nests too deeply"
    elif isinstance(error, MemoryError):
        said = "it needs too much memory"
    return f"the chat template fails{where}: {said}; {_REMEDY}"

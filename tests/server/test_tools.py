"""Tool calls as models write them, in every cutting; what is no call is content; forced calls are read back."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance", reason="needs the extra [serve]")

from formats_kit import EOS, TOOLS, WEATHER, cuts, function, replies, sample, split, tokenizer

from sluice.errors import InputError
from sluice.server.formats import Format, check_tools
from sluice.server.splitter import HARMONY
from sluice.server.structured import TriggeredMask
from sluice.text.chat import render_chat

D = "\uff5cDSML\uff5c"


def token(name: str) -> str:
    return f"<\uff5ctool\u2581{name.replace(' ', chr(0x2581))}\uff5c>"


def templated(*markers: str) -> str:
    """A template that shows tools and speaks of these markers."""
    return "{% if tools %}{{ tools | tojson }}{% endif %}" + "\n".join(markers)


# By format: what the template holds, and a reply with two calls, text before them where the format has room for it.
OSLO, NOTE = {"city": "Oslo", "days": 3}, {"path": "a.txt", "text": 'say "hi"\n<b>é</b>', "tags": ["x", "y"]}
FORMATS: dict[str, tuple[list[str], str]] = {
    "hermes": (
        ["<tool_call>", "</tool_call>"],
        'I look.\n<tool_call>\n{"name": "get_weather", "arguments": ' + json.dumps(OSLO) + "}\n</tool_call>\n"
        '<tool_call>\n{"name": "write_file", "arguments": ' + json.dumps(NOTE) + "}\n</tool_call>",
    ),
    "hermes, arguments first and as text": (
        ["<tool_call>", "</tool_call>"],
        'I look.<tool_call>{"arguments": ' + json.dumps(OSLO) + ', "name": "get_weather"}</tool_call>'
        '<tool_call>{"name": "write_file", "arguments": ' + json.dumps(json.dumps(NOTE)) + "}</tool_call>",
    ),
    "functions": (
        ["<tool_call>", "<function=", "<parameter="],
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=write_file>\n<parameter=path>\na.txt\n"
        '</parameter>\n<parameter=text>\nsay "hi"\n<b>é</b>\n</parameter>\n<parameter=tags>\n["x", "y"]\n</parameter>\n'
        "</function>\n</tool_call>",
    ),
    "functions, without the block around them": (
        ["<tool_call>", "<function=", "<parameter="],
        "I look.\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        '</function>\n<function=write_file>\n<parameter=path>a.txt</parameter><parameter=text>say "hi"\n<b>é</b>'
        '</parameter><parameter=tags>["x", "y"]</parameter></function>',
    ),
    "functions, seed": (
        ["<seed:tool_call>", "<function=", "<parameter="],
        "I look.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n<parameter=days>3"
        "</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=write_file>\n<parameter=path>a.txt"
        '</parameter>\n<parameter=text>say "hi"\n<b>é</b></parameter>\n<parameter=tags>["x", "y"]</parameter>\n'
        "</function>\n</seed:tool_call>",
    ),
    "functions, JSON": (
        ["<function="],
        'I look.<function=get_weather>{"city": "Oslo", "days": 3}</function><function=write_file>'
        + json.dumps(NOTE) + "</function>",
    ),
    "glm": (
        ["<tool_call>", "<arg_key>"],
        "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>"
        "\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>write_file<arg_key>path</arg_key><arg_value>a.txt"
        '</arg_value><arg_key>text</arg_key><arg_value>say "hi"\n<b>é</b></arg_value><arg_key>tags</arg_key>'
        '<arg_value>["x", "y"]</arg_value></tool_call>',
    ),
    "hunyuan": (
        ["<tool_sep>", "<arg_key>"],
        "I look.<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>write_file<tool_sep>\n<arg_key>path"
        '</arg_key>\n<arg_value>a.txt</arg_value>\n<arg_key>text</arg_key>\n<arg_value>say "hi"\n<b>é</b></arg_value>\n'
        '<arg_key>tags</arg_key>\n<arg_value>["x", "y"]</arg_value>\n</tool_call>\n</tool_calls>',
    ),
    "minimax": (
        ["<minimax:tool_call>", "<invoke name="],
        'I look.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n'
        '<invoke name="write_file">\n<parameter name="path">a.txt</parameter>\n'
        '<parameter name="text">say "hi"\n<b>é</b></parameter>\n<parameter name="tags">["x", "y"]</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
    ),
    "dsml": (
        [D, "function_calls>"],
        f'I look.\n\n<{D}function_calls>\n<{D}invoke name="get_weather">\n<{D}parameter name="city" string="true">Oslo'
        f'</{D}parameter>\n<{D}parameter name="days" string="false">3</{D}parameter>\n</{D}invoke>\n<{D}invoke '
        f'name="write_file">\n<{D}parameter name="path" string="true">a.txt</{D}parameter>\n<{D}parameter name="text" '
        f'string="true">say "hi"\n<b>é</b></{D}parameter>\n<{D}parameter name="tags" string="false">["x", "y"]'
        f"</{D}parameter>\n</{D}invoke>\n</{D}function_calls>",
    ),
    "deepseek": (
        [token("calls begin")],
        f"I look.{token('calls begin')}{token('call begin')}get_weather{token('sep')}{json.dumps(OSLO)}"
        f"{token('call end')}{token('call begin')}write_file{token('sep')}{json.dumps(NOTE)}{token('call end')}"
        f"{token('calls end')}",
    ),
    "deepseek, fenced": (
        [token("calls begin"), "```json"],
        f"I look.{token('calls begin')}{token('call begin')}function{token('sep')}get_weather\n```json\n"
        f"{json.dumps(OSLO)}\n```{token('call end')}\n{token('call begin')}function{token('sep')}write_file\n```json\n"
        f"{json.dumps(NOTE)}\n```{token('call end')}{token('calls end')}",
    ),
    "kimi": (
        ["<|tool_calls_section_begin|>"],
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        + json.dumps(OSLO) + "<|tool_call_end|><|tool_call_begin|>functions.write_file:1<|tool_call_argument_begin|>"
        + json.dumps(NOTE) + "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "mistral": (
        ["[TOOL_CALLS]", "[ARGS]"],
        "I look.[TOOL_CALLS]get_weather[ARGS]" + json.dumps(OSLO) + "[TOOL_CALLS]write_file[ARGS]" + json.dumps(NOTE),
    ),
    "mistral, with ids": (
        ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
        "I look.[TOOL_CALLS]get_weather[CALL_ID]abc123DEF[ARGS]" + json.dumps(OSLO)
        + "[TOOL_CALLS]write_file[ARGS]" + json.dumps(NOTE),
    ),
    "mistral, list": (
        ["[TOOL_CALLS]"],
        'I look.[TOOL_CALLS][{"name": "get_weather", "arguments": ' + json.dumps(OSLO) + ', "id": "abc123DEF"}, '
        '{"name": "write_file", "arguments": ' + json.dumps(NOTE) + "}]",
    ),
    "lfm2": (
        ["<|tool_call_start|>"],
        "I look.<|tool_call_start|>[get_weather(city='Oslo', days=3), write_file(path=\"a.txt\", text='say \"hi\"\\n"
        "<b>é</b>', tags=['x', \"y\"])]<|tool_call_end|>",
    ),
    "gemma": (
        ["<|tool_call>", "<tool_call|>"],
        'I look.<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|><|tool_call>call:write_file{path:'
        '<|"|>a.txt<|"|>,text:<|"|>say "hi"\n<b>é</b><|"|>,tags:[<|"|>x<|"|>,<|"|>y<|"|>]}<tool_call|>',
    ),
    "tool_calls, list": (
        ["<tool_calls>", "</tool_calls>"],
        'I look.<tool_calls>[{"name": "get_weather", "arguments": ' + json.dumps(OSLO) + '}, {"name": "write_file", '
        '"arguments": ' + json.dumps(NOTE) + "}]</tool_calls>",
    ),
    "tool_calls, lines": (
        ["<tool_calls>\n{", "</tool_calls>"],
        'I look.<tool_calls>\n{"name": "get_weather", "arguments": ' + json.dumps(OSLO) + '}\n{"name": "write_file", '
        '"arguments": ' + json.dumps(NOTE) + "}\n</tool_calls>",
    ),
    "granite": (
        ["<|tool_call|>"],
        'I look.<|tool_call|>[{"name": "get_weather", "arguments": ' + json.dumps(OSLO) + '}, {"name": "write_file", '
        '"arguments": ' + json.dumps(NOTE) + "}]",
    ),
    "nemotron": (
        ["<TOOLCALL>"],
        'I look.<TOOLCALL>[{"name": "get_weather", "arguments": ' + json.dumps(OSLO) + '}, {"name": "write_file", '
        '"arguments": ' + json.dumps(NOTE) + "}]</TOOLCALL>",
    ),
    "cohere": (
        ["<|START_ACTION|>"],
        'I look.<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "get_weather", "parameters": ' + json.dumps(OSLO)
        + '},\n{"tool_call_id": "1", "tool_name": "write_file", "parameters": ' + json.dumps(NOTE)
        + "}\n]<|END_ACTION|>",
    ),
    "llama": (
        ["<|start_header_id|>", '"parameters": '],
        'I look.<|python_tag|>{"name": "get_weather", "parameters": ' + json.dumps(OSLO) + '}; {"type": "function", '
        '"name": "write_file", "parameters": ' + json.dumps(NOTE) + "}",
    ),
}  # fmt: skip


def made(name: str) -> tuple[Format, str]:
    markers, reply = FORMATS[name]
    return Format.of(templated(*markers)), reply


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_in_every_cutting(name: str) -> None:
    format, text = made(name)
    assert format.name == name.partition(",")[0] and format.takes_tools
    reply = replies(format, text)
    assert reply.content == "I look." and not reply.reasoning
    assert [called for called, _ in reply.calls] == ["get_weather", "write_file"]
    assert [json.loads(arguments) for _, arguments in reply.calls] == [OSLO, NOTE]
    assert len(set(reply.ids)) == 2 and all(reply.ids)
    if name == "kimi":
        assert reply.ids == ["functions.get_weather:0", "functions.write_file:1"]
    if name == "mistral, with ids":
        assert reply.ids[0] == "abc123DEF"


@pytest.mark.parametrize("name", FORMATS)
def test_whatever_is_cut_off_nothing_is_lost_and_nothing_breaks(name: str) -> None:
    """A reply may end anywhere. No call comes of text that names no function in full, nor content of half a marker."""
    format, text = made(name)
    for end in range(0, len(text), 3):
        reply = split(format.splitter(tokenizer(), tools=TOOLS), [text[:end]])
        assert all(called in ("get_weather", "write_file") for called, _ in reply.calls)
        if not reply.calls:
            assert reply.content == text[:end]
        else:  # of a further call that is none yet
            rest = reply.content.removeprefix("I look.")
            assert rest != reply.content and text[:end].endswith(rest)


@pytest.mark.parametrize("name", FORMATS)
def test_what_only_looks_like_a_call_is_content(name: str) -> None:
    format, text = made(name)
    opener = format.syntax.openers[0]  # type: ignore[union-attr]
    for junk in ("", " ", "is what calls begin with.", '{"a": 1}', "[", "{}", "<", '{"name": 1}', '{"name": "', "f("):
        said = f"So {opener}{junk} and on"
        reply = replies(format, said, seeds=4)
        assert not reply.calls and reply.content == said
    # one that is whole still counts after it
    assert len(replies(format, f"{opener} no. {text}", seeds=4).calls) == 2
    # and without tools nothing is looked for
    assert replies(format, f" {text} \n", tools=None, seeds=4).content == f" {text} \n"


@pytest.mark.parametrize("name", FORMATS)
def test_shuffled_replies_come_out_the_same_in_every_cutting(name: str) -> None:
    """Replies' own pieces in any order, some twice: nothing breaks, and calls still have names."""
    format, text = made(name)
    pieces = [piece for piece in re.split(r"(<[^<>]*>|[{}\[\]\n\"]|\w+)", text) if piece]
    rng = np.random.default_rng(11)
    for _ in range(40):
        mixed = "".join(rng.choice(pieces, int(rng.integers(1, 2 * len(pieces)))))
        around = text[: rng.integers(len(text))] + mixed + text[rng.integers(len(text)) :]
        for said in (mixed, around):
            assert all(called for called, _ in replies(format, said, seeds=3).calls)


# the others understand a block as a whole
@pytest.mark.parametrize("name", [n for n in FORMATS if n not in ("lfm2", "gemma") and not n.endswith("as text")])
def test_arguments_come_as_they_are_written(name: str) -> None:
    """Long strings are passed on while they come."""
    format, text = made(name)
    long = text.replace("a.txt", "very " * 100 + "long")
    splitter = format.splitter(tokenizer(), tools=TOOLS)
    pieces = [splitter.push(c) for c in long]
    assert sum(delta.kind == "arguments" for piece in pieces for delta in piece) > 300


def test_names_and_strings_that_a_parser_may_trip_over() -> None:
    format, _ = made("hermes")
    arguments = {"city": '</tool_call>"}\\ {[ \u2028 <tool_call>', "days": -1}
    text = f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(arguments)}}}</tool_call> tail'
    reply = replies(format, text)
    assert json.loads(reply.calls[0][1]) == arguments and reply.content == "tail"
    # an unknown function is still a call, which the client can refuse; a closing brace too few changes nothing
    reply = replies(format, '<tool_call>\n{"name": "fly", "arguments": {"a": {"b": 1}}\n</tool_call>')
    assert reply.parts == ("", "", [("fly", '{"a": {"b": 1}}')])
    assert replies(format, '<tool_call>{"name": "get_weather"}</tool_call>').calls == [("get_weather", "{}")]
    nested = '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {}}}</tool_call>'
    assert replies(format, nested).calls == [("f", "{}")]
    spelt = '<tool_call>{"name": "caf\\u00e9", "arguments": {}}</tool_call>'
    assert replies(format, spelt).calls == [("caf\u00e9", "{}")]


def test_values_between_tags_get_the_types_of_the_schema() -> None:
    tools = check_tools(
        [
            function(
                "f",
                {
                    "s": {"type": "string"}, "n": {"type": "number"}, "b": {"type": "boolean"}, "o": {"type": "object"},
                    "sn": {"type": ["string", "null"]}, "e": {"enum": ["1", "2"]}, "any": {},
                    "u": {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "r": {"$ref": "#/$defs/x"},
                },
            )
        ]
    )  # fmt: skip
    format, _ = made("functions")

    def value(key: str, text: str) -> Any:
        body = f"<function=f>\n<parameter={key}>\n{text}\n</parameter>\n</function>"
        ((_, arguments),) = replies(format, body, tools=tools, seeds=3).calls
        return json.loads(arguments)[key]

    for key, text, meant in (
        ("s", "1", "1"), ("s", "", ""), ("s", " a\n\nb ", " a\n\nb "), ("s", "null", "null"), ("n", "1", 1),
        ("n", "1.5", 1.5), ("n", "many", "many"), ("b", "True", True), ("b", "false", False),
        ("o", '{"a": [1]}', {"a": [1]}),
        ("sn", "null", None), ("sn", "5", "5"), ("e", "1", "1"), ("u", "5", 5), ("u", "x", "x"), ("any", "[1]", [1]),
        ("any", "x y", "x y"), ("r", "2", 2), ("unknown", "3", 3), ("o", "[" * 5000, "[" * 5000),
    ):  # fmt: skip
        assert value(key, text) == meant, (key, text)


def test_a_reply_that_is_json_is_no_call_unless_it_names_a_tool() -> None:
    format, _ = made("llama")
    for answer in (
        '{"city": "Oslo"}', '{"name": "Ann", "parameters": {"age": 3}}', '{"name": "get_weather", "age": 3', "{", "[1]",
    ):  # fmt: skip
        assert replies(format, answer).parts == (answer, "", [])
    called = replies(format, '\n{"name": "get_weather", "parameters": {"city": "Oslo"}}')
    assert called.parts == ("", "", [("get_weather", '{"city": "Oslo"}')])


def test_control_tokens_that_have_no_text_are_seen_by_their_ids() -> None:
    format, text = made("mistral")
    words = tokenizer(("[TOOL_CALLS]", "[ARGS]", "<other>"))
    splitter = format.splitter(words, tools=TOOLS)
    deltas = []
    for id in words.encode(text + "<other>", special=True, bos=False):
        deltas += splitter.push("" if words.is_control(id) else words.token_bytes(id).decode("latin-1"), id)
    deltas += splitter.finish()
    assert [delta.text for delta in deltas if delta.kind == "name"] == ["get_weather", "write_file"]
    assert "".join(delta.text for delta in deltas if delta.kind == "content") == "I look."


def test_ids_are_what_the_template_accepts() -> None:
    nine = Format.of(templated("[TOOL_CALLS]") + "{% if messages[0].id|length != 9 %}{% endif %}")
    text = '[TOOL_CALLS][{"name": "get_weather", "arguments": {}}]'
    assert re.fullmatch("[A-Za-z0-9]{9}", replies(nine, text).ids[0])
    assert replies(made("hermes")[0], FORMATS["hermes"][1]).ids[0].startswith("call_")


# ---- what is forced


def tagged(format: Format) -> Any:
    """A vocabulary with control tokens for the tags of a format."""
    markers = HARMONY if format.harmony else format.syntax.markers  # type: ignore[union-attr]
    return tokenizer(tuple(sorted({m for m in markers if re.fullmatch(r"<[^\n]+>|\[[^\n]+\]", m)})))


@pytest.mark.parametrize("name", [*FORMATS, "harmony"])
def test_forced_calls_are_calls_that_fit(name: str) -> None:
    format = Format.of(templated("<|start|>", "<|channel|>", "<|message|>")) if name == "harmony" else made(name)[0]
    words = tagged(format)
    rng = np.random.default_rng(7)
    tail = "<|start|>assistant"
    make = format.constraint(words, None, TOOLS, "required", prompt_tail=tail)
    named = format.constraint(
        words, None, TOOLS, {"type": "function", "function": {"name": "get_weather"}}, prompt_tail=tail
    )
    assert make is not None and named is not None
    ends = 0
    for i in range(8):
        text, ended = sample((named if i % 2 else make)(), words, rng, special=12 if name == "harmony" else 6)
        if not ended:
            continue
        ends += 1
        reply = split(format.splitter(words, prompt_tail=tail, tools=TOOLS), cuts(text, i))
        assert reply.calls and not reply.content, text
        if i % 2:
            assert [called for called, _ in reply.calls] == ["get_weather"]
        for called, arguments in reply.calls:
            value = json.loads(arguments)
            keys = {"get_weather": ["city", "days"], "write_file": ["path", "text", "tags"]}[called]
            assert [key for key in keys if key in value] == list(value)
            assert isinstance(value[keys[0]], str) and isinstance(value.get("days", 1), int)
            assert called == "get_weather" or isinstance(value["text"], str)
    assert ends >= 4


def test_with_auto_a_call_is_held_to_the_schema_once_it_has_begun() -> None:
    format = Format.of(templated("<tool_call>", "<think>", "</think>"))
    words = tokenizer((), ("<tool_call>", "</tool_call>", "<think>", "</think>"))
    make = format.constraint(words, None, TOOLS, None)
    assert make is not None
    mask = make()
    assert isinstance(mask, TriggeredMask)

    def free() -> bool:
        logits = np.zeros(words.n_vocab, np.float32)
        mask.allow(logits)
        return bool((logits == 0).all())

    def take(text: str) -> None:
        for token in words.encode(text, special=True, bos=False):
            mask.accept(token)

    take("<think>maybe a <tool_call> or")
    assert free()
    take("</think> well <tool_call>")
    assert not free()
    text, rng = "", np.random.default_rng(1)
    while not free():
        logits = rng.normal(size=words.n_vocab).astype(np.float32) * 3
        logits[words.encode("</tool_call>", bos=False)[0]] += len(text) / 10
        logits[words.encode('"', bos=False)[0]] += len(text) / 20
        mask.allow(logits)
        token = int(logits.argmax())
        text += words.token_bytes(token).decode("latin-1")
        mask.accept(token)
    written = text.removesuffix(EOS).rstrip()
    assert written.endswith("</tool_call>") and not mask.ended
    called = json.loads(written.removesuffix("</tool_call>"))
    assert called["name"] in ("get_weather", "write_file")
    take(" and then text")
    assert free()
    # several tokens to the marker: nothing to begin at, so nothing is enforced
    assert format.constraint(tokenizer(), None, TOOLS, "auto") is None
    assert format.constraint(words, None, TOOLS, "none") is None
    assert format.constraint(words, {"type": "text"}, None, None) is None


def test_with_auto_and_a_response_format_it_is_one_or_the_other() -> None:
    format, _ = made("hermes")
    words = tokenizer(("<tool_call>", "</tool_call>"))
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}}}
    make = format.constraint(words, wanted, TOOLS, "auto")
    assert make is not None
    rng = np.random.default_rng(2)
    seen = set()
    for _ in range(20):
        text, ended = sample(make(), words, rng)
        reply = split(format.splitter(words, tools=TOOLS), [text])
        if ended:
            seen.add(bool(reply.calls))
            assert reply.calls or json.loads(reply.content)["ok"] in (True, False)
    assert seen == {True, False}


def test_choices_of_tools() -> None:
    format, _ = made("hermes")
    words = tokenizer(("<tool_call>", "</tool_call>"))
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
        {"type": "function", "function": {"name": "write_file"}}]}}  # fmt: skip
    make = format.constraint(words, None, TOOLS, some, parallel=False)
    assert make is not None
    reply = split(format.splitter(words, tools=TOOLS), [sample(make(), words, np.random.default_rng(0))[0]])
    assert [called for called, _ in reply.calls] == ["write_file"]
    for wrong, said in (
        ("sometimes", "sometimes"), ({"type": "function"}, "no function"), ({"type": "custom"}, "no function"),
        ({"type": "function", "function": {"name": "fly"}}, "fly"),
        ({"type": "function", "function": {"name": ["a"]}}, "not among"),
        ({"type": "allowed_tools", "allowed_tools": {"tools": []}}, "no tools"),
        ({"type": "allowed_tools", "allowed_tools": {"tools": 5}}, "no list"),
        ({"type": "allowed_tools", "allowed_tools": {}}, "no list"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": 3, "tools": []}}, "'3'"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            format.constraint(words, None, TOOLS, wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="there are no tools"):
        format.constraint(words, None, None, "required")
    with pytest.raises(InputError, match="takes no tools"):
        Format.of("{{ messages[0].content }}").constraint(words, None, TOOLS, "required")
    for wrong, said in (
        ({"type": "xml"}, "xml"), ({"type": "json_schema"}, "no schema"),
        ({"type": "json_schema", "json_schema": {"schema": [1]}}, "no schema"),
        ({"type": "json_schema", "json_schema": {"schema": {"not": {}}, "strict": True}}, "not"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            format.constraint(words, wrong)


def test_tools_are_checked_and_completed() -> None:
    assert check_tools(None) is None and check_tools([]) is None
    [plain] = check_tools([{"type": "function", "function": {"name": "f"}}]) or []
    assert plain["function"] == {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    for wrong, said in (
        ([1], "tools\\[0\\]"), ([{"type": "code"}], "no function"), ([{"type": "function", "function": {}}], "name"),
        ([function("a b", {})], "name"), ([function("a" * 65, {})], "name"), ([WEATHER, WEATHER], "two tools"),
        ([function("f", {}, description=3)], "description"), ([function("f", deep)], "deep"),
        ([{"type": "function", "function": {"name": "f", "parameters": [1]}}], "parameters"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            check_tools(wrong)


def test_a_strict_tool_is_refused_where_a_lax_one_is_not() -> None:
    format, _ = made("hermes")
    words = tokenizer(("<tool_call>", "</tool_call>"))
    odd = {"a": {"type": "array", "uniqueItems": True}}
    assert format.constraint(words, None, check_tools([function("f", odd)]), "required")
    with pytest.raises(InputError, match="the schema of tool 'f' can't be enforced"):
        format.constraint(words, None, check_tools([function("f", odd, strict=True)]), "required")


# ---- templates


def test_earlier_calls_reach_templates_as_they_expect_them() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    said = [{"role": "user", "content": "u"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    loop = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    objects = loop + "{% for k, v in c.function.arguments.items() %}{{ k ~ v }}{% endfor %}{% endfor %}{% endfor %}"
    texts = loop + "{{ 'json:' + c.function.arguments }}{% endfor %}{% endfor %}"
    either = loop + "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
    either += "{% endfor %}{% endfor %}"
    for template, made_of_it in ((objects, "uaé"), (texts, 'ujson:{"a": "é"}'), (either, 'u{"a": "é"}')):
        assert render_chat(template, Format.of(template).messages(said)) == made_of_it
    assert said[1]["content"] is None  # what was given stays as it was
    for arguments in ("[1]", "{", "1", "[" * 100_000, 5):
        wrong = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]
        with pytest.raises(InputError, match="no JSON object"):
            Format.of(objects).messages(wrong)

"""Reasoning told apart from the answer, in every cutting, and asked for through templates' own variables."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("llguidance", reason="needs the extra [serve]")

from formats_kit import TOOLS, replies, sample, split, tokenizer

from sluice.server.formats import Format
from sluice.server.splitter import HARMONY as HARMONY_TOKENS
from sluice.server.thinking import block_of, words

THINK = "{{ '<think>' }}{{ '</think>' }}"
HARMONY = "{{ tools }}<|start|>{{ '<|channel|>' }}{{ '<|message|>' }}{{ reasoning_effort }}"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("template", "open", "close"),
    [
        (THINK, "<think>", "</think>"),
        ("{{ '<seed:think>' ~ '</seed:think>' }}", "<seed:think>", "</seed:think>"),
        ("{{ '[THINK]' ~ '[/THINK]' }}", "[THINK]", "[/THINK]"),
        ("{{ '<|START_THINKING|>' }}<|END_THINKING|>", "<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|channel>thought\n<channel|>", "<|channel>thought", "<channel|>"),
        ("{% set HYTK = ':opensource' %}{{ '</think{}>'.format(HYTK) }}", "<think:opensource>", "</think:opensource>"),
        ("</think>", "<think>", "</think>"),
    ],
)
def test_blocks_of_reasoning(template: str, open: str, close: str) -> None:
    format = Format.of(template)
    assert format.thinks
    text = f"{open}\nWell, 1 < 2.\n\nSo be it.\n{close}\n\nYes. {open} \n"
    reply = replies(format, text, tools=None)
    assert reply.reasoning == "Well, 1 < 2.\n\nSo be it." and reply.content == f"Yes. {open} \n"
    # the prompt may open the block itself, or open and close it
    opened = replies(format, text.removeprefix(open), tail=f"user: {close} assistant: {open}\n", tools=None)
    assert opened.parts == reply.parts
    closed = replies(format, "Yes.", tail=f"assistant: {open}\n\n{close}\n\n", tools=None)
    assert closed.parts == ("Yes.", "", [])
    # cut off before its end, all is reasoning; half a marker is never content
    assert replies(format, text[: text.index(close) + 3], tools=None).content == ""
    assert replies(format, " plain \n", tools=None).parts == (" plain \n", "", [])
    assert replies(format, f"{open}{close}Yes.", tools=None).parts == ("Yes.", "", [])


def test_a_template_without_blocks_leaves_text_alone() -> None:
    format = Format.of("{{ messages }}")
    assert not format.thinks and block_of("<think>") is None
    assert replies(format, "<think>a</think>b", tools=None).content == "<think>a</think>b"
    assert Format.of(None) is Format.of("")


def test_frames_around_the_answer_are_taken_off() -> None:
    hunyuan = Format.of(THINK + "<answer></answer>")
    text = "<think>\na\n</think>\n<answer>\nYes <answer> it is.\n</answer>\n"
    assert replies(hunyuan, text, tools=None).parts == ("Yes <answer> it is.", "a", [])
    assert replies(hunyuan, "<think>a</think>Yes </answer>", tools=None).content == "Yes </answer>"
    granite = Format.of(THINK + "write your response between <response></response>")
    assert replies(granite, "<think>a</think><response>Yes</response>", tools=None).parts == ("Yes", "a", [])


def test_calls_after_reasoning_and_calls_that_end_it() -> None:
    format = Format.of("{{ tools }}<tool_call>" + THINK)
    assert replies(format, f"<think>a</think>\n\n{CALL}").parts == ("", "a", [("get_weather", '{"city": "Oslo"}')])
    # some begin a call without ending their thoughts; that counts if it names a tool
    assert replies(format, f"<think>a\n{CALL}\nb").parts == ("b", "a", [("get_weather", '{"city": "Oslo"}')])
    other = CALL.replace("get_weather", "fly")
    assert replies(format, f"<think>a\n{other}</think>b").parts == ("b", f"a\n{other}", [])
    assert replies(format, "<think>a <tool_call> is a tag</think>b").parts == ("b", "a <tool_call> is a tag", [])


# ---- harmony


def test_channels_of_harmony() -> None:
    format = Format.of(HARMONY)
    assert format.name == "harmony" and format.thinks and format.takes_tools
    tail = "<|end|><|start|>user<|message|>hi<|end|><|start|>assistant"
    text = (
        "<|channel|>analysis<|message|>They say hi.<|end|><|start|>assistant<|channel|>analysis<|message|>So do I."
        "<|end|><|start|>assistant<|channel|>final<|message|>Hello <b>.<|return|>"
    )
    assert replies(format, text, tail=tail).parts == ("Hello <b>.", "They say hi.\n\nSo do I.", [])
    call = (
        "<|channel|>analysis<|message|>Weather.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city":"Oslo"}<|call|>'
    )
    assert replies(format, call, tail=tail).parts == ("I look.", "Weather.", [("get_weather", '{"city":"Oslo"}')])
    # the recipient may stand before the channel, and the tokens that end messages may have no text
    early = ' to=functions.get_weather<|channel|>commentary json<|message|>{"city":"Oslo"}'
    assert replies(format, early, tail=tail).calls == [("get_weather", '{"city":"Oslo"}')]
    assert replies(format, "no message", tail=tail).parts == ("no message", "", [])
    assert replies(format, "", tail=tail).parts == ("", "", [])
    # a prompt that has begun the message
    begun = tail + "<|channel|>final<|message|>"
    assert replies(format, "Hello", tail=begun).parts == ("Hello", "", [])
    assert replies(format, "<|channel|>final<|message|>Hello<|start|>assistant<|channel|>x<|message|>y").content


def test_harmony_can_be_held_to_a_schema() -> None:
    format = Format.of(HARMONY)
    vocabulary = tokenizer(HARMONY_TOKENS)
    make = format.constraint(vocabulary, {"type": "json_object"}, prompt_tail="<|start|>assistant")
    assert make is not None
    rng, ends = np.random.default_rng(5), 0
    for _ in range(10):
        text, ended = sample(make(), vocabulary, rng, special=12)
        reply = split(format.splitter(vocabulary, prompt_tail="<|start|>assistant"), [text])
        ends += ended
        assert not ended or isinstance(json.loads(reply.content), dict)
    assert ends > 3


@pytest.mark.parametrize("tail", ["assistant: ", "assistant: <think>\n", "assistant: <think>\n\n</think>\n"])
def test_reasoning_is_free_before_what_a_grammar_forces(tail: str) -> None:
    format = Format.of("{{ tools }}<tool_call>" + THINK)
    vocabulary = tokenizer((), ("<think>", "</think>", "<tool_call>", "</tool_call>"))
    make = format.constraint(vocabulary, {"type": "json_object"}, TOOLS, "auto", prompt_tail=tail)
    assert make is not None
    rng, kinds = np.random.default_rng(4), set()
    for _ in range(25):
        text, ended = sample(make(), vocabulary, rng, special=20)
        reply = split(format.splitter(vocabulary, prompt_tail=tail, tools=TOOLS), [text])
        if ended:
            kinds.add((bool(reply.reasoning), bool(reply.calls)))
            assert reply.calls or isinstance(json.loads(reply.content), dict)
    thought = {kind for kind, _ in kinds}
    wanted = {"assistant: ": {True, False}, "assistant: <think>\n": {True}}
    assert thought == wanted.get(tail, {False}) and len(kinds) > 1


# ---- variables


def test_effort_and_thinking_through_the_variables_that_templates_read() -> None:
    qwen = Format.of("{% if enable_thinking is defined and not enable_thinking %}{% endif %}")
    assert qwen.variables("high") == {"enable_thinking": True}
    assert qwen.variables("none") == qwen.variables(None, False) == {"enable_thinking": False}
    assert qwen.variables("high", False) == {"enable_thinking": False} and qwen.variables() == {}
    deepseek = Format.of("{% if not thinking is defined %}{% set thinking = false %}{% endif %}")
    assert deepseek.variables("low") == {"thinking": True}
    seed = Format.of("{% if thinking_budget is defined %}{% endif %}")
    assert seed.variables("none") == {"thinking_budget": 0} and seed.variables("low") == {}
    gpt_oss = Format.of(HARMONY + "{{ 'medium' }}")
    efforts = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
    asked = [gpt_oss.variables(effort)["reasoning_effort"] for effort in efforts]
    assert asked == ["low", "low", "low", "medium", "high", "high", "high"]
    hunyuan = Format.of("{% if reasoning_effort in ['low', 'high', 'no_think'] %}{% endif %}")
    assert [hunyuan.variables(effort)["reasoning_effort"] for effort in efforts] == [
        "no_think", "low", "low", "high", "high", "high", "high",
    ]  # fmt: skip
    either = Format.of("{{ enable_thinking }}{{ reasoning_effort == 'max' }}")
    assert either.variables("xhigh") == {"enable_thinking": True, "reasoning_effort": "max"}
    assert either.variables("high") == {"enable_thinking": True}
    # text that only looks like a variable is none
    assert Format.of("{{ 'detailed thinking on' }}enable_thinking").variables("none") == {}


def test_broken_and_endless_templates_have_no_words() -> None:
    for template in ("{% if %}", "{{ '" + "x" * (1 << 18) + "' }}", "{{ " + "(" * 5000 + "a" + ")" * 5000 + " }}"):
        assert words(template) == (frozenset(), frozenset())
        assert Format.of(template).variables("high", True) == {}


def test_earlier_reasoning_gets_the_name_that_the_template_reads() -> None:
    said = [{"role": "assistant", "content": "a", "reasoning_content": "r"}]
    assert Format.of("{{ message.thinking }}").messages(said)[0]["thinking"] == "r"
    assert "thinking" not in Format.of("{{ message.reasoning_content }}").messages(said)[0]
    call = {"function": {"name": "f", "arguments": "{}"}}
    both = Format.of(HARMONY + "{{ message.thinking }}").messages([{**said[0], "tool_calls": [call]}])
    assert both[0]["thinking"] == "r" and both[0]["content"] == ""

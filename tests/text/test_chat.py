"""Chat templates: rendered as transformers renders them, and harmless whatever they try."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.exceptions import SecurityError

from sluice.errors import TemplateError
from sluice.text import template_sandbox
from sluice.text.chat import guard_messages, render_chat

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HI = [{"role": "user", "content": "Hi <b> 世界"}]


def test_chatml() -> None:
    want = "<|im_start|>user\nHi <b> 世界<|im_end|>\n"
    assert render_chat(CHATML, HI) == want + "<|im_start|>assistant\n"
    assert render_chat(CHATML, HI, add_generation_prompt=False) == want


def test_what_the_assistant_wrote_is_taken_at_its_word() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, "b"]
    messages = [
        {"role": "system", "content": "a"}, {"role": "assistant", "content": "a"}, {"role": "tool", "content": parts},
        {"role": "user", "content": None}, {"role": "user"},
    ]  # fmt: skip
    before = json.dumps(messages)
    guarded = guard_messages(messages, str.upper)
    assert [message.get("content") for message in guarded] == [
        "A", "a", [{"type": "text", "text": "A"}, {"type": "image"}, "b"], None, None,
    ]  # fmt: skip
    assert json.dumps(messages) == before


@given(messages=st.lists(st.fixed_dictionaries({"role": st.text(), "content": st.text()}), max_size=8))
def test_content_passes_through_unchanged(messages: list[dict[str, Any]]) -> None:
    want = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    assert render_chat(CHATML, messages, add_generation_prompt=False) == want


@pytest.mark.parametrize(
    ("template", "want"),
    [
        ("  {% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
        ("{{ bos_token }}|{{ eos_token }}|{{ enable_thinking }}", "<s>|</s>|False"),
        ("{{ tools is none }}{{ nothing is defined }}{{ nothing }}", "TrueFalse"),
        ("{{ messages[0]|tojson }}", json.dumps(HI[0], ensure_ascii=False)),
        ("{{ {'b': 1, 'a': [2]}|tojson(indent=2, sort_keys=true) }}", json.dumps({"a": [2], "b": 1}, indent=2)),
        ("{{ ['é']|tojson(ensure_ascii=true, separators=(',', ':')) }}", '["\\u00e9"]'),
        ("{% generation %}own words{% endgeneration %}", "own words"),
        ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}"
         "{% endfor %}", "013"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% for x in 'ab' %}{{ loop.index }}{{ x }}{{ ',' if not loop.last }}{% else %}none{% endfor %}", "1a,2b"),
        ("{% for x in [] %}{{ x }}{% else %}none{% endfor %}", "none"),
        ("{% for a, b in {'x': 1}.items() %}{{ a ~ '=' ~ b }}{% endfor %}{{ 'a' ~ 1 ~ none }}", "x=1a1None"),
        ("{% macro f(x, y=2) %}<{{ x }}{{ y }}{{ caller() if caller }}>{% endmacro %}{{ f(1) }}"
         "{% call f(3) %}c{% endcall %}", "<12><32c>"),
        ("{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x|upper }}{% filter upper %}b{% endfilter %}", "A1B"),
        ("{{ 'a,b'.split(',')|join('-') }}{{ '-'.join(['c', 'd']) }}{{ 'xyx'.replace('x', 'z') }}"
         "{{ 'q'|replace('q', 'r') }}", "a-bc-dzyzr"),
        ("{{ ' x '|trim }}{{ ' y '.strip() }}{{ 'z'.ljust(3) }}|{{ '%s-%d' % ('a', 3) }}|{{ '{}{x}'.format(1, x=2) }}",
         "xyz  |a-3|12"),
        ("{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ messages|map(attribute='role')|first }}",
         "1user"),
        ("{{ 'abc'[::-1] }}{{ messages[-1:][0].role }}{{ [1, 2] + [3] }}{{ 2 ** 3 }}{{ 7 % 4 }}{{ 3 * 'a' }}",
         "cbauser[1, 2, 3]83aaa"),
        ("{{ 'b' in 'abc' }}{{ 1 in [1] }}{{ 1 < 2 < 3 }}{{ [1] == [1] }}{{ 'a' is in(['a']) }}", "True" * 5),
        ("{{ 'a\nb'|indent(2) }}{{ {'b': 1, 'a': 2}|dictsort }}{{ [3, 1]|sort|list }}",
         "a\n  b[('a', 2), ('b', 1)][1, 3]"),
    ],
)  # fmt: skip
def test_what_templates_use(template: str, want: str) -> None:
    assert render_chat(template, HI, bos_token="<s>", eos_token="</s>", enable_thinking=False) == want


def test_strftime_now() -> None:
    assert render_chat("{{ strftime_now('%Y') }}", []) in {str(datetime.now().year), str(datetime.now().year - 1)}


def test_a_long_conversation_is_no_attack() -> None:
    """3,000 turns, gathered with `+`, each turn looking at all the text so far: within the bounds."""
    template = (
        "{% set ns = namespace(out='') %}{% for m in messages %}{% set ns.out = ns.out + m.get('content') + '\n' %}"
        "{% endfor %}{{ ns.out }}"
    )
    messages = [{"role": "user", "content": f"turn {i}"} for i in range(3000)]
    assert render_chat(template, messages) == "".join(f"turn {i}\n" for i in range(3000))
    big = [{"role": "user", "content": "x" * 3_000_000}]
    assert render_chat("{{ messages[0].content.strip() | trim }}", big) == "x" * 3_000_000


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a\n{% if %}", "at line 2"),
        ("{{ raise_exception('no system\nrole here') }}", "at line 1: no system role here"),
        ("a\nb\n{{ nothing.at.all }}", "at line 3: 'nothing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'x'|nosuchfilter }}", "nosuchfilter"),
        ("{% include 'x' %}", "at line 1"),
        ("{{ messages.pop() }}", "at line 1"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages|tojson }}{{ joiner|tojson }}", "JSON"),
        ("{{ '" + "x" * 200_000 + "' }}", "characters long"),
    ],
)
def test_broken_templates_name_line_and_remedy(template: str, message: str) -> None:
    with pytest.raises(TemplateError, match="chat template") as raised:
        render_chat(template, HI)
    assert message in str(raised.value)
    assert str(raised.value).endswith("use --raw to send the prompt without it")
    assert "\n" not in str(raised.value)


_DOUBLING = "{% set n = namespace(s=START) %}{% for i in range(99) %}{% set n.s = STEP %}{% endfor %}{{ n.s }}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 10**10 }}", "{{ [1] * 10**10 }}", "{{ 9**(9**9) }}", "{% for i in range(10**9) %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}",
        "{% set x %}{% for i in range(99999) %}" + "y" * 50_000 + "{% endfor %}{% endset %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{% block a %}{{ self.a() }}{% endblock %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for x in [1, 2] recursive %}{% if loop.depth < 50 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
        "{{ 'x'.ljust(10**10) }}", "{{ 'x'.rjust(10**10) }}", "{{ 'x'.center(10**10) }}", "{{ '1'.zfill(10**10) }}",
        "{{ '\t'.expandtabs(10**10) }}", "{{ 'x'|center(10**10) }}", "{{ 'x'|indent(10**10, true) }}",
        "{{ [1]|tojson(indent=10**10) }}", "{{ '%9999999999d' % 1 }}", "{{ '%*d' % (10**10, 1) }}",
        "{{ '{:9999999999}'.format(1) }}", "{{ '{x:9999999999}'.format_map({'x': 1}) }}",
        "{{ ('{0}' * 10**5).format('y' * 10**6) }}", "{{ ('%s' * 2 * 10**4) % ((('y' * 10**6),) * 2 * 10**4) }}",
        "{{ ('y' * 10**6).replace('y', 'z' * 10**6) }}", "{{ ('y' * 10**6)|replace('y', 'z' * 10**6) }}",
        "{{ ('z' * 10**6).join([''] * 10**5) }}", "{{ ([''] * 10**5)|join('z' * 10**6) }}",
        "{{ ('y' * 10**6)|join('z' * 10**6) }}", "{{ ('x ' * 10**7).split() }}", "{{ ('x' * 10**8)|list }}",
        "{{ ([[1] * 999] * 99999)|sum(start=[]) }}", "{{ [1]|batch(10**10, 1)|list }}", "{{ lipsum(n=10**9) }}",
        "{{ (1).to_bytes(10**10) }}", "{{ strftime_now('%9999999999d') }}", "{{ ('x' * 10**6)|list|tojson }}" * 20,
        _DOUBLING.replace("START", "'xxxx'").replace("STEP", "n.s ~ n.s"),
        _DOUBLING.replace("START", "'xxxx'").replace("STEP", "n.s + n.s"),
        _DOUBLING.replace("START", "99").replace("STEP", "n.s * n.s"),
        _DOUBLING.replace("START", "[1]").replace("STEP", "[n.s, n.s]"),
        _DOUBLING.replace("START", "(1,)").replace("STEP", "(n.s, n.s)"),
        _DOUBLING.replace("START", "{}").replace("STEP", "dict(a=n.s, b=n.s)"),
        _DOUBLING.replace("START", "[1]").replace("STEP", "[n.s] * 2"),
        "{% macro m(n) %}{% if n < 60 %}{{ m(n + 1, varargs, varargs) }}{% else %}{{ varargs == [varargs] }}"
        "{{ varargs }}{% endif %}{% endmacro %}{{ m(0, 1) }}",
        "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "{{ " + "[" * 5000 + "]" * 5000 + " }}",
        "{% if x %}" * 5000,
        "{% set a = 'x' * 10**7 %}{% for i in range(99999) %}{% if ('y' ~ i) in a %}{% endif %}{% endfor %}",
        "{% for i in range(99999) %}{% filter upper %}" + "z" * 10_000 + "{% endfilter %}{% endfor %}",
    ],
)  # fmt: skip
def test_hostile_templates_are_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 100_000)  # the same stops, sooner
    with pytest.raises(TemplateError, match="chat template") as raised:
        render_chat(template, HI)
    assert len(str(raised.value)) < 400


def test_time_is_bounded() -> None:
    meter = template_sandbox.Meter(deadline=0)
    with pytest.raises(SecurityError, match=r"or 5 s"):
        meter.tick()


def test_one_rendering_leaves_nothing_to_the_next() -> None:
    """A meter that has run out belongs to its rendering, and so does what a template sets."""
    with pytest.raises(TemplateError):
        render_chat("{{ 'x' * 10**10 }}" + CHATML, HI)
    template = "{{ seen }}{% set seen = 1 %}" + CHATML
    assert render_chat(template, HI) == render_chat(template, HI) == render_chat(CHATML, HI)

"""Tools, structure and reasoning through the `openai` client, of a model that knows no words: what is forced holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from api_server import served
from tiny import write_tiny

from sluice.engine import Engine

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nCall <tool_call>{\"name\": …, \"arguments\": …}</tool_call>\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
WHICH = {"type": "string", "enum": ["bridge", "river"]}
SCHEMA = {
    "type": "object", "properties": {"which": WHICH, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["which", "n"], "additionalProperties": False,
}  # fmt: skip
LOOK = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA}}
ASKED: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "the river"}], "max_tokens": 120}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = write_tiny(tmp_path_factory.mktemp("api") / "tiny.gguf", chat_template=TEMPLATE).path
    with (
        Engine.open(path, expert_slots=12, threads=1, ctx=1024, streams=3) as engine,
        served(engine) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client
        assert running.faults == []


def fits(value: dict[str, Any]) -> bool:
    return set(value) == {"which", "n"} and value["which"] in WHICH["enum"] and value["n"] in range(10)


def test_a_schema_is_kept_to(client: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "where", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(**ASKED, response_format=form, n=3, seed=1)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert fits(json.loads(choice.message.content))


def test_a_call_can_be_demanded(client: Any) -> None:
    demand: dict[str, Any] = {"tools": [LOOK], "tool_choice": "required", "parallel_tool_calls": False, "seed": 2}
    answer = client.chat.completions.create(**ASKED, **demand)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert all(call.function.name == "look" and fits(json.loads(call.function.arguments)) and call.id
               for call in choice.message.tool_calls)  # fmt: skip
    chunks = client.chat.completions.create(**ASKED, **demand, stream=True)
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or ():
            if call.function.name:
                names[call.index] = call.function.name
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    said = choice.message.tool_calls
    assert list(names.values()) == [call.function.name for call in said]
    assert [json.loads(text) for text in arguments.values()] == [json.loads(call.function.arguments) for call in said]


def test_a_conversation_with_calls_goes_on(client: Any) -> None:
    call = {"name": "look", "arguments": '{"which": "river", "n": 1}'}
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "a", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "a", "content": "cold"},
    ]  # fmt: skip
    named = {"type": "function", "function": {"name": "look"}}
    answer = client.chat.completions.create(**ASKED | {"messages": messages}, tools=[LOOK], tool_choice=named)
    (call,) = answer.choices[0].message.tool_calls
    assert fits(json.loads(call.function.arguments))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tool_choice": "required"}, "no tools"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "jump"}}}, "'jump'"),
        ({"tools": [{"type": "web_search"}]}, "tools[0] is no function"),
        ({"response_format": {"type": "xml"}}, "'xml'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}}, ""),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function":
                        {"name": "look", "arguments": "{"}}]}]}, "no JSON object"),
    ],
)  # fmt: skip
def test_what_can_not_be_forced_is_refused(client: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASKED | options)
    assert says in caught.value.message

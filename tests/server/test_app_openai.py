"""The `openai` client gets what the engine makes by itself: whole, streamed, many at once, with log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_server import Served, served
from tiny import write_tiny

from sluice.engine import Engine

openai = pytest.importorskip("openai")

HELLO = [{"role": "user", "content": "the river runs"}]
IDS = [30, 40, 50, 60, 70, 80]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("api") / "tiny.gguf").path


@pytest.fixture(scope="module")
def alone(tiny: Path) -> Iterator[Engine]:
    """The same model, for one at a time."""
    with Engine.open(tiny, expert_slots=24, threads=1, ctx=512) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Served]:
    with Engine.open(tiny, expert_slots=12, threads=1, ctx=512, streams=4) as engine, served(engine) as running:
        yield running
        assert running.faults == []


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(engine: Engine, prompt: Any, n: int, **sampling: Any) -> str:
    ids = engine.encode_chat(prompt) if isinstance(prompt[0], dict) else prompt
    return "".join(token.text for token in engine.generate(ids, n, **sampling))


def test_a_chat_is_what_the_engine_says(client: Any, alone: Engine) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12, seed=7)
    (choice,) = answer.choices
    assert choice.message.content == expected(alone, HELLO, 12, seed=7)
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert answer.usage.prompt_tokens == len(alone.encode_chat(HELLO))
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (12, answer.usage.prompt_tokens + 12)
    assert answer.model_extra["sluice"]["choices"][0]["seed"] == 7
    assert answer.model_extra["sluice"]["mode"]["routing"] == "exact"


def test_a_stream_is_the_same_in_pieces(client: Any, alone: Engine) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=HELLO, max_completion_tokens=12, seed=7, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    *spoken, last, usage = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in spoken) == expected(alone, HELLO, 12, seed=7)
    assert spoken[0].choices[0].delta.role == "assistant"
    assert last.choices[0].finish_reason == "length" and last.model_extra["sluice"]["choices"][0]["seed"] == 7
    assert usage.choices == [] and usage.usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in (*spoken, last))
    assert len({chunk.id for chunk in chunks}) == 1


def test_many_at_once_are_each_what_they_are_alone(server: Served, alone: Engine) -> None:
    texts = ["the old bridge", "people on the banks", "letters and bread", "fires are burning", "def return", "wine"]

    async def ask(client: Any, i: int, text: str) -> str:
        messages = [{"role": "user", "content": text}]
        options: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 10, "seed": i}
        if i % 2:
            return (await client.chat.completions.create(**options)).choices[0].message.content
        pieces = [chunk async for chunk in await client.chat.completions.create(stream=True, **options)]
        return "".join(chunk.choices[0].delta.content or "" for chunk in pieces)

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, i, text) for i, text in enumerate(texts)))

    for i, (text, got) in enumerate(zip(texts, asyncio.run(ask_all()), strict=True)):
        assert got == expected(alone, [{"role": "user", "content": text}], 10, seed=i)


def test_choices_draw_by_seeds_that_follow(client: Any, alone: Engine) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=8, seed=20, n=3)
    said = [choice.message.content for choice in sorted(answer.choices, key=lambda choice: choice.index)]
    assert said == [expected(alone, HELLO, 8, seed=20 + i) for i in range(3)]
    assert answer.usage.prompt_tokens == len(alone.encode_chat(HELLO))
    assert answer.usage.completion_tokens == 24


def test_without_a_seed_one_is_drawn_and_told(client: Any, alone: Engine) -> None:
    answer = client.completions.create(model="tiny", prompt=IDS, max_tokens=6)
    (how,) = answer.model_extra["sluice"]["choices"]
    assert answer.choices[0].text == expected(alone, IDS, 6, seed=how["seed"])


def test_a_negative_seed_is_a_seed(client: Any) -> None:
    first, second = (client.completions.create(model="tiny", prompt=IDS, max_tokens=6, seed=-5) for _ in range(2))
    assert first.choices[0].text == second.choices[0].text


def test_a_stop_string_ends_the_text(client: Any, alone: Engine) -> None:
    whole = expected(alone, IDS, 24, temperature=0)
    middle = len(whole) // 2
    stop = whole[middle : middle + 3]
    answer = client.completions.create(model="tiny", prompt=IDS, max_tokens=24, temperature=0, stop=[stop, "not there"])
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_log_probabilities_of_a_chat(client: Any, alone: Engine) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 6, "temperature": 0}
    whole = client.chat.completions.create(logprobs=True, top_logprobs=3, **options)
    said = whole.choices[0].logprobs.content
    text = b"".join(bytes(token.bytes) for token in said).decode("utf-8", "replace")
    assert text == whole.choices[0].message.content == expected(alone, HELLO, 6, temperature=0)
    for token in said:
        tops = [top.logprob for top in token.top_logprobs]
        assert tops == sorted(tops, reverse=True) and len(tops) == 3
        assert token.logprob == tops[0] <= 0  # greedy: the likeliest
    streamed = client.chat.completions.create(logprobs=True, top_logprobs=3, stream=True, **options)
    pieces = [chunk.choices[0].logprobs for chunk in streamed]
    assert [token for piece in pieces if piece for token in piece.content] == said


def log_probabilities(engine: Engine, ids: list[int]) -> np.ndarray:
    """[n_tokens, n_vocab] float64, by plain arithmetic."""
    logits = engine.logits(ids).astype(np.float64)[:, : engine.tokenizer.n_vocab]
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_log_probabilities_of_prompts(client: Any, alone: Engine, max_tokens: int) -> None:
    """What lm-eval asks for: several prompts of ids, echoed, with the likeliest token of each place."""
    prompts = [IDS, [90, 91, 92]]
    answer = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=max_tokens, logprobs=1, echo=True, temperature=0
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice, ids in zip(answer.choices, prompts, strict=True):
        got, reference = choice.logprobs, log_probabilities(alone, ids)
        assert len(got.tokens) == len(got.token_logprobs) == len(got.top_logprobs) == len(ids) + max_tokens
        assert got.token_logprobs[0] is None and got.top_logprobs[0] is None
        wanted = [reference[i, id] for i, id in enumerate(ids[1:])]
        assert got.token_logprobs[1 : len(ids)] == pytest.approx(wanted, abs=1e-4)
        for i in range(1, len(ids)):
            assert max(got.top_logprobs[i].values()) == pytest.approx(reference[i - 1].max(), abs=1e-4)
        assert all(a <= b for a, b in pairwise(got.text_offset))
        assert choice.text.startswith(alone.tokenizer.decode(ids))


def test_an_echo_without_log_probabilities(client: Any) -> None:
    plain = client.completions.create(model="tiny", prompt="the river", max_tokens=5, seed=1)
    options: dict[str, Any] = {"model": "tiny", "prompt": "the river", "max_tokens": 5, "seed": 1, "echo": True}
    echoed = client.completions.create(**options)
    assert echoed.choices[0].text == "the river" + plain.choices[0].text
    assert echoed.choices[0].logprobs is None
    chunks = client.completions.create(stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == echoed.choices[0].text


def test_a_bias_decides(client: Any) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": IDS, "max_tokens": 4, "temperature": 0}
    free = client.completions.create(**options, logprobs=0)
    forced = client.completions.create(**options, logprobs=0, logit_bias={"65": 100})
    assert len(set(forced.choices[0].logprobs.tokens)) == 1
    assert forced.choices[0].logprobs.tokens != free.choices[0].logprobs.tokens


def test_the_models_are_told(client: Any, alone: Engine) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").model_extra["max_model_len"] == alone.n_ctx
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served"):
        client.chat.completions.create(model="gpt-4", messages=HELLO)


def test_other_roles_and_parts_of_text(client: Any, alone: Engine) -> None:
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the\nriver"}]
    parts = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "river"}]},
    ]
    answer = client.chat.completions.create(model="tiny", messages=parts, max_tokens=5, seed=2)
    assert answer.choices[0].message.content == expected(alone, plain, 5, seed=2)

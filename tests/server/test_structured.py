"""Grammars hold what is generated to them, whatever the logits; hostile schemas are refused in one line, soon."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import T, write_tiny

pytest.importorskip("llguidance", reason="needs the extra [serve]")
pytest.importorskip("resource", reason="needs a POSIX system's count of memory")

import resource

from formats_kit import EOS, TOOLS, sample, tokenizer

from sluice.config import EngineConfig
from sluice.engine import Engine
from sluice.errors import InputError
from sluice.server.formats import Format
from sluice.server.jobs import Failed, Finished, Job, TokenEvent
from sluice.server.structured import MAX_SCHEMA_DEPTH, Grammar, check_schema, reserved_token, vocabulary
from sluice.server.worker import Worker
from sluice.text.sampling import SamplingParams
from sluice.text.tokenizer import Tokenizer

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "\u00e9"]}, "minItems": 1, "maxItems": 3},
        "home": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "near": {"type": ["boolean", "null"]}},
            "required": ["zip", "near"],
            "additionalProperties": False,
        }
    },
}


def fits(value: Any) -> bool:
    home = value["home"]
    return (
        list(value) == ["name", "age", "tags", "home"]
        and isinstance(value["name"], str) and len(value["name"]) <= 12
        and type(value["age"]) is int and 0 <= value["age"] <= 130
        and 1 <= len(value["tags"]) <= 3 and set(value["tags"]) <= {"a", "b", "\u00e9"}
        and len(home["zip"]) == 5 and home["zip"].isdigit() and home["near"] in (True, False, None)
    )  # fmt: skip


@pytest.mark.parametrize("spaces", [False, True])
def test_whatever_the_logits_the_text_fits_the_schema(spaces: bool) -> None:
    words = tokenizer(("<tool>",), ("<user>",), spaces=spaces)
    g = Grammar(words)
    person, thing = g.compiled(g.json(PERSON)), g.compiled(g.json({"type": "object"}))
    rng = np.random.default_rng(3)
    for _ in range(12):
        text, ended = sample(person(), words, rng)
        assert ended and fits(json.loads(text))
    ends = 0
    for _ in range(12):
        text, ended = sample(thing(), words, rng)
        ends += ended
        assert not ended or isinstance(json.loads(text), dict)
    assert ends > 6


def test_the_mask_says_what_may_come_and_when_the_text_may_end() -> None:
    words = tokenizer()
    (eos,) = words.encode(EOS, special=True, bos=False)
    g = Grammar(words)
    mask = g.compiled(g.json({"enum": [1, 12]}))()

    def allowed(n: int = words.n_vocab) -> set[int]:
        logits = np.zeros(n, np.float32)
        mask.allow(logits)
        return set(np.flatnonzero(logits == 0).tolist())

    one, two, twelve = (
        next(i for i in range(words.n_vocab) if words.token_bytes(i) == text) for text in (b"1", b"2", b"12")
    )
    assert allowed() == {one, twelve}
    assert allowed(words.n_vocab + 9) == {one, twelve}  # a head padded beyond the vocabulary
    assert not mask.ended
    mask.accept(one)
    assert allowed() == {two, eos} and not mask.ended
    mask.accept(two)
    assert mask.ended and allowed() == {eos}
    mask.accept(eos)
    assert mask.ended
    wrong = g.compiled(g.json({"enum": [1, 12]}))()
    with pytest.raises(InputError, match="past token"):
        wrong.accept(two)


def test_copies_of_a_grammar_do_not_share_their_place() -> None:
    words = tokenizer()
    g = Grammar(words)
    make = g.compiled(g.text("ab"))
    first, second = make(), make()
    for text in "ab":
        first.accept(words.encode(text, bos=False)[0])
    assert first.ended and not second.ended


def test_text_reserved_tokens_and_lazy_ends() -> None:
    words = tokenizer(("<a>",), ("<b>",))
    assert reserved_token(words, "<a>") is not None and reserved_token(words, "<b>") is None
    assert reserved_token(tokenizer((), ("<|b|>",)), "<|b|>") is not None  # declared content, and yet no text
    g = Grammar(words)
    mask = g.compiled(f"{g.until('<a>')} {g.until('<b>')} {g.text('!')}")()
    for token in words.encode("x<b>y<a>z<b", special=True, bos=False):
        mask.accept(token)
    assert not mask.ended
    for token in words.encode(">!", bos=False):
        mask.accept(token)
    assert mask.ended


def test_forced_text_is_cut_into_tokens_as_the_model_would() -> None:
    for words in (tokenizer(), tokenizer(spaces=True)):
        seen = vocabulary(words)
        for text in ('{"name": " the é"}', " x", "", "\n\ta"):
            ids = seen.tokenize_str(text)
            assert b"".join(words.token_bytes(i) for i in ids) == text.encode()
            lead = words.encode("." + text, bos=False)
            assert ids == lead[len(lead) - len(ids) :] or text.startswith("\n")
        assert vocabulary(words) is seen


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def tangle(n: int) -> dict[str, Any]:
    """Definitions that all refer to others, without end."""

    def one(i: int) -> dict[str, Any]:
        below = {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i * 3 % n}"}}}
        return {"anyOf": [{"$ref": f"#/$defs/d{(i + 1) % n}"}, {"$ref": f"#/$defs/d{(i * 7 + 3) % n}"}, below]}

    return {"$defs": {f"d{i}": one(i) for i in range(n)}, "$ref": "#/$defs/d0"}


HOSTILE: dict[str, tuple[Any, str | None]] = {
    "itself": ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "can't be enforced"),
    "tangle": (tangle(100), None),
    "deep": (nested(MAX_SCHEMA_DEPTH), "deep"),
    "very deep": (nested(20_000), "deep"),
    "just deep enough": (nested(MAX_SCHEMA_DEPTH // 2 - 2), None),
    "powers": ({"type": "string", "pattern": "^(((a|b){1,100}){1,100}){1,100}$"}, None),
    "exponential": ({"type": "string", "pattern": "^.*a.{30}$"}, None),
    "look-around": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    "no pattern": ({"type": "string", "pattern": "(a"}, "unclosed"),
    "long": ({"type": "string", "minLength": 10**9}, None),
    "many items": ({"type": "array", "items": {"type": "integer"}, "minItems": 10**9}, None),
    "many properties": ({"type": "object", "properties": {f"p{i}": {} for i in range(3000)}}, "can't be"),
    "many values": ({"enum": list(range(10**5))}, "values"),
    "much text": ({"description": "x" * (1 << 20)}, "bytes"),
    "remote": ({"$ref": "https://example.com/x.json"}, "can't be enforced"),
    "file": ({"$ref": "file:///etc/passwd"}, "can't be enforced"),
    "nothing": (False, "can't be enforced"),
    "no type": ({"type": "foo"}, "foo"),
    "a list": ([1], "no JSON schema"),
    "not JSON": ({"const": float("nan")}, "not JSON"),
    "unknown keyword": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "contradiction": (
        {"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {"const": j}}} for j in range(4)]} for i in range(12)]},
        "too large",
    ),
    "options": ({"type": "string", "x-guidance": {"whitespace_pattern": "(a{1,1000}){1,1000}"}}, "x-guidance"),
    "huge number": ({"type": "integer", "minimum": -(10**30), "maximum": 10**30}, "can't be enforced"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_cost_little_and_are_refused_in_one_line(name: str) -> None:
    """In a thread with the smallest stack that threads have anywhere."""
    schema, said = HOSTILE[name]
    words = tokenizer()
    vocabulary(words)
    outcome: list[Any] = []

    def work() -> None:
        try:
            g = Grammar(words)
            outcome.append(sample(g.compiled(g.json(schema, strict=True))(), words, np.random.default_rng(0), 40))
        except Exception as error:
            outcome.append(error)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = threading.stack_size(512 << 10)
    try:
        thread = threading.Thread(target=work)
        thread.start()
    finally:
        threading.stack_size(size)
    thread.join()
    (result,) = outcome
    if said is None:
        assert isinstance(result, tuple)
    else:
        assert isinstance(result, InputError) and said in str(result) and "\n" not in str(result)
        assert len(str(result)) < 600
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10  # KiB


def test_what_can_not_be_enforced_is_left_out_unless_strict() -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 1, "maxItems": 2}
    words = tokenizer()
    g = Grammar(words)
    text, ended = sample(g.compiled(g.json(schema))(), words, np.random.default_rng(0))
    assert ended and 1 <= len(json.loads(text)) <= 2
    with pytest.raises(InputError, match="the schema of f can't be enforced"):
        g.json(schema, strict=True, what="the schema of f")
    fallback = g.compiled(g.json({"type": "object", "required": 3}, fallback=True))
    text, ended = sample(fallback(), words, np.random.default_rng(1))
    assert ended and isinstance(json.loads(text), dict)


def test_schemas_in_outline() -> None:
    check_schema(True)
    check_schema({"properties": {"x-guidance": {"type": "string"}}})  # a property may be called so
    with pytest.raises(InputError, match="the schema of tool 'f' is no JSON schema"):
        check_schema("string", "the schema of tool 'f'")


def test_a_file_without_an_end_of_text_can_still_be_constrained() -> None:
    words = tokenizer()
    bare = Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "default", "tokenizer.ggml.merges": [],
            "tokenizer.ggml.tokens": [words._vocabulary.texts[i] for i in range(256)],
        }
    )  # fmt: skip
    assert not bare.eos_ids
    g = Grammar(bare)
    mask = g.compiled(g.text("ok"))()
    for token in bare.encode("ok", bos=False):
        mask.accept(token)
    assert mask.ended


# ---- with engines


class Heard:
    def __init__(self) -> None:
        self.text, self.end, self.over = "", None, threading.Event()

    def __call__(self, event: Any) -> None:
        if isinstance(event, TokenEvent):
            self.text += event.text
        if isinstance(event, (Finished, Failed)):
            self.end = event
            self.over.set()


def ask_all(worker: Worker, jobs: list[Job]) -> list[Heard]:
    heard = [Heard() for _ in jobs]
    for job, each in zip(jobs, heard, strict=True):
        worker.submit(job, each)
    assert all(each.over.wait(300) for each in heard)
    return heard


def hot(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.5, top_p=1.0, seed=seed)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = write_tiny(
        tmp_path_factory.mktemp("structured") / "m.gguf", n_layers=1, n_embd=64, n_head=2, n_head_kv=1, head_dim=32,
        n_ff_exp=64, n_vocab=517, expert_type=T.Q8_0,
    ).path  # fmt: skip
    with Engine(path, EngineConfig(threads=1, ctx=1024, streams=4)) as engine:
        yield engine


def test_a_model_of_noise_writes_what_the_schema_says(random_model: Engine) -> None:
    """Tokens marked unused pad this vocabulary; they never come."""
    words = random_model.tokenizer
    constraint = Format.of(words.chat_template).constraint(
        words, {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}
    )
    prompt = tuple(words.encode("a person", bos=False))
    jobs = [Job(prompt, hot(seed), max_tokens=400, constraint=constraint) for seed in range(8)]
    ends = 0
    with Worker(random_model) as worker:
        for heard in ask_all(worker, jobs):
            assert isinstance(heard.end, Finished)
            ends += heard.end.reason == "stop"
            assert heard.end.reason == "length" or fits(json.loads(heard.text))
    assert ends >= 5


def test_the_demo_model_answers_in_json_and_calls_tools(demo_model: Path) -> None:
    with Engine(demo_model, EngineConfig(threads=2, ctx=1024, streams=4)) as engine, Worker(engine) as worker:
        words = engine.tokenizer
        format = Format.of("{% if tools %}<tool_call>{% endif %}")
        prompt = tuple(words.encode("Once upon a time", bos=False))
        small = {"properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}}}
        schema = {"type": "object", **small, "required": ["name", "ok"], "additionalProperties": False}
        wanted = format.constraint(words, {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}})
        anything = format.constraint(words, {"type": "json_object"})
        called = format.constraint(words, None, TOOLS, "required", parallel=False)
        each = (wanted, anything, called)
        heard = ask_all(worker, [Job(prompt, hot(1), max_tokens=40, constraint=make) for make in each])
        ends = [isinstance(one.end, Finished) and one.end.reason for one in heard]
        assert ends[0] == "stop" and set(ends) <= {"stop", "length"}
        value = json.loads(heard[0].text)
        assert list(value) == ["name", "ok"] and len(value["name"]) <= 8 and value["ok"] in (True, False)
        assert ends[1] == "length" or isinstance(json.loads(heard[1].text), dict)
        splitter = format.splitter(words, tools=TOOLS)
        deltas = [*splitter.push(heard[2].text), *splitter.finish()]
        assert [delta.kind for delta in deltas][:1] == ["name"]
        assert ends[2] == "length" or isinstance(json.loads(deltas[1].text), dict)

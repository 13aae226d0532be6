"""What the server doesn't do: each refusal in OpenAI's format, with its status, and none that hurts another request."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx
import pytest
from api_server import POST, Served, connected, served
from tiny import write_tiny

from sluice.engine import Engine
from sluice.server import asking
from sluice.server.limits import Limits

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "the river"}]
LIMITS = Limits(body_bytes=20_000, depth=16, containers=1000, pending_events=400, body_s=1.0, send_s=1.0)
ENDLESS: dict[str, Any] = {"prompt": [30, 40, 50], "max_tokens": 3900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("api") / "tiny.gguf", n_ctx=4096).path


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Served]:
    with (
        Engine.open(tiny, expert_slots=12, threads=1, ctx=4000, streams=2) as engine,
        served(engine, limits=LIMITS, max_queue=2) as running,
    ):
        yield running
        assert running.faults == []


@pytest.fixture
def http(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error, which has OpenAI's shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and "\n" not in body["error"]["message"]
    return body["error"]


HOSTILE = {
    "nothing": b"",
    "no JSON": b"{",
    "no object": b"[1, 2]",
    "deep lists": b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}",
    "deep objects": b'{"a": ' * 2500 + b"1" + b"}" * 2500,
    "deeper than the limit": b'{"messages": ' + b"[" * 20 + b"]" * 20 + b"}",
    "more lists than the limit": b'{"prompt": "x", "metadata": [' + b"[]," * 1000 + b"1]}",
    "a text without an end": b'{"prompt": "' + b'\\"[' * 5000,
    "half an escape": b'{"prompt": "' + b"[" * 5000 + b"\\",
    "a huge int": b'{"prompt": "x", "seed": ' + b"9" * 6000 + b"}",
    "an int of 300 digits": b'{"prompt": "x", "seed": ' + b"9" * 300 + b"}",
    "a huge int for a float": b'{"prompt": "x", "temperature": ' + b"9" * 400 + b"}",
    "a float past the end": b'{"prompt": "x", "temperature": 1e999}',
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "Infinity": b'{"prompt": "x", "temperature": -Infinity}',
    "half a surrogate pair": b'{"prompt": "\\ud800"}',
    "half a surrogate pair as a key": b'{"prompt": "x", "logit_bias": {"\\udfff": 1}}',
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
}


@pytest.mark.parametrize("route", [CHAT, TEXT])
@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bodies(http: httpx.Client, route: str, body: bytes) -> None:
    error_of(http.post(route, content=body, headers={"content-type": "application/json"}), 400)


def part(one: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation of one message with one part."""
    return [{"role": "user", "content": [one]}]


BAD_CHATS: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "no messages": ({}, "missing", "messages"),
    "empty messages": ({"messages": []}, "at least 1", "messages"),
    "a message that is none": ({"messages": ["x"]}, "messages[0]", "messages[0]"),
    "an unknown role": ({"messages": [{"role": "king", "content": "x"}]}, "role", "messages[0].role"),
    "no content": ({"messages": [{"role": "user"}]}, "neither content", "messages[0]"),
    "an image": ({"messages": part({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}})},
                 "'image_url' is not served", "messages[0].content[0]"),
    "a file": ({"messages": part({"type": "file", "file": {"file_id": "x"}})},
               "'file' is not served", "messages[0].content[0]"),
    "sound": ({"messages": [{"role": "user", "content": "x", "audio": {"id": "y"}}]},
              "audio is not served", "messages[0]"),
    "an unknown field": ({"messages": HELLO, "smoothness": 3}, "'smoothness'", "smoothness"),
    "an unknown field with a line break": ({"messages": HELLO, "a\nb": 3}, "'a b'", None),
    "more log-probabilities than are held": ({"messages": HELLO, "n": 64, "logprobs": True, "max_tokens": 3900},
                                             "249,600", "logprobs"),
    "a penalty": ({"messages": HELLO, "frequency_penalty": 0.5}, "use repetition_penalty", None),
    "old functions": ({"messages": HELLO, "functions": [{"name": "f"}]}, "use tools", None),
    "web search": ({"messages": HELLO, "web_search_options": {}}, "opens no URL", None),
    "too hot": ({"messages": HELLO, "temperature": 101}, "temperature", "temperature"),
    "text for a number": ({"messages": HELLO, "temperature": "1"}, "temperature", "temperature"),
    "no nucleus": ({"messages": HELLO, "top_p": 0}, "top_p", "top_p"),
    "too many choices": ({"messages": HELLO, "n": 65}, "n:", "n"),
    "no tokens": ({"messages": HELLO, "max_tokens": 0}, "max_tokens", "max_tokens"),
    "more tokens than positions": ({"messages": HELLO, "max_tokens": 4001}, "4000 positions", "max_tokens"),
    "too many stops": ({"messages": HELLO, "stop": ["x"] * 17}, "stop", "stop"),
    "an empty stop": ({"messages": HELLO, "stop": ""}, "stop", "stop"),
    "a long stop": ({"messages": HELLO, "stop": "x" * 257}, "stop", "stop"),
    "a bias for no token": ({"messages": HELLO, "logit_bias": {"x": 1}}, "logit_bias names 'x'", "logit_bias"),
    "a bias for a token beyond": ({"messages": HELLO, "logit_bias": {"99999999": 1}}, "logit_bias", "logit_bias"),
    "a bias too strong": ({"messages": HELLO, "logit_bias": {"1": 101}}, "logit_bias", "logit_bias"),
    "too many biases": ({"messages": HELLO, "logit_bias": {str(i): 1 for i in range(1025)}},
                        "at most 1024", "logit_bias"),
    "too many likeliest": ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs"),
    "likeliest of nothing": ({"messages": HELLO, "top_logprobs": 1}, "set logprobs", "logprobs"),
    "the template's own variable": ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "'messages'",
                                    "chat_template_kwargs"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "says", "param"), BAD_CHATS.values(), ids=BAD_CHATS.keys())
def test_chats_that_are_refused_by_name(http: httpx.Client, body: dict[str, Any], says: str, param: str | None) -> None:
    error = error_of(http.post(CHAT, json=body), 400)
    assert says in error["message"]
    assert param is None or error["param"] == param


BAD_TEXTS: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({}, "missing"),
    "an empty prompt": ({"prompt": ""}, "empty"),
    "no prompts": ({"prompt": []}, "prompt"),
    "a token beyond": ({"prompt": [100000]}, "outside"),
    "a mixed prompt": ({"prompt": [1, "x"]}, "prompt"),
    "a long prompt": ({"prompt": [1] * 4001}, "4001 tokens"),
    "too many choices": ({"prompt": ["x"] * 10, "n": 7}, "at most 64"),
    "more choices than may ever wait": ({"prompt": "x", "n": 5}, "ask for fewer"),
    "more log-probabilities than are held": ({"prompt": "x", "n": 4, "logprobs": 20, "max_tokens": 3900}, "stream it"),
    "more of prompts than are held": (
        {"prompt": [[1] * 500] * 8, "n": 4, "logprobs": 20, "max_tokens": 0, "echo": True, "stream": True},
        "336,000",
    ),
    "best of more": ({"prompt": "x", "best_of": 3}, "use n"),
    "a suffix": ({"prompt": "x", "suffix": "y"}, "suffix"),
}


@pytest.mark.parametrize(("body", "says"), BAD_TEXTS.values(), ids=BAD_TEXTS.keys())
def test_prompts_that_are_refused_by_name(http: httpx.Client, body: dict[str, Any], says: str) -> None:
    assert says in error_of(http.post(TEXT, json=body), 400)["message"]


def test_harmless_fields_are_left_alone(http: httpx.Client) -> None:
    plain: dict[str, Any] = {"messages": HELLO, "max_tokens": 4, "seed": 1}
    more = {"metadata": {"a": "b"}, "store": False, "service_tier": "auto", "frequency_penalty": 0, "top_k": -1,
            "presence_penalty": 0.0, "user": "me", "stop": None, "modalities": ["text"]}  # fmt: skip
    answers = [http.post(CHAT, json=body).json() for body in (plain, plain | more)]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_brackets_in_texts_are_no_lists(http: httpx.Client) -> None:
    text = '[{"\\[' * 600
    assert http.post(TEXT, json={"prompt": text, "max_tokens": 1}).json()["usage"]["completion_tokens"] == 1


def test_without_max_tokens_as_much_is_answered_as_can_be_held(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "MAX_FIGURES", 100)
    body = {"messages": HELLO, "n": 2, "logprobs": True, "top_logprobs": 4, "ignore_eos": True}
    told = http.post(CHAT, json=body).json()["choices"]
    assert [(len(each["logprobs"]["content"]), each["finish_reason"]) for each in told] == [(10, "length")] * 2
    assert error_of(http.post(CHAT, json=body | {"max_tokens": 11}), 400)["param"] == "logprobs"


def test_a_stream_may_bring_more_than_is_held(http: httpx.Client) -> None:
    with http.stream("POST", TEXT, json=ENDLESS | {"n": 4, "logprobs": 20}) as response:
        assert response.status_code == 200
        told = json.loads(next(response.iter_lines()).removeprefix("data: "))["choices"][0]
        assert len(told["logprobs"]["top_logprobs"][0]) >= 20


def test_what_is_no_route_and_no_json(http: httpx.Client) -> None:
    error_of(http.get("/v1/nothing"), 404)
    error_of(http.get(CHAT), 405)
    error_of(http.post(TEXT, content=b'{"prompt": "x"}', headers={"content-type": "text/plain"}), 415)
    error_of(http.post(TEXT, json={"prompt": "x" * 30_000}), 413)

    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 1000

    error_of(http.post(TEXT, content=endless(), headers={"content-type": "application/json"}), 413)


def test_a_body_that_does_not_arrive(server: Served) -> None:
    with connected(server, POST + b"Content-Length: 100\r\n\r\n{") as raw:
        assert raw.recv(1000).startswith(b"HTTP/1.1 408")


def test_who_leaves_within_a_body_is_no_fault(server: Served, http: httpx.Client) -> None:
    def refused() -> int:
        counts = re.findall(r'^sluice_requests_refused_total\{status="400"\} (\d+)', http.get("/metrics").text, re.M)
        return int(counts[0]) if counts else 0

    before = refused()
    with connected(server, POST + b"Content-Length: 100\r\n\r\n{"):
        pass
    deadline = monotonic() + 30
    while refused() == before:
        assert monotonic() < deadline
        sleep(0.01)
    assert server.faults == []


def test_other_sites_pages_get_nothing(http: httpx.Client) -> None:
    assert error_of(http.get("/v1/models", headers={"host": "evil.example"}), 403)["code"] == "wrong_host"
    assert http.get("/v1/models", headers={"host": "[::1]:80"}).status_code == 200
    asked = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in http.options(CHAT, headers=asked).headers


def waiting(server: Served, running: int, queued: int) -> None:
    """Until so many run and wait."""
    deadline = monotonic() + 30
    while (state := server.worker.state()) and (len(state.running), len(state.queue)) != (running, queued):
        assert monotonic() < deadline, (state.running, state.queue)
        sleep(0.01)


def test_whoever_leaves_is_let_go(server: Served, http: httpx.Client) -> None:
    before = server.worker.state().totals
    with http.stream("POST", TEXT, json=ENDLESS) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        next(lines)
        waiting(server, 1, 0)
    waiting(server, 0, 0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + TEXT, json=ENDLESS | {"stream": False}, timeout=0.3)
    waiting(server, 0, 0)
    after = server.worker.state().totals
    assert after.failures["cancelled"] == before.failures.get("cancelled", 0) + 2


def test_a_full_queue_says_when_to_return(server: Served, http: httpx.Client) -> None:
    streams = [http.stream("POST", TEXT, json=ENDLESS) for _ in range(4)]
    entering = [threading.Thread(target=stream.__enter__) for stream in streams]
    for thread in entering:
        thread.start()
    waiting(server, 2, 2)
    response = http.post(TEXT, json={"prompt": "x"})
    assert error_of(response, 429)["code"] == "rate_limit_exceeded"
    assert int(response.headers["retry-after"]) >= 1
    error_of(http.post(TEXT, json={"prompt": ["x"] * 3}), 429)
    for state in (server.worker.state().running, server.worker.state().queue):
        for each in state:
            server.worker.cancel(each.ticket)
    for thread, stream in zip(entering, streams, strict=True):
        thread.join()
        stream.__exit__(None, None, None)
    waiting(server, 0, 0)


def test_a_client_that_does_not_read_is_cut_off_and_holds_up_nobody(server: Served, http: httpx.Client) -> None:
    before = server.worker.state().totals.failures.get("cancelled", 0)
    body = json.dumps(ENDLESS | {"logprobs": 20}).encode()
    with connected(server, POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body, room=2048):
        waiting(server, 1, 0)
        other = http.post(TEXT, json={"prompt": "x", "max_tokens": 3})
        assert other.status_code == 200
        waiting(server, 0, 0)
    assert server.worker.state().totals.failures["cancelled"] == before + 1


def test_a_bad_request_hurts_no_other(server: Served, http: httpx.Client) -> None:
    alone = http.post(TEXT, json={"prompt": [30, 40, 50], "max_tokens": 40, "temperature": 0}).json()
    together: list[Any] = []

    def ask() -> None:
        body = {"prompt": [30, 40, 50], "max_tokens": 40, "temperature": 0}
        together.append(httpx.post(server.url + TEXT, json=body, timeout=60).json())

    thread = threading.Thread(target=ask)
    thread.start()
    for body in HOSTILE.values():
        http.post(CHAT, content=body, headers={"content-type": "application/json"})
    thread.join()
    assert together[0]["choices"] == alone["choices"]


def test_a_deadline_ends_a_request(tiny: Path) -> None:
    with (
        Engine.open(tiny, expert_slots=12, threads=1, ctx=4000, streams=1) as engine,
        served(engine, deadline_s=0.3) as late,
    ):
        response = httpx.post(late.url + TEXT, json=ENDLESS | {"stream": False}, timeout=60)
        assert error_of(response, 504)["code"] == "deadline_exceeded"
        assert response.headers["x-should-retry"] == "false"
        with httpx.stream("POST", late.url + TEXT, json=ENDLESS, timeout=60) as streamed:
            *_, last, done = [line for line in streamed.iter_lines() if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        assert done == "data: [DONE]"


def test_the_metrics_add_up(server: Served, http: httpx.Client) -> None:
    http.post(TEXT, json={"prompt": "x", "max_tokens": 3})
    lines = http.get("/metrics").text.splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    ended = sum(value for name, value in values.items() if name.startswith("sluice_jobs_ended_total"))
    assert values["sluice_jobs_submitted_total"] == ended + values["sluice_running"] + values["sluice_queued"]
    parts = ("hits", "late_hits", "misses")
    for phase in ("prefill", "decode"):
        counted = sum(values[f'sluice_{part}_total{{phase="{phase}"}}'] for part in parts)
        assert values[f'sluice_demands_total{{phase="{phase}"}}'] == counted
    assert values['sluice_ttft_seconds_bucket{le="+Inf"}'] == values["sluice_ttft_seconds_count"] > 0
    named = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(named) == len(set(named))

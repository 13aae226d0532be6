"""Connections that say nothing, don't read, or are no HTTP: each is ended, and none keeps others out."""

from __future__ import annotations

import json
import logging
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from time import monotonic

import httpx
import pytest
from api_server import POST, Served, connected, served
from tiny import write_tiny

from sluice.engine import Engine
from sluice.server.limits import Limits

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = write_tiny(tmp_path_factory.mktemp("connections") / "tiny.gguf").path
    with Engine.open(path, expert_slots=12, threads=1, ctx=256, streams=1) as engine:
        yield engine


@pytest.fixture
def hasty(engine: Engine) -> Iterator[Served]:
    with served(engine, limits=Limits(head_s=0.5, send_s=0.5)) as running:
        yield running
        assert running.faults == []


@pytest.fixture
def small(engine: Engine) -> Iterator[Served]:
    with served(engine, limits=Limits(connections=8)) as running:
        yield running
        assert running.faults == []


def everything(raw: socket.socket) -> bytes:
    """All that comes until the other side ends the connection."""
    out = bytearray()
    try:
        while piece := raw.recv(1 << 16):
            out += piece
    except ConnectionResetError:
        pass
    return bytes(out)


SILENT = {"nothing": b"", "half": GET[:-2], "half of a second": GET + GET[:-2], "a blank line": b"\r\n"}


@pytest.mark.parametrize("said", SILENT.values(), ids=SILENT.keys())
def test_who_asks_nothing_is_left(hasty: Served, said: bytes) -> None:
    with connected(hasty, said) as raw:
        assert everything(raw).count(b"200 OK") == said.count(b"\r\n\r\n")


def test_a_body_after_its_answer_does_not_keep_a_connection(hasty: Served) -> None:
    with connected(hasty, b"POST /none HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n") as raw:
        assert everything(raw).startswith(b"HTTP/1.1 404")


def test_who_does_not_read_is_left(engine: Engine) -> None:
    many = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100
    with served(engine, limits=Limits(connections=1, send_s=0.5)) as server, connected(server, many, room=2048):
        deadline = monotonic() + 60
        while httpx.get(f"{server.url}/health", timeout=60).status_code != 200:
            assert monotonic() < deadline


def test_silent_connections_make_room(small: Served) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(small)) for _ in range(8)]
        assert httpx.get(f"{small.url}/health", timeout=60).status_code == 200
        left = [raw for raw in silent if select.select([raw], [], [], 0)[0]]
        assert [raw.recv(1) for raw in left] == [b""]  # one of them had to go


def test_where_all_have_requests_the_next_is_told(small: Served) -> None:
    with ExitStack() as stack:
        for _ in range(8):
            raw = stack.enter_context(connected(small, POST + b"Content-Length: 9\r\nExpect: 100-continue\r\n\r\n"))
            assert raw.recv(1000).startswith(b"HTTP/1.1 100")  # its body is waited for
        with connected(small) as raw:
            head, _, body = everything(raw).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ") and b"Retry-After: " in head
        assert json.loads(body)["error"]["code"] == "too_many_connections"
    deadline = monotonic() + 60
    while httpx.get(f"{small.url}/health", timeout=60).status_code != 200:
        assert monotonic() < deadline


MALFORMED = {
    "no HTTP": b"\x00\x01 is no request\r\n\r\n",
    "a long head": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000,
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 7\r\n\r\n{}",
    "a chunk that is none": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "one where nobody reads": POST.replace(b"/v1/completions", b"/none") + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
}


@pytest.mark.parametrize("said", MALFORMED.values(), ids=MALFORMED.keys())
def test_what_is_no_http(small: Served, said: bytes) -> None:
    with connected(small, said) as raw:
        head, _, body = everything(raw).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "bad_http"


def test_what_is_malformed_behind_its_answer_is_no_fault(small: Served, caplog: pytest.LogCaptureFixture) -> None:
    head = POST.replace(b"/v1/completions", b"/none") + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
    with caplog.at_level(logging.ERROR), connected(small, head) as raw:
        assert raw.recv(1 << 16).startswith(b"HTTP/1.1 404")
        raw.sendall(b"zz\r\n\r\n")
        everything(raw)
    assert caplog.records == []

"""Serves a tiny model over real HTTP on a free loopback port, in a thread; knows no expected values."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from sluice.engine import Engine

pytest.importorskip("fastapi", reason="needs the extra [serve]")

from sluice.server.app import Serving, build_app
from sluice.server.auth import Keys
from sluice.server.limits import Limits
from sluice.server.listening import bind, listen, serve, url_of
from sluice.server.metrics import Metrics
from sluice.server.model import ServedModel
from sluice.server.worker import Worker

POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@dataclass
class Served:
    """A running server: where it is, and what is behind it."""

    url: str
    worker: Worker
    app: Any
    faults: list[str]


@contextmanager
def served(
    engine: Engine, *, keys: tuple[str, ...] = (), limits: Limits | None = None, deadline_s: float | None = None,
    max_queue: int = 64,
) -> Iterator[Served]:  # fmt: skip
    """Serve `engine`, which the server has for itself, until the block ends. The system buffers little of answers."""
    faults: list[str] = []
    bounds = limits or Limits()
    end = threading.Event()
    with Worker(engine, max_queue=max_queue) as worker, bind("127.0.0.1", 0) as bound:
        model = ServedModel(engine, "tiny", created=1)
        app = build_app(
            Serving(
                worker, model, Keys(keys), host="127.0.0.1", deadline_s=deadline_s, limits=bounds,
                metrics=Metrics(faults.append),
            )
        )  # fmt: skip
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        listen(bound)
        running = Served(url_of(bound, "127.0.0.1"), worker, app, faults)

        def run() -> None:
            asyncio.run(serve(app, bound, worker, end.is_set, drain_s=0, on_drain=lambda n: None, limits=bounds))

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield running
        finally:
            end.set()
            thread.join()


@contextmanager
def connected(server: Served, said: bytes = b"", *, room: int | None = None) -> Iterator[socket.socket]:
    """A connection on which `said` was said; `room`: bytes that the system takes in for it."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as raw:
        if room is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        raw.settimeout(60)
        raw.connect((host, int(port)))
        raw.sendall(said)
        yield raw

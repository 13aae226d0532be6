"""Listens on a socket and serves an application until told to end; then lets what runs finish. Knows no routes."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from sluice.errors import InputError
from sluice.server.connections import protocol, watch
from sluice.server.jobs import Service, Totals
from sluice.server.limits import Limits

LAST_WORDS_S = 3  # for answers that were cut off to reach their clients
_TICK_S = 0.1
_BACKLOG = 1024


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to `host`, the first of its addresses, and `port` (0: a free one). Raises InputError.

    It doesn't listen yet, so that clients are turned away while the model is loaded and don't wait.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError, OverflowError) as error:
        raise InputError(f"--host {host[:100]} --port {port} name no address ({error}): give others") from None
    family, kind, protocol, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    made = socket.socket(family, kind, protocol)
    try:
        if sys.platform != "win32":  # there it would let two servers share a port
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with _named(host, port):
            made.bind(address)
    except BaseException:
        made.close()
        raise
    return made


@contextmanager
def _named(host: str, port: int) -> Iterator[None]:
    """Within, what the system says against this address is the input's fault."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"port {port} of {host} is in use: give another --port, or 0 for a free one") from None
        raise InputError(f"can't listen on port {port} of {host} ({error.strerror}): give others") from None


def listen(bound: socket.socket) -> None:
    """Begin to take connections. Raises InputError if another process was faster."""
    host, port = bound.getsockname()[:2]
    with _named(host, port):
        bound.listen(_BACKLOG)


def url_of(bound: socket.socket, host: str) -> str:
    """Where clients find what listens on `bound`."""
    port = bound.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host or 'localhost'}:{port}"


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone: the command line has handlers of its own."""
        yield


@dataclass(frozen=True)
class Ending:
    """How serving ended: what the service had counted, and how many jobs were cut off at the end."""

    totals: Totals
    cut_off: int


async def serve(
    app: FastAPI, bound: socket.socket, service: Service, asked_to_end: Callable[[], bool], *, drain_s: float,
    on_drain: Callable[[int], object], limits: Limits,
) -> Ending:  # fmt: skip
    """Serve until `asked_to_end`, a few times a second, says so. Then nothing new is taken, what runs may finish within
    `drain_s` or until it says so again, and what doesn't is failed; `on_drain` is told how many jobs there were."""
    config = uvicorn.Config(
        app, http=protocol(limits), log_level="critical", access_log=False, ws="none", server_header=False,
        timeout_graceful_shutdown=LAST_WORDS_S, backlog=_BACKLOG,
    )  # fmt: skip
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    watching = asyncio.create_task(watch(server.server_state.connections, limits))
    while not asked_to_end() and not serving.done():
        await asyncio.sleep(_TICK_S)
    app.state.draining = True
    before = await asyncio.to_thread(service.state)
    on_drain(len(before.running) + len(before.queue))
    closing = asyncio.create_task(asyncio.to_thread(service.close, drain_s))
    while not (await asyncio.wait((closing,), timeout=_TICK_S))[0]:
        if asked_to_end():
            await asyncio.to_thread(service.close, 0)
    await closing
    after = await asyncio.to_thread(service.state)
    server.should_exit = True
    await serving
    watching.cancel()
    cut_off = sum(after.totals.failures.values()) - sum(before.totals.failures.values())
    return Ending(after.totals, cut_off)

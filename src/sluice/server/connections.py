"""Connections within bounds that uvicorn lacks: of number, of silence, of clients that don't read. Knows no routes.

uvicorn waits for ever for a request's head and for a client to take what was sent, and counts connections only when a
request has come: clients that say nothing would keep all others out. Here a connection without a request under way is
closed after a time, and before that when another needs its place.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from sluice.server.errors import ApiError
from sluice.server.limits import Limits

_MALFORMED = ApiError(400, "this is not HTTP/1.1 as this server takes it, or its head is too long", code="bad_http")
_FULL = ApiError(
    503, "too many connections are open: try again", type="server_error", code="too_many_connections",
    headers={"Retry-After": "1"},
)  # fmt: skip


class Connection(H11Protocol):
    """One of a client's connections. `limits` are the server's; `look` has to be called now and then."""

    limits = Limits()
    _quiet_s = 0.0  # for how long no request has been under way, or the client has not read what was sent
    _unsent = 0  # bytes that waited for the client
    _answered: Any = None  # the request that came last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._make_room()

    def _make_room(self) -> None:
        """Close the connection that has been without a request for longest; if all have one, turn this one away."""
        others = [one for one in self.connections if isinstance(one, Connection) and one is not self and one._idle]
        if others:
            max(others, key=lambda one: one._quiet_s)._abort()
        else:
            self.transport.write(_raw(_FULL))
            self.transport.close()

    @property
    def _idle(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _abort(self) -> None:
        """Close at once; what was not sent is lost."""
        self.connections.discard(self)
        self.transport.abort()

    def look(self, passed_s: float) -> None:
        """Close the connection if it has been silent for too long, or its client has not read for too long.

        `passed_s`: since this was last called.
        """
        unsent = self.transport.get_write_buffer_size()
        if unsent:
            stuck = 0 < self._unsent <= unsent
            limit_s = self.limits.send_s + 1  # an answer that isn't read is cut off before, and says so
        else:
            stuck = self._idle and not self._unsent and self.cycle is self._answered
            limit_s = self.limits.head_s
        self._unsent, self._answered = unsent, self.cycle
        self._quiet_s = self._quiet_s + passed_s if stuck else 0.0
        if self._quiet_s > limit_s:
            self._abort()

    def send_400_response(self, msg: str) -> None:
        """Tell of a malformed request, if its answer has not begun, and have its application, if it runs, end."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_raw(_MALFORMED))
        if not self._idle:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


def protocol(limits: Limits) -> type[Connection]:
    """The connections of a server with these limits."""
    return type("BoundedConnection", (Connection,), {"limits": limits})


async def watch(connections: Iterable[Any], limits: Limits) -> None:
    """Look at all of `connections`, the server's own set of them, now and then, for ever."""
    period_s = min(1.0, limits.head_s / 4, limits.send_s / 4)
    clock = asyncio.get_running_loop().time
    before = clock()
    while True:
        await asyncio.sleep(period_s)
        now = clock()
        passed_s = min(now - before, 2 * period_s)  # where this process itself stood still, no client is to blame
        before = now
        for one in list(connections):
            if isinstance(one, Connection):
                one.look(passed_s)


def _raw(error: ApiError) -> bytes:
    """The whole of a response that ends its connection."""
    body = json.dumps(error.body).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in error.headers.items())
    status = f"{error.status} {HTTPStatus(error.status).phrase}"
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}{more}Connection: close\r\n\r\n".encode() + body

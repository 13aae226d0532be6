"""Sends a run's answer, whole or as a stream of server-sent events. Knows HTTP, and nothing of what answers look like.

A client that goes away ends its run at the worker's next step. A stream's headers wait a little for the first token, so
that what fails before it is told with its own status; a stream that is silent for long gets comments, which keep
proxies from closing it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from fastapi.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from sluice.server.errors import as_api_error
from sluice.server.jobs import Event, Failed
from sluice.server.limits import Limits
from sluice.server.running import Run, SlowClient

Chunk = dict[str, Any]
_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect it
]
_DONE, _COMMENT = b"data: [DONE]\n\n", b": still at work\n\n"


class Shape(Protocol):
    """What becomes of the events of one request's jobs."""

    def take(self, index: int, event: Event) -> Iterable[Chunk]:
        """Note an event of job `index`; the chunks it makes in a stream. Failed never comes here."""
        ...

    def closing(self) -> Iterable[Chunk]:
        """The last chunks of a stream."""
        ...

    def whole(self) -> Chunk:
        """The answer in one piece, once all events have come."""
        ...


class Watch(Protocol):
    """Who counts what is served."""

    def saw(self, event: Event) -> None:
        """An event is about to be told to the client."""
        ...

    def ended(self, error: BaseException | None) -> None:
        """An answer has ended, well or with `error`; called once for each."""
        ...

    def fault(self, error: BaseException) -> None:
        """An error that is the server's own fault."""
        ...


class Answer(Response):
    """The response that a run makes; `headers` go with it, and `watch` is told of it."""

    def __init__(
        self, run: Run, shape: Shape, watch: Watch, *, stream: bool, limits: Limits, headers: Mapping[str, str]
    ) -> None:
        self.run = run
        self.shape = shape
        self.watch = watch
        self.stream = stream
        self.limits = limits
        self.extra = dict(headers)
        self.status_code = 200
        self.background = None
        self._started = self._over = False
        self._stuck = False  # the client doesn't take what is sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            self._started = True
            try:
                async with asyncio.timeout(self.limits.send_s):
                    await send(message)
            except TimeoutError:
                self._stuck = True
                raise SlowClient(f"the client took nothing for {self.limits.send_s:g} s: it reads too slowly") from None

        answering = asyncio.create_task(self._answer(scope, sending))
        leaving = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._end(ClientGone())  # unless it has ended before
            for task in (answering, leaving):
                task.cancel()
            await asyncio.wait((answering, leaving))
            if not answering.cancelled() and (error := answering.exception()) is not None:
                raise error

    def _end(self, error: BaseException | None) -> None:
        if not self._over:
            self._over = True
            self.run.cancel()
            self.watch.ended(error)

    async def _answer(self, scope: Scope, send: Send) -> None:
        try:
            await (self._stream(send) if self.stream else self._whole(scope, send))
        except Exception as error:
            self._end(error)
            with suppress(SlowClient):
                await self._fail(error, scope, send)
        else:
            self._end(None)

    async def _whole(self, scope: Scope, send: Send) -> None:
        while not self.run.ended:
            for index, event in await self.run.events():
                list(self._take(index, event))
        await JSONResponse(self.shape.whole(), headers=self.extra)(scope, _never, send)

    async def _stream(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        came = await self.run.events(self.limits.headers_s)
        for _, event in came:
            _check(event)
        headers = [*_STREAM, *((name.lower().encode(), text.encode()) for name, text in self.extra.items())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        sent_s = clock()
        while True:
            # what came together goes out together
            out = b"".join(_sse(chunk) for index, event in came for chunk in self._take(index, event))
            if not out and clock() - sent_s >= self.limits.comment_s:
                out = _COMMENT
            if out:
                await send({"type": "http.response.body", "body": out, "more_body": True})
                sent_s = clock()
            if self.run.ended:
                break
            came = await self.run.events(self.limits.comment_s)
        out = b"".join(map(_sse, self.shape.closing())) + _DONE
        await send({"type": "http.response.body", "body": out, "more_body": False})

    def _take(self, index: int, event: Event) -> Iterable[Chunk]:
        _check(event)
        self.watch.saw(event)
        return self.shape.take(index, event)

    async def _fail(self, error: Exception, scope: Scope, send: Send) -> None:
        """Tell the client: by status if none was sent, else as the stream's last event."""
        told = as_api_error(error)
        if told.status == 500:
            self.watch.fault(error)
        if not self._started:
            await told.response(scope, _never, send)
        elif self.stream and not self._stuck:
            await send({"type": "http.response.body", "body": _sse(told.body) + _DONE, "more_body": False})


class ClientGone(Exception):
    """The client closed its connection before its answer was complete."""


def _check(event: Event) -> None:
    """Raise the error that `event` tells of, if it does."""
    if isinstance(event, Failed):
        raise event.error


def _sse(chunk: Chunk) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _gone(receive: Receive) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _never() -> Message:
    raise RuntimeError("nothing is received while an answer is sent")

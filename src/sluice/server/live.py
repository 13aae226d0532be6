"""Serves the page at `/` and streams to it what the machine does; knows neither models nor how requests are answered.

`GET /live` is an event stream: `model` once, what doesn't change; then `state` up to five times a second, running
totals from which the page makes rates; and `experts` when the map has changed, one byte an expert. The service is asked
only while somebody watches, once for all who do. A watcher that reads slowly misses states and holds up nobody.
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from fastapi import APIRouter
from fastapi.responses import Response, StreamingResponse
from starlette.types import Message, Send

from sluice import __version__
from sluice.engine.report import mode_text
from sluice.server.errors import ApiError
from sluice.server.jobs import ExpertsState, RequestState, Service, ServiceState
from sluice.server.model import ServedModel

PERIOD_S = 0.2
COMMENT_S = 5.0  # a stream that has nothing to tell (a long step) says so as often, and the page knows it lives
SEND_S = 30.0  # for a client to take what is sent
MAX_WATCHERS = 16
MAX_LISTED = 32  # requests that run, and as many that wait, are listed; all are counted
RESIDENT = 128  # of a map's byte; the rest is heat, on a logarithmic scale
HEAT_TOP = 4096.0

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class Frame:
    """One moment, as it goes to watchers: two encoded events. `experts` is the same object while it has not changed."""

    state: bytes
    experts: bytes
    over: bool  # nothing will follow: the service is shutting down and has nothing left to do


class Live:
    """Asks `service` what it does while anybody watches. Use it in one event loop."""

    def __init__(
        self, service: Service, about: Mapping[str, Any], *, period_s: float = PERIOD_S, comment_s: float = COMMENT_S
    ) -> None:
        self._service = service
        self._period_s = period_s
        self._comment_s = comment_s
        self._about = event("model", json.dumps(dict(about)))
        self._watchers = 0
        self._frame: Frame | None = None
        self._news = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None

    def watch(self) -> AsyncIterator[bytes]:
        """The stream for one more watcher, who is counted when iteration begins. Raises ApiError when too many are."""
        if self._watchers >= MAX_WATCHERS:
            raise ApiError(
                503, f"{MAX_WATCHERS} pages watch this server already: close one", type="server_error",
                code="too_many_watchers", headers={"Retry-After": "5"},
            )  # fmt: skip
        return self._watch()

    async def _watch(self) -> AsyncIterator[bytes]:
        if self._watchers >= MAX_WATCHERS:  # others came between
            return
        self._watchers += 1
        try:
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask())
            yield self._about
            seen: Frame | None = None
            experts: bytes | None = None
            while seen is None or not seen.over:
                frame, news = self._frame, self._news
                if frame is None or frame is seen:
                    if self._asking is None:  # it ended: the service could not be asked
                        return
                    try:
                        async with asyncio.timeout(self._comment_s):
                            await news.wait()
                    except TimeoutError:
                        yield b": nothing new\n\n"
                    continue
                seen = frame
                if frame.experts is not experts:
                    experts = frame.experts
                    yield frame.experts
                yield frame.state
        finally:
            self._watchers -= 1

    async def _ask(self) -> None:
        """Make frames until nobody watches."""
        loop = asyncio.get_running_loop()
        last: ServiceState | None = None
        try:
            while self._watchers:
                began = loop.time()
                state = await asyncio.to_thread(self._service.state)
                if state is last:  # a step goes on
                    await asyncio.sleep(self._period_s)
                    continue
                last = state
                experts = event("experts", cells(state.experts))
                if self._frame is not None and self._frame.experts == experts:
                    experts = self._frame.experts
                listed = json.dumps(described(state), separators=(",", ":"))
                over = state.draining and not state.running and not state.queue
                self._tell(Frame(event("state", listed), experts, over))
                if over:
                    return
                await asyncio.sleep(max(self._period_s - (loop.time() - began), self._period_s / 4))
        finally:
            self._asking = None
            # the next to come must not be shown what was long ago
            self._tell(self._frame if self._frame is not None and self._frame.over else None)

    def _tell(self, frame: Frame | None) -> None:
        self._frame = frame
        self._news.set()
        self._news = asyncio.Event()


def event(name: str, data: str) -> bytes:
    """One event of a stream; `data` has no line breaks."""
    return f"event: {name}\ndata: {data}\n\n".encode()


def cells(experts: ExpertsState | None) -> str:
    """The map, one byte an expert, layer by layer, in base64: RESIDENT if in the pool, plus 0 to 127 of heat.

    Heat h is stored as 127 × ln(1 + h) ÷ ln(1 + HEAT_TOP), rounded, but never to 0 where there is any to see.
    """
    if experts is None:
        return ""
    heat = np.clip(np.nan_to_num(experts.heat), 0, HEAT_TOP)
    scaled = np.rint(127 * np.log1p(heat) / np.log1p(HEAT_TOP)).astype(np.uint8)
    return b64encode((scaled | np.where(experts.resident != 0, RESIDENT, 0).astype(np.uint8)).tobytes()).decode()


PHASE = ("tokens", "wall_s", "compute_s", "wait_s", "host_s", "hits", "late_hits", "misses", "bytes_read")


def described(state: ServiceState) -> dict[str, Any]:
    """What the page shows of a state, but for the map. Who asked is not told."""
    return {
        "at_s": state.at_s,
        "draining": state.draining,
        "streams": state.streams,
        "max_queue": state.max_queue,
        "n_running": len(state.running),
        "n_queued": len(state.queue),
        "longest_wait_s": max((each.age_s for each in state.queue), default=0.0),
        "running": _listed(state.running),
        "queue": _listed(state.queue),
        "generated_tokens": state.totals.generated_tokens,
        "ledger": {
            phase: {name: state.ledger[phase][name] for name in PHASE} for phase in ("prefill", "decode")
        },
        "slots": state.slots,
        "kept_tokens": state.kept_tokens,
        "slots_resident": state.slots_resident,
        "budget_bytes": state.budget_bytes,
        "rss_bytes": state.rss_bytes,
    }  # fmt: skip


def _listed(requests: Sequence[RequestState]) -> list[dict[str, Any]]:
    names = ("ticket", "phase", "prompt_tokens", "fed", "generated", "max_tokens", "age_s")
    return [{name: getattr(each, name) for name in names} for each in requests[:MAX_LISTED]]


def about(model: ServedModel) -> dict[str, Any]:
    """What doesn't change while a model is served."""
    spec = model.engine.spec
    return {
        "name": model.id,
        "version": __version__,
        "mode": mode_text(model.engine.mode),
        "layers": list(spec.moe_layers),
        "n_expert": spec.n_expert,
        "top_k": spec.top_k,
        "n_ctx": model.n_ctx,
        "slot_bytes": model.engine.plan.slot_bytes,
    }


class Stream(StreamingResponse):
    """An event stream that gives up a client which takes nothing for SEND_S seconds."""

    media_type = "text/event-stream"

    async def stream_response(self, send: Send) -> None:
        async def sending(message: Message) -> None:
            async with asyncio.timeout(SEND_S):
                await send(message)

        await super().stream_response(sending)


def page_files() -> dict[str, tuple[str, bytes]]:
    """The page's files by the path each is served at: (content type, content)."""
    files = sorted((resources.files("sluice.server") / "page").iterdir(), key=lambda file: file.name)
    return {
        "/" if file.name == "index.html" else f"/page/{file.name}": (kind, file.read_bytes())
        for file in files
        if (kind := TYPES.get(file.name[file.name.rfind(".") :])) is not None
    }


def open_paths() -> frozenset[str]:
    """Paths that anyone may get: the page holds nothing secret, and has to be there before it can ask for a key."""
    return frozenset(page_files())


def router(service: Service, model: ServedModel) -> APIRouter:
    """The page at `/`, its files under `/page/`, and `/live`, which nobody without a key may see."""
    routes = APIRouter(include_in_schema=False)
    live = Live(service, about(model))

    @routes.get("/live")
    async def watch() -> Response:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"}
        return Stream(live.watch(), headers=headers)

    def serve(path: str, kind: str, content: bytes) -> None:
        headers = HEADERS | {"Content-Type": kind}

        @routes.api_route(path, methods=["GET", "HEAD"])
        async def file() -> Response:
            return Response(content, headers=headers)

    for path, (kind, content) in page_files().items():
        serve(path, kind, content)
    return routes

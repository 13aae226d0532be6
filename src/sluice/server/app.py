"""The HTTP application over a service: its routes, and what stands before and behind them. Opens and closes nothing."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from sluice import __version__
from sluice.errors import SluiceError
from sluice.server import chat, completions, live, openapi
from sluice.server.answers import Answer, Shape
from sluice.server.asking import Asker
from sluice.server.auth import Guard, Keys
from sluice.server.bodies import Bodies, parse
from sluice.server.errors import ApiError, as_api_error
from sluice.server.jobs import Draining, Job, Service
from sluice.server.limits import Limits
from sluice.server.metrics import CONTENT_TYPE, Metrics
from sluice.server.model import ServedModel
from sluice.server.running import Run
from sluice.server.schemas import ChatRequest, CompletionRequest, GenerationRequest

PREPARING_THREADS = 4  # so that one conversation that takes long to prepare doesn't hold up the next
R = TypeVar("R", bound=GenerationRequest)
Prepare = Callable[[R, ServedModel, Asker, Limits], tuple[list[Job], Shape]]


@dataclass(frozen=True)
class Serving:
    """What the routes work with. `deadline_s` is what each request gets; `host` the name that was bound."""

    service: Service
    model: ServedModel
    keys: Keys
    host: str = "localhost"
    deadline_s: float | None = None
    limits: Limits = field(default_factory=Limits)
    metrics: Metrics = field(default_factory=Metrics)


def build_app(serving: Serving) -> FastAPI:
    """The application; whoever serves it sets `app.state.draining` when nothing new is to be taken."""
    threads = ThreadPoolExecutor(PREPARING_THREADS, "prepare")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        threads.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="Sluice", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.draining = False
    service, model, limits, metrics = serving.service, serving.model, serving.limits, serving.metrics
    bodies = Bodies(limits)

    async def answer(request: Request, kind: type[R], prepare: Prepare[R]) -> Response:
        """Read, check and prepare a request off the event loop, submit its jobs, and answer with what comes of them."""
        if app.state.draining:
            raise Draining
        asker = Asker(request.state.asker, serving.deadline_s)

        def prepared(raw: bytearray) -> tuple[R, list[Job], Shape]:
            asked = kind.model_validate(parse(raw, limits))
            model.check(asked.model)
            return asked, *prepare(asked, model, asker, limits)

        async with bodies.read(request) as raw:
            asked, jobs, shape = await asyncio.get_running_loop().run_in_executor(threads, prepared, raw)
        run = Run(service, jobs, max_pending=limits.pending_events)
        headers = {"x-request-id": f"req-{secrets.token_hex(12)}"}
        return Answer(run, shape, metrics, stream=asked.stream, limits=limits, headers=headers)

    @app.post("/v1/chat/completions", **openapi.route(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await answer(request, ChatRequest, chat.prepare)

    @app.post("/v1/completions", **openapi.route(CompletionRequest))
    async def text_completions(request: Request) -> Response:
        """Continue prompts."""
        return await answer(request, CompletionRequest, completions.prepare)

    def described() -> dict[str, Any]:
        return {
            "id": model.id, "object": "model", "created": model.created, "owned_by": "sluice",
            "max_model_len": model.n_ctx, "mode": dict(model.mode),
        }  # fmt: skip

    @app.get("/v1/models", **openapi.MODELS)
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return {"object": "list", "data": [described()]}

    @app.get("/v1/models/{name:path}", **openapi.MODEL)
    async def one_model(name: str) -> dict[str, Any]:
        """The model that is served, by its id."""
        model.check(name)
        return described()

    @app.get("/health", **openapi.HEALTH)
    async def health() -> Response:
        """Whether new requests are taken."""
        status = "failed" if service.fault else "draining" if app.state.draining else "ok"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Figures in Prometheus' text format."""
        state = await asyncio.get_running_loop().run_in_executor(None, service.state)
        return Response(metrics.text(state), media_type=CONTENT_TYPE)

    app.include_router(live.router(service, model))

    async def tell(request: Request, error: Exception) -> Response:
        told = as_api_error(error)
        metrics.refused(told.status)
        if told.status == 500:
            metrics.fault(error)
        return told.response

    for kind in (ApiError, SluiceError, ValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, tell)
    app.openapi = lambda: openapi.schema(app)  # type: ignore[method-assign]
    app.add_middleware(Guard, keys=serving.keys, host=serving.host, open=live.open_paths() | {"/health"})
    return app

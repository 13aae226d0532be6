"""The description of the routes that programs read; bodies are checked by hand, so it is put together by hand too."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

from sluice.server.schemas import ChatRequest, CompletionRequest

_REF = "#/components/schemas/{model}"


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(_Closed):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(_Closed):
    """What every status of 400 and above comes with."""

    error: ErrorDetail


class PromptDetails(_Closed):
    cached_tokens: int


class CompletionDetails(_Closed):
    reasoning_tokens: int


class Usage(_Closed):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class How(_Closed):
    """How one choice went; times in seconds."""

    index: int
    seed: int
    reused_tokens: int
    queue_s: float
    ttft_s: float | None
    tpot_s: float | None
    total_s: float


class Report(_Closed):
    """What OpenAI's format has no place for."""

    mode: dict[str, Any]
    choices: list[How]


class _Reply(_Closed):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    sluice: Report


class TopLogprob(_Closed):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Closed):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(_Closed):
    name: str
    arguments: str


class CalledTool(_Closed):
    id: str
    type: str
    function: CalledFunction


class ChatMessage(_Closed):
    role: str
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None


class ChatChoice(_Closed):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(_Reply):
    object: str
    choices: list[ChatChoice]


class TextLogprobs(_Closed):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(_Closed):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str


class Completion(_Reply):
    object: str
    choices: list[TextChoice]


class Model(_Closed):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int
    mode: dict[str, Any]


class Models(_Closed):
    object: str
    data: list[Model]


class Health(_Closed):
    status: str


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorBody} for status in statuses}


def route(asked: type[BaseModel]) -> dict[str, Any]:
    """The description of a route that generates."""
    whole = ChatCompletion if asked is ChatRequest else Completion
    stream = {"text/event-stream": {"schema": {"type": "string"}}}
    body = {"content": {"application/json": {"schema": {"$ref": _REF.format(model=asked.__name__)}}}, "required": True}
    answers = {200: {"model": whole, "content": stream}, **_errors(400, 401, 403, 404, 408, 413, 415, 429, 503, 504)}
    return {"responses": answers, "openapi_extra": {"requestBody": body}}


MODELS: dict[str, Any] = {"response_model": Models, "responses": _errors(401, 403)}
MODEL: dict[str, Any] = {"response_model": Model, "responses": _errors(401, 403, 404)}
HEALTH: dict[str, Any] = {"response_model": Health, "responses": {503: {"model": Health}, **_errors(403)}}


def schema(app: FastAPI) -> dict[str, Any]:
    """The whole description, made once."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, asked = models_json_schema(
            [(kind, "validation") for kind in (ChatRequest, CompletionRequest)], ref_template=_REF
        )
        schemas = made["components"]["schemas"]
        schemas |= asked["$defs"]
        for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own checks, which nothing here can fail
            schemas.pop(name, None)
        for operations in made["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        app.openapi_schema = made
    return app.openapi_schema

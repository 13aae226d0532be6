"""Errors as OpenAI's API tells them: a status, and {"error": {"message", "type", "param", "code"}}. Knows no routes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from sluice.errors import ContextError, EngineClosed, InputError, SluiceError, TemplateError
from sluice.server.jobs import Busy, Cancelled, DeadlineExceeded, Draining
from sluice.server.running import SlowClient

INVALID = "invalid_request_error"
NO_RETRY = {"x-should-retry": "false"}  # the openai client obeys it: the same request would fail the same way
DRAIN_RETRY_S = 5
_OWN = ("text_alone", "not_served")  # faults that the schemas name in words of their own
_BRANCHES = ("str", "int", "bool", "dict", "list")  # how a union's branches are called among a fault's fields


class ApiError(Exception):
    """A request that is answered with an error. `param` names the field at fault, `code` what is wrong with it."""

    def __init__(
        self, status: int, message: str, *, type: str = INVALID, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def response(self) -> Response:
        return JSONResponse(self.body, self.status, self.headers)


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A field that can't be served as given."""
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of `error`; of faults that are not Sluice's own words, nothing but that there was one."""
    match error:
        case ApiError():
            return error
        case Busy():
            wait = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
            return ApiError(429, str(error), type="rate_limit_error", code="rate_limit_exceeded", headers=wait)
        case Draining():
            wait = {"Retry-After": str(DRAIN_RETRY_S)}
            return ApiError(503, str(error), type="server_error", code="draining", headers=wait)
        case DeadlineExceeded():
            return ApiError(504, str(error), type="server_error", code="deadline_exceeded", headers=NO_RETRY)
        case Cancelled() | EngineClosed():
            return ApiError(503, str(error), type="server_error", code="cancelled")
        case SlowClient():
            return ApiError(408, str(error), code="slow_client", headers=NO_RETRY)
        case ContextError():
            return bad(str(error), "messages", "context_length_exceeded")
        case TemplateError():
            return bad(str(error), "messages", "chat_template")
        case InputError():
            return bad(str(error))
        case SluiceError():
            return ApiError(500, str(error), type="server_error", code=type(error).__name__)
        case ValidationError():
            return _invalid(error)
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case _:
            text = "internal error: the server's log names it"
            return ApiError(500, text, type="server_error", code="internal_error")


def _invalid(error: ValidationError) -> ApiError:
    """The first of the faults, its field written like messages[0].content. What was sent is not repeated."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    # of a union's branches, the one that went furthest is what the client meant
    first = max(faults, key=lambda each: (each["type"] in _OWN, len(each["loc"]), not each["type"].endswith("_type")))
    param = ""
    for part in first["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif part.isidentifier() and part not in _BRANCHES:
            param += f".{part}" if param else part
    param, said = param[:100], first["msg"]
    if first["type"] == "extra_forbidden":
        name = param or " ".join(str(first["loc"][-1]).split())[:100]
        said, code = f"this server knows no field {name!r}: leave it out", "unknown_parameter"
    elif first["type"] == "missing":
        said, code = f"the field {param!r} is missing", "missing_required_parameter"
    else:
        said, code = f"{param}: {said[:1].lower()}{said[1:]}" if param else said, "invalid_value"
    return bad(said[:500], param or None, code)

"""Takes in request bodies: strict JSON objects within bounds of size, depth and time. Knows none of their fields."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from sluice.server.errors import ApiError, bad
from sluice.server.limits import Limits

# All up to where a list or an object begins, in JSON. It always matches, if need be to the end, and keeps no way back:
# nothing that is sent makes it slow or large.
_BEFORE = re.compile(rb'(?:[^"\[{]++|"(?:[^"\\]++|\\.)*+(?:"|\\?\Z))*+', re.DOTALL)


class Bodies:
    """Reads bodies; all that are held at a time stay within one bound."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._room = limits.body_bytes * limits.BODIES

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytearray]:
        """A request's body, which counts as held while the block runs. Raises ApiError."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a browser sends no other site's page's JSON without asking this server first
            raise ApiError(415, "send the header Content-Type: application/json", code="unsupported_media_type")
        body = bytearray()
        try:
            await self._gather(request, body)
            yield body
        finally:
            self._room += len(body)

    async def _gather(self, request: Request, body: bytearray) -> None:
        limit = self._limits.body_bytes
        try:
            async with asyncio.timeout(self._limits.body_s):
                async for piece in request.stream():
                    if len(body) + len(piece) > limit:
                        raise ApiError(413, f"the body is longer than {limit:,} bytes: send less", code="too_large")
                    if len(piece) > self._room:
                        raise ApiError(
                            429, "too many large requests are being read: try again", type="rate_limit_error",
                            code="rate_limit_exceeded", headers={"Retry-After": "1"},
                        )  # fmt: skip
                    self._room -= len(piece)
                    body += piece
        except ClientDisconnect:  # nobody hears this
            raise ApiError(400, "the connection closed before the body was complete", code="client_left") from None
        except TimeoutError:
            raise ApiError(408, f"the body took longer than {self._limits.body_s:g} s to arrive") from None


def parse(raw: bytes | bytearray, limits: Limits) -> dict[str, Any]:
    """The JSON object that `raw` is. Raises ApiError (400) for anything else.

    Refused with what is no JSON: NaN and Infinity, numbers longer than Python reads, surrogates without their half,
    nesting deeper than the limit, more lists and objects than the limit.
    """
    if _holds_more(raw, limits.containers):
        raise bad(f"the body holds more than {limits.containers:,} lists and objects: send fewer")
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise bad("the body is not UTF-8") from None
    except RecursionError:
        raise bad("the body nests too deeply") from None
    except ValueError as error:
        raise bad(f"the body is not JSON that this server takes: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise bad("the body is not a JSON object")
    _check(value, limits.depth)
    return value


def _holds_more(raw: bytes | bytearray, most: int) -> bool:
    """Whether `raw`, if it is JSON, holds more than `most` lists and objects."""
    if raw.count(b"[") + raw.count(b"{") <= most:  # some of which may be in texts
        return False
    at = 0
    for _ in range(most + 1):
        found = _BEFORE.match(raw, at)
        if found is None or found.end() == len(raw):
            return False
        at = found.end() + 1
    return True


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _check(value: Any, depth: int) -> None:
    """Look through all of `value` without recursion."""
    level = [value]
    for _ in range(depth):
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += each
                below += each.values()
            elif isinstance(each, list):
                below += each
            elif isinstance(each, str) and not each.isascii():
                _check_text(each)
            elif isinstance(each, float) and not math.isfinite(each):
                raise bad("the body holds a number too large for a float")
        if not below:
            return
        level = below
    raise bad(f"the body nests deeper than {depth} levels")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad("the body holds half of a surrogate pair, which is no text") from None

"""Who may ask: keys compared in constant time, and names of this machine alone where there is no key. Knows no routes.

Without a key, only requests whose Host names the loopback are answered: a page of another site that has its own name
resolved to 127.0.0.1 gets nothing. With one, everything wants the key but what is named open.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Sequence
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sluice.errors import InputError
from sluice.server.errors import ApiError

MAX_KEYS, MAX_KEY_FILE_BYTES = 1000, 1 << 20
LEAST_KEY_CHARACTERS = 8


class Keys:
    """The keys that are taken. Raises InputError for keys that no client could send, or that are guessed too soon."""

    def __init__(self, keys: Sequence[str]) -> None:
        for key in keys:
            if not key.isascii() or not key.isprintable() or " " in key:
                raise InputError("an API key holds characters that a header can't: use ASCII without spaces")
            if len(key) < LEAST_KEY_CHARACTERS:
                raise InputError(f"an API key has {len(key)} characters: give {LEAST_KEY_CHARACTERS} or more")
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def name_of(self, authorization: str) -> str | None:
        """A name for the key in an Authorization header, no secret; None if it isn't taken.

        Takes as long for every key, right or wrong.
        """
        scheme, _, given = authorization.partition(" ")
        digest = sha256(given.strip().encode("utf-8", "replace")).digest()
        found = None
        for number, known in enumerate(self._digests, 1):
            if hmac.compare_digest(digest, known):
                found = f"key {number}"
        return found if scheme.lower() == "bearer" else None


def read_keys(path: Path) -> list[str]:
    """The keys in a file, one a line; empty lines and lines that begin with # don't count. Raises InputError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_KEY_FILE_BYTES + 1)
        lines = [line.strip() for line in raw.decode().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the key file {path} can't be read ({error}): name one with a key a line") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys or len(keys) > MAX_KEYS or len(raw) > MAX_KEY_FILE_BYTES:
        raise InputError(f"the key file {path} holds {len(keys)} keys: give 1 to {MAX_KEYS}, one a line")
    return keys


def is_loopback(host: str) -> bool:
    """Whether every address that `host` names is this machine's own. Raises InputError if it names none."""
    try:
        found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InputError(f"--host {host[:100]} names no address ({error}): give one of this machine's") from None
    return all(ip_address(str(address[4][0]).partition("%")[0]).is_loopback for address in found)


class Guard:
    """ASGI middleware that lets requests pass, with the asker's name in `scope["state"]["asker"]`, or answers 401/403.

    `open` are paths that anyone may GET.
    """

    def __init__(self, app: ASGIApp, *, keys: Keys, host: str, open: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._host = host.lower()
        self._open = open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            scope.setdefault("state", {})["asker"] = self._asker(scope)
        except ApiError as error:
            await error.response(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _asker(self, scope: Scope) -> str:
        """The asker's name. Raises ApiError."""
        headers = Headers(scope=scope)
        remote = str(scope["client"][0]) if scope.get("client") else "local"
        if not self._keys:
            if not self._names_us(headers.get("host", "")):
                raise ApiError(403, "without an API key this server answers to localhost alone", code="wrong_host")
            return remote
        name = self._keys.name_of(headers.get("authorization", ""))
        if name is None:
            if scope["path"] in self._open and scope["method"] in ("GET", "HEAD"):
                return remote
            raise ApiError(
                401, "the API key is missing or wrong: send the header Authorization: Bearer KEY",
                type="authentication_error", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        return name

    def _names_us(self, host: str) -> bool:
        name = host.lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        if name in ("", "localhost", self._host) or name.endswith(".localhost"):
            return True
        try:
            return ip_address(name).is_loopback
        except ValueError:
            return False

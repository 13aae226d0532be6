"""Keys: who is let in, what stays open, and which files and addresses are taken."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from api_server import Served, served
from tiny import write_tiny

from sluice.engine import Engine
from sluice.errors import InputError
from sluice.server.auth import Keys, is_loopback, read_keys
from sluice.server.listening import bind, listen, url_of

FIRST, SECOND = "sk-first-key", "sk-second-key"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = write_tiny(tmp_path_factory.mktemp("api") / "tiny.gguf").path
    with (
        Engine.open(path, expert_slots=12, threads=1, ctx=256, streams=2) as engine,
        served(engine, keys=(FIRST, SECOND)) as running,
    ):
        yield running


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong-key", f"Basic {FIRST}", FIRST,
                                    f"Bearer {FIRST[:-1]}", f"Bearer {FIRST}x", "Bearer \xff\xfe"])  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json", "/live", "/v1/nothing", "//", "/health/x"])
def test_without_a_key_nothing_is_told(server: Served, path: str, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    response = httpx.get(server.url + path, headers=headers)  # type: ignore[arg-type]
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", [FIRST, SECOND])
def test_each_key_is_taken_under_any_name(server: Served, key: str) -> None:
    headers = {"authorization": f"bearer {key}", "host": "sluice.example"}
    assert httpx.get(server.url + "/v1/models", headers=headers).status_code == 200
    asked = {"prompt": "x", "max_tokens": 2, "user": "me"}
    assert httpx.post(server.url + "/v1/completions", json=asked, headers=headers).status_code == 200


def test_what_anyone_may_get_can_not_be_posted_to(server: Served) -> None:
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
    assert httpx.post(server.url + "/health").status_code == 401


def test_keys_have_names_that_are_no_secret() -> None:
    keys = Keys([FIRST, SECOND])
    assert keys.name_of(f"Bearer {SECOND}") == "key 2"
    assert keys.name_of("Bearer other") is None
    assert not Keys([])


@pytest.mark.parametrize("key", ["short", "with spaces in it", "ключ-ключ-ключ", "line\nbreak-in-it"])
def test_keys_that_can_not_be(key: str) -> None:
    with pytest.raises(InputError):
        Keys([key])


def test_a_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# two of them\n{FIRST}\n\n  {SECOND}\n")
    assert read_keys(file) == [FIRST, SECOND]
    file.write_text("# none\n")
    with pytest.raises(InputError, match="holds 0 keys"):
        read_keys(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="can't be read"):
        read_keys(file)
    with pytest.raises(InputError, match="can't be read"):
        read_keys(tmp_path / "none")


def test_which_addresses_are_this_machine_alone() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("localhost") and is_loopback("127.1.2.3")
    assert not is_loopback("0.0.0.0") and not is_loopback("") and not is_loopback("192.0.2.1")
    with pytest.raises(InputError, match="names no address"):
        is_loopback("no.such.host.invalid")


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} of 127.0.0.1 is in use"):
            bind("127.0.0.1", port)
    with bind("127.0.0.1", 0) as free:
        listen(free)
        assert url_of(free, "127.0.0.1") == f"http://127.0.0.1:{free.getsockname()[1]}"

"""`sluice serve` as a process: what it prints, refuses, and does when it is told to end."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny import write_tiny

pytest.importorskip("fastapi", reason="needs the extra [serve]")
FAST = ("--threads", "1", "--expert-slots", "12", "--ctx", "4000")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("serve") / "tiny.gguf", n_ctx=4096).path


def command(*words: object, **options: Any) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-m", "sluice", "serve", *map(str, words)], stdin=subprocess.DEVNULL, stdout=pipe,
        stderr=pipe, encoding="utf-8", **options,
    )  # fmt: skip


@contextmanager
def serving(*words: object) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The process, where it listens, and the line that said so."""
    with command(*words, "--port", 0) as child:
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            found = re.search(r"http://\S+:\d+", line)
            assert found, line or child.communicate(timeout=60)
            yield child, found[0], line
        finally:
            child.kill()


def test_it_serves_and_ends(tiny: Path) -> None:
    with serving(tiny, *FAST, "--top-k-experts", 1) as (child, url, line):
        assert line.startswith("serving tiny at http://127.0.0.1:") and "lossy" in line
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "the river", "max_tokens": 4}, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 4
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (143, "")
    assert "1 answered, 0 failed; 4 tokens generated" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("drain", "told"), [(60, "1 answered, 0 failed"), (0.2, "0 answered, 1 failed, 1 cut off")])
def test_what_runs_may_finish(tiny: Path, drain: float, told: str) -> None:
    body = {"prompt": "the river", "max_tokens": 300 if drain > 1 else 3900, "ignore_eos": True, "stream": True}
    with serving(tiny, *FAST, "--drain", drain) as (child, url, _):
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            child.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert rest[-1] == "data: [DONE]"
    assert ("draining" in rest[-2]) == (drain < 1)
    assert "finishing 1 request" in err and told in err
    assert "Traceback" not in err


def test_while_draining_nothing_new_is_taken(tiny: Path) -> None:
    body = {"prompt": "the river", "max_tokens": 3900, "ignore_eos": True, "stream": True}
    with (
        serving(tiny, *FAST, "--drain", 60) as (child, url, _),
        httpx.Client(timeout=60) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        child.send_signal(signal.SIGINT)
        while (health := client.get(f"{url}/health")).status_code == 200:
            pass
        assert (health.status_code, health.json()) == (503, {"status": "draining"})
        refused = client.post(f"{url}/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        child.send_signal(signal.SIGINT)  # the second ends it at once
        _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "0 answered, 1 failed, 1 cut off" in err
    assert "Traceback" not in err


def test_signals_that_come_together_end_it_in_words(tiny: Path) -> None:
    body = {"prompt": "the river", "max_tokens": 3900, "ignore_eos": True, "stream": True}
    with serving(tiny, *FAST, "--drain", 60) as (child, url, _):
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)  # two of one kind would be one to the system
            child.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        _, err = child.communicate(timeout=60)
    assert child.returncode in (130, 143)
    assert "draining" in rest[-2] and rest[-1] == "data: [DONE]"
    assert "0 answered, 1 failed, 1 cut off" in err
    assert "Traceback" not in err


REFUSED = {
    "another address": (["--host", "0.0.0.0"], "an API key is needed"),
    "every address": (["--host", ""], "an API key is needed"),
    "no address": (["--host", "no.such.host.invalid"], "names no address"),
    "an empty key": (["--api-key", ""], "8 or more"),
    "a weak key": (["--api-key", "x"], "8 or more"),
    "two keys": (["--api-key", "long-enough", "--api-key-file", "x"], "give one of them"),
    "no key file": (["--api-key-file", "/no/such/file"], "can't be read"),
    "no port": (["--port", "70000"], "out of range"),
    "no streams": (["--max-streams", "0"], "--max-streams 0"),
    "no time": (["--deadline", "0"], "--deadline"),
    "no model": (["/no/such/model.gguf"], "no such file"),
}


@pytest.mark.parametrize(("words", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals(tiny: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    from sluice.cli import main

    model = [] if words[0].startswith("/no") else [str(tiny)]
    assert main(["serve", *model, *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err


def test_a_port_in_use(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    from sluice.cli import main

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(tiny), "--port", str(port)]) == 2
    _, err = capsys.readouterr()
    assert err.count("\n") == 1 and "in use" in err


def test_a_key_from_the_environment(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_API_KEY", "sk-from-outside")
    with serving(tiny, *FAST) as (_, url, line):
        assert "sk-from-outside" not in line
        assert httpx.get(f"{url}/v1/models").status_code == 401
        headers = {"authorization": "Bearer sk-from-outside"}
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200

"""A server of Sluice in a process of its own, and asyncio clients that note when they are told what. It judges nothing.

The server is what users start, `sluice serve`, on a free port; clients speak HTTP with httpx. Prompts are pieces of
benchmarks/texts as token ids, so their lengths are exact, and they begin with a random token each, so that none is
another's beginning unless that is wanted.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any

import httpx
import numpy as np
from common import HERE, log
from machine import UnavailableError

from sluice.ggml import load_library
from sluice.gguf import open_gguf
from sluice.text.tokenizer import Tokenizer

Json = dict[str, Any]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TERMINATED = 128 + signal.SIGTERM  # the exit code of a command that SIGTERM has ended
GIVE_UP_S = 600.0  # a server that says nothing for so long is stuck


class Server:
    """`sluice serve MODEL` with `words` more; a context manager. `said` are its lines on stderr, `url` where it is."""

    def __init__(self, model: str | Path, *words: object, key: str | None = None) -> None:
        self._words = [str(word) for word in (model, *words, "--host", "127.0.0.1", "--port", 0)]
        self.key = key
        self.said: list[str] = []
        self.url = ""

    def __enter__(self) -> Server:
        log(f"+ sluice serve {' '.join(self._words)}")
        command = [sys.executable, "-m", "sluice", "serve", *self._words]
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._listening = Thread(target=self._listen, daemon=True)
        self._listening.start()
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        found = re.search(r"http://\S+:\d+", line)
        if found is None:
            self.child.wait()
            self._listening.join()
            raise UnavailableError(f"sluice serve ended with {self.child.returncode}: {' '.join(self.said[-1:])}")
        self.url = found[0]
        log(f"  {line.strip()}")
        return self

    def __exit__(self, *exc: object) -> None:
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        self._listening.join()

    def _listen(self) -> None:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.said.append(line.rstrip("\n"))
            log(f"  server: {self.said[-1]}")

    def ask_to_end(self) -> None:
        self.child.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = 120.0) -> int | None:
        """Its exit code; None if it is still there after `timeout_s`."""
        try:
            return self.child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def memory_bytes(self, field: str) -> int:
        """`VmRSS`, its resident memory, or `VmHWM`, the most that it ever was."""
        status = Path(f"/proc/{self.child.pid}/status").read_text()
        found = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
        assert found is not None
        return int(found[1]) << 10

    def client(self) -> httpx.AsyncClient:
        """For any number of requests at a time."""
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=GIVE_UP_S, limits=limits, trust_env=False)


async def metrics(client: httpx.AsyncClient) -> dict[str, float]:
    """Every figure of /metrics by its name, labels included."""
    answer = await client.get("/metrics")
    answer.raise_for_status()
    lines = (line.rpartition(" ") for line in answer.text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


@dataclass
class Told:
    """What a request was told. Times in seconds of perf_counter: `arrivals` of chunks with content, `ended` of the end.

    `error` is OpenAI's error object, of an answer that is one or of a stream that ended in one. `complete`: the answer
    came to its end.
    """

    sent: float
    status: int = 0
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    text: str = ""
    usage: Json | None = None
    choices: list[Json] = field(default_factory=list)  # of an answer in one piece
    seeds: list[int] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)  # each choice's reason
    error: Json | None = None
    retry_after: str | None = None
    complete: bool = False

    @property
    def tokens(self) -> int:
        return 0 if self.usage is None else self.usage["completion_tokens"]

    @property
    def ttft_s(self) -> float:
        """Until the first chunk with content."""
        return self.arrivals[0] - self.sent

    @property
    def tpot_s(self) -> float:
        """Between tokens after the first, their mean."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between chunks with content."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]

    def whole(self, answer: Json) -> None:
        """Note an answer in one piece, which may be an error."""
        self.error = answer.get("error")
        self.choices = answer.get("choices", [])
        self.usage = answer.get("usage")
        self.text = "".join(choice.get("text") or _content(choice.get("message", {})) for choice in self.choices)
        self.finished = [choice["finish_reason"] for choice in self.choices]
        self._report(answer)

    def chunk(self, answer: Json) -> None:
        """Note a chunk of a stream."""
        self.error = answer.get("error") or self.error
        self.usage = answer.get("usage") or self.usage
        for choice in answer.get("choices", []):
            text = choice.get("text") or _content(choice.get("delta", {}))
            if text:
                self.arrivals.append(perf_counter())
                self.text += text
            if choice["finish_reason"] is not None:
                self.finished.append(choice["finish_reason"])
        self._report(answer)

    def _report(self, answer: Json) -> None:
        self.seeds += [choice["seed"] for choice in answer.get("sluice", {}).get("choices", [])]


def _content(message: Json) -> str:
    """A message's text; of a tool's call what it is called with."""
    calls = [call.get("function", {}).get("arguments", "") for call in message.get("tool_calls") or ()]
    return (message.get("content") or "") + (message.get("reasoning_content") or "") + "".join(calls)


async def ask(client: httpx.AsyncClient, path: str, body: Json) -> Told:
    """Post `body` and take in the answer, whole or as a stream as it says."""
    told = Told(perf_counter())
    if not body.get("stream"):
        response = await client.post(path, json=body)
        told.ended = perf_counter()
        told.status, told.retry_after = response.status_code, response.headers.get("retry-after")
        told.whole(response.json())
        told.complete = told.status == 200
        return told
    async with client.stream("POST", path, json=body) as response:
        told.status, told.retry_after = response.status_code, response.headers.get("retry-after")
        if told.status != 200:
            told.whole(json.loads(await response.aread()))
        else:
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    told.complete = told.error is None
                    break
                told.chunk(json.loads(line.removeprefix("data: ")))
    told.ended = perf_counter()
    return told


def streamed(**fields: Any) -> Json:
    """A body whose answer streams, with its usage."""
    return fields | {"stream": True, "stream_options": {"include_usage": True}}


class Texts:
    """The tokens of benchmarks/texts by a model file's tokenizer, and pieces of them."""

    def __init__(self, model: Path) -> None:
        tokenizer = Tokenizer.from_metadata(open_gguf(model, load_library()).metadata)
        files = sorted((HERE / "texts").glob("*.txt"))
        self._ids = [id for file in files for id in tokenizer.encode(file.read_text(), bos=False)]

    def piece(self, n: int, rng: np.random.Generator) -> list[int]:
        """`n` tokens: a random one, then text from a random place on."""
        start = int(rng.integers(len(self._ids)))
        first = self._ids[int(rng.integers(len(self._ids)))]
        return [first, *(self._ids[(start + i) % len(self._ids)] for i in range(n - 1))]

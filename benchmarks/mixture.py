"""What the clients of an endurance run do: requests of every kind, good and bad, and which answer each deserves.

Every client notes what it saw in one Tally, so that it can be held against what the server counted. A request whose
client left before it was told anything is `unsure`: the server may have begun it, or just refused it.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import httpx
import numpy as np
from served import CHAT, COMPLETIONS, Json, Server, Texts, Told, ask, streamed

LONG_TOKENS = 1800  # of a long prompt: four chunks
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["answer", "sure"],
    "properties": {"answer": {"enum": ["yes", "no", "perhaps"]}, "sure": {"type": "boolean"}},
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "note", "description": "Notes an answer.", "parameters": SCHEMA}}
QUESTIONS = ("Why is the sky blue?", "Name a river.", "What is a prime number?", "How do bees see?", "Who was Ada?")


@dataclass
class Tally:
    """What clients saw. `refused` by status, `left`: walked away from answers that had begun, `halves`: bodies begun.

    `finished` choices and `generated` tokens are those of complete answers; `left_jobs`, `left_tokens`: how many there
    may have been in answers that nobody waited for.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    refused: Counter[int] = field(default_factory=Counter)
    complete: int = 0
    left: int = 0
    unsure: int = 0
    halves: int = 0
    finished: int = 0
    generated: int = 0
    left_jobs: int = 0
    left_tokens: int = 0
    repeated: int = 0
    differing: int = 0


def malformed(n_ctx: int) -> list[tuple[str, bytes, int]]:
    """Requests that no server should take: path, body, and the status that each deserves."""
    hello = [{"role": "user", "content": "Hello"}]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]
    chats: list[Json] = [
        {}, {"messages": []}, {"messages": "Hello"}, {"messages": hello, "no_such_field": 1}, {"messages": image},
        {"messages": [{"role": "king", "content": "x"}]}, {"messages": hello, "temperature": "hot"},
        {"messages": hello, "top_p": 2}, {"messages": hello, "n": 100_000}, {"messages": hello, "max_tokens": -1},
        {"messages": hello, "stop": ["x"] * 100}, {"messages": hello, "logit_bias": {"one": 1}},
        {"messages": hello, "response_format": {"type": "poem"}}, {"messages": hello, "tools": [{"type": "hammer"}]},
        {"messages": hello, "tool_choice": "required"}, {"messages": hello, "max_tokens": 10 * n_ctx},
    ]  # fmt: skip
    texts: list[Json] = [
        {}, {"prompt": []}, {"prompt": [-1]}, {"prompt": [1 << 30]}, {"prompt": ["x"] * 100}, {"prompt": {"a": 1}},
        {"prompt": [7] * (n_ctx + 1)}, {"prompt": "x", "logprobs": 1000}, {"prompt": "x", "suffix": "y"},
    ]  # fmt: skip
    raw = [
        b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b'{"n": 1e999}',
        b'{"a": ' * 5000 + b"1" + b"}" * 5000, b'{"prompt": "x"} {"prompt": "y"}', b"9" * 10_000,
    ]  # fmt: skip
    return [
        *((CHAT, json.dumps(each).encode(), 400) for each in chats),
        *((COMPLETIONS, json.dumps(each).encode(), 400) for each in texts),
        *((path, each, 400) for path in (CHAT, COMPLETIONS) for each in raw),
        (CHAT, json.dumps({"messages": hello, "model": "another"}).encode(), 404),
        ("/v1/embeddings", b'{"input": "x"}', 404), ("/v1/models", b"{}", 405),
    ]  # fmt: skip


class Crowd:
    """Clients of `server`, which has `streams` streams, a queue of `queue` and `n_ctx` positions.

    `tools`: whether the model's template takes any; without, a request with tools is refused, and that is deserved.
    """

    def __init__(
        self, server: Server, client: httpx.AsyncClient, texts: Texts, *, streams: int, queue: int, n_ctx: int,
        seed: int,
    ) -> None:  # fmt: skip
        self.tally = Tally()
        self.tools = True
        self._server = server
        self._client = client
        self._texts = texts
        self._places = streams + queue
        self._n_ctx = n_ctx
        self._rng = np.random.default_rng(seed)
        self._bursting, self._burst_ended = False, -1.0
        self._malformed = malformed(n_ctx)
        self._large = asyncio.Lock()
        self._beginnings = [texts.piece(1100, self._rng) for _ in range(3)]
        self.pool = self._pool()
        self._answers: dict[int, str] = {}
        self._kinds: dict[Callable[[], Awaitable[None]], float] = {
            self.chat: 6, self.text: 4, self.choices: 2, self.long: 1.5, self.begun_alike: 3, self.seeded: 6,
            self.structured: 2, self.tool: 1.5, self.scored: 1, self.leave_prefill: 2, self.leave_decode: 3,
            self.cancel: 2, self.half_a_body: 1, self.oversize: 0.5, self.no_request: 4, self.wrong_key: 1,
            self.look: 2,
        }  # fmt: skip

    async def find_out(self) -> None:
        """Ask with a tool, to see whether the model's template takes any."""
        body = {"messages": self._question(), "max_tokens": 1, "tools": [TOOL]}
        told = await ask(self._client, CHAT, body)
        self.tools = told.status == 200
        self._see(told, (200, 400), about="find out")

    async def live(self, until: float) -> None:
        """One client: a request after the other, of kinds drawn at random, `until` a time of the event loop's clock."""
        clock = asyncio.get_running_loop().time
        kinds, weights = [*self._kinds], np.array([*self._kinds.values()])
        while clock() < until:
            kind = kinds[int(self._rng.choice(len(kinds), p=weights / weights.sum()))]
            await self.one(kind)
            await asyncio.sleep(float(self._rng.exponential(0.1)))

    async def one(self, kind: Callable[[], Awaitable[None]]) -> None:
        """One request of a kind; what goes wrong in the connection is unexpected."""
        name = getattr(kind, "__name__", "?")
        self.tally.kinds[name] += 1
        try:
            await kind()
        except (httpx.HTTPError, OSError, ValueError, KeyError) as error:
            self.tally.unexpected.append(f"{name}: {type(error).__name__}: {error}")

    # --- what a request was told

    def _see(
        self, told: Told, deserved: Collection[int] = (200,), *, tokens: int | None = None, about: str = ""
    ) -> bool:
        """Note an answer; whether it is complete. `tokens`: how many it must have."""
        tally = self.tally
        if told.status == 200:
            tally.complete += told.complete
            tally.finished += len(told.finished)
            tally.generated += told.tokens
        else:
            tally.refused[told.status] += 1
        busy = told.status == 429 and (self._bursting or self._burst_ended >= told.sent)
        if busy and not (told.retry_after or "").isdecimal():
            tally.unexpected.append(f"429 with Retry-After {told.retry_after!r}")
        elif told.status not in deserved and not busy:
            tally.unexpected.append(f"{about}: {told.status} {told.error}")
        elif told.status == 200 and not told.complete:
            tally.unexpected.append(f"{about}: a stream ended with {told.error}")
        elif told.complete and tokens is not None and told.tokens != tokens:
            tally.unexpected.append(f"{about}: {told.tokens} tokens and not {tokens}")
        elif told.status >= 400 and (told.error is None or not told.error.get("message")):
            tally.unexpected.append(f"{about}: {told.status} without an error object")
        return told.complete

    def _draw(self, low: int, high: int) -> int:
        return int(self._rng.integers(low, high))

    def _either(self, **fields: Any) -> Json:
        """A body, streamed or not."""
        return streamed(**fields) if self._rng.random() < 0.5 else fields

    def _question(self) -> list[Json]:
        return [{"role": "user", "content": QUESTIONS[self._draw(0, len(QUESTIONS))]}]

    # --- good requests

    async def chat(self) -> None:
        body = self._either(messages=self._question(), max_tokens=self._draw(4, 40))
        self._see(await ask(self._client, CHAT, body), about="chat")

    async def text(self) -> None:
        n = self._draw(1, 40)
        prompt = self._texts.piece(self._draw(4, 200), self._rng)
        body = self._either(prompt=prompt, max_tokens=n, ignore_eos=True, user=f"user {self._draw(0, 4)}")
        self._see(await ask(self._client, COMPLETIONS, body), tokens=n, about="text")

    async def choices(self) -> None:
        body = self._either(prompt=self._texts.piece(40, self._rng), max_tokens=12, n=2, ignore_eos=True)
        self._see(await ask(self._client, COMPLETIONS, body), tokens=24, about="choices")

    async def long(self) -> None:
        prompt = self._texts.piece(LONG_TOKENS, self._rng)
        body = self._either(prompt=prompt, max_tokens=8, ignore_eos=True)
        self._see(await ask(self._client, COMPLETIONS, body), tokens=8, about="long")

    async def begun_alike(self) -> None:
        beginning = self._beginnings[self._draw(0, len(self._beginnings))]
        rest = self._texts.piece(self._draw(2, 200), self._rng)
        body = self._either(prompt=beginning + rest, max_tokens=16, ignore_eos=True)
        self._see(await ask(self._client, COMPLETIONS, body), tokens=16, about="begun_alike")

    async def scored(self) -> None:
        """The prompt's own log-probabilities, as lm-eval asks for them."""
        prompt = self._texts.piece(self._draw(10, 600), self._rng)
        body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
        told = await ask(self._client, COMPLETIONS, body)
        if self._see(told, tokens=0, about="scored") and len(told.choices[0]["logprobs"]["tokens"]) != len(prompt):
            self.tally.unexpected.append("scored: not a log-probability a token")

    async def structured(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
        body = self._either(messages=self._question(), max_tokens=128, response_format=form, temperature=1.0)
        told = await ask(self._client, CHAT, body)
        if self._see(told, about="structured") and "length" not in told.finished:
            self._check_json(told.text, "structured")

    async def tool(self) -> None:
        body = self._either(messages=self._question(), max_tokens=128, tools=[TOOL], tool_choice="required")
        told = await ask(self._client, CHAT, body)
        if self._see(told, (200,) if self.tools else (400,), about="tool") and told.finished == ["tool_calls"]:
            self._check_json(told.text, "tool")

    def _check_json(self, text: str, about: str) -> None:
        with suppress(ValueError):
            value = json.loads(text)
            if value.keys() == {"answer", "sure"} and isinstance(value["sure"], bool):
                return
        self.tally.unexpected.append(f"{about}: {text[:80]!r} does not fit its schema")

    def _pool(self) -> list[tuple[str, Json]]:
        """Requests with seeds, which get the same answer each time."""
        pool: list[tuple[str, Json]] = []
        for seed in range(10):
            common = {"seed": seed, "temperature": 1.0, "max_tokens": 24}
            if seed % 2:
                pool.append((CHAT, {"messages": [{"role": "user", "content": QUESTIONS[seed // 2]}], **common}))
            else:
                pool.append((COMPLETIONS, {"prompt": self._texts.piece(20 + 90 * seed, self._rng), **common}))
        return pool

    async def seeded(self) -> None:
        await self.repeat(self._draw(0, len(self.pool)))

    async def repeat(self, i: int) -> Told:
        """Ask the pool's `i`th request again, streamed or not, and hold the answer against its first."""
        path, body = self.pool[i]
        told = await ask(self._client, path, self._either(**body))
        if self._see(told, about="seeded"):
            self.tally.repeated += i in self._answers
            self.tally.differing += self._answers.setdefault(i, told.text) != told.text
        return told

    # --- clients that go away

    async def leave_prefill(self) -> None:
        prompt = self._texts.piece(LONG_TOKENS, self._rng)
        await self._walk_away(COMPLETIONS, streamed(prompt=prompt, max_tokens=300, ignore_eos=True))

    async def cancel(self) -> None:
        body = {"prompt": self._texts.piece(30, self._rng), "max_tokens": 1000, "n": 2, "ignore_eos": True}
        await self._walk_away(COMPLETIONS, body)

    async def _walk_away(self, path: str, body: Json) -> None:
        """Send a request and close the connection up to a second later."""
        sent = asyncio.Event()

        async def trace(name: str, info: Any) -> None:
            if name == "http11.send_request_body.complete":
                sent.set()

        began = perf_counter()
        asking = asyncio.create_task(self._client.post(path, json=body, extensions={"trace": trace}))
        sending = asyncio.create_task(sent.wait())
        await asyncio.wait({asking, sending}, return_when=asyncio.FIRST_COMPLETED)
        sending.cancel()
        if asking.done() or (await asyncio.wait({asking}, timeout=float(self._rng.random())))[0]:
            response = await asking  # it was refused
            self._see(Told(began, response.status_code, error=response.json().get("error"),
                           retry_after=response.headers.get("retry-after")), (), about="walk away")  # fmt: skip
            return
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        self.tally.unsure += 1
        self._left(body)

    def _left(self, body: Json) -> None:
        n = body.get("n", 1)
        self.tally.left_jobs += n
        self.tally.left_tokens += n * body["max_tokens"]

    async def leave_decode(self) -> None:
        body = streamed(prompt=self._texts.piece(30, self._rng), max_tokens=1000, ignore_eos=True)
        enough = self._draw(1, 12)
        told = Told(perf_counter())
        async with self._client.stream("POST", COMPLETIONS, json=body) as response:
            told.status, told.retry_after = response.status_code, response.headers.get("retry-after")
            if told.status != 200:
                told.whole(json.loads(await response.aread()))
                self._see(told, about="leave_decode")
                return
            async for line in response.aiter_lines():
                enough -= line.startswith("data: ")
                if enough <= 0:
                    break
        self.tally.left += 1
        self._left(body)

    async def half_a_body(self) -> None:
        """Begin a body and close the connection."""
        url = httpx.URL(self._server.url)
        _, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {url.host}:{url.port}\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {self._server.key}\r\nContent-Length: 5000\r\n\r\n"
        writer.write(head.encode() + b'{"messages": [')
        await writer.drain()
        await asyncio.sleep(float(self._rng.random()) / 4)
        writer.close()
        await writer.wait_closed()
        self.tally.halves += 1

    # --- bad requests

    async def oversize(self) -> None:
        async with self._large:  # several at a time may be told to come again
            body = b'{"prompt": "' + b"x" * (9 << 20) + b'"}'
            await self._post(COMPLETIONS, body, 413)

    async def no_request(self) -> None:
        path, body, status = self._malformed[self._draw(0, len(self._malformed))]
        kind = "text/plain" if self._rng.random() < 0.1 and status == 400 else "application/json"
        await self._post(path, body, status if kind == "application/json" else 415, kind)

    async def _post(self, path: str, body: bytes, status: int, kind: str = "application/json") -> None:
        told = Told(perf_counter())
        response = await self._client.post(path, content=body, headers={"Content-Type": kind})
        told.status, told.error = response.status_code, response.json().get("error")
        told.retry_after = response.headers.get("retry-after")
        self._see(told, (status,), about=f"{path} {body[:60]!r}")

    async def wrong_key(self) -> None:
        key = ("Bearer no-such-key", "Basic x", "")[self._draw(0, 3)]
        path = ("/v1/models", "/metrics", "/live")[self._draw(0, 3)]
        answer = await self._client.get(path, headers={"Authorization": key})
        if answer.status_code != 401:  # what the guard turns away is not counted as a request
            self.tally.unexpected.append(f"{path} with a wrong key: {answer.status_code}")

    async def look(self) -> None:
        """The pages that programs and people look at, and for a moment the machine live."""
        for path in ("/health", "/v1/models", "/metrics", "/"):
            answer = await self._client.get(path)
            if answer.status_code != 200:
                self.tally.unexpected.append(f"{path}: {answer.status_code}")
        async with self._client.stream("GET", "/live") as response:
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    async for _ in response.aiter_raw():
                        pass

    # --- bursts

    async def burst(self) -> None:
        """More at once than there are places."""
        self.tally.kinds["burst"] += 1
        self._bursting = True
        body = {"prompt": self._texts.piece(20, self._rng), "max_tokens": 16, "ignore_eos": True}
        try:
            every = await asyncio.gather(*(ask(self._client, COMPLETIONS, body) for _ in range(self._places + 16)))
            for told in every:
                self._see(told, tokens=16, about="burst")
        except (httpx.HTTPError, OSError) as error:
            self.tally.unexpected.append(f"burst: {type(error).__name__}: {error}")
        finally:
            self._bursting = False
            self._burst_ended = perf_counter()

"""What the page is told of the machine: never more than it needs, only while somebody watches, and nobody's secrets."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="needs the extra [serve]")

from sluice.engine.ledger import PhaseLedger
from sluice.server import live
from sluice.server.errors import ApiError
from sluice.server.jobs import ExpertsState, RequestState, Service, ServiceState, Totals


def request(ticket: int, phase: Any = "queued", age_s: float = 1.0) -> RequestState:
    return RequestState(ticket, "the client's name", phase, 100, 10, 0, 3, None, age_s)


def experts(resident: list[list[int]], heat: list[list[float]]) -> ExpertsState:
    return ExpertsState(tuple(range(len(resident))), np.array(resident, np.uint8), np.array(heat, np.float32))


STATE = ServiceState(
    at_s=1.0, uptime_s=1.0, draining=False, streams=4, width_limit=4, max_queue=8, queue=(), running=(),
    totals=Totals(), ledger={phase: PhaseLedger().as_dict() for phase in ("prefill", "decode")}, recent=(),
    decode_tok_per_s=None, kept_tokens=0, slots=3, slot_bytes=1000, slots_resident=1, budget_bytes=None,
    rss_bytes=10**6, page_cache_bytes=None, experts=experts([[1, 0, 0]], [[2.0, 0.0, 9.0]]),
)  # fmt: skip


class FakeService:
    """Counts how often it is asked; each answer is a moment later, unless it is `stuck` in a step."""

    def __init__(self, state: ServiceState = STATE) -> None:
        self.now = state
        self.asked = 0
        self.stuck = False

    def state(self, patience_s: float = 1.0) -> ServiceState:
        self.asked += 1
        if not self.stuck:
            self.now = replace(self.now, at_s=self.now.at_s + 1)
        return self.now


def made(fake: FakeService, *, period_s: float = 0.005, comment_s: float = 5.0) -> live.Live:
    return live.Live(cast("Service", fake), {"name": "model"}, period_s=period_s, comment_s=comment_s)


def parse(raw: bytes) -> tuple[str, str]:
    """(event, data)"""
    first, second, *rest = raw.decode().split("\n")
    assert rest == ["", ""] and first.startswith("event: ") and second.startswith("data: ")
    return first.removeprefix("event: "), second.removeprefix("data: ")


async def take(stream: AsyncIterator[bytes], n: int) -> list[tuple[str, str]]:
    return [parse(await anext(stream)) for _ in range(n)]


# --- the map


def test_each_byte_of_the_map_tells_residency_and_heat() -> None:
    state = experts([[1, 0], [1, 0]], [[0.0, 0.0], [5.0, 1e9]])
    raw = b64decode(live.cells(state))
    assert [byte >= live.RESIDENT for byte in raw] == [True, False, True, False]
    heats = [byte % live.RESIDENT for byte in raw]
    assert heats[:2] == [0, 0] and 0 < heats[2] < heats[3] == 127


@pytest.mark.parametrize("heat", [0.5, 1.0, 30.0, 4000.0])
def test_heat_comes_back_within_a_few_percent(heat: float) -> None:
    stored = b64decode(live.cells(experts([[0]], [[heat]])))[0]
    assert np.expm1(stored / 127 * np.log1p(live.HEAT_TOP)) == pytest.approx(heat, rel=0.08, abs=0.05)


def test_heat_that_is_no_number_is_cold() -> None:
    assert b64decode(live.cells(experts([[1, 0]], [[float("nan"), -3.0]]))) == bytes([live.RESIDENT, 0])


def test_a_model_of_64_layers_of_512_experts_takes_less_than_45_kb() -> None:
    n = np.ones((64, 512))
    assert len(live.cells(ExpertsState(tuple(range(64)), n.astype(np.uint8), n))) < 45_000
    assert live.cells(None) == ""


# --- the state


def test_all_requests_are_counted_and_a_bounded_number_is_listed() -> None:
    queue = [request(i, age_s=float(i)) for i in range(1000)]
    told = live.described(replace(STATE, queue=queue, running=[request(5000, "decode")]))
    assert (told["n_queued"], told["n_running"], told["longest_wait_s"]) == (1000, 1, 999.0)
    assert len(told["queue"]) == live.MAX_LISTED and told["running"][0]["ticket"] == 5000


def test_who_asked_is_not_told() -> None:
    told = json.dumps(live.described(replace(STATE, queue=[request(1)], running=[request(2, "prefill")])))
    assert "client" not in told


# --- watching


def test_a_watcher_hears_of_the_model_then_of_states_and_of_the_map_when_it_changes() -> None:
    async def watch() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        fake = FakeService()
        stream = made(fake).watch()
        before = await take(stream, 5)
        fake.now = replace(fake.now, experts=experts([[0, 1, 0]], [[2.0, 0.0, 9.0]]))
        return before, await take(stream, 6)

    before, after = asyncio.run(watch())
    assert [name for name, _ in before] == ["model", "experts", "state", "state", "state"]
    assert json.loads(before[0][1]) == {"name": "model"}
    times = [json.loads(data)["at_s"] for name, data in before + after if name == "state"]
    assert times == sorted(set(times))
    [changed] = [data for name, data in after if name == "experts"]
    assert changed != before[1][1]


def test_nobody_is_asked_while_nobody_watches() -> None:
    async def watch() -> tuple[int, int, int]:
        fake = FakeService()
        hub = made(fake)
        await asyncio.sleep(0.03)
        before = fake.asked
        stream = hub.watch()
        await take(stream, 3)
        await cast(Any, stream).aclose()
        await asyncio.sleep(0.03)
        left = fake.asked
        await asyncio.sleep(0.05)
        return before, left, fake.asked

    before, left, later = asyncio.run(watch())
    assert before == 0 < left == later


def test_watchers_share_what_is_asked() -> None:
    async def watch() -> tuple[int, int]:
        fake = FakeService()
        hub = made(fake)
        streams = [hub.watch() for _ in range(8)]
        seen = await asyncio.gather(*(take(stream, 12) for stream in streams))
        return fake.asked, sum(len(each) for each in seen)

    asked, seen = asyncio.run(watch())
    assert seen == 96 and asked < 30


def test_a_slow_watcher_misses_states_and_is_told_the_latest() -> None:
    async def watch() -> tuple[float, float]:
        fake = FakeService()
        stream = made(fake).watch()
        first = (await take(stream, 3))[-1]
        while fake.asked < 20:
            await asyncio.sleep(0.005)
        return json.loads(first[1])["at_s"], json.loads((await take(stream, 1))[0][1])["at_s"]

    first, second = asyncio.run(watch())
    assert second > first + 10


def test_silence_is_broken_by_comments() -> None:
    async def watch() -> bytes:
        fake = FakeService()
        stream = made(fake, comment_s=0.02).watch()
        await take(stream, 3)
        fake.stuck = True
        while (raw := await anext(stream)).startswith(b"event"):
            pass
        return raw

    assert asyncio.run(watch()).startswith(b":")


def test_too_many_watchers_are_refused_and_those_who_leave_make_room() -> None:
    async def watch() -> tuple[int, list[tuple[str, str]]]:
        hub = made(FakeService())
        streams = [hub.watch() for _ in range(live.MAX_WATCHERS)]
        for stream in streams:
            await anext(stream)
        with pytest.raises(ApiError) as refused:
            hub.watch()
        await cast(Any, streams.pop()).aclose()
        return refused.value.status, await take(hub.watch(), 3)

    status, seen = asyncio.run(watch())
    assert status == 503 and seen[0][0] == "model"


def test_the_stream_ends_when_the_service_has_drained_and_not_before() -> None:
    async def watch() -> list[bool]:
        fake = FakeService(replace(STATE, draining=True, running=[request(1, "decode")]))
        stream = made(fake).watch()
        await take(stream, 5)
        fake.now = replace(fake.now, running=())
        rest = [parse(raw) async for raw in stream]
        return [json.loads(data)["n_running"] == 0 for name, data in rest if name == "state"]

    seen = asyncio.run(watch())
    assert seen[-1] and not any(seen[:-1])


def test_a_service_that_fails_ends_the_stream() -> None:
    class Broken(FakeService):
        def state(self, patience_s: float = 1.0) -> ServiceState:
            raise RuntimeError("broken")

    async def watch() -> list[bytes]:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # the task's, told when collected
        return [raw async for raw in made(Broken()).watch()]

    [only] = asyncio.run(watch())
    assert parse(only)[0] == "model"

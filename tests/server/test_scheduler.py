"""What the scheduler promises, over random lives of random requests: fairness, bounds, nobody lost, nobody twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sluice.server.jobs import Busy, Draining
from sluice.server.scheduler import PATIENCE, PROMPT_PATIENCE, RETRY_S, Prefill, Request, Scheduler

CHUNK = 8


@dataclass
class World:
    """Stands in for worker, engine and clock: does what the scheduler decides, and holds it to its promises."""

    streams: int = 3
    room: int = CHUNK
    max_queue: int = 1000
    max_step_s: float | None = None
    prompt_share: float = 0.5
    now: float = 0.0
    left: dict[int, int] = field(default_factory=dict)  # tokens to generate, of requests that have not ended
    ended: Counter[int] = field(default_factory=Counter)
    reasons: dict[int, str] = field(default_factory=dict)
    clients: dict[int, str] = field(default_factory=dict)
    admitted: list[int] = field(default_factory=list)
    generated: Counter[int] = field(default_factory=Counter)
    steps: list[Any] = field(default_factory=list)
    overtaken: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            self.streams, room=self.room, chunk=CHUNK, max_queue=self.max_queue, max_step_s=self.max_step_s,
            prompt_share=self.prompt_share,
        )  # fmt: skip
        self.prompts_s = self.decodes_s = self.chunk_s = 0.0  # steps since streams have decoded; the longest of prompts
        self.undecoded: set[int] = set()  # streams that have not decoded since the last prefill step

    def submit(self, client: str = "", n_prompt: int = 3, n: int = 2, **options: Any) -> int:
        ticket = len(self.clients) + 1
        self.scheduler.submit([Request(ticket, client, n_prompt, **options)], self.now)
        self.clients[ticket] = client
        self.left[ticket] = n
        self.scheduler.check()
        return ticket

    def cancel(self, ticket: int) -> None:
        alive = ticket in self.left and ticket not in self.scheduler._leaving
        assert self.scheduler.cancel(ticket) == alive
        self.scheduler.check()

    def end(self, ticket: int, reason: str) -> None:
        self.ended[ticket] += 1
        self.reasons[ticket] = reason
        del self.left[ticket]
        self.undecoded.discard(ticket)
        if not any(request.phase == "decode" for request in self.scheduler.running.values()):
            self.prompts_s = self.decodes_s = self.chunk_s = 0.0

    def work(self, seconds: float = 1.0, reused: int = 0) -> bool:
        """One turn of the worker's; False when there was nothing to do."""
        scheduler = self.scheduler
        leaving = set(scheduler._leaving)
        before = set(scheduler.queue)
        changes = scheduler.changes(self.now)
        assert leaving <= {ticket for ticket, _ in changes.leave}, "who was cancelled leaves at once"
        for ticket, reason in changes.leave:
            self.end(ticket, reason)
        for request in (*scheduler.queue.values(), *scheduler.running.values()):
            assert request.deadline is None or request.deadline > self.now, "its deadline has passed"
        limit = min(self.streams, scheduler.width_limit)
        assert len(scheduler.running) >= min(limit, len(self.left)), "a stream is idle while a request waits"
        for ticket in changes.admit:
            self.note_admission(ticket, before)
            n_prompt = scheduler.running[ticket].n_prompt
            if take := n_prompt if reused > n_prompt else min(reused, (n_prompt - 1) // CHUNK * CHUNK):
                scheduler.placed(ticket, take)
                if take == n_prompt:
                    self.undecoded.add(ticket)
                    self.token(ticket)
        scheduler.check()
        step = scheduler.step()
        self.steps.append(step)
        self.now += seconds
        if isinstance(step, Prefill):
            self.prefill(step, seconds)
        elif step is not None:
            self.decode(step.tickets, seconds)
        scheduler.check()
        return step is not None or bool(changes.leave or changes.admit)

    def note_admission(self, ticket: int, waiting: set[int]) -> None:
        own = self.clients[ticket]
        earlier = [t for t in waiting - set(self.admitted) if self.clients[t] == own and t < ticket and t in self.left]
        assert not earlier, "a client's requests begin in their order"
        self.admitted.append(ticket)
        queued = {self.clients[t] for t in self.scheduler.queue}
        self.overtaken[own] = 0
        for client in queued - {own}:
            self.overtaken[client] += 1
        for client in set(self.overtaken) - queued:
            self.overtaken[client] = 0
        assert max(self.overtaken.values()) <= PATIENCE + len(queued) + 1

    def prefill(self, step: Prefill, seconds: float) -> None:
        running = self.scheduler.running
        if any(request.phase == "decode" for request in running.values()):
            self.prompts_s += seconds
            self.chunk_s = max(self.chunk_s, seconds)
        allowed = self.prompt_share * (self.prompts_s + self.decodes_s) + self.chunk_s
        assert self.prompts_s <= allowed + 1e-6, "prompts take more than their share"
        assert not self.undecoded, "two prefill steps, and a stream has not decoded between them"
        assert len({ticket for ticket, _ in step.parts}) == len(step.parts) > 0
        assert sum(n for _, n in step.parts) <= self.room
        for ticket, n in step.parts:
            request = running[ticket]
            assert n > 0 and request.fed % CHUNK + n <= CHUNK
            assert request.fed + n == request.n_prompt or (request.fed + n) % CHUNK == 0, "only ends may cut a chunk"
            assert not request.alone or len(step.parts) == 1
        kin = [kin for ticket, _ in step.parts if (kin := running[ticket].kin) is not None]
        assert len(set(kin)) == len(kin), "the same prompt is fed twice"
        self.scheduler.prefilled(step.parts, seconds)
        self.undecoded = {ticket for ticket, request in running.items() if request.phase == "decode"}
        for ticket, _ in step.parts:
            if not running[ticket].left:
                self.token(ticket)

    def decode(self, tickets: tuple[int, ...], seconds: float) -> None:
        assert 0 < len(tickets) <= min(self.streams, self.scheduler.width_limit)
        for ticket in tickets:
            assert self.scheduler.running[ticket].phase == "decode"
            self.undecoded.discard(ticket)
        for ticket in tickets:
            self.token(ticket)
        self.decodes_s += seconds
        self.scheduler.decoded(tickets, seconds)

    def token(self, ticket: int) -> None:
        self.generated[ticket] += 1
        self.left[ticket] -= 1
        if not self.left[ticket]:
            self.scheduler.ended(ticket, self.now)
            self.end(ticket, "finished")

    def run(self, most: int = 100_000) -> None:
        for _ in range(most):
            if not self.work():
                return
        raise AssertionError("it never ends")


submits = st.tuples(
    st.just("submit"), st.sampled_from("abc"), st.integers(1, 5 * CHUNK), st.integers(1, 6),
    st.none() | st.integers(0, 20), st.booleans(), st.none() | st.integers(1, 3),
)  # fmt: skip
actions = st.one_of(
    submits,
    submits,
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("work"), st.integers(1, 6), st.sampled_from([0, 0, CHUNK, 3 * CHUNK])),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(actions, max_size=60), st.integers(1, 5), st.sampled_from([CHUNK, 3 * CHUNK]), st.integers(0, 6),
    st.none() | st.floats(0.05, 3.0), st.booleans(),
)  # fmt: skip
def test_everyone_ends_exactly_once(
    actions: list[Any], streams: int, room: int, max_queue: int, max_step_s: float | None, give_up: bool
) -> None:
    world = World(streams, room, max_queue, max_step_s)
    for action, *values in actions:
        if action == "submit":
            client, n_prompt, n, within, alone, kin = values
            deadline = None if within is None else world.now + within
            places = max_queue + max(0, min(streams, world.scheduler.width_limit) - len(world.scheduler.running))
            full = len(world.scheduler.queue) >= places
            try:
                world.submit(client, n_prompt, n, deadline=deadline, alone=alone, kin=kin)
            except Busy as busy:
                assert full and RETRY_S[0] <= busy.retry_after_s <= RETRY_S[1]
            else:
                assert not full
        elif action == "cancel":
            world.cancel(values[0])
        else:
            for _ in range(values[0]):
                world.work(0.1 * (1 + len(world.scheduler.running)), reused=values[1])
    world.scheduler.drain()
    with pytest.raises(Draining):
        world.submit()
    if give_up:
        world.scheduler.give_up()
    world.run()
    assert not world.left and set(world.ended.values()) <= {1} and len(world.ended) == len(world.clients)
    assert not world.scheduler.running and not world.scheduler.queue and not world.scheduler._clients


def test_a_long_prompt_puts_one_chunk_between_two_tokens() -> None:
    world = World(streams=3)
    world.submit("a", n=60)
    world.submit("b", n=60)
    for _ in range(4):
        world.work()
    world.submit("c", n_prompt=20 * CHUNK, n=1)
    world.steps.clear()
    for _ in range(40):
        world.work()
    kinds = [isinstance(step, Prefill) for step in world.steps]
    assert kinds == [True, False] * 20, "chunks and decode steps take turns"
    assert world.reasons[3] == "finished"


@pytest.mark.parametrize(("share", "decodes"), [(0.5, 8), (0.8, 2), (1.0, 1)])
def test_prompts_take_their_share_of_the_time(share: float, decodes: int) -> None:
    world = World(streams=2, prompt_share=share)
    world.submit("a", n=10**6)
    world.work()
    world.submit("b", n_prompt=20 * CHUNK, n=10**6)
    world.work(0.125)  # after a's own prompt, a token
    world.steps.clear()
    for _ in range(4 * (decodes + 1)):
        world.work(1.0 if isinstance(world.scheduler.step(), Prefill) else 0.125)
    kinds = [isinstance(step, Prefill) for step in world.steps]
    assert kinds == ([True] + [False] * decodes) * 4


def test_short_prompts_share_a_step() -> None:
    world = World(streams=4, room=2 * CHUNK)
    for n_prompt in (5, 7, 3, 1):
        world.submit(n_prompt=n_prompt)
    world.work()
    assert sorted(n for _, n in world.steps[0].parts) == [1, 3, 5, 7]


def test_one_of_several_equal_prompts_is_fed() -> None:
    world = World(streams=4, room=2 * CHUNK)
    for kin in (1, 1, 2, None):
        world.submit(n_prompt=3, kin=kin)
    world.work()
    assert sorted(ticket for ticket, _ in world.steps[0].parts) == [1, 3, 4]


def test_prompts_with_logprobs_are_fed_alone() -> None:
    world = World(streams=3, room=4 * CHUNK)
    tickets = [world.submit(n_prompt=2, alone=alone) for alone in (False, True, False)]
    world.work()
    world.work()
    world.work()
    parts = [{ticket for ticket, _ in step.parts} for step in world.steps if isinstance(step, Prefill)]
    assert {tickets[1]} in parts and {tickets[0], tickets[2]} in parts


def test_clients_share_the_streams() -> None:
    world = World(streams=4)
    for _ in range(40):
        world.submit("bulk", n=3)
    others = [world.submit(name, n=3) for name in ("x", "y", "z")]
    for _ in range(12):
        world.work()
    assert all(world.ended[ticket] for ticket in others), "forty of one client's do not hold up three others"
    world.run()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3))
def test_a_flood_of_new_clients_starves_nobody(streams: int, per_turn: int) -> None:
    world = World(streams)
    for _ in range(streams):
        world.submit("old", n=10**6)
    waiting = world.submit("old", n=1)
    world.work()
    for ticket in range(1, streams):
        world.cancel(ticket)
    for i in range(40 * (PATIENCE + 2)):
        if world.ended[waiting]:
            break
        if len(world.scheduler.queue) < 8:
            for j in range(per_turn):
                world.submit(f"new{i}.{j}", n=1)
        world.work()
        if streams == 1 and i == 3:
            world.cancel(1)
    assert world.ended[waiting], "it was passed over for ever"


def test_prompts_of_many_clients_take_turns() -> None:
    world = World(streams=3)
    long, other = world.submit("a", n_prompt=10 * CHUNK), world.submit("b", n_prompt=10 * CHUNK)
    short = world.submit("c", n_prompt=2)
    fed: list[int] = []
    for _ in range(12):
        world.work()
        if isinstance(world.steps[-1], Prefill):
            fed.append(world.steps[-1].parts[0][0])
    assert fed[:3] == [long, other, short]
    assert fed[3:7] == [long, other, long, other]


def test_a_clients_short_prompts_pass_a_long_one_so_often() -> None:
    world = World(streams=3)
    long = world.submit("a", n_prompt=4 * CHUNK, n=1)
    seen: list[int] = []
    for _ in range(200):
        while len(world.scheduler.queue) < 2:
            world.submit("a", n_prompt=CHUNK, n=1)
        world.work()
        if isinstance(world.steps[-1], Prefill):
            seen.append(world.steps[-1].parts[0][0])
        if world.ended[long]:
            break
    turns = [i for i, ticket in enumerate(seen) if ticket == long]
    assert len(turns) == 4 and turns[0] > 0, "the shorter ones go first"
    assert max(b - a for a, b in zip([-1, *turns], turns, strict=False)) <= PROMPT_PATIENCE + 1


def test_who_is_cancelled_leaves_at_once_and_its_stream_is_free() -> None:
    world = World(streams=1)
    first, second, third = world.submit(n_prompt=9 * CHUNK), world.submit(), world.submit()
    world.work()
    world.cancel(first)  # in mid-prefill
    world.cancel(second)  # in the queue
    world.work()
    assert world.reasons == {first: "cancelled", second: "cancelled"}
    assert list(world.scheduler.running) == [third]
    world.work()
    world.cancel(third)  # in mid-decode, or just ended
    world.run()
    assert not world.left
    assert not world.scheduler.cancel(first)


def test_deadlines_pass_in_every_phase() -> None:
    world = World(streams=2)
    decoding, feeding = world.submit(n=10**6, deadline=5.0), world.submit(n_prompt=99 * CHUNK, deadline=6.0)
    queued, patient = world.submit(deadline=3.0), world.submit(n=10**6, deadline=1e9)
    while world.now < 4:
        world.work()
    assert world.reasons == {queued: "deadline"}
    world.work()
    world.work()
    world.work()
    assert world.reasons[decoding] == world.reasons[feeding] == "deadline" and patient in world.scheduler.running


def test_a_full_queue_says_when_to_come_back() -> None:
    world = World(streams=2, max_queue=3)
    for _ in range(5):
        world.submit(n=4)
    with pytest.raises(Busy) as unknown:
        world.submit()
    for _ in range(8):
        world.work(seconds=20.0)
    with pytest.raises(Busy) as known:
        for _ in range(6):
            world.submit(n=4)
    assert known.value.retry_after_s > unknown.value.retry_after_s, "requests were seen to take longer"
    with pytest.raises(Busy) as many:
        world.scheduler.submit([Request(ticket, "", 1) for ticket in range(100, 104)], world.now)
    assert RETRY_S[0] <= known.value.retry_after_s < many.value.retry_after_s <= RETRY_S[1]
    assert len(world.clients) == len(world.ended) + len(world.scheduler.queue) + len(world.scheduler.running)


def test_draining_finishes_what_there_is_or_gives_up() -> None:
    world = World(streams=1)
    first, second = world.submit(n=2), world.submit(n=10**6)
    world.scheduler.drain()
    with pytest.raises(Draining):
        world.submit()
    for _ in range(20):
        world.work()
    assert world.reasons == {first: "finished"}
    world.scheduler.give_up()
    world.run()
    assert world.reasons == {first: "finished", second: "draining"}


# --- how wide a step may be


def decode_seconds(width: int) -> float:
    """A step whose reading grows less and less with its width: 10 ms at 1, 31 ms at 8, 63 ms at 32."""
    return 0.002 + 0.04 * (1 - 0.8**width) + 0.0006 * width


@settings(max_examples=30, deadline=None)
@given(st.floats(0.005, 0.2), st.integers(1, 64))
@example(0.031, 64)
def test_steps_keep_to_their_target(target: float, streams: int) -> None:
    world = World(streams, max_step_s=target, room=64 * CHUNK)
    for i in range(3 * streams):
        world.submit(f"client {i % 3}", n=100)
    widths: list[int] = []
    for _ in range(300):
        decoding = sum(request.phase == "decode" for request in world.scheduler.running.values())
        width = min(world.scheduler.width_limit, decoding)
        world.work(decode_seconds(max(1, width)))
        if world.steps[-1] is not None and not isinstance(world.steps[-1], Prefill):
            widths.append(len(world.steps[-1].tickets))
    best = max([w for w in range(1, streams + 1) if decode_seconds(w) <= target], default=1)
    late = widths[-60:]
    wide = [width for width in late if width > best]
    assert len(wide) <= 6, f"steps of {wide} streams, and {best} meet the target"
    assert max(late) >= max(1, int(0.7 * best)), f"at most {max(late)} streams, and {best} meet the target"


def test_without_a_target_all_decode_together() -> None:
    world = World(streams=7, room=64 * CHUNK)
    for _ in range(7):
        world.submit(n=5)
    world.run()
    assert max(len(step.tickets) for step in world.steps if step and not isinstance(step, Prefill)) == 7


def test_too_many_streams_for_the_target_take_turns() -> None:
    world = World(streams=8, max_step_s=1.0, room=64 * CHUNK)
    tickets = [world.submit(n=10**6) for _ in range(8)]
    while len(world.scheduler.running) < 8 or world.scheduler.width_limit < 8:
        world.work(0.01)
    for _ in range(5):
        world.work(3.0)  # the machine has become slow
    assert world.scheduler.width_limit < 8
    before = world.generated.copy()
    for _ in range(60):
        world.work(0.05 * world.scheduler.width_limit + 0.8)
    gained = [world.generated[ticket] - before[ticket] for ticket in tickets]
    assert min(gained) > 0 and max(gained) - min(gained) <= 1, f"not in turns: {gained}"

"""Decides who has a stream and what the next step feeds: events in, decisions out. Knows no model, clock or thread.

A step either prefills chunks of prompts or decodes a token of each of several streams.

    submit ──▶ queued ──admit──▶ prefill ──prefilled──▶ decode ──ended──▶ gone
                  └───────────────────┴── cancel, deadline ──┴──leaving──▲

What it promises, whatever comes (tests/server/test_scheduler.py):
- Between two prefill steps every decoding stream decodes: a prompt, however long, puts one chunk's step between two
  tokens of another stream and no more.
- While streams decode, prompts take `prompt_share` of the time at most, a chunk's step aside: then decode steps follow
  each other until they have had their share. So prompts, however many, slow streams to 1 - prompt_share of their speed.
- Of the clients whose requests wait, the one with the fewest streams is next, but none is passed over more than
  PATIENCE times plus once for each other client that waits as long. A client's requests begin in their order.
- Clients with prompts to feed take turns, a chunk each. Of a client's own prompts the one with the least left is next;
  none is passed over more than PROMPT_PATIENCE times in its client's turns, others that wait as long aside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sluice.server.jobs import Busy, Draining
from sluice.server.width import WidthLimit

PATIENCE = 16  # streams that go to others before a client whose request waits is next
PROMPT_SHARE = 0.5  # half: nobody's tokens take more than twice as long, and nobody's prompt
PROMPT_PATIENCE = 8  # chunks of later or shorter prompts of the same client before a prompt is next
DEFAULT_SERVICE_S = 10.0  # how long a request takes, before one has been seen to end
RETRY_S = (1.0, 600.0)  # the shortest and longest wait that Busy asks for
SMOOTHING = 0.2  # weight of the latest request in the mean

Phase = Literal["queued", "prefill", "decode"]
Reason = Literal["cancelled", "deadline", "draining"]


@dataclass(slots=True)
class Request:
    """What the scheduler knows of a job. `fed` of its `n_prompt` tokens are in its stream, none while it is queued.

    `alone`: its chunks share no step with others'. `kin`: requests with the same one have the same prompt, so that what
    one is fed can serve the others: only one of them is fed in a step. `deadline` is a time, None: none.
    """

    ticket: int
    client: str
    n_prompt: int
    deadline: float | None = None
    alone: bool = False
    kin: int | None = None
    phase: Phase = "queued"
    fed: int = 0
    submitted: float = 0.0
    admitted: float = 0.0
    passed: int = 0  # prompts of its client that were fed before it, since it could have been
    turn: int = 0  # when it decoded last, as a count of decode steps

    @property
    def left(self) -> int:
        """Prompt tokens to feed."""
        return self.n_prompt - self.fed


class Prefill(NamedTuple):
    """Feed each ticket's stream so many of its prompt's next tokens, in one step."""

    parts: tuple[tuple[int, int], ...]


class Decode(NamedTuple):
    """A token of each."""

    tickets: tuple[int, ...]


class Changes(NamedTuple):
    """Who leaves before the next step, with its stream if it has one; and who gets one, in this order."""

    leave: tuple[tuple[int, Reason], ...]
    admit: tuple[int, ...]


@dataclass(slots=True)
class _Client:
    """`passed`: streams that went to others while it waited, since its own last. `turn`: its last chunk's number."""

    passed: int = 0
    turn: int = 0


class Scheduler:
    """Requests by ticket, for an engine with `streams` streams, whose prefill steps take up to `room` tokens.

    Chunks end at multiples of `chunk` positions. `max_queue` requests wait at most. With `max_step_s` no more streams
    are admitted, or decode together, than decode steps within that time allow as measured so far; should more have been
    admitted by then, they take turns.
    `prompt_share` is the prompts' share of the time while streams decode; 1: a chunk and a decode step take turns.

    Call `changes` between steps, carry it out (`placed` tells what a new stream already holds), then `step`, and report
    what became of it with `prefilled`, `decoded` and `ended`. `step` itself changes nothing.
    """

    def __init__(
        self, streams: int, *, room: int, chunk: int, max_queue: int, max_step_s: float | None = None,
        prompt_share: float = PROMPT_SHARE,
    ) -> None:  # fmt: skip
        assert streams > 0 and chunk > 0 and room > 0 and max_queue >= 0 and 0 < prompt_share <= 1
        self.streams = streams
        self.room = room
        self.chunk = chunk
        self.max_queue = max_queue
        self.draining = False
        self.queue: dict[int, Request] = {}  # by ticket, oldest first
        self.running: dict[int, Request] = {}  # those with a stream, in the order they got it
        self._width = WidthLimit(streams, max_step_s)
        self._clients: dict[str, _Client] = {}  # of the requests there are
        self._leaving: dict[int, Reason] = {}
        self._owed: set[int] = set()  # streams that decode before the next prefill step
        self._owed_s = 0.0  # decode steps take so long before the next prefill step, as long as streams decode
        self._owed_each_s = (1 - prompt_share) / prompt_share  # for a second of prompts
        self._turn = 0  # chunks fed
        self._decodes = 0
        self._service_s: float | None = None  # how long requests have had their streams, smoothed

    @property
    def width_limit(self) -> int:
        """The most streams that may decode together now, `streams` at most."""
        return self._width.limit

    @property
    def most_together(self) -> int:
        """How many requests can be submitted together where there are no others: more never can."""
        return self.max_queue + self._width.least

    # -- events --

    def submit(self, new: Sequence[Request], now: float) -> None:
        """Queue all of `new`, or none: raises Draining, or Busy with an estimate when the queue can take more."""
        if self.draining:
            raise Draining
        places = self.max_queue + max(0, self.width_limit - len(self.running)) - len(self.queue)
        if len(new) > places:
            raise Busy(self.retry_after_s(len(new) - places))
        for request in new:
            assert request.ticket not in self.queue and request.ticket not in self.running
            request.submitted = now
            self.queue[request.ticket] = request
            self._clients.setdefault(request.client, _Client(turn=self._turn))

    def retry_after_s(self, n: int) -> float:
        """When about `n` places will have become free in the queue: as streams end, at the rate they have so far."""
        each = DEFAULT_SERVICE_S if self._service_s is None else self._service_s
        return min(max(n * each / self.width_limit, RETRY_S[0]), RETRY_S[1])

    def cancel(self, ticket: int) -> bool:
        """The request leaves with the next `changes`; False if there is none that hasn't ended or begun to leave."""
        return self._leave(ticket, "cancelled")

    def drain(self) -> None:
        """Take nothing new."""
        self.draining = True

    def give_up(self) -> None:
        """Everyone leaves with the next `changes`: what draining had to be finished in is over."""
        for ticket in [*self.queue, *self.running]:
            self._leave(ticket, "draining")

    def placed(self, ticket: int, fed: int) -> None:
        """A stream in prefill now holds the first `fed` tokens of its prompt, without a step having fed them."""
        request = self.running[ticket]
        assert request.phase == "prefill" and (fed % self.chunk == 0 or fed == request.n_prompt)
        request.fed = fed
        if not request.left:
            self._begin_decoding(request)
            self._owed.add(ticket)

    def _begin_decoding(self, request: Request) -> None:
        request.phase = "decode"
        request.turn = self._decodes

    def prefilled(self, parts: Iterable[tuple[int, int]], seconds: float) -> None:
        """A prefill step has fed `parts`, so many tokens of each ticket's prompt, and took `seconds`."""
        if self._decoding:
            self._owed_s += seconds * self._owed_each_s
        taken = set()
        for ticket, n in parts:
            taken.add(ticket)
            request = self.running[ticket]
            assert request.phase == "prefill" and 0 < n <= request.left
            request.fed += n
            self._turn += 1
            self._clients[request.client].turn = self._turn
            if not request.left:
                self._begin_decoding(request)
        clients = {self.running[ticket].client for ticket in taken}
        for request in self.running.values():
            if request.ticket in taken:
                request.passed = 0
            elif request.phase == "prefill" and request.client in clients:
                request.passed += 1
        self._owed = {request.ticket for request in self._decoding}

    def decoded(self, tickets: Sequence[int], seconds: float) -> None:
        """A decode step has brought each of `tickets` a token, and took `seconds`."""
        self._decodes += 1
        self._owed.difference_update(tickets)
        self._owed_s = max(0.0, self._owed_s - seconds)
        for ticket in tickets:
            if ticket in self.running:  # some may have ended with it
                self.running[ticket].turn = self._decodes
        self._width.took(len(tickets), seconds)

    def ended(self, ticket: int, now: float) -> None:
        """A request has its answer, or failed: its stream is free."""
        request = self.running[ticket]
        took = now - request.admitted
        self._service_s = took if self._service_s is None else self._service_s + SMOOTHING * (took - self._service_s)
        self._forget(ticket)

    # -- decisions --

    def changes(self, now: float) -> Changes:
        """Who leaves and who gets a stream. It counts as done."""
        for request in [*self.queue.values(), *self.running.values()]:
            if request.deadline is not None and request.deadline <= now:
                self._leave(request.ticket, "deadline")
        leave = tuple(self._leaving.items())
        for ticket, _ in leave:
            self._forget(ticket)
        self._leaving.clear()
        admit = []
        while self.queue and len(self.running) < self.width_limit:
            request = self._next_in_queue()
            del self.queue[request.ticket]
            request.phase, request.admitted = "prefill", now
            self.running[request.ticket] = request
            admit.append(request.ticket)
        return Changes(leave, tuple(admit))

    def step(self) -> Prefill | Decode | None:
        """What to do next; None: there is nothing to do."""
        due = self._owed or self._owed_s > 0
        if not due and (parts := self._chunks()):
            return Prefill(tuple(parts))
        decoding = self._decoding
        # those still owed a step are the ones that have waited longest, but for streams begun since
        decoding.sort(key=lambda request: (request.ticket not in self._owed, request.turn, request.ticket))
        chosen = decoding[: self.width_limit]
        return Decode(tuple(request.ticket for request in chosen)) if chosen else None

    # -- how --

    @property
    def _decoding(self) -> list[Request]:
        return [request for request in self.running.values() if request.phase == "decode"]

    def _leave(self, ticket: int, reason: Reason) -> bool:
        there = (ticket in self.queue or ticket in self.running) and ticket not in self._leaving
        if there:
            self._leaving[ticket] = reason
        return there

    def _forget(self, ticket: int) -> None:
        request = self.queue.pop(ticket, None) or self.running.pop(ticket)
        self._owed.discard(ticket)
        if not self._decoding:
            self._owed_s = 0.0
        self._leaving.pop(ticket, None)
        others = (*self.queue.values(), *self.running.values())
        if not any(other.client == request.client for other in others):
            del self._clients[request.client]

    def _next_in_queue(self) -> Request:
        """The first request of the client whose turn it is; the others' firsts have been passed over once more."""
        firsts: dict[str, Request] = {}
        for request in self.queue.values():
            firsts.setdefault(request.client, request)
        having = Counter(request.client for request in self.running.values())

        def rank(request: Request) -> tuple[int, int, int]:
            passed = self._clients[request.client].passed
            return (-passed if passed >= PATIENCE else 0, having[request.client], request.ticket)

        chosen = min(firsts.values(), key=rank)
        for client in firsts:
            self._clients[client].passed += 1
        self._clients[chosen.client].passed = 0
        return chosen

    def _chunks(self) -> list[tuple[int, int]]:
        """Chunks that share a step: the next client's next, then, in order, those of others that still fit."""
        waiting: dict[str, list[Request]] = {}
        for request in self.running.values():
            if request.phase == "prefill":
                waiting.setdefault(request.client, []).append(request)
        if not waiting:
            return []
        for own in waiting.values():
            own.sort(key=_prompt_rank)
        order = sorted(waiting, key=lambda client: (self._clients[client].turn, waiting[client][0].ticket))
        candidates = [own[i] for i in range(len(self.running)) for c in order if i < len(own := waiting[c])]
        first, *rest = candidates
        parts = [(first.ticket, self._chunk(first))]
        room = self.room - parts[0][1]
        kin = {first.kin} - {None}
        for request in () if first.alone else rest:
            if not request.alone and request.kin not in kin and (n := self._chunk(request)) <= room:
                parts.append((request.ticket, n))
                room -= n
                kin |= {request.kin} - {None}
        return parts

    def _chunk(self, request: Request) -> int:
        return min(request.left, self.chunk - request.fed % self.chunk)

    def check(self) -> None:
        """Assert every invariant; for tests, after each event."""
        assert not self.queue.keys() & self.running.keys()
        assert len(self.running) <= self.streams
        requests = [*self.queue.values(), *self.running.values()]
        assert {request.client for request in requests} == self._clients.keys()
        assert self._owed <= {request.ticket for request in self._decoding}
        assert self._owed_s >= 0 and (self._decoding or not self._owed_s)
        assert self._leaving.keys() <= self.queue.keys() | self.running.keys()
        for request in requests:
            assert (request.phase == "queued") == (request.ticket in self.queue)
            assert (request.phase == "decode") == (request.left == 0)


def _prompt_rank(request: Request) -> tuple[int, int, int]:
    """Which of a client's prompts is fed next: the least one comes first."""
    late = request.passed >= PROMPT_PATIENCE
    return (-request.passed, 0, request.ticket) if late else (0, request.left, request.ticket)

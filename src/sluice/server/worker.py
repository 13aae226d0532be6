"""Answers jobs with one engine: a thread that carries out what the scheduler decides. It knows neither HTTP nor text.

The thread alone touches the engine. Others only queue, cancel and ask, under one lock that is never held while a step
runs or a submitter is told something. Streams stay open, so that what an ended request leaves in the KV cache can serve
the next.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Literal, TypeVar

import numpy as np

from sluice.engine import Engine
from sluice.engine.workspace import CHUNK
from sluice.errors import ContextError, InputError, SluiceError
from sluice.server.continuation import Continuation
from sluice.server.heat import Heat
from sluice.server.jobs import (
    Busy,
    Cancelled,
    DeadlineExceeded,
    Draining,
    Event,
    Failed,
    Finished,
    Job,
    PromptLogprobs,
    ServiceState,
    StepState,
)
from sluice.server.scheduler import PROMPT_SHARE, Prefill, Reason, Request, Scheduler
from sluice.server.snapshot import RECENT_STEPS, Counts, Progress, snapshot, step_state
from sluice.server.streams import Streams

T = TypeVar("T")

DEFAULT_QUEUE = 256
COOLING_S = 1.0  # how often heat is let pass


@dataclass(slots=True)
class Entry:
    """A job from submission to its end. `at`: which stream it has. `feeding` feeds prompts that want log-probabilities.

    `muted`: its submitter can't be told anything more.
    """

    ticket: int
    job: Job
    on_event: Callable[[Event], None]
    submitted: float
    at: int = -1
    reused: int = 0
    admitted: float = 0.0
    first: float | None = None
    last: float = 0.0
    intervals: list[float] = field(default_factory=list)
    muted: bool = False
    continuation: Continuation | None = None
    feeding: Iterator[int | tuple[PromptLogprobs, np.ndarray]] | None = None

    @property
    def running(self) -> Continuation:
        assert self.continuation is not None, "the job has no stream"
        return self.continuation


class Worker:
    """A Service on `engine`, which it has for itself until `close`; a context manager.

    `max_queue` jobs wait at most for a stream. `max_step_s` bounds decode steps by their width, `prompt_share` what
    prompts take of the time while others generate (see Scheduler).
    """

    def __init__(
        self, engine: Engine, *, max_queue: int = DEFAULT_QUEUE, max_step_s: float | None = None,
        prompt_share: float = PROMPT_SHARE, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.engine = engine
        self._clock = clock
        self._began = clock()
        self._changed = Condition()
        self._scheduler = Scheduler(
            engine.config.streams, room=engine.chunk_room, chunk=CHUNK, max_queue=max_queue, max_step_s=max_step_s,
            prompt_share=prompt_share,
        )  # fmt: skip
        self._entries: dict[int, Entry] = {}  # of jobs that have not ended
        self._tickets = itertools.count(1)
        self._counts = Counts()
        self._give_up_at: float | None = None  # when draining ends
        self._fault: str | None = None  # why nothing is answered any more
        # the thread's own
        self._streams = Streams(engine)
        self._recent: deque[StepState] = deque(maxlen=RECENT_STEPS)
        self._heat = Heat(engine.store, engine.spec.moe_layers, engine.spec.n_expert, self._began)
        self._cooled = self._began
        # who asks for the state, and what they are given
        self._asked = False
        self._published = 0
        self._state = self._snapshot(self._began)
        self._thread = Thread(target=self._live, name="sluice-worker", daemon=True)
        self._thread.start()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- called from any thread

    def submit(self, job: Job, on_event: Callable[[Event], None]) -> int:
        return self.submit_all([job], lambda _, event: on_event(event))[0]

    def submit_all(self, jobs: Sequence[Job], on_event: Callable[[int, Event], None]) -> list[int]:
        for job in jobs:
            self._check(job)
        if len(jobs) > (most := self._scheduler.most_together):
            raise InputError(f"{len(jobs)} choices are asked for, and {most} may wait together: ask for fewer")
        with self._changed:
            if self._fault is not None:
                raise SluiceError(self._fault)
            now = self._clock()
            requests = [self._request(job, now) for job in jobs]
            try:
                self._scheduler.submit(requests, now)
            except (Busy, Draining):
                self._counts.refused += len(jobs)
                raise
            for i, (request, job) in enumerate(zip(requests, jobs, strict=True)):
                tell = lambda event, i=i: on_event(i, event)  # noqa: E731
                self._entries[request.ticket] = Entry(request.ticket, job, tell, now)
            self._counts.submitted += len(jobs)
            self._changed.notify_all()
        return [request.ticket for request in requests]

    @property
    def fault(self) -> str | None:
        return self._fault

    def cancel(self, ticket: int) -> None:
        with self._changed:
            if self._scheduler.cancel(ticket):
                self._changed.notify_all()

    def state(self, patience_s: float = 1.0) -> ServiceState:
        with self._changed:
            if self._thread.is_alive():
                seen, self._asked = self._published, True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._published > seen, patience_s)
            return self._state

    def close(self, drain_s: float | None = 0) -> None:
        with self._changed:
            self._scheduler.drain()
            if drain_s is not None:
                at = self._clock() + drain_s
                self._give_up_at = at if self._give_up_at is None else min(at, self._give_up_at)
            self._changed.notify_all()
        self._thread.join()

    def _check(self, job: Job) -> None:
        """Raise InputError or ContextError for a job that this model can't answer."""
        n_vocab, n_ctx = self.engine.spec.n_vocab, self.engine.n_ctx
        if min(job.prompt) < 0 or max(job.prompt) >= n_vocab:
            raise InputError(f"the prompt holds a token id outside of the vocabulary of {n_vocab}: give this model's")
        if len(job.prompt) > n_ctx:
            raise ContextError(
                f"the prompt has {len(job.prompt)} tokens and the context {n_ctx}: shorten it, or serve with more --ctx"
            )
        n_known = self.engine.tokenizer.n_vocab
        if not all(0 <= id < n_known for id in job.logit_bias):
            raise InputError(f"logit_bias names a token id outside of the vocabulary of {n_known}: give this model's")

    def _request(self, job: Job, now: float) -> Request:
        deadline = None if job.deadline_s is None else now + job.deadline_s
        # what one of several with the same prompt is fed serves the others
        kin = None if job.echo_logprobs else hash(job.prompt)
        ticket = next(self._tickets)
        return Request(ticket, job.client, len(job.prompt), deadline, alone=job.echo_logprobs, kin=kin)

    # --- the thread

    def _live(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            self._collapse(error)
        finally:
            self._heat.close()
            self._streams.close()
            with self._changed:
                self._publish()

    def _turn(self) -> bool:
        """Whoever leaves leaves, whoever comes comes, then a step; False when all is over."""
        with self._changed:
            now = self._clock()
            if self._give_up_at is not None and now >= self._give_up_at:
                self._scheduler.give_up()
            changes = self._scheduler.changes(now)
        if now - self._cooled >= COOLING_S:
            self._heat.pass_time(now)
            self._cooled = now
        for ticket, reason in changes.leave:
            self._gone(self._entries[ticket], Failed(_error(reason, self._entries[ticket].job)))
        for ticket in changes.admit:
            self._admit(self._entries[ticket], now)
        with self._changed:
            step = self._scheduler.step()
            if self._asked:
                self._publish()
            if step is None:
                if not self._scheduler.queue and not self._scheduler.running:
                    if self._scheduler.draining:
                        return False
                    self._changed.wait_for(self._is_wanted)
                return True
        if isinstance(step, Prefill):
            self._prefill(step)
        else:
            self._decode([self._entries[ticket] for ticket in step.tickets])
        return True

    def _is_wanted(self) -> bool:
        return bool(self._scheduler.queue) or self._scheduler.draining or self._asked

    def _collapse(self, error: BaseException) -> None:
        """A fault in the thread itself: nobody waits for ever."""
        with self._changed:
            self._fault = f"the server's worker broke down ({_named(error)}): restart it"
            entries = list(self._entries.values())
            for kept in (self._entries, self._scheduler.queue, self._scheduler.running):
                kept.clear()
            self._counts.failures["error"] += len(entries)
        for entry in entries:
            failed = SluiceError(self._fault)
            failed.__cause__ = error
            self._tell(entry, Failed(failed))

    # --- streams

    def _admit(self, entry: Entry, now: float) -> None:
        """Give a job its stream, with the kept tokens it can begin with."""
        entry.admitted = now
        job = entry.job
        try:
            entry.at = self._streams.take([] if job.echo_logprobs else list(job.prompt))
            entry.continuation = Continuation(job, self._streams[entry.at])
        except Exception as error:
            self._ended(entry, Failed(_as_sluice_error(error)))
            return
        if job.echo_logprobs:
            entry.feeding = entry.continuation.feed_for_logprobs()
        elif entry.continuation.max_tokens < 1:
            entry.continuation.end()
            self._finish(entry)
            return
        self._took_over(entry)

    def _took_over(self, entry: Entry) -> None:
        """Note what a stream holds of its prompt, some of it without having been fed that."""
        n = len(entry.running.session.tokens)
        with self._changed:
            gained = n - self._scheduler.running[entry.ticket].fed
            if gained:
                self._scheduler.placed(entry.ticket, n)
                entry.reused += gained
                self._counts.reused_tokens += gained

    # --- steps

    def _prefill(self, step: Prefill) -> None:
        entries = [self._entries[ticket] for ticket, _ in step.parts]
        if entries[0].feeding is not None:
            self._feed(entries[0], entries[0].feeding)
            return
        # some that begin alike may have been fed since these were admitted
        behind = [entry for entry in entries if self._streams.catch_up(entry.at, entry.running.generation.prompt)]
        for entry in behind:
            self._took_over(entry)
        if behind:
            return  # the step is another now
        parts, ends = [], []
        for i, (entry, (_, n)) in enumerate(zip(entries, step.parts, strict=True)):
            prompt, session = entry.running.generation.prompt, entry.running.session
            fed = len(session.tokens)
            parts.append((session, prompt[fed : fed + n]))
            if fed + n == len(prompt):
                ends.append(i)
        began = self._clock()
        logits = self._step("prefill", entries, lambda: self.engine.prefill_step(parts, ends))
        if logits is None:
            return
        self._fed(step.parts, began)
        for row, i in enumerate(ends):
            for twin in self._twins(entries[i]):
                self._streams.copy(twin.at, entries[i].at)
                self._took_over(twin)
                self._advance(twin, logits[row])
            self._advance(entries[i], logits[row])

    def _twins(self, entry: Entry) -> list[Entry]:
        """Jobs with the same prompt that have a stream and have not been fed all of it: other choices, say."""
        running = self._scheduler.running.values()
        others = [self._entries[request.ticket] for request in running if request.phase == "prefill"]
        return [other for other in others if other.feeding is None and other.job.prompt == entry.job.prompt]

    def _feed(self, entry: Entry, feeding: Iterator[int | tuple[PromptLogprobs, np.ndarray]]) -> None:
        """A step of a prompt whose log-probabilities are wanted."""
        began = self._clock()
        fed = self._step("prefill", [entry], lambda: next(feeding))
        if fed is None:
            return
        assert isinstance(fed, int)
        n_prompt = len(entry.job.prompt)
        self._fed([(entry.ticket, fed - self._scheduler.running[entry.ticket].fed)], began)
        if fed < n_prompt:
            return
        logprobs, logits = next(feeding)  # type: ignore[misc]  # what comes last
        self._tell(entry, logprobs)
        if entry.running.max_tokens < 1:
            entry.running.end()
            self._finish(entry)
        else:
            self._advance(entry, logits)

    def _fed(self, parts: Sequence[tuple[int, int]], began: float) -> None:
        with self._changed:
            self._scheduler.prefilled(parts, self._clock() - began)
            self._counts.prompt_tokens += sum(n for _, n in parts)

    def _decode(self, entries: Sequence[Entry]) -> None:
        began = self._clock()
        sessions = [entry.running.session for entry in entries]
        ids = [entry.running.last_id for entry in entries]
        logits = self._step("decode", entries, lambda: self.engine.decode(sessions, ids))
        if logits is None:
            return
        for entry, row in zip(entries, logits, strict=True):
            self._advance(entry, row)
        with self._changed:
            self._scheduler.decoded([entry.ticket for entry in entries], self._clock() - began)

    def _step(self, phase: Literal["prefill", "decode"], entries: Sequence[Entry], run: Callable[[], T]) -> T | None:
        """What `run`, a step of the engine, returns; None if it raises, which is the end of all that took part."""
        ledger = self.engine.ledger[phase]
        before = copy(ledger)
        try:
            result = run()
        except Exception as error:
            for entry in entries:
                self._ended(entry, Failed(_as_sluice_error(error)))
            return None
        self._recent.append(step_state(phase, len(entries), ledger, before, self._clock()))
        return result

    def _advance(self, entry: Entry, logits: np.ndarray) -> None:
        """The next token of a job, by `logits` [n_vocab]."""
        try:
            events = entry.running.take(logits)
        except Exception as error:
            self._ended(entry, Failed(_as_sluice_error(error)))
            return
        now = self._clock()
        if entry.first is None:
            entry.first = now
        else:
            entry.intervals.append(now - entry.last)
        entry.last = now
        for event in events:
            self._counts.generated_tokens += event.id is not None
            self._tell(entry, event)
        if entry.running.finish_reason is not None:
            self._finish(entry)

    # --- ends

    def _finish(self, entry: Entry) -> None:
        generation = entry.running.generation
        reason = "stop" if generation.finish_reason == "stop" else "length"
        event = Finished(
            reason, generation.seed, len(entry.job.prompt), entry.reused, len(generation.tokens),
            entry.admitted - entry.submitted, None if entry.first is None else entry.first - entry.submitted,
            tuple(entry.intervals), self._clock() - entry.submitted,
        )  # fmt: skip
        self._ended(entry, event)

    def _ended(self, entry: Entry, event: Finished | Failed) -> None:
        """A job with a stream has its answer, or will not get one."""
        with self._changed:
            self._scheduler.ended(entry.ticket, self._clock())
        self._gone(entry, event)

    def _gone(self, entry: Entry, event: Finished | Failed) -> None:
        """The scheduler has let a job go: its stream is idle, and its submitter hears the last of it."""
        if entry.at >= 0:
            self._streams.give_back(entry.at)
        with self._changed:
            del self._entries[entry.ticket]
            if isinstance(event, Finished):
                self._counts.finished[event.reason] += 1
            else:
                self._counts.failures[_kind(event.error)] += 1
        self._tell(entry, event)

    def _tell(self, entry: Entry, event: Event) -> None:
        """Tell a submitter; one that fails to listen is not waited for."""
        if entry.muted:
            return
        try:
            entry.on_event(event)
        except Exception:
            entry.muted = True
            self.cancel(entry.ticket)

    # --- the state

    def _publish(self) -> None:
        """Make the state anew, under the lock."""
        self._state = self._snapshot(self._clock())
        self._asked = False
        self._published += 1
        self._changed.notify_all()

    def _snapshot(self, now: float) -> ServiceState:
        return snapshot(
            self.engine, self._scheduler, {ticket: _progress(entry) for ticket, entry in self._entries.items()},
            self._counts, now=now, began=self._began, recent=self._recent,
            kept_tokens=self._streams.kept_tokens, experts=self._heat.state(now), fault=self._fault,
        )  # fmt: skip


def _progress(entry: Entry) -> Progress:
    generated = 0 if entry.continuation is None else len(entry.continuation.generation.tokens)
    return Progress(entry.reused, generated, entry.job.max_tokens)


def _error(reason: Reason, job: Job) -> SluiceError:
    """Why the scheduler let a job go."""
    if reason == "cancelled":
        return Cancelled()
    return DeadlineExceeded(job.deadline_s) if reason == "deadline" else Draining()


def _kind(error: SluiceError) -> str:
    kinds = {Cancelled: "cancelled", DeadlineExceeded: "deadline", Draining: "draining"}
    return kinds.get(type(error), "error")


def _as_sluice_error(error: Exception) -> SluiceError:
    """What a submitter is told of an exception: Sluice's own as they are, others in one line."""
    if isinstance(error, SluiceError):
        return error
    wrapped = SluiceError(f"the request failed ({_named(error)}): this is a fault in the server, please report it")
    wrapped.__cause__ = error
    return wrapped


def _named(error: BaseException) -> str:
    said = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__

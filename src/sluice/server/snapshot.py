"""Puts a service's state together between two steps, from its parts. It only looks; it changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sluice.engine import Engine
from sluice.engine.ledger import PhaseLedger
from sluice.memory import page_cache_bytes, rss_bytes
from sluice.server.jobs import ExpertsState, RequestState, ServiceState, StepState, Totals
from sluice.server.scheduler import Request, Scheduler

RECENT_STEPS = 256
RATE_S = 5.0  # tokens a second are those of the last so many seconds


@dataclass(slots=True)
class Counts:
    """Totals as they grow; see there."""

    submitted: int = 0
    refused: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by reason
    failures: Counter[str] = field(default_factory=Counter)  # by kind
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0

    def totals(self) -> Totals:
        kinds = ("cancelled", "deadline", "draining", "error")
        return Totals(
            self.submitted, self.refused, self.finished["stop"], self.finished["length"],
            {kind: self.failures[kind] for kind in kinds},
            self.prompt_tokens, self.reused_tokens, self.generated_tokens,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Progress:
    """What the worker knows of a job beyond its request, in tokens; `max_tokens` as the job has it."""

    reused: int
    generated: int
    max_tokens: int | None


def step_state(
    phase: Literal["prefill", "decode"], width: int, after: PhaseLedger, before: PhaseLedger, at_s: float
) -> StepState:  # fmt: skip
    """A step that ended at `at_s`, from the phase's ledger `after` and `before` it."""
    return StepState(
        phase, at_s, width, after.tokens - before.tokens, after.wall_s - before.wall_s,
        after.compute_s - before.compute_s,
        after.wait_s - before.wait_s, after.bytes_read - before.bytes_read, after.io_busy_s - before.io_busy_s,
    )  # fmt: skip


def snapshot(
    engine: Engine, scheduler: Scheduler, progress: dict[int, Progress], counts: Counts, *, now: float, began: float,
    recent: Iterable[StepState], kept_tokens: int, experts: ExpertsState | None, fault: str | None,
) -> ServiceState:  # fmt: skip
    """The state at `now`. `progress` by ticket."""

    def states(requests: Iterable[Request]) -> tuple[RequestState, ...]:
        return tuple(_state(request, progress[request.ticket], now) for request in requests)

    steps = tuple(recent)
    return ServiceState(
        at_s=now,
        uptime_s=now - began,
        draining=scheduler.draining,
        streams=scheduler.streams,
        width_limit=scheduler.width_limit,
        max_queue=scheduler.max_queue,
        queue=states(scheduler.queue.values()),
        running=states(scheduler.running.values()),
        totals=counts.totals(),
        ledger={name: phase.as_dict() for name, phase in engine.ledger.items()},
        recent=steps,
        decode_tok_per_s=_rate(steps, now),
        kept_tokens=kept_tokens,
        slots=engine.plan.slots,
        slot_bytes=engine.plan.slot_bytes,
        slots_resident=sum(1 for _ in engine.store.cache.keys_resident()),
        budget_bytes=engine.plan.budget,
        rss_bytes=rss_bytes(),
        page_cache_bytes=page_cache_bytes(),
        experts=experts,
        fault=fault,
    )


def _state(request: Request, progress: Progress, now: float) -> RequestState:
    return RequestState(
        request.ticket, request.client, request.phase, request.n_prompt, request.fed, progress.reused,
        progress.generated, progress.max_tokens, now - request.submitted,
    )  # fmt: skip


def _rate(recent: Sequence[StepState], now: float) -> float | None:
    """Tokens decoded a second in the steps of the last RATE_S seconds; None if there were none."""
    late = [step for step in recent if step.at_s - step.wall_s > now - RATE_S]
    decoded = sum(step.tokens for step in late if step.phase == "decode")
    return decoded / (now - late[0].at_s + late[0].wall_s) if decoded and now > late[0].at_s - late[0].wall_s else None

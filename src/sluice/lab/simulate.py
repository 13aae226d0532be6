"""Replays a trace's demands through the engine's own cache and says what it hit; knows no machine and no time.

Each execution of a layer is cut into waves and acquired as the engine does it, and every read ends as soon as it was
issued: what a run that reads on demand only comes to, demand for demand.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sluice.errors import InputError
from sluice.experts.cache import ExpertCache
from sluice.experts.policies import POLICIES, Belady, Policy, make_policy
from sluice.experts.waves import Waves, waves
from sluice.lab.replay import Demands
from sluice.types import ExpertKey

Array = np.ndarray[Any, Any]
Progress = Callable[[float, float], None]

SIMULATED = (*POLICIES, "belady")
_STRIDE = 1 << 14  # executions from one report of progress to the next


@dataclass(frozen=True)
class Result:
    """What a cache came to. Rates of nothing are None; `tok_per_s` is, unless a model of the machine adds it."""

    policy: str
    capacity_slots: int
    capacity_share: float  # of all experts
    demands: int
    hits: int
    misses: int
    evictions: int
    hit_rate: float | None
    byte_hit_rate: float | None
    reads_per_token: float | None
    tok_per_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)


def simulate(
    demands: Demands, policy: str, n_slots: int, *, phase: str = "all", pinned: Collection[ExpertKey] | None = None,
    progress: Progress | None = None,
) -> Result:  # fmt: skip
    """`policy`, one of SIMULATED, with `n_slots` slots. The whole trace is replayed, `phase` says what is counted.

    `pinned` is the fixed set of the policy of that name, by default `hottest` of the trace itself.
    """
    misses = replay(demands, policy_for(demands, policy, n_slots, pinned), n_slots, progress)
    return result(demands, policy, n_slots, misses, phase)


def policy_for(
    demands: Demands, name: str, n_slots: int, pinned: Collection[ExpertKey] | None = None
) -> Policy:  # fmt: skip
    """A new policy by its name in SIMULATED. Raises InputError for another; see `simulate`."""
    if name == "belady":
        return Belady(demands.keys())
    if name not in POLICIES:
        raise InputError(f"unknown cache policy {name!r}; choose from {', '.join(SIMULATED)}")
    if pinned is None:
        pinned = hottest(demands, n_slots) if name == "pinned" else ()
    return make_policy(name, n_slots=n_slots, n_layers=demands.info.n_layers, pinned=pinned)


def hottest(demands: Demands, n_slots: int) -> list[ExpertKey]:
    """The experts demanded most, as many as leave room for the largest demand of a decode step in one layer.

    The lower layer and expert of equals first. Without decode steps the room is the model's top_k.
    """
    counts = np.bincount(demands.ids, minlength=len(demands.experts))
    decode = demands.counts[demands.decode]
    room = int(decode.max()) if len(decode) else demands.info.top_k
    ranked = np.argsort(-counts, kind="stable")[: max(0, n_slots - room)]
    return [demands.experts[i] for i in ranked.tolist()]


def replay(demands: Demands, policy: Policy, n_slots: int, progress: Progress | None = None) -> Array:
    """[executions] int32: misses of each, with a new cache of `n_slots` slots."""
    cache = ExpertCache(n_slots, policy)
    counters, resident = cache.counters, cache.resident
    bound = policy if isinstance(policy, Belady) else None
    misses: list[int] = []
    before = skipped = 0
    for i, execution in enumerate(demands):
        if progress is not None and i % _STRIDE == 0:
            progress(i, len(demands))
        keys = execution.keys
        if bound is not None and len(keys) > n_slots:
            skipped += _least(cache, bound, keys, execution.tick)
        else:
            demand(cache, waves(keys, n_slots, resident), execution.tick, scan=execution.scan)
        misses.append(counters.misses + skipped - before)
        before = counters.misses + skipped
    found = np.array(misses, np.int32)
    assert counters.evictions + skipped == _evictions(found, n_slots).sum()
    return found


def demand(cache: ExpertCache, plan: Waves, tick: int, *, scan: bool) -> None:
    """One execution of a layer: acquire `plan`'s groups as the engine does, their reads ending at once."""
    held: Sequence[ExpertKey] = ()
    for group in plan.groups:
        if held and not plan.overlap:
            cache.release(held)
            held = ()
        for read in cache.acquire(group, tick, scan=scan).submit:
            cache.complete(read)
        if held:
            cache.release(held)
        held = group
    cache.release(held)


def _least(cache: ExpertCache, policy: Belady, keys: Sequence[ExpertKey], tick: int) -> int:
    """Belady's bound for a demand that doesn't fit: what no way to cut it into waves does better than.

    What is resident hits; then of all there is, the experts used soonest stay. An absent one that isn't of these is a
    miss that leaves the slots alone, though a real cache must hold it for a moment; returns how many.
    """
    skipped = 0
    for key in sorted(keys, key=cache.resident, reverse=True):
        if cache.resident(key) or cache.n_free or policy.use_after_next(key) < policy.farthest():
            demand(cache, Waves([[key]], overlap=False), tick, scan=False)
        else:
            policy.skip(key)
            skipped += 1
    return skipped


def free_before(misses: Array, n_slots: int) -> Array:
    """[executions] int64: slots never used before each. A miss takes one as long as there is one, for good."""
    return np.maximum(0, n_slots - (np.cumsum(misses, dtype=np.int64) - misses))


def _evictions(misses: Array, n_slots: int) -> Array:
    """[executions]: misses that found no free slot."""
    return np.maximum(0, misses - free_before(misses, n_slots))


def result(demands: Demands, policy: str, n_slots: int, misses: Array, phase: str = "all") -> Result:
    """Sums up `misses` [executions] over those of `phase`."""
    mine = demands.of_phase(phase)
    counts, sizes = demands.counts[mine], demands.expert_bytes[mine]
    n, missed = int(counts.sum()), int(misses[mine].sum())
    n_bytes, missed_bytes = int(counts @ sizes), int(misses[mine] @ sizes)
    tokens = demands.tokens(phase)
    return Result(
        policy=policy,
        capacity_slots=n_slots,
        capacity_share=n_slots / demands.n_experts,
        demands=n,
        hits=n - missed,
        misses=missed,
        evictions=int(_evictions(misses, n_slots)[mine].sum()),
        hit_rate=(n - missed) / n if n else None,
        byte_hit_rate=(n_bytes - missed_bytes) / n_bytes if n_bytes else None,
        reads_per_token=missed / tokens if tokens else None,
    )

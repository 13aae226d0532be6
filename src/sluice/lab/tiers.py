"""Replays a trace through slots in a device's memory above a pool in RAM, by the engine's own rules. Copies nothing.

It stands for runs without prefetching and without uploads for one step, whose order depends on when reads end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from sluice.experts.cache import ExpertCache
from sluice.experts.policies import make_policy
from sluice.experts.tiers import UpperLevel, settle
from sluice.experts.waves import waves
from sluice.lab.replay import Demands, Execution
from sluice.lab.simulate import demand
from sluice.types import ExpertKey

Array = np.ndarray[Any, Any]


class TierSlots(NamedTuple):
    """Slots on a device that the experts of `layers`, all of one size, share."""

    layers: Sequence[int]
    slots: int


@dataclass(frozen=True)
class TierCounts:
    """Of each execution, [executions] int32: demands met on the device, in RAM, and read; copies up and down."""

    above: Array
    hits: Array
    misses: Array
    promotions: Array
    demotions: Array

    def only(self, mine: Array) -> TierCounts:
        """Some of the executions, by a mask."""
        return TierCounts(*(getattr(self, each.name)[mine] for each in fields(self)))


def replay_tiers(demands: Demands, groups: Sequence[TierSlots], slots: int, policy: str) -> TierCounts:
    """A new pool of `slots` in RAM, and new slots above it, both with `policy`, by its name among the engine's."""
    n_layers = demands.info.n_layers
    below = ExpertCache(slots, make_policy(policy, n_slots=slots, n_layers=n_layers))
    levels: dict[int, UpperLevel] = {}
    for group in groups:
        if group.slots:
            level = UpperLevel(group.slots, make_policy(policy, n_slots=group.slots, n_layers=n_layers))
            levels.update(dict.fromkeys(group.layers, level))
    found = [_execution(below, levels.get(each.layer), slots, each) for each in demands]
    return TierCounts(*(np.array(column, np.int32) for column in zip(*found, strict=True)))


def _execution(below: ExpertCache, level: UpperLevel | None, slots: int, execution: Execution) -> tuple[int, ...]:
    counters, keys, tick = below.counters, execution.keys, execution.tick
    above: list[ExpertKey] = []
    rising: list[ExpertKey] = []
    if level is not None:
        met, rising = level.meet(keys, tick, scan=execution.scan)
        above = list(met)
    rest = [key for key in keys if key not in set(above)]
    hits, misses = counters.hits, counters.misses
    if rest:
        demand(below, waves(rest, slots, below.resident), tick, scan=execution.scan)
    promotions = demotions = 0
    if level is not None:
        level.release(above)
        for key in rising:
            if not below.resident(key) or level.cache.resident(key):
                continue
            rise = level.rise(key, tick)
            if rise is None:
                break
            promotions += 1
            if (read := settle(level, below, rise)) is not None:
                below.complete(read)
                demotions += 1
            level.release([key])
    return len(above), counters.hits - hits, counters.misses - misses, promotions, demotions

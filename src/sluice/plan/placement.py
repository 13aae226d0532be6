"""Finds which experts to pin and how many slots to leave to a policy, by replaying a trace; knows no machine, no files.

How much to pin is found, not assumed. The trace is cut in time. Every share of the slots in SHARES is tried with the
experts that the first quarter demanded most, on the second quarter, and the one with the fewest misses is taken; with
the first half's experts it is then judged on the second half, beside none and all pinned. So no figure comes from
demands that the pins were chosen by, and the verdict from none that the share was. The plan itself pins what the whole
trace demanded most. All candidates start with a full pool, as a run with a plan does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from sluice.errors import InputError
from sluice.experts.cache import ExpertCache
from sluice.experts.policies import pinning
from sluice.experts.waves import waves
from sluice.lab.replay import Demands
from sluice.lab.simulate import demand
from sluice.types import ExpertKey

SHARES = (0.0, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1.0)  # of the slots that may be pinned
MIN_STEPS = 8  # of a trace, to be cut in four
_STRIDE = 1 << 13  # executions from one report of progress to the next

Progress = Callable[[float, float], None]


@dataclass(frozen=True)
class Outcome:
    """What `pins` pinned experts came to on a stretch of the trace."""

    pins: int
    demands: int
    misses: int
    decode_demands: int
    decode_misses: int

    @property
    def hit_rate(self) -> float:
        return 1 - self.misses / self.demands

    @property
    def decode_hit_rate(self) -> float | None:
        """None for a stretch without decode steps."""
        return 1 - self.decode_misses / self.decode_demands if self.decode_demands else None

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "pins": self.pins, "demands": self.demands, "misses": self.misses,
            "hit_rate": self.hit_rate, "decode_hit_rate": self.decode_hit_rate,
        }  # fmt: skip


@dataclass(frozen=True)
class Split:
    """What to do with `slots` slots, and why: outcomes by share on the second quarter, by name on the second half."""

    policy: str
    slots: int
    room: int  # slots that no share may pin
    pins: list[ExpertKey]  # the hottest first
    load: list[ExpertKey]  # what else to start with, the hottest last
    tried: list[Outcome]
    held_out: dict[str, Outcome]  # "planned", "none pinned", "all pinned"

    @property
    def expected(self) -> dict[str, float]:
        """Hit rates on the second half, as a plan file holds them."""
        return {
            "hit_rate": self.held_out["planned"].hit_rate,
            "none_pinned_hit_rate": self.held_out["none pinned"].hit_rate,
            "all_pinned_hit_rate": self.held_out["all pinned"].hit_rate,
        }


def find_split(
    demands: Demands, slots: int, *, policy: str = "lru", room: int | None = None, progress: Progress | None = None
) -> Split:
    """The split of `slots` with the fewest misses. `room` (by default the model's top_k) is always left to `policy`.

    Raises InputError for a trace that is too short to be cut, and for slots that leave nothing to choose.
    """
    room = demands.info.top_k if room is None else room
    if slots <= room:
        raise InputError(f"{slots} slots leave nothing to pin, {room} are needed for what a layer demands: raise --ram")
    quarters = _cut(demands, 4)
    halves = _cut(demands, 2)
    sizes = sorted({round(share * (slots - room)) for share in SHARES})
    total = len(sizes) * len(quarters[1]) + 3 * len(halves[1])
    done = 0

    def judge(fitted: Demands, part: Demands, size: int) -> Outcome:
        nonlocal done
        pins, load = chosen(fitted, slots, size)

        def report(n: int) -> None:
            if progress is not None:
                progress(done + n, total)

        misses = replay_placed(part, pins, load, slots, policy, report)
        done += len(part)
        mine, counts = part.decode, part.counts
        return Outcome(
            len(pins), int(counts.sum()), int(misses.sum()), int(counts[mine].sum()), int(misses[mine].sum())
        )  # fmt: skip

    tried = [judge(quarters[0], quarters[1], size) for size in sizes]
    best = min(range(len(sizes)), key=lambda i: tried[i].misses)  # of equals the one that pins least
    held_out = {
        "planned": judge(halves[0], halves[1], sizes[best]),
        "none pinned": judge(halves[0], halves[1], 0),
        "all pinned": judge(halves[0], halves[1], slots - room),
    }
    pins, load = chosen(demands, slots, sizes[best])
    return Split(policy, slots, room, pins, load, tried, held_out)


def chosen(demands: Demands, slots: int, size: int) -> tuple[list[ExpertKey], list[ExpertKey]]:
    """The `size` experts demanded most, the hottest first; and what fills `slots` up beside them, the hottest last.

    Of experts demanded equally the lower layer and expert comes first. What was never demanded is in neither.
    """
    counts = np.bincount(demands.ids, minlength=len(demands.experts))
    ranked = np.argsort(-counts, kind="stable")[: min(slots, int(np.count_nonzero(counts)))].tolist()
    experts = [demands.experts[i] for i in ranked]
    return experts[:size], experts[size:][::-1]


def replay_placed(
    demands: Demands, pins: Sequence[ExpertKey], load: Sequence[ExpertKey], slots: int, policy: str,
    report: Callable[[int], None] | None = None,
) -> np.ndarray:  # fmt: skip
    """[executions] int64: misses of each, in a pool that starts with `pins` and `load` as an engine with a plan."""
    cache = ExpertCache(slots, pinning(pins, policy, n_slots=slots, n_layers=demands.info.n_layers))
    for read in cache.preload((*reversed(pins), *load)):
        cache.complete(read)
    counters, misses, before = cache.counters, [], 0
    for i, execution in enumerate(demands):
        if report is not None and i % _STRIDE == 0:
            report(i)
        plan = waves(execution.keys, slots, cache.resident)
        demand(cache, plan, execution.tick, scan=execution.scan)
        misses.append(counters.misses - before)
        before = counters.misses
    return np.array(misses, np.int64)


def _cut(demands: Demands, n: int) -> list[Demands]:
    """`n` consecutive parts of whole steps, with about equally many demands. Raises InputError for too few steps."""
    starts = np.flatnonzero(np.diff(demands.step, prepend=-1))  # executions that open a step
    if len(starts) < MIN_STEPS:
        raise InputError(f"the trace has {len(starts)} steps, a plan needs {MIN_STEPS} and should have thousands")
    at = demands.offsets[starts]
    wanted = np.minimum(np.searchsorted(at, [len(demands.ids) * i // n for i in range(1, n)]), len(starts) - 1)
    inner = starts[wanted].tolist()
    bounds = [0, *inner, len(demands)]
    if min(np.diff(bounds)) < 1:
        raise InputError("the trace is one long step and little more: a plan needs a trace of many steps")
    return [_part(demands, first, end) for first, end in pairwise(bounds)]


def _part(demands: Demands, first: int, end: int) -> Demands:
    """Executions [first, end)."""
    offsets = demands.offsets[first : end + 1]
    columns = ("step", "layer", "decode", "n_rows", "n_tokens", "n_sequences", "token_demands")
    return replace(
        demands, ids=demands.ids[offsets[0] : offsets[-1]], offsets=offsets - offsets[0],
        **{name: getattr(demands, name)[first:end] for name in columns},
    )  # fmt: skip

"""What caches of every size would hit on a trace: LRU and a static set at all sizes, Belady's bound and others at some.

Knows no figures. How a cache behaves is the simulator's business (sluice.lab.simulate, sluice.lab.stack_distance).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from sluice.lab.replay import Demands
from sluice.lab.routes import Joined, Routes
from sluice.lab.simulate import simulate
from sluice.lab.stack_distance import LruStack
from sluice.trace import TraceReader
from sluice.types import ExpertKey

Array = np.ndarray[Any, Any]

# Of all experts; the first always, the others if there is time.
SHARES = (0.134, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8)
OTHERS = ("lfu", "lfru", "s3fifo", "arc")
BUDGET = 6_000_000  # demands replayed, all points together: some 15 s
STATIC, BOUND = "static", "belady"
_KEPT = 100  # points of a line that is known at every capacity, in JSON


class Line(NamedTuple):
    """Hits of one policy at ascending numbers of slots."""

    slots: Array  # [n]
    hits: Array  # [n]

    def at(self, slots: int) -> int | None:
        """Hits with exactly so many slots, if known."""
        i = int(np.searchsorted(self.slots, slots))
        return int(self.hits[i]) if i < len(self.slots) and self.slots[i] == slots else None

    def thinned(self) -> Line:
        """At most _KEPT points and the last."""
        step = -(-len(self.slots) // _KEPT)
        kept = np.unique(np.append(np.arange(0, len(self.slots), step), len(self.slots) - 1))
        return Line(self.slots[kept], self.hits[kept])


class Distances(NamedTuple):
    """Reuse distances: `counts[d]` demands of an expert when d others had been demanded since its last use."""

    counts: Array
    cold: int  # first uses

    def quantile(self, q: float) -> int | None:
        """The distance that a share `q` of the reuses doesn't exceed; None without reuses."""
        total = self.counts.sum()
        return int(np.searchsorted(np.cumsum(self.counts), q * total - 1e-9)) if total else None


@dataclass(frozen=True)
class Curves:
    """`lines` by policy. `static`: the experts used most in the whole trace, each read once, in all slots but top_k.

    `tokenwise`: the trace has no decode, so each of its tokens was taken as a step of its own. `lru_exact`: the
    engine's LRU would hit the same (sluice.lab.stack_distance).
    """

    n_all: int  # experts of the model
    top_k: int
    demands: int
    n_tokens: int
    distances: Distances
    lines: dict[str, Line]
    tokenwise: bool
    lru_exact: bool

    @property
    def usual(self) -> int:
        """Slots of the first of SHARES, which every policy was tried with."""
        return _slots(SHARES[0], self.n_all, self.top_k)

    def table(self) -> list[tuple[int, list[int | None]]]:
        """(slots, hits of each policy) at the capacities of the bound."""
        return [(n, [line.at(n) for line in self.lines.values()]) for n in self.lines[BOUND].slots.tolist()]


def curves(
    trace: Joined, routes: Routes, progress: Callable[[float, float], None] = lambda done, total: None
) -> Curves:
    """Replay a trace. `progress` is told of demands replayed, and how many there are to replay."""
    tokenwise = not routes.n_decode
    demands = tokenwise_demands(routes) if tokenwise else Demands.of(cast(TraceReader, trace))
    stack, n_all = LruStack(demands), demands.n_experts
    known = stack.hits[: n_all + 1]
    lru = np.concatenate([known, np.full(n_all + 1 - len(known), known[-1])])
    every = np.arange(n_all + 1)
    lines = {
        BOUND: Line(every[:0], every[:0]),
        "lru": Line(every, lru),
        STATIC: Line(every, _static(demands, routes.info.top_k)),
    }

    slots = list(dict.fromkeys(_slots(share, n_all, routes.info.top_k) for share in SHARES))
    n_demands = len(demands.ids)
    n_points = max(1, min(len(slots), BUDGET // max(n_demands, 1)))
    n_others = min(len(OTHERS), max(0, BUDGET // max(n_demands, 1) - n_points) // len(slots))
    jobs = [(BOUND, n) for n in sorted(slots[:n_points])]
    jobs += [(name, n) for name in OTHERS[:n_others] for n in sorted(slots)]
    found: dict[str, list[tuple[int, int]]] = {}
    for i, (name, n) in enumerate(jobs):
        found.setdefault(name, []).append((n, simulate(demands, name, n).hits))
        progress(i + 1, len(jobs))
    lines |= {name: Line(*np.array(points).T) for name, points in found.items()}

    counts = np.bincount(stack.distances, minlength=stack.never + 1)
    return Curves(
        n_all,
        routes.info.top_k,
        n_demands,
        demands.tokens(),
        Distances(counts[: stack.never], int(counts[stack.never])),
        lines,
        tokenwise,
        stack.exact,
    )


def _slots(share: float, n_all: int, top_k: int) -> int:
    return max(round(share * n_all), top_k)


def _static(demands: Demands, room: int) -> Array:
    """[1 + all experts]: hits of the experts demanded most, each read once, when `room` slots are left to the others.

    None of the others counts as a hit, unless all fit.
    """
    again = np.sort(np.bincount(demands.ids, minlength=len(demands.experts)))[::-1] - 1
    hits = np.full(demands.n_experts + 1, int(again.sum()))
    kept = np.cumsum(np.concatenate([np.zeros(room + 1, np.int64), again]))[: len(demands.experts)]
    hits[: len(kept)] = kept
    return hits


def tokenwise_demands(routes: Routes) -> Demands:
    """A trace's demands as if each token, in the order of sequences and positions, had been a step of its own."""
    n_expert = routes.info.n_expert
    order = np.lexsort((routes.layer, routes.token))
    token, layer = routes.token[order], routes.layer[order].astype(np.int64)
    experts = routes.experts[order].astype(np.int64)
    codes = np.sort(np.where(experts >= 0, experts + layer[:, None] * n_expert, -1), axis=1)
    used = codes >= 0
    used[:, 1:] &= codes[:, 1:] != codes[:, :-1]
    distinct, ids = np.unique(codes[used], return_inverse=True)
    n = used.sum(axis=1)
    one = np.ones(len(order), np.int32)
    return Demands(
        routes.info, [ExpertKey(*divmod(code, n_expert)) for code in distinct.tolist()], ids.astype(np.int32),
        np.concatenate([[0], np.cumsum(n)]), token, layer.astype(np.int16), one.astype(np.bool_), one, one, one,
        n.astype(np.int64),
    )  # fmt: skip

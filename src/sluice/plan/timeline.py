"""Goes through a step's layers with a clock for the main thread and a queue for the disk; knows costs, no experts.

A layer with experts is, for the main thread: its segment's arithmetic, Python, the arithmetic of the experts that are
there, then that of each absent one as it arrives. The disk brings one absent expert each `load_s`, those of the
earliest layer first. Without prefetching its queue is filled when the layer's router has spoken, so reads run under
that layer's resident experts alone. With it, what the predictor names (its `recall`) is asked for before: all of it
one layer ahead, the better half two. While both are busy, each keeps only a share of its speed: reading takes
processor time, of the host on a virtual disk, and arithmetic takes what reading would need (SPEC S10). A read into
memory that was never touched costs more, in the thread that begins it, in the load, or both.

With everything `beside` = 1, no prefetching, k experts of which m are absent, a layer takes

    segment + Python + max(k e, load + m e, m load + e),     e = one expert's arithmetic

which is max(arithmetic, bytes ÷ bandwidth) of SPEC S2, plus the one expert that can't overlap with its own read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BETTER_HALF = 0.5  # of what is predicted two layers ahead is worth a read


@dataclass(frozen=True)
class Costs:
    """Seconds each part of a step takes, alone."""

    segment_s: float  # arithmetic of a layer outside of its experts
    expert_s: float  # arithmetic of one expert
    layer_s: float  # Python a layer
    read_s: float  # Python an expert read
    step_s: float  # a step's Python outside of its layers
    load_s: float  # reading one expert
    compute_beside: float = 1.0  # share of its speed that arithmetic keeps while reading goes on
    read_beside: float = 1.0  # and the other way round
    fresh_host_s: float = 0.0  # what reading an expert into fresh memory costs the main thread more
    fresh_load_s: float = 0.0  # and what it takes longer


@dataclass
class Times:
    """What the main thread spent a step on, seconds. `reads`: experts read, those that nobody needed included.

    `fresh_s` is memory touched for the first time, or waiting for that: neither in `host_s` nor in `wait_s`.
    """

    compute_s: float = 0.0
    wait_s: float = 0.0
    host_s: float = 0.0
    fresh_s: float = 0.0
    reads: float = 0.0

    @property
    def wall_s(self) -> float:
        return self.compute_s + self.wait_s + self.host_s + self.fresh_s

    def add(self, other: Times) -> None:
        self.compute_s += other.compute_s
        self.wait_s += other.wait_s
        self.host_s += other.host_s
        self.fresh_s += other.fresh_s
        self.reads += other.reads


def step_times(
    needed: Sequence[float], absent: Sequence[float], costs: Costs, *, recall: float | None = None,
    needless: Sequence[float] | None = None, fresh: Sequence[float] | None = None,
) -> Times:  # fmt: skip
    """One step. `needed[i]` distinct experts run in the i-th layer, `absent[i]` of them must be read.

    `recall` is None without prefetching; with it, `needless[i]` experts are predicted wrongly and cost a read, by
    default none. `fresh[i]` is the share of a layer's reads that go into memory never touched, by default 0. Counts may
    be fractions: means over many steps.
    """
    run = _Run(costs, fresh or [0.0] * len(needed))
    asked = [0.0] * len(needed)  # of the absent experts, those whose reads were begun
    for i, (k, m) in enumerate(zip(needed, absent, strict=True)):
        run.layer = i
        run.compute(costs.segment_s)
        run.host(costs.layer_s)
        run.ask(i, m - asked[i])
        if recall is not None:
            for ahead, share in ((1, recall), (2, recall * BETTER_HALF)):
                if (j := i + ahead) < len(needed):
                    wanted = max(0.0, absent[j] * share - asked[j])
                    asked[j] += wanted
                    run.ask(j, wanted)
                    if ahead == 1 and needless is not None:
                        run.ask(j, needless[j], needless=True)
        run.compute((k - m) * costs.expert_s)
        left = m
        while left > 1e-9:
            one = min(left, 1.0)
            left -= one
            run.wait(i, left)
            run.compute(one * costs.expert_s)
        run.needless[i] = 0.0  # late guesses are given up
    run.compute(costs.segment_s)
    run.host(costs.step_s)
    return run.times


class _Run:
    """The main thread's times so far, and what the disk has still to do, in seconds of its own by layer."""

    def __init__(self, costs: Costs, fresh: Sequence[float]) -> None:
        self.costs = costs
        self.times = Times()
        self.fresh = fresh
        self.queue = [0.0] * len(fresh)
        self.needless = [0.0] * len(fresh)
        self.layer = 0  # none before it has anything queued, nor any that is more than two ahead

    def ask(self, layer: int, experts: float, *, needless: bool = False) -> None:
        """Queue reads; submitting and ending them costs Python."""
        (self.needless if needless else self.queue)[layer] += experts * self._load_s(layer)
        self.times.reads += experts
        self.host(experts * self.costs.read_s)
        touching_s = experts * self.fresh[layer] * self.costs.fresh_host_s
        self.times.fresh_s += touching_s
        self._serve(touching_s)

    def _load_s(self, layer: int) -> float:
        return self.costs.load_s + self.fresh[layer] * self.costs.fresh_load_s

    def host(self, seconds: float) -> None:
        self.times.host_s += seconds
        self._serve(seconds)

    def compute(self, seconds: float) -> None:
        """Arithmetic that takes `seconds` alone."""
        costs = self.costs
        beside = self._serve(seconds / costs.compute_beside, costs.read_beside)
        self.times.compute_s += beside + max(0.0, seconds - beside * costs.compute_beside)

    def wait(self, layer: int, left: float) -> None:
        """Until no more than `left` experts of a layer are still to come; it is the earliest that has any queued."""
        load_s = self._load_s(layer)
        more_s = self.queue[layer] - left * load_s
        if more_s > 0:
            self.queue[layer] = left * load_s
            plain_s = more_s * self.costs.load_s / load_s
            self.times.wait_s += plain_s
            self.times.fresh_s += more_s - plain_s

    def _serve(self, seconds: float, share: float = 1.0) -> float:
        """Let the disk read for `seconds` at a share of its speed; how long of that it was busy."""
        left = able = seconds * share
        for layer in range(self.layer, min(self.layer + 3, len(self.queue))):
            for queue in (self.queue, self.needless):
                done = min(queue[layer], left)
                queue[layer] -= done
                left -= done
        return seconds * (1 - left / able) if able else 0.0

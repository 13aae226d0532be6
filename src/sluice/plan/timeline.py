"""Goes through a step's layers with a clock for the main thread and a queue for the disk; knows costs, no experts.

A layer with experts is, for the main thread: its segment's arithmetic, Python, the arithmetic of the experts that are
there, then that of each absent one as it arrives. The disk brings one absent expert each `load_s`, those of the
earliest layer first. Without prefetching its queue is filled when the layer's router has spoken, so reads run under
that layer's resident experts alone. With it, what the predictor names (its `recall`) is asked for before: all of it
one layer ahead, the better half two. While both are busy, each keeps only a share of its speed: reading takes
processor time, of the host on a virtual disk, and arithmetic takes what reading would need (SPEC S10).

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


@dataclass
class Times:
    """What the main thread spent a step on, seconds. `reads`: experts read, those that nobody needed included."""

    compute_s: float = 0.0
    wait_s: float = 0.0
    host_s: float = 0.0
    reads: float = 0.0

    @property
    def wall_s(self) -> float:
        return self.compute_s + self.wait_s + self.host_s

    def add(self, other: Times) -> None:
        self.compute_s += other.compute_s
        self.wait_s += other.wait_s
        self.host_s += other.host_s
        self.reads += other.reads


def step_times(
    needed: Sequence[float], absent: Sequence[float], costs: Costs, *, recall: float | None = None,
    wrong_absent: float = 0.0,
) -> Times:  # fmt: skip
    """One step. `needed[i]` distinct experts run in the i-th layer, `absent[i]` of them must be read.

    `recall` is None without prefetching; with it, `wrong_absent` is the share of wrongly predicted experts that cost a
    read. Counts may be fractions: means over many steps.
    """
    run = _Run(costs, len(needed))
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
                    if ahead == 1:
                        run.ask(j, needed[j] * (1 - recall) * wrong_absent, needless=True)
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
    """The main thread's times so far, and what the disk has still to read, in experts by layer."""

    def __init__(self, costs: Costs, n_layers: int) -> None:
        self.costs = costs
        self.times = Times()
        self.queue = [0.0] * n_layers
        self.needless = [0.0] * n_layers
        self.layer = 0  # none before it has anything queued, nor any that is more than two ahead

    def ask(self, layer: int, experts: float, *, needless: bool = False) -> None:
        """Queue reads; submitting and ending them costs Python."""
        (self.needless if needless else self.queue)[layer] += experts
        self.times.reads += experts
        self.host(experts * self.costs.read_s)

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
        more = self.queue[layer] - left
        if more > 0:
            self.queue[layer] = left
            self.times.wait_s += more * self.costs.load_s

    def _serve(self, seconds: float, share: float = 1.0) -> float:
        """Let the disk read for `seconds` at a share of its speed; how long of that it was busy."""
        able = seconds * share / self.costs.load_s if self.costs.load_s else 0.0  # experts
        left = able
        for layer in range(self.layer, min(self.layer + 3, len(self.queue))):
            for queue in (self.queue, self.needless):
                done = min(queue[layer], left)
                queue[layer] -= done
                left -= done
        return seconds * (1 - left / able) if able else 0.0

"""Predicts how fast a model runs at a pool size, from a machine's profile and how many experts are absent.

The source is SPEC S2 (bytes ÷ bandwidth of the slowest tier) and S10 (a load costs a + b × cold); timeline.py says how
arithmetic, reads and Python overlap within a step, and this module what each of them costs:

    arithmetic   as measured on this model, at one column and at the width of a prompt chunk
    reading      absent experts × load_b_s, scaled by plain reading now ÷ plain reading when the profile was taken
    fresh memory the reads into slots never used × what first touches were measured to cost
    Python       as measured, a layer, a read and a token
    contention   the shares of their speed that arithmetic and reading keep beside each other, as measured

It knows no files, no clock and no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np

from sluice.plan.profile import MachineProfile, PromptCost, StepCost
from sluice.plan.timeline import Costs, Times, step_times
from sluice.plan.workload import Absences, Ahead, ahead, draw, on_demand

MAX_STEPS = 128  # of a phase are gone through; more are sampled evenly
DRAWN_STEPS = 32  # where only a mean is known
MEMORY_BOUND = 0.6  # of the memory's bandwidth: arithmetic that reads weights that fast is held back by it


@dataclass(frozen=True)
class Prediction:
    """A phase's speed and what its time goes on, seconds a step: compute + wait + host + fresh.

    `fresh_s` goes on memory that is touched for the first time. A ledger has it in its host_s, or in its wait_s where
    threads read.
    """

    tok_per_s: float
    compute_s: float
    wait_s: float
    host_s: float
    fresh_s: float
    read_s: float  # what its reads take, alone and one after the other
    bytes_per_step: float
    bottleneck: str  # disk, memory, arithmetic, Python or fresh memory

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def predict_decode(
    profile: MachineProfile, absences: Absences, *, prefetch: bool = False, disk: float = 1.0
) -> Prediction | None:
    """Decode of one stream. `prefetch`: with reads ahead, as the engine does them where the profile has that.

    `disk` is how fast plain reading is now, relative to the profile. None without steps.
    """
    recall = profile.recall if prefetch and profile.prefetch is not None else None
    reads = _reads(profile, absences, recall)
    costs = _step_costs(profile, decode_cost(profile, prefetch), disk)
    total, n = Times(), 0
    for i in _rows(len(absences.needed)):
        total.add(_step(absences, reads, i, costs, recall))
        n += 1
    return _prediction(profile, total, n, n, costs) if n else None


def predict_prefill(
    profile: MachineProfile, absences: Absences, tokens: Sequence[int], *, prefetch: bool = False, disk: float = 1.0
) -> Prediction | None:
    """Prompt steps; `tokens[i]` is how many the i-th feeds. None without steps."""
    cost = decode_cost(profile, prefetch)
    recall = profile.recall if prefetch and profile.prefetch is not None else None
    reads = _reads(profile, absences, recall)
    experts_share = cost.experts_s / ((cost.experts_s + cost.segments_s) or 1.0)
    total, n_tokens, n, costs = Times(), 0, 0, None
    for i in _rows(len(tokens)):
        needed, width = absences.needed[i], tokens[i]
        prompt = prompt_cost(profile, width)
        layers = len(needed)
        costs = replace(
            _step_costs(profile, cost, disk),
            segment_s=prompt.compute_s * (1 - experts_share) / (layers + 1),
            expert_s=prompt.compute_s * experts_share / (float(needed.sum()) or 1),
            layer_s=prompt.host_s / layers,
            step_s=0.0,
        )
        total.add(_step(absences, reads, i, costs, recall))
        n_tokens, n = n_tokens + width, n + 1
    return _prediction(profile, total, n, n_tokens, costs) if costs is not None else None


def predict_counters(
    profile: MachineProfile, counters: Mapping[str, Any], *, slots: int, prefetch: bool = False, disk: float = 1.0
) -> Prediction | None:
    """What a decode phase with these ledger entries should have run at. None for one without steps.

    Of the ledger it uses how many demanded experts were read, on demand or ahead, how many reads evicted nothing, and
    how many steps there were; which layers they fell in is drawn at random.
    """
    if not counters["steps"]:
        return None
    absent = counters["misses"] + counters["prefetch_used"]
    share = min(1.0, absent / (counters["demands"] or 1))
    all_experts = profile.moe_layers * profile.n_expert
    fresh = max(0, counters["reads"] - counters["evictions"]) / counters["steps"]
    drawn_steps = drawn(profile, share, absent_share=max(0.0, 1 - slots / all_experts), fresh=fresh)
    return predict_decode(profile, drawn_steps, prefetch=prefetch, disk=disk)


def drawn(
    profile: MachineProfile, share: float, *, absent_share: float, fresh: float = 0.0, steps: int = DRAWN_STEPS
) -> Absences:
    """Steps of a token each whose experts are absent with probability `share`, independently; the same every time.

    The first reads, `fresh` a step in the mean, go into slots never used.
    """
    needed, absent = draw(profile.moe_layers, profile.top_k, share, steps)
    before = np.cumsum(absent.sum(axis=1)) - absent.sum(axis=1)
    return Absences(needed, absent, absent_share, np.maximum(0.0, fresh * steps - before))


def decode_cost(profile: MachineProfile, prefetch: bool) -> StepCost:
    return profile.prefetch if prefetch and profile.prefetch is not None else profile.demand


def prompt_cost(profile: MachineProfile, tokens: int) -> PromptCost:
    """What a prompt step of `tokens` tokens costs: on the line through the two nearest widths that were measured.

    One of them may be the decode step.
    """
    demand = profile.demand
    one = PromptCost(1, demand.segments_s + demand.experts_s, demand.host_s, profile.token_experts)
    points = sorted({1: one, **{p.tokens: p for p in profile.prompts}}.values(), key=lambda p: p.tokens)
    if len(points) == 1:
        return PromptCost(tokens, tokens * one.compute_s, tokens * one.host_s, one.experts)
    compute_s, host_s, experts = (time_on_line(points, tokens, name) for name in ("compute_s", "host_s", "experts"))
    return PromptCost(tokens, compute_s, host_s, min(round(experts), profile.moe_layers * profile.n_expert))


class Width(Protocol):
    """Figures of a step of so many tokens."""

    @property
    def tokens(self) -> int: ...


def on_line(points: Sequence[Width], tokens: int, name: str) -> float:
    """The figure called `name` of a step of `tokens` tokens: on the line through the two nearest `points`, ascending.

    Of a single one, its own.
    """
    if len(points) == 1:
        return float(getattr(points[0], name))
    at = next((i for i, p in enumerate(points[1:-1], 1) if tokens <= p.tokens), len(points) - 1)
    low, high = points[at - 1], points[at]
    first, last = getattr(low, name), getattr(high, name)
    return first + (tokens - low.tokens) / (high.tokens - low.tokens) * (last - first)


def time_on_line(points: Sequence[Width], tokens: int, name: str) -> float:
    """The same of a figure that doesn't fall beyond the widest of `points`."""
    return max(on_line(points, tokens, name), on_line(points, min(tokens, points[-1].tokens), name))


def _reads(profile: MachineProfile, absences: Absences, recall: float | None) -> Ahead:
    return on_demand(absences) if recall is None else ahead(absences, recall, profile.top_k, profile.n_expert)


def _step(absences: Absences, reads: Ahead, i: int, costs: Costs, recall: float | None) -> Times:
    """The i-th step."""
    return step_times(
        absences.needed[i].tolist(), absences.absent[i].tolist(), costs, recall=recall,
        needless=reads.needless[i].tolist(), fresh=reads.fresh[i].tolist(),
    )  # fmt: skip


def _step_costs(profile: MachineProfile, cost: StepCost, disk: float) -> Costs:
    layers = profile.moe_layers
    return Costs(
        segment_s=cost.segments_s / (layers + 1),
        expert_s=cost.experts_s / profile.token_experts,
        layer_s=cost.host_s / layers,
        read_s=profile.host_read_s,
        step_s=profile.sampling_s,
        load_s=profile.load_b_s / disk,
        compute_beside=profile.compute_beside,
        read_beside=profile.read_beside,
        fresh_host_s=profile.fresh_host_s,
        fresh_load_s=profile.fresh_load_s,
    )


def _rows(n: int) -> list[int]:
    """At most MAX_STEPS of `n` steps, evenly: the middle of each part, as the first steps are like no others."""
    parts = min(n, MAX_STEPS)
    return [(2 * i + 1) * n // (2 * parts) for i in range(parts)]


def _prediction(profile: MachineProfile, total: Times, n: int, tokens: int, costs: Costs) -> Prediction:
    read_s = total.reads * costs.load_s
    return Prediction(
        tok_per_s=tokens / total.wall_s,
        compute_s=total.compute_s / n,
        wait_s=total.wait_s / n,
        host_s=total.host_s / n,
        fresh_s=total.fresh_s / n,
        read_s=read_s / n,
        bytes_per_step=total.reads * profile.expert_bytes / n,
        bottleneck=bottleneck(profile, total),
    )


def bottleneck(profile: MachineProfile, times: Times) -> str:
    """What the main thread spends most of its time on: waiting for the disk, arithmetic, Python, or fresh memory.

    Arithmetic that goes through weights nearly as fast as memory gives them is held back by memory.
    """
    spent = {"disk": times.wait_s, "arithmetic": times.compute_s, "Python": times.host_s, "fresh memory": times.fresh_s}
    most = max(spent, key=lambda name: spent[name])
    cost = profile.demand
    weights = profile.dense_bytes + profile.token_experts * profile.expert_bytes
    compute_s = cost.segments_s + cost.experts_s
    if most == "arithmetic" and compute_s and weights / compute_s > MEMORY_BOUND * profile.ram_bytes_per_s:
        return "memory"
    return most


def remedies(
    profile: MachineProfile, absences: Absences, *, prefetch: bool = False, disk: float = 1.0
) -> dict[str, float]:
    """Decode speed ÷ what it is, were one thing better: a disk or arithmetic twice as fast, memory for all experts.

    Where the pool is not full yet: what it comes to once it is. Memory for all experts has them all in it.
    """

    def speed(of: MachineProfile, disk: float, absences: Absences) -> float:
        predicted = predict_decode(of, absences, prefetch=prefetch, disk=disk)
        return predicted.tok_per_s if predicted else 0.0

    now = speed(profile, disk, absences)
    if not now:
        return {}
    halves = {
        name: replace(cost, segments_s=cost.segments_s / 2, experts_s=cost.experts_s / 2)
        for name in ("demand", "prefetch")
        if (cost := getattr(profile, name)) is not None
    }
    once_full = {"memory touched before": speed(profile, disk, replace(absences, free=0.0)) / now}
    return {
        "a disk twice as fast": speed(profile, 2 * disk, absences) / now,
        "arithmetic twice as fast": speed(replace(profile, **halves), disk, absences) / now,
        "memory for all experts": speed(profile, disk, absences.resident()) / now,
        **(once_full if np.any(absences.free) else {}),
    }

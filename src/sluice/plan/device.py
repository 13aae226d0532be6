"""Measures what a device makes of a model's steps, and predicts steps that are divided over it; divides nothing itself.

A token's step with no reads takes, with g layers on the device and all experts in RAM, a time that grows or falls in a
straight line from one layer to all of them; both ends are measured. Each demand that is met by an expert on the device
saves the same: the difference to a step whose experts are all there, divided by their number. What reads add is what
they add without a device (bandwidth.py). An expert that goes up or down costs a copy, as if nothing ran beside it.
Prompts are device_prompts.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from sluice.config import EngineConfig
from sluice.errors import InputError
from sluice.plan.bandwidth import decode_cost, predict_decode
from sluice.plan.device_prompts import PromptCosts, PromptRun, predict_prompts, prompt_costs, resident_s, run_prompt
from sluice.plan.probe import QUICK_PROMPT_S, STEPS, WARM_UP_STEPS, Check, Probe
from sluice.plan.profile import MachineProfile
from sluice.plan.workload import TierLoad

if TYPE_CHECKING:
    from sluice.engine import Engine

Opener = Callable[[EngineConfig], AbstractContextManager["Engine"]]
Prompts = dict[int, list[PromptRun]]  # by width
COPIES = 5
SLOW_WIDTH = 128  # tokens


@dataclass(frozen=True)
class DeviceCosts:
    """Seconds of a decode step that reads nothing, with all experts in RAM: on the processor, with one part of the
    model on the device, with `layers` of them; and what a demand met there saves, and a copy costs."""

    name: str
    layers: int  # with experts
    first_layers: int
    first_s: float
    all_s: float
    saved_s: float
    copy_s: float
    prompts: tuple[PromptCosts, ...] = ()

    def resident_s(self, layers: int, host_s: float) -> float:
        """A step with `layers` on the device, where one without takes `host_s`."""
        return resident_s(layers, self.first_layers, self.layers, host_s, self.first_s, self.all_s)

    @property
    def by_width(self) -> list[PromptCosts]:
        """Steps of one token and of prompts, ascending."""
        one = PromptCosts(1, self.first_s, self.all_s, self.saved_s, 0.0, 0.0)
        return [one, *(point for point in self.prompts if point.tokens > 1)]


@dataclass(frozen=True)
class Split:
    """One way to divide a model: `layers` with experts on the device, and what its slots and those in RAM will do."""

    layers: int
    load: TierLoad


def measure_costs(
    config: EngineConfig, opener: Opener, widths: Sequence[int], check: Check = lambda: None
) -> DeviceCosts:
    """Open the model three times with the device of `config`.

    `widths` are those of the prompts: no more than the context, and than SLOW_WIDTH where the device is so slow that
    they would take long. Raises InputError where it takes no layer.
    """
    everything = replace(config, gpu_layers=None, cpu_moe_layers=0)
    with opener(replace(everything, cpu_moe_layers=1 << 20)) as engine:
        whole = _measured(engine, lambda probe: _prompts_within(probe, widths), check)
    widths = list(whole.prompts)

    def prompts(probe: Probe) -> Prompts:
        return {width: run_prompt(probe, width, times=2) for width in widths}

    with opener(replace(everything, gpu_layers=1, cpu_moe_layers=1 << 20)) as engine:
        first = _measured(engine, prompts, check)
    with opener(everything) as engine:
        assert engine.device is not None
        name, near, copy_s = str(engine.device["name"]), _measured(engine, prompts, check), _copy_s(engine)
    by_width = tuple(
        prompt_costs(
            width, first.prompts[width][-1], whole.prompts[width][-1], near.prompts[width][0], near.prompts[width][-1],
            copy_s,
        )
        for width in widths
    )  # fmt: skip
    saved = (whole.step_s - near.step_s) / near.met if near.met else 0.0
    return DeviceCosts(name, whole.layers, first.layers, first.step_s, whole.step_s, saved, copy_s, by_width)


def _prompts_within(probe: Probe, widths: Sequence[int]) -> Prompts:
    """Prompts of `widths`, as far as the context and the device's speed allow."""
    most, found = probe.engine.n_ctx, Prompts()
    for width in sorted(widths):
        if (width := min(width, most)) not in found:
            found[width] = run_prompt(probe, width, times=2)
            if found[width][-1].seconds > QUICK_PROMPT_S:
                most = min(most, max(width, SLOW_WIDTH))
    return found


class _Measured(NamedTuple):
    """Layers with experts on the device, prompts by width, twice each, seconds of a decode step that reads nothing, and
    demands met there in it."""

    layers: int
    prompts: Prompts
    step_s: float
    met: float


def _measured(engine: Engine, prompts: Callable[[Probe], Prompts], check: Check) -> _Measured:
    facts = engine.device
    if facts is None:
        raise InputError(f"the device takes nothing of this model ({'; '.join(engine.notes) or 'none is there'})")
    probe = Probe(engine, check)
    probe.fill()
    found_prompts = prompts(probe)
    if engine.device_pool is not None:  # the token's experts find room there
        engine.device_pool.clear()
    token = 1 % engine.spec.n_vocab
    with engine.session() as session:
        session.feed([token] * 8)
        list(probe.steps(session, token, WARM_UP_STEPS + engine.spec.top_k))  # rising takes a few
        spent = list(probe.steps(session, token, STEPS))
    found = [one for one in spent if one.waited_for == 0] or spent
    met = sum(one.device_hits for one in spent) / STEPS
    return _Measured(facts["moe_layers"], found_prompts, median(one.wall_s for one in found), met)


def _copy_s(engine: Engine) -> float:
    """Seconds of a copy of an expert, there or back."""
    pool, times = engine.device_pool, []
    if pool is None or not pool.groups:
        return 0.0
    for _ in range(COPIES):
        began = perf_counter()
        pool.copy_bytes(pool.groups[0].layers[0])
        times.append((perf_counter() - began) / 2)
    return median(times)


def predict_split_prompts(
    profile: MachineProfile, costs: DeviceCosts, split: Split, *, prefetch: bool, disk: float = 1.0
) -> dict[str, Any] | None:
    """Prompts of one stream, as `predict_prompts`."""
    layers = split.layers, costs.first_layers, costs.layers
    return predict_prompts(
        profile, costs.by_width, layers, costs.copy_s, split.load.prompts, prefetch=prefetch, disk=disk
    )


def predict_split(
    profile: MachineProfile, costs: DeviceCosts, split: Split, *, prefetch: bool, disk: float = 1.0
) -> dict[str, Any] | None:
    """Decode of one stream: tokens a second, and what a step's time goes on, in seconds. None without steps."""
    load = split.load
    with_reads = predict_decode(profile, load.absences, prefetch=prefetch, disk=disk)
    without = predict_decode(profile, load.absences.resident(), prefetch=prefetch, disk=disk)
    if with_reads is None or without is None:
        return None
    cost = decode_cost(profile, prefetch)
    resident = costs.resident_s(split.layers, cost.segments_s + cost.experts_s + cost.host_s)
    reads = 1 / with_reads.tok_per_s - 1 / without.tok_per_s
    copies = load.copies * costs.copy_s
    saved = load.above * costs.saved_s
    wall = max(1e-9, resident - saved + copies + reads + profile.sampling_s)
    parts = {"arithmetic": resident - saved, "disk": reads, "copies": copies}
    return {
        "tok_per_s": 1 / wall,
        "resident_s": resident - saved,
        "reads_s": reads,
        "copies_s": copies,
        "device_demands": load.above,
        "read_experts": load.read,
        "bytes_per_step": load.read * profile.expert_bytes,
        "copied_bytes_per_step": load.copies * profile.expert_bytes,
        "bottleneck": max(parts, key=lambda name: parts[name]),
    }

"""`sluice simulate`: what caches of any policy and size would have hit on a trace. Simulates nothing itself."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.options import Json, grouped
from sluice.cli.simulate_reroute import rules_of, simulate_rerouted
from sluice.cli.simulate_timed import TimedOptions, matching_profile, simulate_timed
from sluice.cli.terminal import emit, print_facts, print_table, progress_bar
from sluice.errors import InputError
from sluice.experts.policies import POLICIES

if TYPE_CHECKING:
    from sluice.lab.replay import Demands
    from sluice.lab.simulate import Result

NAMES = (*POLICIES, "belady")
PHASES = ("all", "prefill", "decode")
RANGE_STEPS = 12
DEFAULT_CAPACITY = "5%,13.4%,25%,50%"

Trace = Annotated[Path, typer.Argument(metavar="TRACE", help="A trace that `sluice trace` wrote.")]
Policies = Annotated[
    str | None,
    typer.Option("--policies", metavar="LIST", help=f"Of {', '.join(NAMES)}. Default: all; with --predictors or "
                 "--reroute, lru.", show_default=False),
]  # fmt: skip
Capacity = Annotated[
    str,
    typer.Option("--capacity", metavar="LIST", help="Slots (96), per cent of all experts (13.4%), or a range "
                 f"(5%..60%) in {RANGE_STEPS} equal steps; several with commas."),
]  # fmt: skip
Phase = Annotated[
    str, typer.Option("--phase", metavar="NAME", help="Count all, prefill or decode; all is replayed in any case.")
]
Profile = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="A machine profile of `sluice plan`, to predict speed.",
                 show_default=False),
]  # fmt: skip

Reroute = Annotated[
    str | None,
    typer.Option("--reroute", metavar="MARGINS[:J]", help="Simulate `run --reroute` at several margins, with commas, "
                 "on a trace that was recorded with scores.", show_default=False),
]  # fmt: skip

Speed = Callable[["Result", Any], float | None]  # of a result and its misses [executions]


@grouped
def simulate(
    *,
    trace: Trace,
    policies: Policies = None,
    capacity: Capacity = DEFAULT_CAPACITY,
    phase: Phase = "all",
    profile: Profile = None,
    reroute: Reroute = None,
    timed: TimedOptions,
    json: Json = False,
) -> int:
    """Replay a trace through cache policies at any capacity, as the engine would have: hits, misses, evictions.

    belady knows the future and bounds the others. pinned keeps the trace's own most demanded experts, as many as leave
    room for one layer's demand.

    --predictors replays decoding on a machine of given speed, with reads ahead of their demand: so they can come too
    late, or for nothing. The machine is --read-rate, --layer-ms and --expert-ms, or --profile.

    --reroute lets chosen experts that would have to be read give way to ones in memory that score at most a margin
    less, but for a token's J best (1), in decode steps: what is read then, and how far routing weights stray.
    """
    ahead = timed.predictors is not None
    rules = None if reroute is None else rules_of(reroute)
    if rules is not None and (ahead or profile is not None):
        raise InputError("--reroute is simulated without time: leave out --predictors and --profile, or --reroute")
    if policies is None:
        policies = "lru" if ahead or rules is not None else ",".join(NAMES)
    names = _names(policies)
    if phase not in PHASES:
        raise InputError(f"phase {phase!r} is unknown: choose from {', '.join(PHASES)}")
    if ahead and phase == "prefill":
        raise InputError("--predictors simulates decoding: leave out --phase prefill")
    wanted = [_capacity(item) for item in capacity.split(",")]
    from sluice.lab.replay import Demands
    from sluice.trace import TraceReader

    with TraceReader(trace) as reader:
        slots = capacities(wanted, len(reader.info.moe_layers) * reader.info.n_expert)
        demands = Demands.of(reader)
        if rules is not None:
            simulate_rerouted(reader, demands, names, slots, rules, phase, json=json)
            return 0
    if ahead:
        simulate_timed(demands, timed, names, slots, profile, json=json)
        return 0
    speed = None if profile is None else _speed(profile, demands, phase)
    with progress_bar("simulating") as progress:
        results = _simulated(demands, names, slots, phase, speed, progress)
    if json:
        emit({"results": [result.as_dict() for result in results]})
    else:
        _show(demands, results, phase, len(slots))
    return 0


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in NAMES:
            raise InputError(f"policy {name!r} is unknown: choose from {', '.join(NAMES)}")
    return names


# --- capacities

Amount = tuple[float, bool]  # a number, and whether it is per cent of all experts


def _amount(text: str) -> Amount:
    if not (match := re.fullmatch(r"\s*(?:(\d{1,9})|(\d{1,3}(?:\.\d{1,9})?)\s*%)\s*", text)):
        raise InputError(f"capacity {text.strip()!r}: write slots like 96, a share like 13.4%, or a range like 5%..60%")
    slots, share = match.groups()
    return (float(slots), False) if share is None else (float(share), True)


def _capacity(text: str) -> list[Amount]:
    first, dots, last = text.partition("..")
    if not dots:
        return [_amount(text)]
    if not (first.strip() and last.strip()):
        raise InputError(f"capacity {text.strip()!r}: a range has two ends, like 5%..60%")
    (low, percent), (high, other) = _amount(first), _amount(last)
    if percent != other or low >= high:
        raise InputError(f"capacity {text.strip()!r}: a range goes from less to more of one kind, like 5%..60%")
    return [(low + (high - low) * i / (RANGE_STEPS - 1), percent) for i in range(RANGE_STEPS)]


def capacities(wanted: Sequence[Sequence[Amount]], n_experts: int) -> list[int]:
    """Slots, each number once, for a model of `n_experts` experts. Raises InputError for 0 slots and more than that."""
    found: dict[int, None] = {}
    for number, percent in (amount for amounts in wanted for amount in amounts):
        slots = math.floor((number / 100 * n_experts if percent else number) + 0.5)
        if not 1 <= slots <= n_experts:
            unit = "%" if percent else " slots"
            raise InputError(f"a capacity of {number:g}{unit} is {slots} of {n_experts} experts: give 1 to {n_experts}")
        found[slots] = None
    return list(found)


# --- results


def _simulated(
    demands: Demands, names: Sequence[str], slots: Sequence[int], phase: str, speed: Speed | None,
    progress: Callable[[float, float], None],
) -> list[Result]:  # fmt: skip
    """One result for each policy at each capacity, a capacity's together."""
    from sluice.lab.simulate import policy_for, replay, result
    from sluice.lab.stack_distance import LruStack

    results: list[Result] = []
    stack: LruStack | None = None
    total = len(slots) * len(names)
    for n_slots in slots:
        for name in names:
            done = len(results)
            if name == "lru" and LruStack.covers(demands, n_slots):
                stack = stack or LruStack(demands)
                misses = stack.misses(n_slots)
            else:
                policy = policy_for(demands, name, n_slots)
                misses = replay(demands, policy, n_slots, lambda i, n, done=done: progress(done + i / n, total))
            found = result(demands, name, n_slots, misses, phase)
            results.append(found if speed is None else replace(found, tok_per_s=speed(found, misses)))
            progress(len(results), total)
    return results


def _speed(path: Path, demands: Demands, phase: str) -> Speed:
    """Predicts tokens a second on the machine of a profile: of decoding, or of prompts with that `phase`.

    None where the phase has no steps, or decodes several streams at once, which the machine model doesn't know.
    """
    from sluice.plan.bandwidth import predict_decode, predict_prefill
    from sluice.plan.workload import Absences

    profile = matching_profile(path, demands.info)
    kind = "prefill" if phase == "prefill" else "decode"
    mine = demands.of_phase(kind)
    single = bool((demands.n_tokens[mine] == 1).all())
    tokens = demands.by_step(demands.n_tokens, kind).max(axis=1, initial=0).tolist()

    def speed(found: Result, misses: Any) -> float | None:
        absences = Absences.of(demands, misses, found.capacity_slots, kind)
        if kind == "prefill":
            predicted = predict_prefill(profile, absences, tokens)
        else:
            predicted = predict_decode(profile, absences) if single else None
        return None if predicted is None else predicted.tok_per_s

    return speed


def _show(demands: Demands, results: Sequence[Result], phase: str, n_capacities: int) -> None:
    info, first = demands.info, results[0]
    n = len(results) // n_capacities
    print_facts(
        [
            ("model", info.name or info.architecture or "unnamed"),
            ("experts", f"{demands.n_experts}: {len(info.moe_layers)} layers × {info.n_expert}, {info.top_k} a token"),
            ("counted", "prefill and decode" if phase == "all" else phase),
            ("demands", f"{first.demands} of {demands.tokens(phase)} tokens"),
        ]
    )
    names = [found.policy for found in results[:n]]
    gap = {"lru", "belady"} <= set(names)
    by_capacity = [{r.policy: r for r in results[i : i + n]} for i in range(0, len(results), n)]

    def head(of: dict[str, Result]) -> list[str]:
        return [f"{of[names[0]].capacity_slots} ({of[names[0]].capacity_share:.1%})"]

    rates = [
        head(of) + [_percent(of[name].hit_rate) for name in names] + ([_gap(of["lru"], of["belady"])] if gap else [])
        for of in by_capacity
    ]
    print_table(["slots (share)", *names, *(["lru's gap to belady"] if gap else [])], rates, title="hit rate")
    reads = [head(of) + [_number(of[name].reads_per_token) for name in names] for of in by_capacity]
    print_table(["slots (share)", *names], reads, title="experts read a token")
    if any(found.tok_per_s is not None for found in results):
        speeds = [head(of) + [_number(of[name].tok_per_s) for name in names] for of in by_capacity]
        print_table(["slots (share)", *names], speeds, title="predicted tokens a second")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _gap(lru: Result, belady: Result) -> str:
    """In points of hit rate."""
    return "-" if lru.hit_rate is None or belady.hit_rate is None else f"{100 * (belady.hit_rate - lru.hit_rate):.1f}"

"""The part of `sluice simulate` with `--predictors`: what reading ahead would gain on a machine. Simulates nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.options import check_count
from sluice.cli.terminal import Progress, emit, print_facts, print_table, progress_bar
from sluice.config import format_size, parse_size
from sluice.errors import InputError
from sluice.experts.predictors import PREDICTORS, RECALL

if TYPE_CHECKING:
    from sluice.lab.machine import Speeds
    from sluice.lab.replay import Demands, Execution
    from sluice.lab.timed import TimedResult
    from sluice.plan.profile import MachineProfile
    from sluice.trace import TraceInfo

DEPTH = 4
MAX_DEPTH = 1 << 16
_STRIDE = 1 << 12  # executions from one report of progress to the next
_MACHINE = ("read_rate", "layer_ms", "expert_ms")


def _option(*names: str, metavar: str, help: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="Prefetch in time", show_default=False)


@dataclass(frozen=True)
class TimedOptions:
    """Which predictors, on what machine. None: the profile's, or a default."""

    predictors: Annotated[
        str | None,
        _option("--predictors", metavar="LIST", help=f"Simulate decoding with reads ahead by {', '.join(PREDICTORS)}."),
    ] = None
    read_rate: Annotated[
        str | None, _option("--read-rate", metavar="SIZE", help="Bytes a second that the disk reads.")
    ] = None
    layer_ms: Annotated[
        float | None, _option("--layer-ms", metavar="X", help="Arithmetic of a layer but for its routed experts.")
    ] = None
    expert_ms: Annotated[
        float | None, _option("--expert-ms", metavar="Y", help="Arithmetic of one expert that a layer executes.")
    ] = None
    latency_ms: Annotated[
        float | None, _option("--latency-ms", metavar="L", help="Latency of a read before its bytes come. Default 0.")
    ] = None
    depth: Annotated[int | None, _option("--depth", metavar="N", help=f"Reads under way at once. Default {DEPTH}.")] = (
        None
    )
    recall: Annotated[
        float | None,
        _option("--recall", metavar="R", help=f"Of the next layer's experts, what next-layer names. Default {RECALL}."),
    ] = None

    def __post_init__(self) -> None:
        if self.predictors is None:
            for each in fields(self):
                if getattr(self, each.name) is not None:
                    raise InputError(f"{_flag(each.name)} is for reads ahead: name --predictors too, or leave it out")
        for name in ("layer_ms", "expert_ms", "latency_ms"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise InputError(f"{_flag(name)} {value:g} is no time: give milliseconds of at least 0")
        if self.recall is not None and not 0 <= self.recall <= 1:
            raise InputError(f"--recall {self.recall:g} can't be: give 0 to 1")
        if self.depth is not None and check_count("--depth", self.depth) > MAX_DEPTH:
            raise InputError(f"--depth {self.depth} is too large: give at most {MAX_DEPTH}")

    @property
    def names(self) -> list[str]:
        """The predictors, each once. Raises InputError."""
        names = list(dict.fromkeys(name.strip() for name in (self.predictors or "").split(",")))
        for name in names:
            if name not in PREDICTORS:
                raise InputError(f"predictor {name!r} is unknown: choose from {', '.join(PREDICTORS)}")
        return names


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def simulate_timed(
    demands: Demands, options: TimedOptions, policies: Sequence[str], slots: Sequence[int], profile: Path | None,
    *, json: bool,
) -> None:  # fmt: skip
    """Replay decoding for each capacity, policy and predictor, and print what each comes to. Raises InputError."""
    if not demands.decode.any():
        raise InputError("the trace has no decode steps, which --predictors simulates: record one that generates")
    names = options.names
    machine = None if profile is None else matching_profile(profile, demands.info)
    recall = options.recall
    if recall is None:
        recall = machine.recall if machine is not None and machine.recall is not None else RECALL
    speeds = {name: _speeds(options, machine, demands.info, name) for name in names}
    results: list[dict[str, Any]] = []
    combinations = [(n, policy, name) for n in slots for policy in policies for name in names]
    with progress_bar("simulating") as progress:
        for i, (n_slots, policy, name) in enumerate(combinations):
            executions = _shown(demands, progress, i, len(combinations))
            ahead, found = _replayed(demands, executions, policy, n_slots, name, recall, speeds[name])
            share = n_slots / demands.n_experts
            results.append(
                {"policy": policy, "predictor": name, "lead_layers": ahead, "capacity_slots": n_slots,
                 "capacity_share": share, **found.as_dict()}
            )  # fmt: skip
    if json:
        emit({"results": results})
    else:
        _show(demands.info, results, speeds[names[0]], recall)


def _replayed(
    demands: Demands, executions: Iterator[Execution], policy: str, n_slots: int, name: str, recall: float,
    speeds: Speeds,
) -> tuple[list[int], TimedResult]:  # fmt: skip
    """How many layers ahead the predictor guesses, and what its replay comes to."""
    from sluice.experts.predictors import make_predictor
    from sluice.lab.simulate import policy_for
    from sluice.lab.timed import TimedReplay, reserve

    info = demands.info
    predictor = make_predictor(name, n_layers=len(info.moe_layers), n_experts=info.n_expert, recall=recall)
    cache_policy = policy_for(demands, policy, n_slots)
    replay = TimedReplay(info, cache_policy, n_slots, predictor, speeds, reserve=reserve(demands))
    return list(predictor.ahead), replay.run(executions)


def _shown(demands: Demands, progress: Progress, done: int, total: int) -> Iterator[Execution]:
    """The executions, with progress of the `done`-th replay of `total`."""
    for i, execution in enumerate(demands):
        if i % _STRIDE == 0:
            progress(done + i / len(demands), total)
        yield execution


def matching_profile(path: Path, info: TraceInfo) -> MachineProfile:
    """The machine profile of PATH. Raises InputError where it is of another model than the trace."""
    from sluice.plan.profile import load

    profile = load(path)
    if profile.fingerprint and info.fingerprint and profile.fingerprint != info.fingerprint:
        raise InputError(f"{path}: the profile is of another model than the trace: give one of the same")
    for what, own, other in (
        ("layers with experts", profile.moe_layers, len(info.moe_layers)),
        ("experts a layer", profile.n_expert, info.n_expert),
    ):
        if own != other:
            raise InputError(f"{path}: the profile's model has {own} {what}, the trace's {other}: give one of the same")
    return profile


def _speeds(options: TimedOptions, profile: MachineProfile | None, info: TraceInfo, predictor: str) -> Speeds:
    """The machine: the profile's figures, and what options say instead. Raises InputError for one that lacks some."""
    from sluice.lab.machine import Speeds

    given: dict[str, Any] = {"depth": DEPTH if options.depth is None else options.depth}
    if profile is not None:
        from sluice.plan.bandwidth import decode_cost

        cost = decode_cost(profile, predictor == "next-layer")  # whose guesses are arithmetic too
        given |= {
            "read_rate": profile.expert_bytes / profile.load_b_s,
            "layer_s": cost.segments_s / info.n_layers,
            "expert_s": cost.experts_s / profile.token_experts,
            "step_s": profile.sampling_s,
            "layer_host_s": cost.host_s / info.n_layers,
            "read_host_s": profile.host_read_s,
            "compute_beside": profile.compute_beside,
            "read_beside": profile.read_beside,
        }
    elif missing := [_flag(name) for name in _MACHINE if getattr(options, name) is None]:
        raise InputError(f"--predictors needs a machine: give {' and '.join(missing)}, or --profile")
    if options.read_rate is not None:
        given["read_rate"] = parse_size(options.read_rate)
    for name in ("layer", "expert", "latency"):
        if (ms := getattr(options, f"{name}_ms")) is not None:
            given[f"{name}_s"] = ms / 1e3
    return Speeds(**given)


_HEADS = (
    "slots (share)", "policy", "predictor", "tok/s", "waiting", "hits", "late", "recall", "read/token", "ahead", "used",
    "too late", "wasted", "lead ms p10", "p50",
)  # fmt: skip


def _show(info: TraceInfo, results: Sequence[dict[str, Any]], speeds: Speeds, recall: float) -> None:
    first = results[0]
    print_facts(
        [
            ("model", info.name or info.architecture or "unnamed"),
            ("decoding", f"{first['tokens']} tokens in {first['steps']} steps, {first['demands']} demands"),
            (
                "machine",
                f"reads {format_size(round(speeds.read_rate))}/s, {speeds.depth} at once; "
                f"a layer {speeds.layer_s * 1e3:.3g} ms, an expert {speeds.expert_s * 1e3:.3g} ms",
            ),
            ("next-layer", f"recall {recall:.0%}"),
        ]
    )
    title = "ahead: reads issued before their demand; used: demanded later; too late: of those, still on their way then"
    print_table(_HEADS, [_row(result) for result in results], title=title)


def _row(result: dict[str, Any]) -> list[str]:
    wall = result["compute_s"] + result["wait_s"] + result["host_s"]
    lead = result["lead_ms"] or {"p10": None, "p50": None}
    return [
        f"{result['capacity_slots']} ({result['capacity_share']:.1%})",
        result["policy"],
        result["predictor"],
        _text(result["tok_per_s"], "{:.2f}"),
        _text(result["wait_s"] / wall if wall else None, "{:.0%}"),
        _text(result["hit_rate"], "{:.1%}"),
        _text(result["late_hits"] / result["demands"], "{:.1%}"),
        _text(result["recall_at_k"], "{:.1%}"),
        format_size(round(result["bytes_read"] / result["tokens"])),
        *(str(result[f"prefetch_{name}"]) for name in ("issued", "used", "late", "wasted")),
        _text(lead["p10"], "{:.2f}"),
        _text(lead["p50"], "{:.2f}"),
    ]


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)

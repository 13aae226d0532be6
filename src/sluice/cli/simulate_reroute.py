"""The part of `sluice simulate` with `--reroute`: what a margin would save of reading on a trace. Simulates nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sluice.cli.terminal import emit, print_facts, print_table, progress_bar
from sluice.config import parse_reroute
from sluice.errors import InputError
from sluice.experts.rerouting import Rerouting

if TYPE_CHECKING:
    from sluice.lab.replay import Demands
    from sluice.lab.rerouting import ReroutedResult
    from sluice.trace import TraceReader

MAX_MARGINS = 64
_HEADS = ("slots (share)", "policy", "margin", "hit rate", "misses", "read/token", "replaced", "agreement", "KL")


def rules_of(text: str) -> list[Rerouting]:
    """The rules of "MARGIN,MARGIN:J", each once; J holds for all. Raises InputError."""
    margins, colon, keep = text.partition(":")
    rules = dict.fromkeys(Rerouting(*parse_reroute(margin + colon + keep)) for margin in margins.split(","))
    if len(rules) > MAX_MARGINS:
        raise InputError(f"--reroute with {len(rules)} margins: give at most {MAX_MARGINS}")
    return list(rules)


def simulate_rerouted(
    reader: TraceReader, demands: Demands, policies: Sequence[str], slots: Sequence[int], rules: Sequence[Rerouting],
    phase: str, *, json: bool,
) -> None:  # fmt: skip
    """Replay the trace for each capacity, policy and rule, and print what each comes to. Raises InputError."""
    from sluice.lab.rerouting import simulate_rerouting

    if not demands.decode.any():
        raise InputError("the trace has no decode steps, which --reroute is about: record one that generates")
    with progress_bar("simulating") as progress:
        results = simulate_rerouting(reader, demands, policies, slots, rules, phase=phase, progress=progress)
    if json:
        emit({"results": [result.as_dict() for result in results]})
    else:
        _show(demands, results, rules[0].keep, phase)


def _show(demands: Demands, results: Sequence[ReroutedResult], keep: int, phase: str) -> None:
    info = demands.info
    print_facts(
        [
            ("model", info.name or info.architecture or "unnamed"),
            ("experts", f"{demands.n_experts}: {len(info.moe_layers)} layers × {info.n_expert}, {info.top_k} a token"),
            ("counted", "prefill and decode" if phase == "all" else phase),
            ("kept", f"the best {keep} of a token's experts" if keep else "none"),
        ]
    )
    rows = [
        [
            f"{one.capacity_slots} ({one.capacity_share:.1%})",
            one.policy,
            f"{one.margin:g}",
            _text(one.hit_rate, "{:.1%}"),
            str(one.misses),
            _text(one.reads_per_token, "{:.2f}"),
            str(one.substituted),
            _text(one.native_agreement, "{:.2%}"),
            _text(one.reroute_kl, "{:.3g}"),
        ]
        for one in results
    ]
    print_table(_HEADS, rows, title="agreement with the routers' choice, and KL of routing weights from it in nats")


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)

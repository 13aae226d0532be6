"""What `sluice plan` says of a device: how a model would be divided over it, RAM and disk, and how fast that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice.cli.inspect import format_mib
from sluice.cli.opening import open_engine
from sluice.cli.signals import deferred
from sluice.cli.terminal import note, print_facts, print_table
from sluice.config import EngineConfig, format_size
from sluice.errors import BudgetError

if TYPE_CHECKING:
    from sluice.engine import Engine
    from sluice.ggml import Library
    from sluice.plan.profile import MachineProfile
    from sluice.plan.workload import Workload

BAR = 40  # characters of a memory
SHADES = ("▓", "▒", "░", "·", " ")


def default_vram(library: Library, name: str) -> list[int]:
    """Budgets to plan for where none is given: quarters of what may be used of the device; none without a device."""
    from sluice.engine.devices import choose, memory_for

    device = choose(library, name)
    if device is None:
        return []
    most = memory_for(device, None)
    return [most * i // 4 for i in range(1, 5)]


def splits(
    path: Path, config: EngineConfig, budgets: Sequence[int], vram: Sequence[int], workload: Workload,
    profile: MachineProfile, *, prefetch: bool, disk: float,
) -> dict[str, Any]:  # fmt: skip
    """Each of `vram` with each of `budgets`: what goes where, and what is predicted. Measures the device first."""
    from sluice.engine import Engine
    from sluice.lab.tiers import TierSlots
    from sluice.memory import free_bytes
    from sluice.plan.device import Split, measure_costs, predict_split, predict_split_prompts
    from sluice.plan.measure import probe_config

    note("measuring the device with the model")
    with deferred() as stop:

        def opener(one: EngineConfig) -> Engine:
            return open_engine(path, one, stop)

        planned = Engine(path, replace(config, device="cpu"), plan_only=True)
        costs = measure_costs(
            replace(probe_config(planned, free_bytes()), device=config.device, vram=max(vram)), opener,
            [prompt.tokens for prompt in profile.prompts], stop.check,
        )  # fmt: skip
    rows: list[dict[str, Any]] = []
    for size in vram:
        for budget in budgets:
            try:
                engine = Engine(path, replace(config, ram=budget, vram=size), plan_only=True)
            except BudgetError as error:
                rows.append({"vram_bytes": size, "budget_bytes": budget, "refused": str(error)})
                continue
            facts = engine.device
            groups = [] if facts is None else [TierSlots(*one) for one in facts["groups"]]
            layers = 0 if facts is None else facts["moe_layers"]
            split = Split(layers, workload.tiers(groups, engine.plan.slots))
            needs = engine.plan.needs
            rows.append({
                "vram_bytes": size, "budget_bytes": budget, "slots": engine.plan.slots, "device": facts,
                "experts": len(engine.spec.moe_layers) * engine.spec.n_expert,
                "ram": {"dense": needs.dense, "kv": needs.kv, "slots": engine.plan.slots * engine.plan.slot_bytes,
                        "other": needs.fixed - needs.dense - needs.kv},
                "notes": engine.notes,
                "decode": predict_split(profile, costs, split, prefetch=prefetch, disk=disk),
                "prefill": predict_split_prompts(profile, costs, split, prefetch=prefetch, disk=disk),
            })  # fmt: skip
    return {"name": costs.name, "costs": asdict(costs), "splits": rows, **_worth(rows)}


def _worth(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Speed gained a gigabyte more of each memory, between the two largest budgets that were planned for."""
    return {
        f"a_gigabyte_of_{name}": _slope(rows, f"{key}_bytes") for name, key in (("vram", "vram"), ("ram", "budget"))
    }


def _slope(rows: Sequence[dict[str, Any]], key: str) -> float | None:
    other = "budget_bytes" if key == "vram_bytes" else "vram_bytes"
    known = [row for row in rows if row.get("decode")]
    most = max((row[other] for row in known), default=0)
    line = sorted((row[key], row["decode"]["tok_per_s"]) for row in known if row[other] == most)
    if len(line) < 2:
        return None
    (low, slow), (high, fast) = line[-2:]
    return (fast - slow) / ((high - low) / (1 << 30)) if high > low else None


_HEADS = ("--vram", "--ram", "layers there", "slots there", "slots in RAM", "of all", "met there", "read/token",
          "tok/s", "bottleneck", "prefill tok/s")  # fmt: skip


def show_splits(found: dict[str, Any]) -> None:
    """The splits as a table, the largest as a picture, and what a gigabyte more would bring."""
    table = []
    for row in found["splits"]:
        if "refused" in row:
            table.append([format_mib(row["vram_bytes"]), format_mib(row["budget_bytes"]), "refused", *["–"] * 8])
            continue
        facts, decode = row["device"] or {"moe_layers": 0, "slots": 0}, row["decode"]
        held = (facts["slots"] + row["slots"]) / row["experts"]
        table.append([
            format_mib(row["vram_bytes"]), format_mib(row["budget_bytes"]), str(facts["moe_layers"]),
            str(facts["slots"]), str(row["slots"]), f"{min(1.0, held):.1%}",
            *(["–"] * 4 if decode is None else [f"{decode['device_demands']:.1f}",
              format_size(round(decode["bytes_per_step"])), f"{decode['tok_per_s']:.2f}", decode["bottleneck"]]),
            "–" if row["prefill"] is None else f"{row['prefill']['tok_per_s']:.1f}",
        ])  # fmt: skip
    print_table(_HEADS, table, title=f"divided over {found['name']}, RAM and disk; predicted for one stream")
    whole = [row for row in found["splits"] if row.get("device")]
    facts = list(pictures(whole[-1])) if whole else []
    for name in ("vram", "ram"):
        if (gain := found[f"a_gigabyte_of_{name}"]) is not None:
            facts.append((f"a GiB more of {name.upper()}", f"{gain:+.2f} tok/s, from the last step of the table"))
    if facts:
        print_facts(facts)


def pictures(row: dict[str, Any]) -> list[tuple[str, str]]:
    """What fills a split's device and RAM, as bars."""
    there = row["device"]
    held = {"weights": there["weights_bytes"], "KV": there["kv_bytes"], "experts": there["slots_bytes"]}
    taken = there["bytes"] + there["slots_bytes"]  # planned for, not made: the slots are not among the bytes yet
    graphs, free = taken - sum(held.values()), max(0, there["budget_bytes"] - taken)
    ram = row["ram"]
    return [
        (there["name"], bar({**held, "graphs": graphs, "free": free})),
        ("RAM", bar({"weights": ram["dense"], "KV": ram["kv"], "experts": ram["slots"], "other": ram["other"]})),
    ]


def bar(parts: dict[str, int]) -> str:
    """Parts of a memory, in bytes, as a bar and its legend."""
    total = sum(parts.values()) or 1
    line, legend = "", []
    for shade, (name, n) in zip(SHADES, parts.items(), strict=False):
        line += shade * round(BAR * n / total)
        legend.append(f"{shade} {name} {format_size(n)}".strip())
    return f"{line}  {', '.join(legend)}"

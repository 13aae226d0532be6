"""`sluice plan --out`: finds what to pin within a budget and writes it as a plan file; simulates nothing itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice.cli.terminal import print_facts, print_table, progress_bar
from sluice.config import EngineConfig
from sluice.errors import InputError

if TYPE_CHECKING:
    from sluice.engine import Engine
    from sluice.plan.placement import Split
    from sluice.trace import TraceInfo

# What differs from one process to the next before a model is loaded. A plan that just fits here must fit there.
PROCESS_MARGIN = 8 << 20


def make_plan(path: Path, config: EngineConfig, trace: Path, out: Path, *, force: bool) -> dict[str, Any]:
    """Write the plan for a model within `config`'s budget; the JSON object that says what it is. Raises InputError."""
    from sluice.new_file import check_out
    from sluice.plan_file import MADE, Placement, write_plan

    if config.ram is None and config.expert_slots is None:
        raise InputError("a plan is for a budget: give --ram")
    check_out(out, force=force, keep=(path, trace), made=MADE)
    from sluice.engine import Engine
    from sluice.engine.placing import model_of

    engine = Engine(path, config, plan_only=True)  # before what would take memory that a run doesn't
    slots = planned_slots(engine)
    model = model_of(engine.file, engine.spec, engine.fingerprint)
    from sluice.lab.replay import Demands
    from sluice.plan.placement import find_split
    from sluice.trace import TraceReader

    with TraceReader(trace) as reader:
        check_trace(trace, reader.info, path, model)
        demands = Demands.of(reader)
    room = min(config.streams * engine.spec.top_k, engine.spec.n_expert)
    with progress_bar("planning") as progress:
        split = find_split(demands, slots, policy=engine.policy, room=room, progress=progress)
    plan = Placement(
        **model, slots=slots, policy=split.policy, pins=tuple(split.pins), load=tuple(split.load),
        expected=split.expected, source=f"sluice plan, from the trace {trace.name}",
    )  # fmt: skip
    write_plan(out, plan, force=force, keep=(*engine.file.paths, trace))
    return described(out, split)


def planned_slots(engine: Engine) -> int:
    """The slots that any run with the engine's configuration will have, at the least."""
    plan = engine.plan
    if engine.config.expert_slots is not None:
        return plan.slots
    all_slots = len(engine.spec.moe_layers) * engine.spec.n_expert
    fewer = 0 if plan.slots == all_slots else -(-PROCESS_MARGIN // plan.slot_bytes)
    return max(plan.slots - fewer, engine.spec.top_k)


def check_trace(trace: Path, info: TraceInfo, path: Path, model: dict[str, Any]) -> None:
    """Raise InputError, naming the difference, unless the trace was recorded on the model."""
    known = bool(info.fingerprint and model["fingerprint"])
    for name in ("moe_layers", "n_expert", *(("architecture", "fingerprint") if known else ())):
        if getattr(info, name) != model[name]:
            raise InputError(
                f"{trace}: recorded on another model than {path} (another {name}): give a trace of this one, or plan "
                "for the other"
            )


def described(out: Path, split: Split) -> dict[str, Any]:
    """A plan and why it is what it is, as one JSON object."""
    return {
        "path": str(out), "slots": split.slots, "room": split.room, "policy": split.policy,
        "pins": len(split.pins), "loaded": len(split.pins) + len(split.load),
        "tried": [one.as_dict() for one in split.tried],
        "held_out": {name: one.as_dict() for name, one in split.held_out.items()},
    }  # fmt: skip


def show_plan(plan: dict[str, Any]) -> None:
    """The same for people."""

    def rates(one: dict[str, Any]) -> list[str]:
        decode = one["decode_hit_rate"]
        return [f"{one['hit_rate']:.2%}", "–" if decode is None else f"{decode:.2%}"]

    heads = ["pinned", "share of the slots", "hit rate", "of decode"]
    rows = [[str(one["pins"]), f"{one['pins'] / plan['slots']:.1%}", *rates(one)] for one in plan["tried"]]
    print_table(heads, rows, title="tried: pins from the trace's first quarter, on its second")
    rows = [[name, str(one["pins"]), *rates(one)] for name, one in plan["held_out"].items()]
    print_table(["", "pinned", "hit rate", "of decode"], rows, title="judged: pins from the first half, on the second")
    print_facts(
        [
            ("plan", plan["path"]),
            ("slots", str(plan["slots"])),
            ("pinned", f"{plan['pins']}, the rest left to {plan['policy']}"),
            ("loaded at the start", str(plan["loaded"])),
        ]
    )

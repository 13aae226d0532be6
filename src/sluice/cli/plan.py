"""`sluice plan`: how fast a model will run here at which memory budget, what holds it back, and what would help."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.inspect import UNLIMITED, format_mib, memory_facts
from sluice.cli.machine import cpu_name
from sluice.cli.opening import load_ggml, open_engine, resolve_model
from sluice.cli.options import EngineOptions, Json, Model
from sluice.cli.plan_device import default_vram, show_splits, splits
from sluice.cli.plan_place import make_plan, show_plan
from sluice.cli.signals import deferred
from sluice.cli.terminal import emit, note, print_facts, print_table, progress_bar
from sluice.config import EngineConfig, format_size, parse_size, usable_cores
from sluice.errors import InputError
from sluice.experts.policies import AUTO, reads_ahead, suited

if TYPE_CHECKING:
    from sluice.engine import Engine
    from sluice.plan.profile import MachineProfile
    from sluice.plan.workload import Workload

Trace = Annotated[
    Path | None,
    typer.Option("--trace", metavar="TRACE", help="Routes of your own text (`sluice trace record`), to replay.",
                 show_default=False),
]  # fmt: skip
Budgets = Annotated[
    list[str] | None,
    typer.Option("--ram", metavar="SIZE", help="Budgets to predict, like 4G,8G; may be repeated. Default: a range.",
                 show_default=False),
]  # fmt: skip
Profile = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="The machine's profile: reused if it exists, else measured and "
                 "saved.", show_default=False),
]  # fmt: skip
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="PLAN", help="Write what to pin at --ram, by --trace, as a plan for --plan.",
                 show_default=False),
]  # fmt: skip
Force = Annotated[
    bool, typer.Option("--force", metavar="", help="Measure again and overwrite the profile; overwrite --out.")
]
Context = Annotated[
    int | None,
    typer.Option("--ctx", metavar="N", help="Positions of context, which take memory too.", show_default=False),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", help="Threads for arithmetic. Default: the cores.", show_default=False),
]
Kv = Annotated[str, typer.Option("--kv", metavar="TYPE", help="Type of the KV cache, which takes memory too.")]
Policy = Annotated[str, typer.Option("--policy", metavar="NAME", help="Cache policy that replays --trace.")]
NoPrefetch = Annotated[bool, typer.Option("--no-prefetch", metavar="", help="Predict runs that read nothing ahead.")]
Ggml = Annotated[
    str | None,
    typer.Option("--ggml", metavar="PATH", help="A folder with other ggml libraries.", show_default=False),
]
Device = Annotated[
    str,
    typer.Option("--device", metavar="NAME", help="Plan for a device too: auto, cpu for none, or a name that `sluice "
                 "doctor` lists."),
]  # fmt: skip
Vram = Annotated[
    list[str] | None,
    typer.Option("--vram", metavar="SIZE", help="Memory of the device to plan for, like 4G,6G. Default: quarters of "
                 "80 % of what is free.", show_default=False),
]  # fmt: skip
DRIFT_WORTH_TELLING = 0.1  # of a disk, since its profile was taken


def plan(
    model: Model = "demo",
    trace: Trace = None,
    ram: Budgets = None,
    profile: Profile = None,
    out: Out = None,
    policy: Policy = AUTO,
    no_prefetch: NoPrefetch = False,
    ctx: Context = None,
    threads: Threads = None,
    kv: Kv = "f16",
    ggml: Ggml = None,
    device: Device = "auto",
    vram: Vram = None,
    force: Force = False,
    json: Json = False,
) -> int:
    """Measure this machine with a model, half a minute, and predict its speed at memory budgets.

    With --trace the experts that a budget lacks are those that replaying it lacks; without, an assumption that is
    printed. A reused profile has plain reading measured again, as disks drift. --out writes a plan of what to pin
    instead, and predicts speed only with --profile. With a device, how the model would be divided over it and how fast
    that is comes after.
    """
    budgets, memories = (
        [parse_size(word) for words in given or () for word in words.split(",")] for given in (ram, vram)
    )
    config = EngineOptions(ctx=ctx, threads=threads, kv=kv, policy=policy, ggml=ggml, device="cpu").config()
    path = resolve_model(model)
    library = load_ggml(ggml)
    memories = memories if memories and device != "cpu" else default_vram(library, device)
    result: dict[str, Any] = {}
    if out is not None:
        if trace is None or len(budgets) != 1:
            raise InputError("--out needs --trace and one --ram: what to pin depends on both")
        result["plan"] = make_plan(path, replace(config, ram=budgets[0]), trace, out, force=force)
    if out is None or profile is not None:
        result |= _predicted(path, config, trace, budgets, profile, not no_prefetch, force, device, memories)
    if json:
        emit(result)
        return 0
    if "plan" in result:
        show_plan(result["plan"])
    if "results" in result:
        _show(result)
    if "device" in result:
        show_splits(result["device"])
    return 0


def _predicted(
    path: Path, config: EngineConfig, trace: Path | None, budgets: list[int], file: Path | None, prefetch: bool,
    force: bool, device: str, vram: list[int],
) -> dict[str, Any]:  # fmt: skip
    """The predictions as one JSON object; `vram` are the device's budgets, none where there is no device."""
    from sluice.engine import Engine
    from sluice.plan.workload import AssumedWorkload, TraceWorkload

    planned = Engine(path, replace(config, ram=UNLIMITED), plan_only=True)
    chosen = [memory_facts(planned, b)["budgets"][0] for b in budgets] or memory_facts(planned, None)["budgets"]
    workload: Workload | None = None
    spec = planned.spec
    if trace is not None:  # before anything takes long
        workload = TraceWorkload(
            trace, policy=config.policy, fingerprint=planned.fingerprint, moe_layers=spec.moe_layers,
            n_expert=spec.n_expert,
        )  # fmt: skip
    measured, disk = _profile(path, planned, file, force)
    if workload is None:
        prompt = measured.prompts[-1]
        workload = AssumedWorkload(len(spec.moe_layers), spec.n_expert, spec.top_k, prompt.tokens, prompt.experts)
    with progress_bar("predicting") as progress:
        results = []
        for i, budget in enumerate(chosen):
            progress(i, len(chosen))
            results.append(budget | _at(measured, workload, budget["slots"], config.policy, prefetch, disk))
    found = {
        "model": str(path), "profile": asdict(measured), "workload": workload.label, "disk_now": disk,
        "results": results,
    }  # fmt: skip
    if vram:
        found["device"] = splits(
            path, replace(config, device=device), budgets or [chosen[-1]["budget_bytes"]], vram, workload, measured,
            prefetch=prefetch, disk=disk,
        )  # fmt: skip
    return found


def _profile(path: Path, planned: Engine, file: Path | None, force: bool) -> tuple[MachineProfile, float]:
    """The machine's profile, and how fast its disk is now relative to it."""
    from sluice.memory import free_bytes
    from sluice.plan.measure import machine_name, measure, probe_config, raw_now
    from sluice.plan.profile import load, save

    machine = machine_name(cpu_name(), usable_cores())
    if file is not None and file.exists() and not force:
        profile = load(file)
        profile.check(
            file, fingerprint=planned.fingerprint, machine=machine, threads=planned.threads,
            ggml=planned.library.version,
        )  # fmt: skip
        return profile, raw_now(planned, profile) / profile.raw_bytes_per_s
    note("measuring this machine with the model: half a minute, longer for large models")

    with deferred() as stop, progress_bar("measuring") as progress:

        def opener(config: EngineConfig) -> Engine:
            return open_engine(path, config, stop)

        profile = measure(
            probe_config(planned, free_bytes()), opener, machine=machine, check=stop.check, progress=progress
        )
    if file is not None:
        save(profile, file, force=force)
    return profile, 1.0


def _at(
    profile: MachineProfile, workload: Workload, slots: int, policy: str, prefetch: bool, disk: float
) -> dict[str, Any]:
    """What is predicted for a pool of `slots` slots."""
    from sluice.plan.bandwidth import predict_decode, predict_prefill, remedies

    absences = workload.absences(slots)
    policy = suited(policy, slots, profile.token_experts)
    ahead = prefetch and profile.prefetch is not None and reads_ahead(policy, slots, profile.token_experts)
    decode = {
        "demand": predict_decode(profile, absences.decode, disk=disk),
        "prefetch": predict_decode(profile, absences.decode, prefetch=True, disk=disk) if ahead else None,
    }
    mode = "prefetch" if ahead else "demand"
    run = decode[mode]
    prefill = predict_prefill(profile, absences.prefill, absences.prompt_tokens, prefetch=ahead, disk=disk)
    return {
        "mode": mode,
        "hit_rate": absences.decode.hit_rate,
        "tok_per_s": None if run is None else run.tok_per_s,
        "prefill_tok_per_s": None if prefill is None else prefill.tok_per_s,
        "bottleneck": None if run is None else run.bottleneck,
        "decode": {name: None if one is None else one.as_dict() for name, one in decode.items()},
        "prefill": None if prefill is None else prefill.as_dict(),
        "would_help": remedies(profile, absences.decode, prefetch=ahead, disk=disk),
    }


_HEADS = ("--ram", "expert slots", "of all", "hit rate", "read/token", "tok/s", "on demand", "waiting", "filling",
          "bottleneck", "prefill tok/s", "what would help most")  # fmt: skip


def _show(result: dict[str, Any]) -> None:
    profile, rows = result["profile"], []
    for one in result["results"]:
        run, demand = one["decode"][one["mode"]], one["decode"]["demand"]
        helps = max(one["would_help"].items(), key=lambda item: item[1], default=None)
        rows.append([
            format_mib(one["budget_bytes"]), str(one["slots"]), f"{one['share']:.1%}", _text(one["hit_rate"], "{:.1%}"),
            "–" if run is None else format_size(round(run["bytes_per_step"])),
            _text(one["tok_per_s"], "{:.2f}"), "–" if demand is None else f"{demand['tok_per_s']:.2f}",
            *(["–"] * 2 if run is None else [f"{run[name] * run['tok_per_s']:.0%}" for name in ("wait_s", "fresh_s")]),
            one["bottleneck"] or "–", _text(one["prefill_tok_per_s"], "{:.1f}"),
            "–" if helps is None or helps[1] < 1.005 else f"{helps[0]}: {helps[1]:.2f}×",
        ])  # fmt: skip
    print_table(_HEADS, rows, title="predicted for one stream")
    ahead = profile["prefetch"] or profile["demand"]
    ms = 1e3
    print_facts([
        ("experts needed", result["workload"]),
        ("machine", f"{profile['machine']}; {profile['threads']} threads, read by {profile['reader']}"),
        ("memory", f"{profile['ram_bytes_per_s'] / 1e9:.1f} GB/s"),
        ("plain reading", f"{profile['raw_bytes_per_s'] * result['disk_now'] / 1e9:.2f} GB/s"),
        ("an expert load", f"{profile['load_a_s'] * ms:.2f} ms + {profile['load_b_s'] * ms:.2f} ms × cold share, "
                           f"within {profile['load_error_s'] * ms:.2f} ms"),
        ("into fresh memory", f"{profile['fresh_host_s'] * ms:.2f} ms more where it is asked for, a load "
                              f"{profile['fresh_load_s'] * ms:.2f} ms longer"),
        ("a token's arithmetic", f"{(ahead['segments_s'] + ahead['experts_s']) * ms:.0f} ms, of which experts "
                                 f"{ahead['experts_s'] * ms:.0f}; Python {ahead['host_s'] * ms:.0f} ms"),
        ("beside each other", f"arithmetic keeps {profile['compute_beside']:.0%} of its speed, reading "
                              f"{profile['read_beside']:.0%}"),
    ])  # fmt: skip
    if abs(result["disk_now"] - 1) > DRIFT_WORTH_TELLING:
        note(f"the disk reads at {result['disk_now']:.0%} of what it did when the profile was taken")


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)

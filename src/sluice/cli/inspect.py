"""`sluice inspect`: what a model is, and what a memory budget would hold of it. Reads headers only."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.opening import load_ggml, resolve_model
from sluice.cli.options import Json
from sluice.cli.terminal import emit, print_facts, print_table
from sluice.config import KV_TYPE_NAMES, EngineConfig, format_size, parse_size

if TYPE_CHECKING:
    from sluice.engine import Engine

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A GGUF file, any shard of it, or demo, the default.", show_default=False)
]
Ram = Annotated[str | None, typer.Option("--ram", metavar="SIZE", help="Show what this budget would hold.")]
Ctx = Annotated[int | None, typer.Option("--ctx", metavar="N", help="Positions of context, which take memory too.")]
Kv = Annotated[str, typer.Option("--kv", metavar="TYPE", help=f"KV cache: {', '.join(KV_TYPE_NAMES)}; K,V for two.")]
Streams = Annotated[int, typer.Option("--streams", metavar="N", help="Conversations at once.")]
Ggml = Annotated[str | None, typer.Option("--ggml", metavar="PATH", help="A folder with other ggml libraries.")]

# What differs from one process to the next before a model is loaded: loaders, allocators, address layout.
PROCESS_MARGIN = 4 << 20
UNLIMITED = 1 << 49  # bytes: a budget that any model fits, so that only the needs are worked out


def inspect(
    model: Model = "demo",
    ram: Ram = None,
    ctx: Ctx = None,
    kv: Kv = "f16",
    streams: Streams = 1,
    ggml: Ggml = None,
    json: Json = False,
) -> int:
    """Show a model's layers, experts and sizes, and the memory it takes."""
    from pathlib import Path

    from sluice.engine import Engine

    budget = None if ram is None else parse_size(ram)
    config = EngineConfig(
        ram=UNLIMITED, ctx=ctx, kv=kv, streams=streams, device="cpu", ggml=None if ggml is None else Path(ggml)
    )
    path = resolve_model(model)
    load_ggml(ggml)
    engine = Engine(path, config, plan_only=True)
    facts = model_facts(engine) | memory_facts(engine, budget)
    if json:
        emit(facts)
    else:
        _show(facts)
    return 0


def model_facts(engine: Engine) -> dict[str, Any]:
    """What the file says of the model. Sizes in bytes; types as {name: number of layers that have it}."""
    from sluice.engine.weights import dense_tensors
    from sluice.models.kv_cache import KV_TYPES, kv_bytes, padded
    from sluice.models.recurrent import recurrent_bytes

    file, spec, metadata = engine.file, engine.spec, engine.file.metadata
    layers = {layer: file.expert_parts(layer) or () for layer in spec.moe_layers}
    sizes = [sum(part.n_bytes for part in parts) for parts in layers.values()]
    types = {
        role: dict(Counter(part.type.name for parts in layers.values() for part in parts if part.role == role))
        for role in ("gate", "up", "down")
    }
    dense = sum(info.n_bytes for info in dense_tensors(file, spec))
    rows = padded(1 << 15)  # so many positions that rounding to pages doesn't show
    dims = {dim for shape in spec.kv_shapes_used for dim in (shape.head_dim, shape.head_dim_v)}
    kv = {
        name: kv_bytes(spec, engine.library, (KV_TYPES[name], KV_TYPES[name]), rows, 1) // rows
        for name in KV_TYPE_NAMES
        if not any(dim % engine.library.ggml_blck_size(KV_TYPES[name]) for dim in dims)
    }
    return {
        "path": str(file.paths[0]),
        "files": len(file.paths),
        "file_bytes": file.n_bytes,
        "name": _metadata_text(metadata.get("general.name")),
        "architecture": spec.architecture,
        "packed": file.packed,
        "layers": spec.n_layers,
        "moe_layers": list(spec.moe_layers),
        "experts": spec.n_expert,
        "top_k": spec.top_k,
        # files give the width of all shared experts together: as many as routed experts would make it
        "shared_experts": -(-spec.n_ff_shared // spec.n_ff_expert),
        "expert_types": types,
        "expert_bytes": {"min": min(sizes), "mean": sum(sizes) / len(sizes), "max": max(sizes)},
        "experts_bytes": sum(sizes) * spec.n_expert,
        "token_bytes": sum(sizes) * spec.top_k,
        "dense_bytes": dense,
        "kv_bytes_per_token": kv,
        "state_bytes_per_stream": recurrent_bytes(spec, 1),
        "recurrent_layers": sorted(spec.recurrent),
        "window": spec.window or None,
        "windowed_layers": list(spec.windowed),
        "skipped_tensors": len(spec.skipped),
        "context": spec.n_ctx_train,
        "embedding": spec.n_embd,
        "vocabulary": spec.n_vocab,
        "tokenizer": _metadata_text(metadata.get("tokenizer.ggml.model")),
        "pre_tokenizer": _metadata_text(metadata.get("tokenizer.ggml.pre")),
        "chat_template": engine.tokenizer.chat_template is not None,
    }


def memory_facts(engine: Engine, budget: int | None) -> dict[str, Any]:
    """What budgets would hold: `budget` if given (BudgetError if it is too little), else a range of them.

    `smallest_budget_bytes` works; `token_budget_bytes` holds one token's experts, below which few reads are saved;
    `full_budget_bytes` holds all.
    """
    from sluice.engine.budget import budget_for, plan_memory

    plan, spec = engine.plan, engine.spec
    n_all = len(spec.moe_layers) * spec.n_expert

    def slots_of(ram: int) -> int:
        return plan_memory(
            plan.needs, plan.slot_bytes, ram=ram, free=0, expert_slots=None,
            least_slots=spec.top_k, floor_slots=plan.floor_slots, all_slots=n_all,
        ).slots  # fmt: skip

    def enough_for(slots: int) -> int:
        whole = 1 << 20
        return -(-(budget_for(plan.needs, plan.slot_bytes, slots) + PROCESS_MARGIN) // whole) * whole

    smallest, full = enough_for(spec.top_k), enough_for(n_all)
    between = (n << shift for shift in range(26, 48) for n in (4, 6))  # 256M, 384M, 512M, 768M, 1G, …
    chosen = [budget] if budget else [smallest, *(b for b in between if smallest < b < full), full]
    budgets = [{"budget_bytes": b, "slots": (n := slots_of(b)), "share": n / n_all} for b in chosen]
    return {
        "ctx": engine.n_ctx,
        "slot_bytes": plan.slot_bytes,
        "resident_bytes": plan.needs.fixed,
        "smallest_budget_bytes": smallest,
        "token_budget_bytes": enough_for(plan.floor_slots),
        "full_budget_bytes": full,
        "budgets": budgets,
    }


def _metadata_text(value: object) -> str | None:
    return value[:200] if isinstance(value, str) else None


def _show(facts: dict[str, Any]) -> None:
    n_moe, sizes = len(facts["moe_layers"]), facts["expert_bytes"]
    size = format_size(sizes["min"])
    if sizes["max"] > sizes["min"]:
        size = f"{size} to {format_size(sizes['max'])}"
    types = ", ".join(f"{role} {'/'.join(kinds)}" for role, kinds in facts["expert_types"].items())
    shards = f", {facts['files']} files" if facts["files"] > 1 else ""
    kind = "packed" if facts["packed"] else "stock"
    print_facts(
        [
            ("model", facts["name"] or "unnamed"),
            (
                "file",
                f"{facts['path']}{shards}, {format_size(facts['file_bytes'])}, {kind}",
            ),
            ("architecture", facts["architecture"]),
            ("layers", ", ".join(_layers(facts, n_moe))),
            (
                "experts",
                f"{facts['experts']} a layer, {facts['top_k']} a token, {facts['shared_experts'] or 'none'} shared",
            ),
            ("an expert", f"{size} ({types})"),
            ("all experts", format_size(facts["experts_bytes"])),
            ("a token's experts", format_size(facts["token_bytes"])),
            ("dense weights", format_size(facts["dense_bytes"])),
            ("KV per token", ", ".join(f"{name} {format_size(n)}" for name, n in facts["kv_bytes_per_token"].items())),
            *(
                [("state of a stream", format_size(facts["state_bytes_per_stream"]))]
                if facts["recurrent_layers"]
                else []
            ),
            ("context", f"{facts['context']} positions (memory below: {facts['ctx']})"),
            (
                "vocabulary",
                f"{facts['vocabulary']} tokens, {facts['tokenizer']} / {facts['pre_tokenizer'] or 'default'}",
            ),
            ("chat template", "yes" if facts["chat_template"] else "no"),
            *([("left in the file", f"{facts['skipped_tensors']} tensors")] if facts["skipped_tensors"] else []),
            ("smallest --ram", format_mib(facts["smallest_budget_bytes"])),
            ("--ram for a token's experts", format_mib(facts["token_budget_bytes"])),
            ("--ram for all experts", format_mib(facts["full_budget_bytes"])),
        ]
    )
    rows = [[format_mib(b["budget_bytes"]), str(b["slots"]), f"{b['share']:.1%}"] for b in facts["budgets"]]
    print_table(["--ram", "expert slots", "of all experts"], rows)


def _layers(facts: dict[str, Any], n_moe: int) -> list[str]:
    parts = [f"{facts['layers']}, of which {n_moe} with experts"]
    if recurrent := len(facts["recurrent_layers"]):
        parts.append(f"{recurrent} recurrent")
    if windowed := len(facts["windowed_layers"]):
        parts.append(f"{windowed} with a window of {facts['window']}")
    return parts


def format_mib(n: int) -> str:
    """A budget in whole MiB, as --ram takes it."""
    return f"{n >> 20}M"

"""`sluice prerouter`: make heads that predict routes, and look at them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.commands import group
from sluice.cli.opening import load_ggml, resolve_model
from sluice.cli.options import Json
from sluice.cli.terminal import emit, one_line, print_facts, progress_bar
from sluice.config import format_size

if TYPE_CHECKING:
    from sluice.routing.prerouter_file import PrerouterFile

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF file, any shard of it, or demo.")]
ItsModel = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="The model to compare with: other heads are refused.", show_default=False),
]
Out = Annotated[str, typer.Argument(metavar="OUT", help="The file to write.")]
File = Annotated[str, typer.Argument(metavar="FILE", help="A file of prerouter heads.")]
Hidden = Annotated[int, typer.Option("--hidden", metavar="N", help="Width of the heads.")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="What fc1 is drawn by.")]
Type = Annotated[str, typer.Option("--type", metavar="TYPE", help="Of the numbers: f32, or f16, half the memory.")]
Force = Annotated[bool, typer.Option("--force", metavar="", help="Overwrite OUT if it exists.")]
Ggml = Annotated[
    str | None, typer.Option("--ggml", metavar="PATH", help="A folder with other ggml libraries.", show_default=False)
]


def init(
    model: Model, out: Out, hidden: Hidden = 128, seed: Seed = 0, type: Type = "f32", force: Force = False,
    ggml: Ggml = None, json: Json = False,
) -> int:  # fmt: skip
    """Write untrained heads for a model: each predicts by the next layer's router, and can learn more."""
    from sluice.routing.prerouter_file import open_prerouter
    from sluice.routing.prerouter_init import init_prerouter

    path = resolve_model(model)
    library = load_ggml(ggml)
    with progress_bar("writing heads") as progress:
        n_bytes = init_prerouter(
            path, out, library, hidden=hidden, seed=seed, type=type, force=force, progress=progress
        )  # fmt: skip
    facts = _facts(open_prerouter(out))
    if json:
        emit(facts)
    else:
        print(one_line(f"{facts['path']}: {len(facts['owners'])} heads, {format_size(n_bytes)}"))
    return 0


def show(file: File, model: ItsModel = None, ggml: Ggml = None, json: Json = False) -> int:
    """Check a file of heads, every number of it, and show which model it is for and what it predicts."""
    from sluice.routing.prerouter_file import open_prerouter

    heads = open_prerouter(file)
    facts = _facts(heads)
    if model is not None:
        _compare(heads, resolve_model(model), ggml)
        facts["fits"] = True
    heads.check_numbers()
    if json:
        emit(facts)
    else:
        _show(facts)
    return 0


def _compare(heads: PrerouterFile, path: Path, ggml: str | None) -> None:
    """Raise InputError unless the heads are for the model in `path`."""
    from sluice.gguf import open_gguf
    from sluice.models import family_of
    from sluice.models.fingerprint import fingerprint

    file = open_gguf(path, load_ggml(ggml))
    spec = family_of(file).read_spec(file)
    heads.check_model(spec, fingerprint=fingerprint(file, spec), name=str(file.metadata.get("general.name") or ""))


def _facts(heads: PrerouterFile) -> dict[str, Any]:
    """What a file holds, as one JSON object. `head_bytes`: the memory that its heads take; `fits`: null, not asked."""
    from sluice.routing.heads import head_bytes

    info = heads.info
    return {
        "path": str(heads.path),
        "bytes": heads.path.stat().st_size,
        "head_bytes": head_bytes(heads),
        "fingerprint": info.fingerprint,
        "architecture": info.architecture,
        "name": info.name,
        "n_layers": info.n_layers,
        "n_embd": info.n_embd,
        "n_expert": info.n_expert,
        "moe_layers": list(info.moe_layers),
        "top_k": info.top_k,
        "owners": list(info.owners),
        "predicts": [list(pair) for pair in info.predicts.items()],
        "first_predicted": info.first_predicted,
        "hidden": sorted({heads.hidden(owner) for owner in info.owners}),
        "types": sorted({tensor.kind for tensor in heads.tensors.values()}),
        "features": info.features,
        "weights": info.weights,
        "training": info.training,
        "fits": None,
    }


def _show(facts: dict[str, Any]) -> None:
    used = dict(facts["predicts"])
    training = ", ".join(f"{name} {value}" for name, value in facts["training"].items())
    print_facts([
        ("heads", f"{len(facts['owners'])}, on layers {_ranges(facts['owners'])}; {len(used)} of them are used"),
        ("predicted", f"layers {_ranges(list(used.values()))} of {facts['n_layers']}, from layer "
                      f"{facts['first_predicted']} on"),
        ("model", f"{facts['name'] or 'without a name'} ({facts['architecture']}), width {facts['n_embd']}, "
                  f"{facts['n_expert']} experts a layer, {facts['top_k']} a token, fingerprint "
                  f"{facts['fingerprint'][:12]}…{', the one given' if facts['fits'] else ''}"),
        ("width of heads", ", ".join(map(str, facts["hidden"])) + f", {', '.join(facts['types'])}"),
        ("memory", format_size(facts["head_bytes"])),
        ("routing weights", "from the heads" if facts["weights"] == "head" else "from the router, at predicted ids"),
        ("training", training[:400] or "not said"),
    ])  # fmt: skip


def _ranges(layers: Sequence[int]) -> str:
    """Ascending numbers as text: 1–3, 5."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)


app = group(
    "prerouter", "Make heads that predict routes a token early, and look at them.", {"init": init, "show": show}
)

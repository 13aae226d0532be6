"""`sluice lora`: what merging an adapter into a quantised model would leave of it. It computes no share itself."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.commands import group
from sluice.cli.eval_texts import Text, TextOptions
from sluice.cli.opening import announce, load_ggml, open_engine, resolve_model
from sluice.cli.options import EngineOptions, Json, grouped
from sluice.cli.signals import Stop, deferred
from sluice.cli.spool import check_room, spool
from sluice.cli.terminal import emit, note, print_table, progress_bar
from sluice.config import EngineConfig, parse_lora
from sluice.errors import InputError

if TYPE_CHECKING:
    from sluice.ggml import Library
    from sluice.io.patched import Patches
    from sluice.routing.linears import Linear

CTX = 512  # as in `sluice eval`
# What the paper that Sluice's mission rests on found on its models, by its own measures.
PAPER = {"attention_projection": 0.34, "dense_projection": 0.02, "output_distribution": 0.18}

GivenModel = Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF file, any shard of it, or demo.")]
Adapters = Annotated[
    list[str],
    typer.Argument(metavar="ADAPTER…", help="LoRA adapters, FILE[:SCALE]: GGUF files, or directories that PEFT saved."),
]


@grouped
def survival(
    *, model: GivenModel, adapters: Adapters, texts: TextOptions, engine: EngineOptions, json: Json = False
) -> int:
    """How much of an adapter would survive if it were merged into the weights and these quantised again.

    Each matrix is read, the update added, stored in the matrix's own type without an importance matrix, and read back.
    The share of the update D that survives is <D', D> / <D, D>, D' being how the stored matrix changed. Nothing is
    written; served with --lora, an adapter survives whole.

    With --text, also the share of its effect on predictions: the text is scored by the model alone, with the adapter
    beside it, and with it merged, one after the other, in windows as in `eval ppl`. Logits and merged weights wait in
    temporary files, in the system's folder for such (TMPDIR names another).
    """
    config = engine.config(ctx=CTX)
    if config.lora:
        raise InputError("adapters are named after MODEL here: leave out --lora")
    config = replace(config, lora=tuple(parse_lora(one) for one in adapters))
    given = texts.texts() if texts.text is not None or texts.domain else {}
    with deferred() as stop, ExitStack() as stack:
        result = _measured(resolve_model(model), config, given, stop, stack)
    if json:
        emit(result)
    else:
        _show(result)
    return 0


def _measured(
    path: Path, config: EngineConfig, given: Mapping[str, Text], stop: Stop, stack: ExitStack
) -> dict[str, Any]:
    from sluice.gguf import open_gguf
    from sluice.io.files import ModelFiles
    from sluice.io.patched import Patches
    from sluice.models import family_of
    from sluice.routing.lora import by_linear
    from sluice.routing.lora_file import open_adapter
    from sluice.routing.lora_survival import Survival, by_type, survival
    from sluice.routing.stored import Converter

    library = load_ggml(config.ggml)
    file = open_gguf(path, library)
    spec = family_of(file).read_spec(file)
    opened = [(open_adapter(name, file, spec, library), scale) for name, scale in config.lora]
    updates = by_linear(opened)
    patches = None
    if given:
        spooled, folder = stack.enter_context(spool())
        n_bytes = sum(_stored_bytes(library, scaled[0][0].linear) for scaled in updates.values())
        check_room("the merged weights take", n_bytes, folder, "name an adapter of fewer matrices")
        patches = Patches(spooled)
    with (
        ModelFiles(file.paths) as files,
        Converter(library) as converter,
        progress_bar("merging", stop.check) as progress,
    ):
        sink = None if patches is None else patches.add
        found = survival(updates, files, converter, sink=sink, progress=progress)
    types = {name: scaled[0][0].linear.type.name for name, scaled in updates.items()}
    result: dict[str, Any] = {
        "model": str(path),
        "adapters": [{"file": str(name), "scale": scale} for name, scale in config.lora],
        "all": sum(found.values(), Survival()).as_dict(),
        "types": {type.name: one.as_dict() for type, one in by_type(found, updates).items()},
        "matrices": {name: {"type": types[name], **one.as_dict()} for name, one in found.items()},
        "output": None,
        "paper": PAPER,
    }
    if patches is not None:
        result["output"] = _of_predictions(path, config, given, patches, stop, stack)
    return result


def _stored_bytes(library: Library, linear: Linear) -> int:
    from sluice.ggml.tensor import row_bytes

    return row_bytes(library, linear.type, linear.n_in) * linear.n_out * (linear.n_stack or 1)


def _of_predictions(
    path: Path, config: EngineConfig, given: Mapping[str, Text], patches: Patches, stop: Stop, stack: ExitStack
) -> dict[str, Any]:
    """The share of the adapters' effect on predictions that survives, with what the three engines ran as."""
    from sluice.eval.adapter_effect import merged_effect
    from sluice.eval.divergence import Recorded, record, spooled_bytes
    from sluice.eval.windows import tokenize
    from sluice.io.patched import PatchedFiles

    alone = replace(config, lora=())
    recorded: list[Recorded] = []
    modes: dict[str, Any] = {}
    for name, one in (("alone", alone), ("unmerged", config)):
        spooled, folder = stack.enter_context(spool())
        with open_engine(path, one, stop) as engine:
            ids = tokenize(engine, {text: it.text for text, it in given.items()})
            check_room("the model's logits take", spooled_bytes(engine, ids), folder, "give less text")
            if name == "unmerged":
                announce(engine)
            with progress_bar(f"scoring, {name}", stop.check) as progress:
                recorded.append(record(engine, ids, spooled, progress))
            modes[name] = engine.mode | {"ctx": engine.n_ctx}
    merged = replace(alone, reader="auto")  # io_uring would read past the patches
    with (
        open_engine(path, merged, stop, open_files=lambda paths: PatchedFiles(paths, patches)) as engine,
        progress_bar("scoring, merged", stop.check) as progress,
    ):
        effect = merged_effect(engine, recorded[0], recorded[1], progress)
    facts = {name: text.facts for name, text in given.items()}
    return {**effect.as_dict(), "texts": facts, "mode": modes["unmerged"], "reference_mode": modes["alone"]}


# --- results


def _show(result: Mapping[str, Any]) -> None:
    rows = [[name, one["type"], *_figures(one)] for name, one in result["matrices"].items()]
    rows += [[f"all in {name}", name, *_figures(one)] for name, one in result["types"].items()]
    rows.append(["all", "", *_figures(result["all"])])
    print_table(["matrix", "type", "survives", "error"], rows)
    if (output := result["output"]) is not None:
        kl = output["kl"]
        print_table(
            ["output", "tokens", "survives", "KL alone to unmerged", "alone to merged", "unmerged to merged"],
            [["distribution", str(output["tokens"]), _percent(output["share"]), *(f"{kl[n]:.3g}" for n in kl)]],
        )
    note(
        f"the paper's, on its models: {PAPER['attention_projection']:.0%} on an attention projection, "
        f"{PAPER['dense_projection']:.0%} on a dense one, {PAPER['output_distribution']:.0%} in the output distribution"
    )


def _figures(one: Mapping[str, Any]) -> list[str]:
    return [_percent(one["share"]), "–" if one["error"] is None else f"{one['error']:.3g}"]


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


app = group("lora", "Measure what merging LoRA adapters would do to them. --lora serves them unmerged.",
            {"survival": survival})  # fmt: skip

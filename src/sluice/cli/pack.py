"""`sluice pack`: write a model anew with each expert's matrices side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.opening import load_ggml, resolve_model
from sluice.cli.options import Json
from sluice.cli.terminal import emit, progress_bar
from sluice.config import format_size
from sluice.errors import InputError

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF file, any shard of it, or demo.")]
Out = Annotated[str, typer.Argument(metavar="OUT", help="The file to write.")]
Force = Annotated[bool, typer.Option("--force", metavar="", help="Overwrite OUT if it exists.")]
Ggml = Annotated[str | None, typer.Option("--ggml", metavar="PATH", help="A folder with other ggml libraries.")]


def pack(model: Model, out: Out, force: Force = False, ggml: Ggml = None, json: Json = False) -> int:
    """Write a packed copy of a model, in which an expert takes one read instead of three. Same output, same size."""
    from sluice.pack import pack as write_packed

    if not Path(out).name:
        raise InputError(f"{out!r} names no file: name the file to write")
    path = resolve_model(model)
    library = load_ggml(ggml)
    with progress_bar("packing") as progress:
        report = write_packed(path, out, library, force=force, progress=progress)
    if json:
        emit(
            {
                "path": str(report.path),
                "layers": report.n_layers,
                "experts": report.n_experts,
                "bytes": report.n_bytes,
                "source_bytes": report.source_bytes,
            }
        )
    else:
        print(
            f"{report.path}: {report.n_experts} experts of {report.n_layers} layers, {format_size(report.n_bytes)} "
            f"(was {format_size(report.source_bytes)})"
        )
    return 0

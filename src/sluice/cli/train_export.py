"""`sluice train export`: writes a Hugging Face model as a GGUF file. It trains nothing, and needs no PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli.opening import load_ggml
from sluice.cli.options import Json
from sluice.cli.terminal import emit, note, one_line, print_facts, progress_bar
from sluice.config import format_size

if TYPE_CHECKING:
    from sluice.train.gguf_out import Exported

ModelDir = Annotated[
    Path, typer.Argument(metavar="MODEL_DIR", help="A Hugging Face directory: config.json, *.safetensors, tokenizer.")
]
Out = Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The file to write.")]
Type = Annotated[
    str,
    typer.Option("--type", metavar="TYPE", help="Of most matrices: f32, f16, bf16, q8_0, q6_k, q5_k, q4_k, q4_0, … as "
                 "llama-quantize has it."),
]  # fmt: skip
Name = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", help="The model's name in the file. Default: MODEL_DIR's.",
                 show_default=False),
]  # fmt: skip
Force = Annotated[bool, typer.Option("--force", metavar="", help="Overwrite OUT if it exists.")]
Ggml = Annotated[
    str | None, typer.Option("--ggml", metavar="PATH", help="A folder with other ggml libraries.", show_default=False)
]


def export(
    model_dir: ModelDir, out: Out, type: Type = "f32", name: Name = None, force: Force = False, ggml: Ggml = None,
    json: Json = False,
) -> int:  # fmt: skip
    """Write a Hugging Face MoE model as a GGUF file, for Sluice and llama.cpp.

    Norms, routers and biases stay F32. A matrix whose rows the type's blocks don't divide takes another type, which is
    said. No importance matrix is used.
    """
    from sluice.train.gguf_out import export_gguf

    library = load_ggml(ggml)
    with progress_bar("writing") as progress:
        done = export_gguf(
            model_dir.expanduser(), out.expanduser(), library, type=type, name=name, force=force, progress=progress
        )
    if json:
        emit(done.as_dict())
    else:
        _show(done)
    return 0


def _show(done: Exported) -> None:
    facts = done.as_dict()
    print_facts([
        ("file", f"{done.path}, {format_size(done.n_bytes)}"),
        ("model", one_line(f"{done.name} ({done.architecture}), {done.n_parameters:,} parameters")),
        ("types", ", ".join(f"{type} {n}" for type, n in facts["types"].items())),
    ])  # fmt: skip
    changes: dict[str, list[str]] = {}
    for tensor, wanted in done.fell_back.items():
        changes.setdefault(f"{done.types[tensor].name} in place of {wanted.name}", []).append(tensor)
    for change, tensors in changes.items():
        note(f"{change}, whose blocks don't divide the rows: {len(tensors)} tensors, {tensors[0]} for one")
    if done.doubt:
        note(f"tokenizer: {done.doubt}")
    if done.skipped:
        note(f"left out: {len(done.skipped)} tensors that are no part of the text model, {done.skipped[0]} for one")

"""`sluice trace`: the commands that write and read traces, under one name; knows none of their business."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.commands import group
from sluice.cli.options import Json, check_count
from sluice.cli.terminal import emit, note, progress_bar
from sluice.cli.trace_record import record
from sluice.cli.trace_report import report
from sluice.cli.trace_synth import synth

In = Annotated[Path, typer.Argument(metavar="IN", help="The recording to read, CSV or JSONL.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The trace to write, a Parquet file.")]
Model = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="The GGUF file it was recorded on, or demo.", show_default=False),
]
Experts = Annotated[
    int | None,
    typer.Option("--experts", metavar="N", help="Experts of each layer, without --model.", show_default=False),
]
TopK = Annotated[
    int | None, typer.Option("--top-k", metavar="N", help="Experts that a token chooses.", show_default=False)
]
Force = Annotated[bool, typer.Option("--force", metavar="", help="Overwrite OUT.")]


def import_(
    source: In, out: Out, model: Model = None, experts: Experts = None, top_k: TopK = None, force: Force = False,
    json: Json = False,
) -> int:  # fmt: skip
    """Make a trace of what another program recorded: CSV of layer,expert rows (llama.cpp's moe-trace), or JSONL of
    objects {"layer", "token", "experts", "weights"}.

    With --model the trace knows the model and its experts' sizes; without, --experts is needed. A CSV doesn't say where
    one token ends: that is inferred where it is beyond doubt, and else --top-k is asked for.
    """
    for option, value in (("--experts", experts), ("--top-k", top_k)):
        if value is not None:
            check_count(option, value)
    from sluice.trace_import import import_trace

    info = None
    if model is not None:
        from sluice.cli.opening import load_ggml, resolve_model
        from sluice.engine.recording import trace_info
        from sluice.gguf import open_gguf
        from sluice.models import family_of

        file = open_gguf(resolve_model(model), load_ggml(None))
        info = trace_info(file, family_of(file).read_spec(file))
    with progress_bar("importing") as progress:
        done = import_trace(source, out, model=info, n_expert=experts, top_k=top_k, force=force, progress=progress)
    if json:
        emit({
            "path": str(out), "rows": done.rows, "steps": done.steps, "sequences": done.sequences,
            "layers": len(done.info.moe_layers), "top_k": done.info.top_k, "n_expert": done.info.n_expert,
        })  # fmt: skip
    else:
        note(
            f"{out}: {done.rows} rows, {done.steps} steps, {len(done.info.moe_layers)} layers, "
            f"{done.info.top_k} of {done.info.n_expert} experts a token"
        )
    return 0


app = group(
    "trace", "Record which experts a model chooses, bring in such recordings, report on them.",
    {"record": record, "import": import_, "report": report, "synth": synth},
)  # fmt: skip

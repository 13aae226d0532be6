"""--trace of the commands that run a model: a record of its routes beside what they do; records nothing itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.terminal import note
from sluice.errors import InputError

if TYPE_CHECKING:
    from sluice.engine import Engine

Trace = Annotated[
    Path | None,
    typer.Option("--trace", metavar="OUT", show_default=False,
                 help="Record which experts are chosen, in a Parquet file. Same output."),
]  # fmt: skip
TraceScores = Annotated[
    bool, typer.Option("--trace-scores", metavar="", help="In the trace, the scores of all experts too.")
]


def trace_config(trace: Path | None, scores: bool, *, force: bool) -> dict[str, Any]:
    """The engine's part of these options. Raises InputError for one that needs another."""
    if trace is None and scores:
        raise InputError("--trace-scores is about a trace: give --trace OUT too")
    return {} if trace is None else {"trace": trace, "trace_scores": scores, "trace_force": force}


def tell_trace(engine: Engine) -> None:
    """Say what was recorded, if anything was to be; for an engine that is closed."""
    if engine.recorder is not None:
        note(f"{engine.recorder.path}: {engine.recorder.n_rows} rows of routes")

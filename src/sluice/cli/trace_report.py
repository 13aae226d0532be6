"""`sluice trace report`: what traces say of a workload, as tables, JSON, a page or a sheet of figures."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.options import Json
from sluice.cli.terminal import emit, note, print_facts, print_table, progress_bar
from sluice.errors import InputError

Traces = Annotated[
    list[Path], typer.Argument(metavar="TRACE...", help="Traces of one model; several are taken as one.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", help="Write a page (.html) or a sheet (.png) with figures.", show_default=False
    ),
]
Force = Annotated[bool, typer.Option("--force", metavar="", help="Overwrite FILE.")]

PAGE, SHEET = (".html", ".htm"), (".png",)


def report(traces: Traces, out: Out = None, force: Force = False, json: Json = False) -> int:
    """Show how a workload uses its experts: reuse, concentration, domains, and what caches would hit."""
    if out is not None:
        if out.suffix.lower() not in PAGE + SHEET:
            raise InputError(f"{out}: give a name that ends in .html or .png")
        if out.exists() and not force:
            raise InputError(f"{out} exists: name another file, or give --force")
    from sluice.lab.analyze import analyze
    from sluice.lab.plots import figures, sheet
    from sluice.lab.report import facts, html, numbers, tables
    from sluice.trace import TraceReader

    with ExitStack() as stack:
        readers = [stack.enter_context(TraceReader(path)) for path in traces]
        with progress_bar("analysing") as progress:
            analysis = analyze(readers, progress)
    if out is not None:
        data = sheet(analysis) if out.suffix.lower() in SHEET else html(analysis, figures(analysis)).encode()
        try:
            with out.open("wb" if force else "xb") as file:
                file.write(data)
        except OSError as error:
            raise InputError(f"{out}: can't be written: {error.strerror}") from None
    if json:
        emit(numbers(analysis))
    else:
        print_facts(facts(analysis))
        for table in tables(analysis):
            print_table(table.heads, table.rows, title=table.title)
    if out is not None:
        note(f"wrote {out}")
    return 0

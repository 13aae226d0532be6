"""--save-residents: writes down which experts a run left in memory, for the next run to start with; runs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli.terminal import note

if TYPE_CHECKING:
    from sluice.engine import Engine

SaveResidents = Annotated[
    Path | None,
    typer.Option("--save-residents", metavar="FILE", show_default=False,
                 help="Write a plan of the experts in memory at the end, for --plan."),
]  # fmt: skip
Force = Annotated[bool, typer.Option("--force", metavar="", help="Overwrite files that exist.")]


def check_residents(path: Path | None, *, force: bool) -> None:
    """Raise InputError, before any work, where `save_residents` could not write."""
    from sluice.new_file import check_out

    if path is not None:
        check_out(path, force=force)


def save_residents(engine: Engine, path: Path | None, *, force: bool) -> None:
    """Write the plan, if one is asked for, and say so. Raises InputError where it can't be written."""
    if path is not None:
        n = engine.save_residents(path, force=force)
        note(f"{path}: {n} experts; --plan {path} starts with them")

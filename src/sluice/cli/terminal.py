"""Prints for people and programs: JSON lines, notes, progress bars, tables. Knows nothing of what it prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

Progress = Callable[[float, float], None]  # (done, total), in any one unit
_SHOWN_AFTER_S = 0.3  # what is done sooner needs no bar


def one_line(text: object) -> str:
    """`text` on one line, without characters that would steer a terminal: it may quote an untrusted file."""
    line = " ".join(str(text).split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def note(text: object) -> None:
    """A line on stderr. That nobody listens there is no reason to fail."""
    with suppress(OSError, ValueError):
        print(one_line(text), file=sys.stderr, flush=True)


def emit(value: Any) -> None:
    """One JSON object as a line on stdout."""
    print(json.dumps(value, allow_nan=False), flush=True)


@contextmanager
def progress_bar(label: str, check: Callable[[], object] = lambda: None) -> Iterator[Progress]:
    """A callback that shows progress on stderr, if that is a terminal and the work takes long enough to be seen.

    It calls `check` first, which may raise to end the work.
    """
    if not (sys.stderr and sys.stderr.isatty()):

        def unseen(done: float, total: float) -> None:
            check()

        yield unseen
        return
    began, bar = perf_counter(), None

    def update(done: float, total: float) -> None:
        nonlocal bar
        check()
        if bar is None:
            if perf_counter() - began < _SHOWN_AFTER_S:
                return
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
            bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            bar.start()
            bar.add_task(label, total=total)
        bar.update(bar.task_ids[0], completed=done, total=total)

    try:
        yield update
    finally:
        if bar is not None:
            bar.stop()


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> None:
    """A table on stdout; all columns but the first are aligned to the right."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE, title=title, title_justify="left")
    for i, head in enumerate(heads):
        table.add_column(Text(head), justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))
    width = None if sys.stdout.isatty() else 160
    Console(width=width).print(table)


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Names and values in two columns on stdout."""
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name:<{width}}  {one_line(value)}")
    sys.stdout.flush()

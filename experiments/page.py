"""Pieces of a page in Markdown: sections, wrapped text, tables, numbers as text. Knows no experiment."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

NOT_RUN = "not run"


def section(title: str, *parts: str) -> str:
    """A heading and what is below it."""
    return "\n\n".join([f"## {title}", *(part.rstrip() for part in parts if part)])


def prose(text: str) -> str:
    """A paragraph, its lines broken anew."""
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def rows(heads: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A table; one without rows says that nothing was run."""
    lines = [list(one) for one in body]
    if not lines:
        return NOT_RUN.capitalize() + "."
    table = [list(heads), ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(one) + " |" for one in table)


def percent(value: float | None, digits: int = 1) -> str:
    """A share."""
    return "–" if value is None else f"{value:.{digits}%}"


def change(value: float | None, digits: int = 1) -> str:
    """A relative change, with its sign."""
    return "–" if value is None else f"{value:+.{digits}%}"


def number(value: float | None, form: str = ".3f") -> str:
    return "–" if value is None else format(value, form)


def spread(found: dict[str, Any], digits: int = 1, said: Callable[[float | None, int], str] = change) -> str:
    """A mean of seeds with its bounds (`bounds.bounded`), each `said` as a change or a share."""
    if found["mean"] is None:
        return NOT_RUN
    mean = said(found["mean"], digits)
    if found["upper"] is None:
        return f"{mean} (one seed, so no bound)"
    return f"{mean} ({said(found['lower'], digits)} to {said(found['upper'], digits)}, {found['n']} seeds)"

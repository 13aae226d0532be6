"""How strong a part of a loss is along a run: schedules by name, or from one place to another. Knows no losses."""

from __future__ import annotations

from collections.abc import Callable


def rising(begin: float, full: float, done: float) -> float:
    """0 before `begin` of the run, 1 from `full` on, linear between them."""
    if done >= full:
        return 1.0
    return (done - begin) / (full - begin) if done > begin else 0.0


ANNEALS: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "rise": lambda done: rising(0.0, 0.5, done),
    "fall": lambda done: min(1.0, 2 - 2 * done),
    "late": lambda done: rising(0.5, 1.0, done),
    "hump": lambda done: max(0.0, 1 - abs(4 * done - 3)),
}


def strength(anneal: str, done: float) -> float:
    """The part of its weight, 0 to 1, that something has when `done` of the run is done."""
    return ANNEALS[anneal](done)

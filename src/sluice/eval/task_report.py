"""Puts outcomes of tasks side by side: scores, points lost against the first mode, and what could have been seen.

Points are hundredths of a score that lies between 0 and 1, so of other scores they are hundred times its unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sluice.eval import paired
from sluice.eval.task_run import Outcome
from sluice.eval.tasks import Task

Outcomes = Mapping[str, Mapping[str, Outcome]]  # by mode and task
POINTS = 100.0


def report(
    tasks: Sequence[Task], outcomes: Outcomes, apart: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> dict[str, Any]:  # fmt: skip
    """{"tasks": {name: {…, "modes": {mode: {…, "against": …}}}}, "average": {mode: points lost over all tasks}}.

    `apart` are divergences of predictions, by mode and task, where there are some. The first mode is the reference.
    """
    reference, *others = outcomes
    pairs: dict[str, list[paired.Paired]] = {mode: [] for mode in others}
    found: dict[str, Any] = {}
    for task in tasks:
        first = outcomes[reference][task.name]
        modes: dict[str, Any] = {reference: first.as_dict()}
        for mode in others:
            second = outcomes[mode][task.name]
            pair = paired.compare(first.scores, second.scores)
            if not task.higher_is_better:
                pair = paired.compare(second.scores, first.scores)
            pairs[mode].append(pair)
            modes[mode] = second.as_dict() | {
                "against": _points(pair) | {
                    "same_answers": _same(first, second), "predictions": apart.get(mode, {}).get(task.name),
                }
            }  # fmt: skip
        found[task.name] = {
            "source": task.source, "output_type": task.output_type, "metric": task.metric, "items": len(first.items),
            "items_in_all": task.n_items, "digest": task.digest, "modes": modes,
        }  # fmt: skip
    return {"tasks": found, "average": {mode: _average(each) for mode, each in pairs.items()}}


def _points(pair: paired.Paired) -> dict[str, Any]:
    """A pair with its differences in points."""
    return {
        "points_lost": pair.lost * POINTS,
        "interval": [pair.low * POINTS, pair.high * POINTS],
        "interval_is": pair.interval,
        "p": pair.p,
        "test": pair.test,
        "worse": pair.worse,
        "better": pair.better,
        "detectable_points": None if pair.detectable is None else pair.detectable * POINTS,
        "items_needed": pair.items_needed,
    }


def _average(pairs: Sequence[paired.Paired]) -> dict[str, Any]:
    lost, low, high = paired.mean_of(pairs)
    return {
        "points_lost": lost * POINTS, "interval": [low * POINTS, high * POINTS], "tasks": len(pairs),
        "worse": sum(pair.worse for pair in pairs), "better": sum(pair.better for pair in pairs),
    }  # fmt: skip


def _same(first: Outcome, second: Outcome) -> float | None:
    """The share of items that got the same answer, whether right or wrong; None where a task has no answers."""
    both = [(a.answer, b.answer) for a, b in zip(first.items, second.items, strict=True) if a.answer is not None]
    return sum(a == b for a, b in both) / len(both) if both else None

"""Holds results against a gate: which of its metrics are there and reach their thresholds. It runs nothing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.errors import InputError
from sluice.lab.gates import MAX_NAME, Gate, Metric, Registration, changed, finite, read_bytes

MAX_RESULT_BYTES = 1 << 26
_MISSING = object()


@dataclass(frozen=True)
class Outcome:
    """What came of a metric. `value` is None where there is no finite number; `why` says what is wrong then."""

    metric: Metric
    value: float | None
    passed: bool
    why: str | None = None


@dataclass(frozen=True)
class Verdict:
    """What came of a gate. `faults` are what keeps it from passing whatever the metrics say."""

    outcomes: tuple[Outcome, ...]
    faults: tuple[str, ...]
    unstated: tuple[str, ...]  # results that say neither what they were measured on nor with what seed

    @property
    def passed(self) -> bool:
        return not self.faults and all(outcome.passed for outcome in self.outcomes)


def read_results(path: Path) -> Any:
    """What is in a file of results: JSON, or lines of which the last is. Raises InputError where neither is."""
    raw = read_bytes(path, MAX_RESULT_BYTES)
    lines = raw.strip().splitlines()
    for part in (raw, lines[-1] if lines else b""):
        try:
            return json.loads(part)
        except (ValueError, RecursionError):
            continue
    raise InputError(f"{path}: is not JSON, nor is its last line: give what a command printed with --json")


def check(gate: Gate, known: Registration, results: Mapping[str, Any], faults: Sequence[str] = ()) -> Verdict:
    """Hold `results`, parsed, by their files' names, against `gate`; `faults` are its datasets'.

    Raises InputError for a metric that could be meant in more than one of the files.
    """
    found = list(faults)
    if known.state == "changed":
        found.insert(0, changed(gate, known))
    elif known.state == "unrecorded":
        found.insert(0, f"{gate.path} was not recorded before these results: a gate is written down first")
    unstated = []
    for name, result in results.items():
        stated = _conditions(gate, name, result, found)
        if not stated:
            unstated.append(name)
    return Verdict(tuple(_outcome(metric, results) for metric in gate.metrics), tuple(found), tuple(unstated))


def _conditions(gate: Gate, name: str, result: Any, faults: list[str]) -> bool:
    """Whether a result says what it was measured on, or its seed; what contradicts the gate is added to `faults`."""
    if not isinstance(result, dict):
        return False
    seed, texts = result.get("seed", _MISSING), result.get("texts")
    if seed is not _MISSING and seed is not None and seed != gate.seed:
        faults.append(f"{name} was measured with seed {str(seed)[:20]}, and the gate says {gate.seed}")
    digests = {dataset.sha256 for dataset in gate.datasets}
    if isinstance(texts, dict):
        for label, text in texts.items():
            if not isinstance(text, dict) or text.get("sha256") not in digests:
                faults.append(f"{name} was measured on a text that is none of the gate's datasets: {label[:MAX_NAME]}")
    return isinstance(texts, dict) or seed not in (_MISSING, None)


def _outcome(metric: Metric, results: Mapping[str, Any]) -> Outcome:
    value, why = _value(metric.name, metric.path, metric.results, results)
    if value is not None and metric.baseline is not None:
        baseline, why = _value(metric.name, metric.baseline, metric.baseline_results, results)
        if baseline == 0:
            why = f"{metric.baseline} is 0: nothing can be relative to it"
        value = value / baseline - 1 if baseline else None
        if value is not None and not math.isfinite(value):
            value, why = None, "the relation to the baseline is no finite number"
    if value is None:
        return Outcome(metric, None, False, why)
    reached = value >= metric.threshold if metric.direction == ">=" else value <= metric.threshold
    return Outcome(metric, value, reached)


def _value(name: str, path: str, file: str | None, results: Mapping[str, Any]) -> tuple[float | None, str | None]:
    """The number at `path`, or None and why there is none. Raises InputError where it could be one of several."""
    if file is not None and file not in results:
        return None, f"there are no results named {file}"
    among = results if file is None else {file: results[file]}
    found = {each: value for each, result in among.items() if (value := _look_up(result, path)) is not _MISSING}
    if len(found) > 1:
        raise InputError(f"the metric {name} is in {' and in '.join(found)}: give one of them, or let the gate name it")
    if not found:
        return None, f"there is no {path} in {' or '.join(among) or 'no results at all'}"
    [value] = found.values()
    number = finite(value)
    return number, None if number is not None else f"{path} is no finite number: {str(value)[:40]}"


def _look_up(result: Any, path: str) -> Any:
    for step in path.split("."):
        if isinstance(result, dict):
            result = result.get(step, _MISSING)
        elif isinstance(result, list) and re.fullmatch(r"\d{1,9}", step, re.ASCII) and int(step) < len(result):
            result = result[int(step)]
        else:
            return _MISSING
    return result

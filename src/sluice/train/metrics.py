"""What a run writes down while it goes: lines of JSON, and TensorBoard's events where that is installed.

Knows no training. A run that goes on from a checkpoint takes back the lines written after it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

METRICS, TENSORBOARD = "metrics.jsonl", "tensorboard"


class Metrics:
    """Writes to a run's folder; a context manager. Lines after step `done` are dropped."""

    def __init__(self, folder: Path, done: int) -> None:
        path = folder / METRICS
        kept = [line for line in _lines(path) if line["step"] <= done]
        path.write_text("".join(_json(line) for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        self._board = _board(folder / TENSORBOARD, done)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def write(self, line: Mapping[str, Any]) -> None:
        """A line: `step` finished steps, and numbers, or numbers by name under a name."""
        self._file.write(_json(line))
        self._file.flush()
        if self._board is not None:
            for name, value in line.items():
                under = value if isinstance(value, Mapping) else {"": value}
                for part, number in under.items():
                    if name != "step" and isinstance(number, (int, float)):
                        self._board.add_scalar(f"{name}/{part}" if part else name, number, line["step"])


class Means:
    """Means of what steps report, from one line to the next. A name counts the steps that gave it."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self._sums: dict[str, list[float]] = {name: list(pair) for name, pair in (state or {}).items()}

    def add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            pair = self._sums.setdefault(name, [0.0, 0])
            pair[0] += value
            pair[1] += 1

    def take(self) -> dict[str, float]:
        """The means since the last call."""
        means = {name: total / n for name, (total, n) in self._sums.items()}
        self._sums = {}
        return means

    def state(self) -> dict[str, list[float]]:
        return {name: list(pair) for name, pair in self._sums.items()}


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines that a file has; a run that was killed may have left a part of one."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("step"), int):
            found.append(value)
    return found


def _json(line: Mapping[str, Any]) -> str:
    return json.dumps(_finite(line), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """Numbers that JSON has no word for become null."""
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _board(folder: Path, done: int) -> Any:
    """TensorBoard's writer, or None where it isn't installed. What it has after step `done` is no longer shown."""
    if find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=done + 1)

"""Gates: what a result must reach, written down and recorded before the experiment. They know files and numbers only.

A gate is a TOML file, with metrics of both sides: what a change brings (benefit) and what it costs (cost).

    name = "three-experts"
    description = "Three experts a token instead of four."
    seed = 7

    [[dataset]]                      # any number; paths are relative to the gate's file
    file = "texts/prose.txt"
    sha256 = "15e9627d…"

    [[metric]]
    name = "hit rate"
    side = "benefit"                 # or "cost"
    path = "results.0.hit_rate"      # into the results: keys, and places in lists from 0
    direction = ">="                 # or "<="
    threshold = 0.6

A metric may say in which file its number is, `results = "lossy.json"`, and be taken relative to another number:
`baseline = "ledger.prefill.misses"`, in `baseline_results`, makes it number ÷ baseline − 1.

Recording writes the hash of the gate and the date beside it, once. A check passes only if the gate is recorded and has
not changed since, its datasets are there and are those it names, and every metric is a finite number that reaches its
threshold. What is missing or no number has failed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sluice.errors import InputError

SIDES = ("benefit", "cost")
DIRECTIONS = (">=", "<=")
MAX_GATE_BYTES = 1 << 18
MAX_ENTRIES, MAX_NAME, MAX_TEXT = 64, 128, 4096
_METRIC_KEYS = {"name", "side", "path", "direction", "threshold", "results", "baseline", "baseline_results"}


@dataclass(frozen=True)
class Metric:
    """A number and the bound it must reach."""

    name: str
    side: str
    path: str
    direction: str
    threshold: float
    results: str | None = None  # the name of the file of results, without folders
    baseline: str | None = None
    baseline_results: str | None = None


@dataclass(frozen=True)
class Dataset:
    """A file that the experiment uses, and its hash."""

    file: str
    sha256: str


@dataclass(frozen=True)
class Gate:
    """A gate's file, read and checked. `sha256` is that of its bytes."""

    path: Path
    name: str
    description: str
    seed: int
    datasets: tuple[Dataset, ...]
    metrics: tuple[Metric, ...]  # benefits first
    sha256: str

    @property
    def record_path(self) -> Path:
        """Where it is recorded."""
        return self.path.with_name(self.path.name + ".recorded.json")


@dataclass(frozen=True)
class Registration:
    """Whether a gate was recorded: "recorded", "unrecorded", or "changed" since; when, and with what hash."""

    state: str
    recorded: str | None = None
    sha256: str | None = None


# --- the gate's file


def read_gate(path: Path) -> Gate:
    """The gate in the file at `path`. Raises InputError for a file that is none."""
    raw = read_bytes(path, MAX_GATE_BYTES)
    try:
        table = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not TOML ({error}): correct it") from None
    try:
        return _gate(path, table, hashlib.sha256(raw).hexdigest())
    except _Fault as fault:
        raise InputError(f"{path}: {fault}") from None


class _Fault(Exception):
    """What is wrong with a gate, to be said with its file's name."""


def _gate(path: Path, table: Mapping[str, Any], sha256: str) -> Gate:
    _only(table, {"name", "description", "seed", "dataset", "metric"}, "the gate")
    datasets = tuple(_dataset(entry, i) for i, entry in _entries(table, "dataset"))
    metrics = [_metric(entry, i) for i, entry in _entries(table, "metric")]
    for side in SIDES:
        if not any(metric.side == side for metric in metrics):
            raise _Fault(f'has no metric with side = "{side}": a gate needs a benefit and a cost')
    if len({metric.name for metric in metrics}) < len(metrics):
        raise _Fault("names two metrics alike: give each a name of its own")
    seed = table.get("seed")
    if type(seed) is not int or not 0 <= seed < 1 << 63:
        raise _Fault("needs a seed, a whole number of at least 0: write it like seed = 7")
    return Gate(
        path, _text(table, "name", "the gate"), _text(table, "description", "the gate", MAX_TEXT), seed, datasets,
        tuple(sorted(metrics, key=lambda metric: SIDES.index(metric.side))), sha256,
    )  # fmt: skip


def _entries(table: Mapping[str, Any], name: str) -> list[tuple[int, Mapping[str, Any]]]:
    entries = table.get(name, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _Fault(f"{name} must be a list of tables: write [[{name}]] before each")
    if len(entries) > MAX_ENTRIES:
        raise _Fault(f"has {len(entries)} entries of {name}: give at most {MAX_ENTRIES}")
    return list(enumerate(entries, 1))


def _dataset(entry: Mapping[str, Any], i: int) -> Dataset:
    what = f"dataset {i}"
    _only(entry, {"file", "sha256"}, what)
    digest = _text(entry, "sha256", what)
    if not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
        raise _Fault(f"{what} needs its file's SHA-256 as 64 hexadecimal digits")
    return Dataset(_text(entry, "file", what, MAX_TEXT), digest.lower())


def _metric(entry: Mapping[str, Any], i: int) -> Metric:
    what = f"metric {i}"
    _only(entry, _METRIC_KEYS, what)
    threshold = entry.get("threshold")
    if finite(threshold) is None:
        raise _Fault(f"{what} needs a threshold, a finite number")
    texts = {key: _text(entry, key, what) for key in _METRIC_KEYS - {"threshold"} if key in entry or key in
             ("name", "side", "path", "direction")}  # fmt: skip
    for key, choices in (("side", SIDES), ("direction", DIRECTIONS)):
        if texts[key] not in choices:
            raise _Fault(f"{what} has {key} {texts[key]!r}: choose from {', '.join(choices)}")
    if "baseline_results" in texts and "baseline" not in texts:
        raise _Fault(f"{what} has baseline_results and no baseline: give the path in it")
    return Metric(threshold=float(threshold), **texts)  # type: ignore[arg-type]


def _only(table: Mapping[str, Any], known: set[str], what: str) -> None:
    if unknown := sorted(set(table) - known):
        raise _Fault(f"{what} has an unknown key {unknown[0][:MAX_NAME]!r}: choose from {', '.join(sorted(known))}")


def _text(table: Mapping[str, Any], key: str, what: str, longest: int = MAX_NAME) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value.strip() or len(value) > longest:
        raise _Fault(f"{what} needs a {key}, a text of at most {longest} characters")
    return value


def finite(value: Any) -> float | None:
    """`value` as a finite float; None if it is anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def reason(error: Exception) -> str:
    """What the system says of an error, in words."""
    return getattr(error, "strerror", None) or str(error)


def read_bytes(path: Path, most: int) -> bytes:
    """The bytes of a file. Raises InputError where it can't be read, or is longer than `most`."""
    try:
        if not path.is_file():
            raise InputError(f"{path}: {'not a regular file' if path.exists() else 'no such file'}: check the path")
        with path.open("rb") as file:
            raw = file.read(most + 1)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: can't be read ({reason(error)}): check the file") from None
    if len(raw) > most:
        raise InputError(f"{path}: is longer than {most >> 10} KiB: that is no such file")
    return raw


# --- its record


def record(gate: Gate) -> Registration:
    """Record `gate`; one that is recorded as it is stays so, with its date.

    Raises InputError if it has changed since it was recorded, or a dataset is missing or another.
    """
    known = registration(gate)
    if known.state == "changed":
        raise InputError(f"{changed(gate, known)}: restore that file, or give the new gate a file of its own")
    if faults := dataset_faults(gate):
        raise InputError(f"{faults[0]}: correct the gate before it is recorded")
    if known.state == "recorded":
        return known
    new = Registration("recorded", datetime.now(UTC).isoformat(timespec="seconds"), gate.sha256)
    text = json.dumps({"gate": gate.name, "sha256": new.sha256, "recorded": new.recorded}, indent=2) + "\n"
    try:
        with gate.record_path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InputError(f"{gate.record_path}: can't be written ({error.strerror}): check the folder") from None
    return new


def registration(gate: Gate) -> Registration:
    """Whether and as what `gate` was recorded. Raises InputError for a record that can't be read."""
    if not gate.record_path.exists():
        return Registration("unrecorded")
    try:
        known = json.loads(read_bytes(gate.record_path, MAX_GATE_BYTES))
        sha256, recorded = known["sha256"], known["recorded"]
        if datetime.fromisoformat(recorded).tzinfo is None or not re.fullmatch(r"[0-9a-f]{64}", sha256):
            raise ValueError
    except (ValueError, LookupError, TypeError, RecursionError):
        raise InputError(f"{gate.record_path}: is not a gate's record: restore it") from None
    return Registration("recorded" if sha256 == gate.sha256 else "changed", recorded, sha256)


def changed(gate: Gate, known: Registration) -> str:
    """What to say of a gate that changed since it was recorded."""
    was, now = (known.sha256 or "")[:16], gate.sha256[:16]
    return f"{gate.path} has changed since it was recorded on {known.recorded}: its SHA-256 was {was}… and is {now}…"


def dataset_faults(gate: Gate) -> list[str]:
    """What is wrong with the files that `gate` names; reads them through."""
    faults = []
    for dataset in gate.datasets:
        path = gate.path.parent / dataset.file
        try:
            if not path.is_file():
                raise ValueError("no such file")
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except (OSError, ValueError) as error:
            faults.append(f"the dataset {dataset.file} can't be read ({reason(error)})")
            continue
        if found != dataset.sha256:
            faults.append(f"the dataset {dataset.file} is another file: its SHA-256 is {found}")
    return faults

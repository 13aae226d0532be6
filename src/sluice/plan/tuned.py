"""Settings that tuning found for a model on this machine, as files in the user's cache folder. It measures nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from sluice.config import READERS
from sluice.errors import InputError
from sluice.experts.policies import AUTO, POLICIES
from sluice.new_file import appearing
from sluice.user_files import cache_folder

FORMAT = 1
MAX_FILE_BYTES = 1 << 16
LIKE = 0.1  # a budget that far from the tuned one is another
# What may be tuned, under the names of the command line's options, and what it may be.
ALLOWED: Mapping[str, Any] = {
    "threads": range(1, 513),
    "io_threads": range(1, 65),
    "reader": READERS,
    "policy": (AUTO, *POLICIES),
    "no_prefetch": (False, True),
    "cpu_moe_layers": range(1 << 12),
    "pool_share": None,  # a number above 0, at most 1
}


@dataclass(frozen=True)
class Tuned:
    """`settings` are those of ALLOWED that differ from the defaults, with which decoding was `gain` (a share) faster.

    They hold for the file `path` of `size` bytes, last changed at `changed_ns`, on `machine`; the share of the pool for
    budgets like `budget`, bytes, alone. `when` is a time in ISO 8601.
    """

    path: str
    size: int
    changed_ns: int
    machine: str
    budget: int | None
    settings: Mapping[str, Any]
    gain: float
    when: str

    @classmethod
    def of(cls, path: Path, machine: str, **more: Any) -> Tuned:
        """For the model file at `path` as it is now."""
        facts = path.stat()
        return cls(str(path.resolve()), facts.st_size, facts.st_mtime_ns, machine, **more)

    def without_pool(self) -> Tuned:
        """The settings that hold at any budget."""
        return replace(self, settings={key: value for key, value in self.settings.items() if key != "pool_share"})

    def for_budget(self, budget: int) -> Tuned:
        """The settings that hold at `budget` bytes."""
        near = self.budget is not None and abs(budget / self.budget - 1) <= LIKE
        return self if near else self.without_pool()


def folder() -> Path:
    return cache_folder() / "tuned"


def save(tuned: Tuned) -> Path:
    """Keep settings, in place of what was kept for the same model and machine. Raises InputError."""
    path = _path(tuned.path, tuned.machine)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{path.parent}: can't be made ({error.strerror}): free the name, or set XDG_CACHE_HOME"
        ) from None
    with appearing(path, "tuned", force=True, made="what was tuned") as making:
        making.write_text(json.dumps({"format": FORMAT, **asdict(tuned)}, indent=1) + "\n", encoding="utf-8")
    return path


def forget(path: Path, machine: str) -> None:
    """Keep nothing for this model and machine any more."""
    _path(str(path.resolve()), machine).unlink(missing_ok=True)


def find(path: Path, machine: str) -> Tuned | None:
    """What is kept for the model file at `path`, unless that has changed since. What is damaged counts as nothing."""
    try:
        with _path(str(path.resolve()), machine).open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        said = json.loads(raw) if len(raw) <= MAX_FILE_BYTES else None
        if not isinstance(said, dict) or said.pop("format", None) != FORMAT:
            return None
        tuned, now = Tuned(**said), path.stat()
        same = (tuned.size, tuned.changed_ns) == (now.st_size, now.st_mtime_ns)
        return tuned if same and _sound(tuned.settings) else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _sound(settings: object) -> bool:
    return isinstance(settings, dict) and all(_allowed(name, value) for name, value in settings.items())


def _allowed(name: str, value: Any) -> bool:
    if name == "pool_share":
        return isinstance(value, float) and 0 < value <= 1
    return name in ALLOWED and isinstance(value, bool) == (name == "no_prefetch") and value in ALLOWED[name]


def _path(model: str, machine: str) -> Path:
    return folder() / f"{sha256(json.dumps([model, machine]).encode(errors='replace')).hexdigest()[:24]}.json"

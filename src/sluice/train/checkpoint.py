"""The folder of a run: its recipe, its checkpoints, its result. Knows their files and not what is trained."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sluice.errors import InputError

RECIPE, RESULT = "recipe.json", "result.json"
PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "tokenizers")
_STEP = re.compile(r"step-(\d{6,})")


class RunFolder:
    """`path`, made for `recipe` or made by the same one before. Raises InputError where another made it."""

    def __init__(self, path: str | Path, recipe: Mapping[str, Any], *, write: bool = True) -> None:
        """`write=False` is for the processes that only read: the first one has the folder made."""
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        asked = json.loads(json.dumps(recipe))  # tuples to lists, as they come back
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path}: a file is there: name a folder for the run")
        known = self.path / RECIPE
        if known.is_file():
            self._compare(read_json(known).get("recipe"), asked)
        elif self.path.is_dir() and any(self.path.iterdir()):
            raise InputError(f"{self.path}: holds files and no {RECIPE}: name an empty folder, or a new one")
        elif write:
            try:
                self.checkpoints.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(f"{self.path}: can't be made ({error.strerror}): name another folder") from error
            write_json(known, {"recipe": asked, "versions": versions()})

    def _compare(self, made: Any, asked: Any) -> None:
        for name, there, here in _differences(made, asked):
            raise InputError(
                f"{self.path}: is a run of another recipe: {name} is {_shown(there)} there and {_shown(here)} here; "
                "name another folder, or give the same recipe"
            )

    # --- result

    @property
    def result(self) -> dict[str, Any] | None:
        """What the finished run came to; None while it isn't finished."""
        path = self.path / RESULT
        return read_json(path) if path.is_file() else None

    def finish(self, result: Mapping[str, Any]) -> None:
        """Keep the result, which says that the run is finished."""
        write_json(self.path / RESULT, result)

    # --- checkpoints

    def steps(self) -> list[int]:
        """The steps of the checkpoints, ascending."""
        if not self.checkpoints.is_dir():
            return []
        found = (_STEP.fullmatch(entry.name) for entry in self.checkpoints.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def folder(self, step: int) -> Path:
        """Where the checkpoint of `step` finished steps is."""
        return self.checkpoints / f"step-{step:06d}"

    def save(self, step: int, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
        """Keep a checkpoint of `step` finished steps; it appears whole or not at all."""
        folder = self.folder(step)
        making = self.checkpoints / f".making-{step:06d}"
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()},
                  making / "model.safetensors")  # fmt: skip
        torch.save(dict(state), making / "state.pt")
        shutil.rmtree(folder, ignore_errors=True)
        making.replace(folder)
        return folder

    def tidy(self, keep: int, every: int, best: int | None) -> None:
        """Remove all checkpoints but the last, the last `keep` of those saved `every` so many steps, and the best."""
        steps = self.steps()
        kept = {*steps[-1:], *[step for step in steps if step % every == 0][-keep:], best}
        for step in steps:
            if step not in kept:
                shutil.rmtree(self.folder(step), ignore_errors=True)


def step_of(folder: Path) -> int:
    """The finished steps of a checkpoint, by its folder's name. Raises InputError."""
    if (match := _STEP.fullmatch(folder.name)) is None or not (folder / "model.safetensors").is_file():
        raise InputError(f"{folder}: is no checkpoint: name a folder like RUN/checkpoints/step-000400")
    return int(match[1])


def load(folder: Path, remedy: str = "remove it, to go on from the one before") -> tuple[dict[str, Tensor], Any]:
    """Weights and state of a checkpoint. Raises InputError, which names the `remedy`, where it is damaged."""
    try:
        weights = load_file(folder / "model.safetensors")
        state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{folder}: is no whole checkpoint ({first[:120]}): {remedy}") from None
    return weights, state


# --- JSON


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises InputError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: can't be read ({error}): name another run's folder") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: is no JSON object: name another run's folder")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A JSON object, which appears whole or not at all."""
    making = path.with_name(f".{path.name}.making")
    making.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    making.replace(path)


def versions() -> dict[str, str | None]:
    """What the run was made with."""
    found: dict[str, str | None] = {}
    for package in ("sluice", *PACKAGES):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _differences(there: Any, here: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Names of what differs between two JSON values, with both values."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in {**there, **here}:
            yield from _differences(there.get(key), here.get(key), f"{name}.{key}" if name else key)
    elif there != here:
        yield name or "it", there, here


def _shown(value: Any) -> str:
    text = "not given" if value is None else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "…"

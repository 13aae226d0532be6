"""Spoils a family's file in every way that metadata can contradict tensors; knows no architecture.

A spoilt file is refused by name before any tensor is read: the engine only plans here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path

import numpy as np
from family_file import FamilyFile

from sluice.config import EngineConfig
from sluice.engine import Engine
from sluice.errors import ModelFileError

HUGE = 0xFFFFFFFF


def problem(path: Path) -> str | None:
    """The one line that opening the file ends in; None if it opens. Anything but ModelFileError passes through."""
    try:
        Engine(path, EngineConfig(threads=1), plan_only=True)
    except ModelFileError as error:
        assert "\n" not in str(error)
        return str(error)
    return None


def names(said: str, tensor: str) -> bool:
    """Whether the line names the tensor; an expert matrix may be named by layer and part, the head by token_embd."""
    if tensor in ("token_embd.weight", "output.weight"):
        return "token_embd.weight" in said or "output.weight" in said
    expert = re.fullmatch(r"blk\.(\d+)\.ffn_(gate_up|gate|up|down)_exps\.weight", tensor)
    return tensor in said or (expert is not None and f"layer {expert[1]}" in said and expert[2] in said)


def spoilt_tensors(make: Callable[[], FamilyFile]) -> Iterator[tuple[str, str, FamilyFile]]:
    """(what was done, tensor, file): each tensor left out, or one longer or shorter in a dimension, and a new one."""
    file_of = make().stored
    for name in file_of:
        file = make()
        del file.stored[name]
        yield "left out", name, file
        raw, t = file_of[name]
        for axis in range(max(1, raw.ndim - 1)):  # not along a row, which is blocks of a type
            for what, indices in (("longer", [*range(raw.shape[axis]), 0]), ("shorter", [*range(raw.shape[axis] - 1)])):
                file = make()
                file.stored[name] = (raw.take(indices, axis=axis), t)
                yield f"{what} in dimension {axis}", name, file
    for name in ("blk.0.mystery.weight", "mystery.weight"):
        file = make()
        file.vector(name, np.zeros(4))
        yield "new", name, file


def assert_spoilt_tensors_are_refused(
    make: Callable[[], FamilyFile], folder: Path, *, may_lack: Callable[[str], bool] = lambda name: False,
    skipped: Callable[[str], bool] = lambda name: False,
) -> None:  # fmt: skip
    """Each is refused with the tensor's name, except that the file does without those of which `may_lack` is true,
    and that nobody looks at those of which `skipped` is."""
    wrong = []
    for what, name, file in spoilt_tensors(make):
        said = problem(file.write(folder / "spoilt.gguf").path)
        fine = skipped(name) or (what == "left out" and may_lack(name))
        if fine if said is not None else not fine:
            wrong.append(f"{name} {what}: {said or 'opens'}")
        elif said is not None and not names(said, name):
            wrong.append(f"{name} {what}: unnamed in {said!r}")
    assert not wrong, "\n".join(wrong)


def assert_spoilt_metadata_is_refused(
    make: Callable[[], FamilyFile], folder: Path, *, optional: AbstractSet[str]
) -> None:
    """A missing key is refused with its name or a tensor's, unless `optional`. Zero, huge, no number or of another
    type, it is refused or harmless, and never an error of another kind. Counts that are one off are refused."""
    wrong = []
    for key in make().keys:
        file = make()
        del file.keys[key]
        said = problem(file.write(folder / "spoilt.gguf").path)
        if (said is None) != (key in optional) or (said is not None and key not in said and "tensor blk." not in said):
            wrong.append(f"{key} left out: {said or 'opens'}")
        for value in (0, HUGE, "text", float("nan")):
            file = make()
            file.metadata({key: value})
            problem(file.write(folder / "spoilt.gguf").path)  # raises what is no refusal
    for key in ("expert_count", "embedding_length", "block_count", "nextn_predict_layers"):
        for change in (-1, 1):
            file = make()
            if key not in file.keys:
                continue
            file.keys[key] += change
            if problem(file.write(folder / "spoilt.gguf").path) is None:
                wrong.append(f"{key} {change:+}: opens")
    assert not wrong, "\n".join(wrong)

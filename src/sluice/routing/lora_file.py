"""Opens LoRA adapters of any kind and checks them against a model; its values are what the rest knows of an adapter.

A linear map y = W x becomes y = W x + s · (alpha ÷ rank) · B (A x), s the user's scale (arXiv 2106.09685); with rank-
stabilised LoRA alpha ÷ √rank. Files say it in two formats, each with a module of its own: `lora_gguf`, `lora_peft`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sluice.errors import InputError
from sluice.ggml import Library
from sluice.gguf import GgufFile
from sluice.models.spec import ModelSpec
from sluice.routing.linears import Linear, linears

MAX_RANK = 1 << 14
Factors = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Update:
    """What an adapter adds to a matrix, as two thin ones; `path` is where it is from.

    `factors` reads them: A [rank, n_in] and B [n_out, rank], float32, alpha ÷ rank in B; of a stack
    [n_stack, rank, n_in] and [n_stack, n_out, rank].
    """

    linear: Linear
    rank: int
    path: Path
    read: Callable[[], Factors]

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        n = (self.linear.n_stack,) if self.linear.n_stack else ()
        return (*n, self.rank, self.linear.n_in), (*n, self.linear.n_out, self.rank)

    def factors(self) -> Factors:
        """Raises InputError for numbers that are none, and where the file can't be read."""
        a, b = self.read()
        assert (a.shape, b.shape) == self.shapes, f"{self.linear.name}: {a.shape}, {b.shape} are not {self.shapes}"
        for part, values in (("A", a), ("B", b)):
            if not np.isfinite(values).all():
                raise InputError(
                    f"{self.path}: {part} of {self.linear.name} holds numbers that are not finite: "
                    "the adapter is damaged"
                )
        return a, b


@dataclass(frozen=True)
class Adapter:
    """One file's updates, by the names of the matrices they change. Its numbers are still unread."""

    path: Path
    updates: dict[str, Update]

    @property
    def ranks(self) -> tuple[int, int]:
        """The lowest and the highest."""
        ranks = [update.rank for update in self.updates.values()]
        return min(ranks), max(ranks)


def open_adapter(path: str | os.PathLike[str], file: GgufFile, spec: ModelSpec, library: Library) -> Adapter:
    """The adapter at `path`: a GGUF file, or a PEFT directory or the safetensors file in one.

    Raises InputError, naming what is wrong, unless every part of it fits the model.
    """
    from sluice.routing.lora_gguf import read_gguf_adapter
    from sluice.routing.lora_peft import read_peft_adapter

    given = Path(os.path.expanduser(path))  # noqa: PTH111  (Path's raises for an unknown user)
    if not os.path.lexists(given):
        raise InputError(f"{given}: no such adapter: check the path")
    known = linears(file, spec)
    if given.is_dir() or given.suffix == ".safetensors":
        updates = read_peft_adapter(given, spec, known)
    else:
        updates = read_gguf_adapter(given, spec, known, library)
    if not updates:
        raise InputError(f"{given}: adapts nothing: it is empty, or no LoRA adapter")
    return Adapter(given, updates)


def check_known(path: Path, name: str, known: Iterable[str], said: str) -> None:
    """Raise InputError where `name` is none of a model's linear maps; `said` is what the file calls it."""
    if name in known:
        return
    if "token_embd" in name:
        reason = "embeddings, which Sluice doesn't adapt"
    elif "norm" in name:
        reason = "a norm, which Sluice doesn't adapt"
    else:
        reason = "no linear map of this model: is the adapter for another?"
    raise InputError(f"{path}: adapts {said}, {reason}")


def check_rank(path: Path, said: str, rank: int) -> int:
    if not 1 <= rank <= MAX_RANK:
        raise InputError(f"{path}: {said} has the rank {rank}, not 1 to {MAX_RANK}: the adapter is damaged")
    return rank


def misfit(path: Path, said: str, what: str, found: object, expected: object) -> InputError:
    """The error for a shape that the model's matrix does not have."""
    return InputError(
        f"{path}: {what} of {said} is {found}, and the model needs {expected}: the adapter is for another model"
    )

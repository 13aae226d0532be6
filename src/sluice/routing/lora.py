"""Keeps LoRA adapters in memory beside the weights they change, which stay as they are; knows no files and no graphs.

A graph that multiplies by a matrix with a low-rank update adds that (see `sluice.ggml.Tensor.low_rank`). However many
adapters change a matrix, it has one update, whose rank is theirs together and whose B holds their scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from sluice.ggml import Buffer, Context, GgmlType, Library, Tensor
from sluice.io.aligned import AlignedBuffer
from sluice.routing.linears import Linear
from sluice.routing.lora_file import Adapter, Factors, Update

ALIGNMENT = 64  # bytes
Scaled = tuple[Update, float]
LowRank = tuple[Tensor, Tensor]


def by_linear(adapters: Sequence[tuple[Adapter, float]]) -> dict[str, list[Scaled]]:
    """All adapters' updates, each with its scale, by the names of the matrices they change."""
    found: dict[str, list[Scaled]] = {}
    for adapter, scale in adapters:
        for name, update in adapter.updates.items():
            found.setdefault(name, []).append((update, scale))
    return found


def joined_factors(updates: Sequence[Scaled]) -> Factors:
    """A and B of several updates of one matrix as one update's, their scales in B. Raises as Update.factors does."""
    each = [(*update.factors(), scale) for update, scale in updates]
    return (
        np.concatenate([a for a, _, _ in each], axis=-2),
        np.concatenate([b * np.float32(scale) for _, b, scale in each], axis=-1),
    )


class LoraWeights:
    """The updates' A [n_in, rank] and B [rank, n_out] as tensors, float32; a context manager.

    Memory is set out at once and untouched until `load`. `n_bytes` is what it takes, `rank` the highest, and `experts`
    holds the updates of experts' matrices by layer and role: A [n_in, rank, n_expert], B [rank, n_out, n_expert].
    """

    def __init__(self, library: Library, adapters: Sequence[tuple[Adapter, float]]) -> None:
        self._updates = by_linear(adapters)
        self._linears = {name: updates[0][0].linear for name, updates in self._updates.items()}
        ranks = {name: sum(update.rank for update, _ in updates) for name, updates in self._updates.items()}
        self.rank = max(ranks.values())
        self.n_bytes = sum(sum(_sizes(linear, ranks[name])) for name, linear in self._linears.items())
        self._memory = AlignedBuffer(self.n_bytes)
        self._buffer = Buffer(library, self._memory.address, self.n_bytes)
        self._context = Context(library, 2 * len(self._updates))
        self._tensors: dict[str, LowRank] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self.experts: dict[tuple[int, str], LowRank] = {}
        at = 0
        for name, linear in self._linears.items():
            n = (linear.n_stack,) if linear.n_stack else ()
            a = self._context.tensor(GgmlType.F32, linear.n_in, ranks[name], *n)
            b = self._context.tensor(GgmlType.F32, ranks[name], linear.n_out, *n)
            size_a, size_b = _sizes(linear, ranks[name])
            self._places[name] = (at, at + size_a)
            self._buffer.place(a, at)
            self._buffer.place(b, at + size_a)
            at += size_a + size_b
            self._tensors[name] = (a, b)
            if linear.tensor is None:
                self.experts[linear.layer, linear.role] = (a, b)

    def __enter__(self) -> LoraWeights:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._context.close()
        self._buffer.close()
        self._memory.close()

    def attach(self, weights: Mapping[str, Tensor]) -> None:
        """Put each update that is not of experts beside its matrix in `weights`, the model's by GGUF name."""
        for name, linear in self._linears.items():
            if linear.tensor is not None:
                weights[linear.tensor].low_rank = self._tensors[name]

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Read all numbers; `progress(done, total)` in bytes. Raises InputError."""
        done = 0
        for name, updates in self._updates.items():
            linear = self._linears[name]
            for values, at in zip(joined_factors(updates), self._places[name], strict=True):
                place = np.frombuffer(self._memory.view, np.float32, values.size, at)
                place.reshape(values.shape)[...] = values
            done += sum(_sizes(linear, sum(update.rank for update, _ in updates)))
            if progress:
                progress(done, self.n_bytes)


def _sizes(linear: Linear, rank: int) -> tuple[int, int]:
    """Bytes of A and of B in memory."""
    n = 4 * rank * (linear.n_stack or 1)
    a, b = (-(-n * width // ALIGNMENT) * ALIGNMENT for width in (linear.n_in, linear.n_out))
    return a, b

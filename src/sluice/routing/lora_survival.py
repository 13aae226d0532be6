"""Merges LoRA updates into stored weights, stores those again in their own type, and measures what is left of them.

Of a matrix W as the file holds it, an update D = s B A, and Q, storing in W's type and reading back, what merging did
is D' = Q(W + D) - W. The share of the update that survives is <D', D> / <D, D>: 1 where storing changes nothing, 0
where every number is rounded back to what it was. Beside it the error |D' - D| / |D|: what merging left out and what
rounding added. Q knows no importance matrix, as that of the file's maker is not in the file.

Rows are worked on a few megabytes at a time, experts one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sluice.ggml import GgmlType
from sluice.ggml.tensor import row_bytes
from sluice.io.aligned import AlignedBuffer
from sluice.io.files import ModelFiles
from sluice.routing.linears import Linear
from sluice.routing.lora import Scaled, joined_factors
from sluice.routing.stored import Converter

BLOCK_BYTES = 16 << 20  # of float32 rows at once
SCRATCH_BYTES = 4 << 20
Sink = Callable[[int, int, bytearray], None]  # (file, offset, merged rows as they would be stored there)


@dataclass(frozen=True)
class Survival:
    """Of one matrix, or of several together: sums of squares over its numbers."""

    update: float = 0.0  # of D
    along: float = 0.0  # <D', D>
    off: float = 0.0  # of D' - D

    def __add__(self, other: Survival) -> Survival:
        return Survival(self.update + other.update, self.along + other.along, self.off + other.off)

    @property
    def share(self) -> float | None:
        """What survives of the update; None where there is none."""
        return self.along / self.update if self.update else None

    @property
    def error(self) -> float | None:
        return (self.off / self.update) ** 0.5 if self.update else None

    def as_dict(self) -> dict[str, Any]:
        return {"share": self.share, "error": self.error}


def survival(
    updates: Mapping[str, Sequence[Scaled]], files: ModelFiles, converter: Converter, *, sink: Sink | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Survival]:  # fmt: skip
    """What is left of each matrix's updates (see `sluice.routing.lora.by_linear`), by its name.

    `sink` is given the merged rows; `progress(done, total)` counts rows. Raises InputError as Update.factors does, and
    ReadError.
    """
    linears = {name: found[0][0].linear for name, found in updates.items()}
    total = sum(linear.n_out * (linear.n_stack or 1) for linear in linears.values())
    found: dict[str, Survival] = {}
    done = 0
    with AlignedBuffer(SCRATCH_BYTES) as scratch:
        for name, linear in linears.items():
            a, b = joined_factors(updates[name])
            of_all = Survival()
            for i in range(linear.n_stack or 1):
                own_a, own_b = (a[i], b[i]) if linear.n_stack else (a, b)
                step = max(1, BLOCK_BYTES // (4 * linear.n_in))
                for first in range(0, linear.n_out, step):
                    change = own_b[first : first + step] @ own_a
                    of_all += _rows(files, scratch, converter, linear, i, first, change, sink)
                    done += len(change)
                    if progress:
                        progress(done, total)
            found[name] = of_all
    return found


def _rows(
    files: ModelFiles, scratch: AlignedBuffer, converter: Converter, linear: Linear, i: int, first: int,
    change: np.ndarray, sink: Sink | None,
) -> Survival:  # fmt: skip
    """Of rows [first, first + n) of matrix `i` of a stack, which `change` [n, n_in] is added to."""
    each = row_bytes(converter.library, linear.type, linear.n_in)
    offset = linear.offset + i * linear.stride + first * each
    raw = bytearray(len(change) * each)
    with memoryview(raw) as view:
        files.read_exact(linear.file, offset, view, scratch)
    before = converter.widened(linear.type, linear.n_in, raw)
    stored = converter.stored(linear.type, before + change)
    if sink is not None:
        sink(linear.file, offset, stored)
    after = converter.widened(linear.type, linear.n_in, stored) - before
    return Survival(_inner(change, change), _inner(after, change), _inner(after - change, after - change))


def _inner(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.einsum("ij,ij->", a, b, dtype=np.float64))


def by_type(found: Mapping[str, Survival], updates: Mapping[str, Sequence[Scaled]]) -> dict[GgmlType, Survival]:
    """The matrices of each type together."""
    sums: dict[GgmlType, Survival] = {}
    for name, one in found.items():
        type = updates[name][0][0].linear.type
        sums[type] = sums.get(type, Survival()) + one
    return sums

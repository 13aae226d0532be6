"""The memory that a model's tensors lie in, the host's or a device's, behind one interface; knows no model.

On the host, tensors begin at pages of one block, in their order. On a device, they lie where ggml puts them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from sluice.ggml import Buffer, Context, Device, DeviceTensors, Library, Tensor
from sluice.io.aligned import AlignedBuffer

PAGE_BYTES = 4096


def page_aligned(n: int) -> int:
    """`n` bytes, rounded up to whole pages."""
    return -(-n // PAGE_BYTES) * PAGE_BYTES


class TensorMemory(Protocol):
    """Where the data of some tensors lies. `n_bytes` is what it takes."""

    n_bytes: int

    def copy(self, tensor: Tensor, source: int, target: int, n: int) -> None:
        """Copy `n` bytes from `source` bytes into the data of `tensor` to `target`; the two don't overlap."""
        ...

    def clear(self, tensor: Tensor, at: int, n: int) -> None:
        """Make `n` bytes of `tensor` zero, from `at` on."""
        ...

    def close(self) -> None: ...


class HostMemory:
    """Tensors in the host's memory, zeroed, untouched until something is written."""

    def __init__(self, library: Library, tensors: Sequence[Tensor]) -> None:
        self.n_bytes = max(PAGE_BYTES, sum(page_aligned(tensor.n_bytes) for tensor in tensors))
        self._memory = AlignedBuffer(self.n_bytes)
        self._buffer = Buffer(library, self._memory.address, self.n_bytes)
        self._at: dict[int, int] = {}
        at = 0
        for tensor in tensors:
            self._buffer.place(tensor, at)
            self._at[tensor.ptr] = at
            at += page_aligned(tensor.n_bytes)

    def flat(self, tensor: Tensor, dtype: type[np.generic], count: int) -> np.ndarray:
        """The first `count` numbers of `tensor`, as a writable array over the same bytes."""
        return np.frombuffer(self._memory.view, dtype, count, self._at[tensor.ptr])

    def copy(self, tensor: Tensor, source: int, target: int, n: int) -> None:
        start = self._memory.address + self._at[tensor.ptr]
        ctypes.memmove(start + target, start + source, n)

    def clear(self, tensor: Tensor, at: int, n: int) -> None:
        ctypes.memset(self._memory.address + self._at[tensor.ptr] + at, 0, n)

    def close(self) -> None:
        self._buffer.close()
        self._memory.close()


def lay(library: Library, context: Context, tensors: Sequence[Tensor], device: Device | None) -> TensorMemory:
    """Memory for `tensors`, which are all that `context` has: of `device`, or the host's where that is None."""
    if device is None or not tensors:
        return HostMemory(library, tensors)
    return DeviceTensors(device, context)

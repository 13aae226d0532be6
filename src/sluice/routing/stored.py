"""Weights as files store them, to float32 and back, by ggml's own routines; knows types and rows, nothing of models."""

from __future__ import annotations

import ctypes as C

import numpy as np

from sluice.errors import GgmlError
from sluice.ggml import Backend, Buffer, Context, GgmlType, GraphAllocator, Library
from sluice.ggml.tensor import row_bytes
from sluice.ggml.types import WEIGHT_TYPES
from sluice.io.aligned import AlignedBuffer


class Converter:
    """Stored rows to float32 and back; a context manager with a thread of ggml's."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._backend = Backend(library, 1)

    def __enter__(self) -> Converter:
        return self

    def __exit__(self, *exc: object) -> None:
        self._backend.close()

    def widened(self, type: GgmlType, n_in: int, stored: bytes | bytearray | memoryview) -> np.ndarray:
        """Stored rows of `n_in` numbers as float32 [n_rows, n_in]."""
        n_rows = self._n_rows(type, n_in, stored)
        if type == GgmlType.F32:
            return np.frombuffer(stored, np.float32).reshape(n_rows, n_in).copy()
        room = -(-len(stored) // 4096) * 4096
        with AlignedBuffer(room + 4 * n_rows) as memory, Buffer(self.library, memory.address, memory.n_bytes) as buffer:
            memory.view[: len(stored)] = stored
            np.frombuffer(memory.view, np.int32, n_rows, room)[:] = np.arange(n_rows, dtype=np.int32)
            with Context(self.library, 8, n_graphs=1) as c, GraphAllocator(self._backend) as allocator:
                weights, ids = c.tensor(type, n_in, n_rows), c.tensor(GgmlType.I32, n_rows)
                buffer.place(weights, 0)
                buffer.place(ids, room)
                rows = c.get_rows(weights, ids)
                graph = c.graph()
                graph.add(rows)
                allocator.reserve(graph)
                allocator.place(graph)
                self._backend.compute(graph)
                place = (C.c_float * (n_rows * n_in)).from_address(rows.address)
                return np.ctypeslib.as_array(place).reshape(n_rows, n_in).copy()

    def _n_rows(self, type: GgmlType, n_in: int, stored: bytes | bytearray | memoryview) -> int:
        if type not in WEIGHT_TYPES:
            raise GgmlError(f"{type.name} is no type of weights")
        n_rows, rest = divmod(len(stored), row_bytes(self.library, type, n_in))
        if rest or n_rows == 0:
            raise GgmlError(f"{len(stored)} bytes are no rows of {n_in} numbers in {type.name}")
        return n_rows

    def stored(self, type: GgmlType, rows: np.ndarray) -> bytearray:
        """float32 `rows` [n_rows, n_in] as `type` stores them.

        No importance matrix is known. Types that can't be made without one get one that finds all inputs equally
        important.
        """
        if type not in WEIGHT_TYPES:
            raise GgmlError(f"{type.name} is no type of weights")
        source = np.ascontiguousarray(rows, np.float32)
        n_rows, n_in = source.shape
        result = bytearray(n_rows * row_bytes(self.library, type, n_in))
        if type == GgmlType.F32:
            result[:] = source.data.cast("B")
            return result
        equal = np.ones(n_in, np.float32) if self.library.ggml_quantize_requires_imatrix(type) else None
        destination = (C.c_char * len(result)).from_buffer(result)
        written = self.library.ggml_quantize_chunk(
            type, source.ctypes.data, C.addressof(destination), 0, n_rows, n_in,
            None if equal is None else equal.ctypes.data,
        )  # fmt: skip
        assert written == len(result), f"{type.name}: {written} bytes instead of {len(result)}"
        return result

"""What recurrent layers remember of each stream, in one block of memory; knows sizes, not what the numbers mean.

Unlike keys and values, which are kept for every position, a state is replaced at each step: it can be cleared, and not
taken back.
"""

from __future__ import annotations

import ctypes

from sluice.ggml import Buffer, Context, GgmlType, Library, Tensor
from sluice.io.aligned import AlignedBuffer
from sluice.models.spec import ModelSpec

STATE_ALIGNMENT = 4096


def recurrent_bytes(spec: ModelSpec, n_streams: int) -> int:
    """Bytes that the states of `n_streams` streams take."""
    return n_streams * _stream_bytes(spec)


def _stream_bytes(spec: ModelSpec) -> int:
    n = 4 * sum(sum(sizes) for sizes in spec.recurrent.values())
    return -(-n // STATE_ALIGNMENT) * STATE_ALIGNMENT


class RecurrentState:
    """States of all layers, F32, a stream's next to each other; a context manager. Clear a stream before it begins."""

    def __init__(self, library: Library, spec: ModelSpec, n_streams: int) -> None:
        self._stride = _stream_bytes(spec)
        self._offsets: dict[int, list[tuple[int, int]]] = {}  # layer -> (offset in a stream, numbers) of each state
        at = 0
        for layer, sizes in spec.recurrent.items():
            self._offsets[layer] = []
            for size in sizes:
                self._offsets[layer].append((at, size))
                at += 4 * size
        self._memory = AlignedBuffer(max(STATE_ALIGNMENT, n_streams * self._stride))
        self._buffer = Buffer(library, self._memory.address, self._memory.n_bytes)
        self._context = Context(library, 1)
        self._all = self._context.tensor(GgmlType.F32, self._memory.n_bytes // 4)
        self._buffer.place(self._all, 0)

    def __enter__(self) -> RecurrentState:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def view(self, c: Context, layer: int, index: int, stream: int) -> Tensor:
        """The `index`-th state of `layer` that `stream` has: [numbers]."""
        at, size = self._offsets[layer][index]
        return c.view(self._all, (size,), (), stream * self._stride + at)

    def clear(self, stream: int) -> None:
        """Make all of a stream's states zero, as before its first token."""
        ctypes.memset(self._memory.address + stream * self._stride, 0, self._stride)

    def copy(self, source: int, target: int) -> None:
        """Have the stream `target` remember what `source` does."""
        start = self._memory.address
        ctypes.memmove(start + target * self._stride, start + source * self._stride, self._stride)

    def close(self) -> None:
        self._context.close()
        self._buffer.close()
        self._memory.close()

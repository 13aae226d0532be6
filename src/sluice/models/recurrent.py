"""What recurrent layers remember of each stream, in one block; knows sizes, not what the numbers mean.

Unlike keys and values, which are kept for every position, a state is replaced at each step: it can be cleared, and not
taken back.
"""

from __future__ import annotations

from collections.abc import Collection

from sluice.ggml import Context, Device, GgmlType, Library, Tensor
from sluice.models.spec import ModelSpec
from sluice.models.tensor_memory import PAGE_BYTES, lay, page_aligned


def recurrent_bytes(spec: ModelSpec, n_streams: int, layers: Collection[int] | None = None) -> int:
    """Bytes that the states of `n_streams` streams take, in all layers or in `layers`."""
    return n_streams * _stream_bytes(spec, layers)


def _stream_bytes(spec: ModelSpec, layers: Collection[int] | None) -> int:
    n = 4 * sum(sum(sizes) for layer, sizes in spec.recurrent.items() if layers is None or layer in layers)
    return page_aligned(n)


class RecurrentState:
    """States of all layers, or of `layers`, F32, a stream's next to each other; in `device`'s memory if it is given.

    A context manager. Clear a stream before it begins.
    """

    def __init__(
        self, library: Library, spec: ModelSpec, n_streams: int, *, layers: Collection[int] | None = None,
        device: Device | None = None,
    ) -> None:  # fmt: skip
        self._stride = _stream_bytes(spec, layers)
        self._offsets: dict[int, list[tuple[int, int]]] = {}  # layer -> (offset in a stream, numbers) of each state
        at = 0
        for layer, sizes in spec.recurrent.items():
            if layers is not None and layer not in layers:
                continue
            self._offsets[layer] = []
            for size in sizes:
                self._offsets[layer].append((at, size))
                at += 4 * size
        self._context = Context(library, 1)
        self._all = self._context.tensor(GgmlType.F32, max(PAGE_BYTES, n_streams * self._stride) // 4)
        self._memory = lay(library, self._context, [self._all], device)
        self.n_bytes = self._memory.n_bytes

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
        self._memory.clear(self._all, stream * self._stride, self._stride)

    def copy(self, source: int, target: int) -> None:
        """Have the stream `target` remember what `source` does."""
        self._memory.copy(self._all, source * self._stride, target * self._stride, self._stride)

    def close(self) -> None:
        self._context.close()
        self._memory.close()

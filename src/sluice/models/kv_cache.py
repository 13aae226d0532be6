"""Keys and values of every position, for all layers and streams, in one block of memory; knows no attention.

Each layer has one tensor of keys and one of values with a row per position; stream s owns the rows
[s × n_ctx, (s + 1) × n_ctx). Rows are written by index and read through views, so graphs are reused.
"""

from __future__ import annotations

from sluice.ggml import Buffer, Context, GgmlType, Library, Tensor
from sluice.ggml.tensor import row_bytes
from sluice.io.aligned import AlignedBuffer
from sluice.models.spec import ModelSpec

KV_TYPES = {"f16": GgmlType.F16, "f32": GgmlType.F32, "q8_0": GgmlType.Q8_0, "q4_0": GgmlType.Q4_0}
# Lengths are padded to this many positions before attention, masked: a graph is rebuilt only when the padding changes.
KV_PADDING = 256


def padded(n: int) -> int:
    return -(-n // KV_PADDING) * KV_PADDING


def kv_bytes(spec: ModelSpec, library: Library, types: tuple[GgmlType, GgmlType], n_ctx: int, n_streams: int) -> int:
    """Bytes that a cache of `n_streams` × `n_ctx` positions takes."""
    k, v = (row_bytes(library, t, n) for t, n in zip(types, (spec.n_embd_k, spec.n_embd_v), strict=True))
    rows = padded(n_ctx) * n_streams
    return spec.n_layers * (_aligned(k * rows) + _aligned(v * rows))


def _aligned(n: int) -> int:
    return -(-n // 4096) * 4096


class KVCache:
    """A context manager; `n_ctx` is rounded up to the padding."""

    def __init__(
        self, library: Library, spec: ModelSpec, types: tuple[GgmlType, GgmlType], n_ctx: int, n_streams: int
    ) -> None:
        self.spec = spec
        self.n_ctx = padded(n_ctx)
        self._memory = AlignedBuffer(kv_bytes(spec, library, types, n_ctx, n_streams))
        self._buffer = Buffer(library, self._memory.address, self._memory.n_bytes)
        self._context = Context(library, 2 * spec.n_layers)
        self._k: list[Tensor] = []
        self._v: list[Tensor] = []
        at, rows = 0, self.n_ctx * n_streams
        for _ in range(spec.n_layers):
            for tensors, type, width in ((self._k, types[0], spec.n_embd_k), (self._v, types[1], spec.n_embd_v)):
                tensor = self._context.tensor(type, width, rows)
                self._buffer.place(tensor, at)
                tensors.append(tensor)
                at += _aligned(tensor.n_bytes)

    def __enter__(self) -> KVCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def write(self, c: Context, layer: int, k: Tensor, v: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Nodes that store `k` [n_embd_k, n], `v` [n_embd_v, n] at `rows` [n] (I64)."""
        return c.set_rows(self._k[layer], k, rows), c.set_rows(self._v[layer], v, rows)

    def read(self, c: Context, layer: int, stream: int, n_kv: int) -> tuple[Tensor, Tensor]:
        """Views of a stream's first `n_kv` positions: [head_dim, n_kv, n_head_kv] each."""
        spec = self.spec
        views = []
        for tensor, dim in ((self._k[layer], spec.head_dim), (self._v[layer], spec.head_dim_v)):
            row, head = tensor.strides[1], row_bytes(c.library, tensor.type, dim)
            views.append(c.view(tensor, (dim, n_kv, spec.n_head_kv), (row, head), stream * self.n_ctx * row))
        return views[0], views[1]

    def close(self) -> None:
        self._context.close()
        self._buffer.close()
        self._memory.close()

"""Keys and values of every position, for layers and streams; knows no attention.

Each layer that attends has one tensor of keys and one of values with a row per position; stream s owns the rows
[s × n_ctx, (s + 1) × n_ctx). Rows are written by index and read through views, so graphs are reused.
"""

from __future__ import annotations

from collections.abc import Collection

from sluice.ggml import Context, Device, GgmlType, Library, Tensor
from sluice.ggml.tensor import row_bytes
from sluice.models.spec import ModelSpec
from sluice.models.tensor_memory import lay, page_aligned

KV_TYPES = {"f16": GgmlType.F16, "f32": GgmlType.F32, "q8_0": GgmlType.Q8_0, "q4_0": GgmlType.Q4_0}
# Lengths are padded to this many positions before attention, masked: a graph is rebuilt only when the padding changes.
KV_PADDING = 256


def padded(n: int) -> int:
    return -(-n // KV_PADDING) * KV_PADDING


def kv_bytes(
    spec: ModelSpec, library: Library, types: tuple[GgmlType, GgmlType], n_ctx: int, n_streams: int,
    layers: Collection[int] | None = None,
) -> int:  # fmt: skip
    """Bytes that a cache of `n_streams` × `n_ctx` positions takes, for all layers or for `layers`."""
    rows, total = padded(n_ctx) * n_streams, 0
    for layer in spec.attending:
        if layers is not None and layer not in layers:
            continue
        for type, width in zip(types, _widths(spec, layer), strict=True):
            total += page_aligned(row_bytes(library, type, width) * rows) if width else 0
    return total


def _widths(spec: ModelSpec, layer: int) -> tuple[int, int]:
    """Numbers that a layer keeps of a position: keys and values."""
    shape = spec.kv_shape(layer)
    return shape.width_k, 0 if spec.values_in_keys else shape.width_v


class KVCache:
    """A context manager; `n_ctx` is rounded up to the padding. Of `layers` only, and in `device`'s memory, if given."""

    def __init__(
        self, library: Library, spec: ModelSpec, types: tuple[GgmlType, GgmlType], n_ctx: int, n_streams: int, *,
        layers: Collection[int] | None = None, device: Device | None = None,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.n_ctx = padded(n_ctx)
        plain = (GgmlType.F16, GgmlType.F32)
        self.converts = device is None and not all(type in plain for type in types)  # worth it for many queries
        self._context = Context(library, 2 * spec.n_layers)
        self._k: dict[int, Tensor] = {}
        self._v: dict[int, Tensor] = {}
        rows = self.n_ctx * n_streams
        for layer in spec.attending:
            if layers is not None and layer not in layers:
                continue
            for tensors, type, width in zip((self._k, self._v), types, _widths(spec, layer), strict=True):
                if width:
                    tensors[layer] = self._context.tensor(type, width, rows)
        self._tensors = [*self._k.values(), *self._v.values()]
        self._memory = lay(library, self._context, self._tensors, device)
        self.n_bytes = self._memory.n_bytes

    def __enter__(self) -> KVCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def write(self, c: Context, layer: int, k: Tensor, v: Tensor | None, rows: Tensor) -> list[Tensor]:
        """Nodes that store `k` [width_k, n], `v` [width_v, n] (none if they are in the keys) at `rows` [n] (I64)."""
        nodes = [c.set_rows(self._k[layer], k, rows)]
        return nodes if v is None else [*nodes, c.set_rows(self._v[layer], v, rows)]

    def read(self, c: Context, layer: int, stream: int, first: int, n_kv: int) -> tuple[Tensor, Tensor]:
        """Views of a stream's positions [first, first + n_kv): [head_dim, n_kv, n_head_kv] each."""
        shape, views = self.spec.kv_shape(layer), []
        for tensor, dim in ((self._k[layer], shape.head_dim), (self._v.get(layer, self._k[layer]), shape.head_dim_v)):
            row, head = tensor.strides[1], row_bytes(c.library, tensor.type, dim)
            at = (stream * self.n_ctx + first) * row
            views.append(c.view(tensor, (dim, n_kv, shape.n_head_kv), (row, head), at))
        return views[0], views[1]

    def copy(self, source: int, target: int, n: int) -> None:
        """Have the stream `target` begin with the first `n` positions of `source`."""
        for tensor in self._tensors:
            row = tensor.strides[1]
            self._memory.copy(tensor, source * self.n_ctx * row, target * self.n_ctx * row, n * row)

    def close(self) -> None:
        self._context.close()
        self._memory.close()

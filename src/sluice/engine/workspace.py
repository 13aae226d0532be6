"""The memory that graphs and Python share: a step's inputs, what passes between graphs, its outputs. Knows no graphs.

Every tensor has a numpy array over the same bytes, so writing an input is an assignment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from sluice.ggml import Context, Device, DeviceTensors, GgmlType, Library, Tensor
from sluice.models.kv_cache import KV_PADDING, padded
from sluice.models.spec import ModelSpec
from sluice.models.tensor_memory import HostMemory

# Prompt chunks end at absolute multiples of this many positions, whatever the budget: a row's bits depend on how many
# rows its attention kernel sees (DESIGN: flash attention takes another kernel from 64 rows on).
CHUNK = 512
LOOKAHEAD = 2  # layers with experts that prefetching looks ahead
_DTYPES = {GgmlType.F32: np.float32, GgmlType.F16: np.float16, GgmlType.I32: np.int32, GgmlType.I64: np.int64}


def _shapes(
    spec: ModelSpec, n_tokens: int, n_streams: int, n_ctx: int, n_outputs: int, recording: bool, ahead: bool,
    expert_ids: bool,
) -> dict[str, tuple]:  # fmt: skip
    """Name -> type and shape (ggml's order)."""
    f32, i32, i64 = GgmlType.F32, GgmlType.I32, GgmlType.I64
    n_pairs = n_tokens * spec.top_k
    n_listed = max(n_pairs, len(spec.moe_layers) * spec.top_k)  # a single token's are listed layer by layer
    shapes = {
        "tokens": (i32, n_tokens),
        "positions": (i32, n_tokens),
        "rows": (i64, n_tokens),  # of the KV cache
        "outputs": (i32, n_outputs),  # columns that logits are wanted of
        "residual": (f32, spec.n_embd, n_tokens),
        "normed": (f32, spec.n_embd, n_tokens),  # what router and experts of the current layer read
        "scores": (f32, spec.n_expert, n_tokens),
        "selected": (i32, spec.top_k, n_tokens),  # the router's choice, best first
        "routed": (i32, spec.top_k, n_tokens),  # the final ids, which weights are taken for
        # what the routers of the layers ahead would choose on this layer's residual, one block of columns each
        "predicted": (i32, spec.top_k, n_tokens * LOOKAHEAD),
        "pairs": (f32, spec.n_embd, n_pairs),  # output of each (token, expert) pair, row = token × top_k + rank
        "pair_tokens": (i32, n_pairs),
        "pair_slots": (i32, n_listed),
        "pair_rows": (i64, n_listed),
        "attention": (f32, spec.mixer_width, n_tokens),
        "logits": (f32, spec.n_vocab, n_outputs),
        "mask": (GgmlType.F16, padded(n_ctx) * max(n_tokens, n_streams)),
    }
    if spec.n_ff_shared:
        shapes["shared"] = (f32, spec.n_embd, n_tokens)  # what the shared experts of the current layer add
    if recording:
        shapes["weights"] = (f32, spec.top_k, n_tokens)  # routing weights of the layer before
    if ahead:  # blocks of a layer each, as wide as there are streams
        n_blocks = len(spec.moe_layers) * n_streams
        shapes["asked"] = (f32, spec.n_embd, n_streams)  # what the current layer's router reads
        shapes["chosen"] = (i32, spec.top_k, n_blocks)  # by the routers, best first
        shapes["executed"] = (i32, spec.top_k, n_blocks)  # the final ids
        shapes["executed_scores"] = (f32, spec.n_expert, n_blocks)  # where heads gave them
        shapes["ahead_ids"] = (i32, spec.top_k, n_blocks)  # what heads say of the next tokens, best first
        shapes["ahead_scores"] = (f32, spec.n_expert, n_blocks)
    if spec.expert_biases or expert_ids:
        shapes["pair_experts"] = (i32, n_listed)
    if spec.window:
        shapes["near_mask"] = (GgmlType.F16, near_reach(spec, n_tokens, n_ctx) * max(n_tokens, n_streams))
    return shapes


def near_reach(spec: ModelSpec, n: int, n_ctx: int) -> int:
    """The most positions that attention with a window spans for `n` consecutive tokens, begun and ended at paddings."""
    return min(padded(n_ctx), padded(spec.window + n) + KV_PADDING)


class WorkspaceTensors:
    """The tensors of a workspace as attributes; `names` are those that there are.

    `expert_ids`: graphs of pairs want experts' numbers, not only their slots, as for biases of experts.
    """

    tokens: Tensor
    positions: Tensor
    rows: Tensor
    outputs: Tensor
    residual: Tensor
    normed: Tensor
    scores: Tensor
    selected: Tensor
    routed: Tensor
    predicted: Tensor
    pairs: Tensor
    pair_tokens: Tensor
    pair_slots: Tensor
    pair_rows: Tensor
    attention: Tensor
    logits: Tensor
    mask: Tensor
    shared: Tensor  # these three only where there are shared experts, biases or updates of experts, windows
    pair_experts: Tensor
    near_mask: Tensor
    weights: Tensor  # only where routes are recorded
    asked: Tensor  # these six only where routes are known ahead
    chosen: Tensor
    executed: Tensor
    executed_scores: Tensor
    ahead_ids: Tensor
    ahead_scores: Tensor

    def __init__(
        self, library: Library, spec: ModelSpec, *, n_tokens: int, n_streams: int, n_ctx: int, n_outputs: int,
        recording: bool = False, ahead: bool = False, expert_ids: bool = False,
    ) -> None:  # fmt: skip
        self.n_tokens = n_tokens
        self.n_outputs = n_outputs
        self.shapes = _shapes(spec, n_tokens, n_streams, n_ctx, n_outputs, recording, ahead, expert_ids)
        self._add(library)

    def listed_at(self, spec: ModelSpec, layer: int) -> int:
        """Where the pairs of a single token in `layer` are listed in pair_slots and pair_rows."""
        return spec.moe_layers.index(layer) * spec.top_k

    def _add(self, library: Library) -> None:
        self.names = frozenset(self.shapes)
        self.context = Context(library, len(self.shapes))
        for name, (type, *shape) in self.shapes.items():
            setattr(self, name, self.context.tensor(type, *shape))


class Workspace(WorkspaceTensors):
    """In the host's memory, with the tensors' arrays (slowest dimension first) under `arrays`; a context manager."""

    def _add(self, library: Library) -> None:
        super()._add(library)
        tensors = [getattr(self, name) for name in self.shapes]
        self._memory = HostMemory(library, tensors)
        self.n_bytes = self._memory.n_bytes
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}
        for (name, (type, *shape)), tensor in zip(self.shapes.items(), tensors, strict=True):
            self.arrays[name] = self._memory.flat(tensor, _DTYPES[type], math.prod(shape)).reshape(shape[::-1])

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.arrays.clear()
        self.context.close()
        self._memory.close()


class DeviceWorkspace(WorkspaceTensors):
    """The tensors of `host`, a workspace, once more in a device's memory; a context manager.

    Rows computed on the host arrive `packed`, with their numbers among all pairs as `packed_rows`.
    """

    packed: Tensor
    packed_rows: Tensor

    def __init__(self, host: Workspace, device: Device, spec: ModelSpec, packed: int) -> None:
        self.n_tokens = host.n_tokens
        self.n_outputs = host.n_outputs
        own = {"packed": (GgmlType.F32, spec.n_embd, packed), "packed_rows": (GgmlType.I64, packed)}
        self.shapes = host.shapes | own
        self._host = host
        self._add(device.library)
        self._memory = DeviceTensors(device, self.context)
        self.n_bytes = self._memory.n_bytes

    def __enter__(self) -> DeviceWorkspace:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def listed_at(self, spec: ModelSpec, layer: int) -> int:
        """At the start: devices want tensors to begin at multiples of up to 256 bytes, and run one layer at a time."""
        return 0

    def put(self, name: str, n: int, start: int = 0) -> None:
        """Bring `n` columns (elements of a vector) of the host's tensor of that name here, from `start` on."""
        array = self._host.arrays[name][start : start + n]
        self._memory.write(getattr(self, name), array, start * array.strides[0])

    def get(self, name: str, n: int, start: int = 0) -> None:
        """Take `n` columns of a tensor to the host's of the same name."""
        array = self._host.arrays[name][start : start + n]
        self._memory.read(getattr(self, name), array, start * array.strides[0])

    def pack(self, outputs: np.ndarray, rows: np.ndarray) -> None:
        """Bring `outputs` [n, n_embd] float32 and the numbers of their `rows` [n] int64 here."""
        self._memory.write(self.packed, outputs)
        self._memory.write(self.packed_rows, rows)

    def close(self) -> None:
        self.context.close()
        self._memory.close()


def chunks(position: int, ids: list[int]) -> Iterator[list[int]]:
    """Cut a prompt that begins at `position` where absolute positions are multiples of CHUNK."""
    start = 0
    while start < len(ids):
        end = min(len(ids), start + CHUNK - (position + start) % CHUNK)
        yield ids[start:end]
        start = end


def columns(c: Context, matrix: Tensor, n: int) -> Tensor:
    """The first `n` columns of a matrix."""
    return c.view(matrix, (matrix.shape[0], n))


def block(c: Context, matrix: Tensor, i: int, n_blocks: int, n: int) -> Tensor:
    """The first `n` columns of a matrix's i-th block of as many."""
    width = matrix.shape[1] // n_blocks
    return c.view(matrix, (matrix.shape[0], n), (), i * width * matrix.strides[1])


def elements(c: Context, vector: Tensor, n: int) -> Tensor:
    """The first `n` elements of a vector."""
    return c.view(vector, (n,))

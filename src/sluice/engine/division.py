"""Which segments of a model, and with them which tensors, a device takes; pure, it knows no device.

Segment i has the attention and router of the i-th layer with experts, and of dense layers before it; the last one has
the head. It also adds up the expert outputs of the layer before, for which it needs some of that layer's tensors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from sluice.gguf import TensorInfo
from sluice.models.spec import ModelSpec

_LAYER = re.compile(r"blk\.(\d+)\.")
EMBEDDING, HEAD = "token_embd.", "output"


def segment_layers(spec: ModelSpec, i: int) -> range:
    """The layers that segment `i` computes all of but the experts."""
    moe = spec.moe_layers
    first = moe[i - 1] + 1 if i else 0
    return range(first, spec.n_layers if i == len(moe) else moe[i] + 1)


def last_layers(spec: ModelSpec, n: int) -> frozenset[int]:
    """The segments that have none but the last `n` layers: with 0 there are none, with 1 there is the head too."""
    first = spec.n_layers - n
    if n <= 0:
        return frozenset()
    return frozenset(
        i for i in range(len(spec.moe_layers) + 1) if all(layer >= first for layer in segment_layers(spec, i))
    )


def layers_of(spec: ModelSpec, segments: Collection[int]) -> list[int]:
    """The layers whose attention, keys and values `segments` have."""
    return sorted(layer for i in segments for layer in segment_layers(spec, i))


def wanted(tensors: Sequence[TensorInfo], spec: ModelSpec, segments: Collection[int]) -> list[TensorInfo]:
    """Those of the resident `tensors` that graphs of `segments` read."""
    own = set(layers_of(spec, segments))
    own.update(spec.moe_layers[i - 1] for i in segments if i)
    last = len(spec.moe_layers) in segments

    def reads(name: str) -> bool:
        if match := _LAYER.match(name):
            return int(match[1]) in own
        if name.startswith(EMBEDDING):
            return 0 in segments or (last and spec.tied_embeddings)
        return last if name.startswith(HEAD) else bool(segments)

    return [info for info in tensors if reads(info.name)]


def of_experts(tensors: Sequence[TensorInfo]) -> list[TensorInfo]:
    """Those that experts are computed with beside what is in their slots: their biases."""
    return [info for info in tensors if "_exps." in info.name]

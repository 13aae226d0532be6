"""Arithmetic that families share, as graph fragments; knows one layer at a time and nothing of experts' whereabouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from sluice.ggml import Context, GgmlType, Graph, Tensor
from sluice.gguf import GgufFile
from sluice.models.kv_cache import KVCache
from sluice.models.spec import ModelSpec, RopeSpec, Shape


@dataclass(frozen=True, slots=True)
class Segment:
    """The columns [start, start + n) of a step that belong to one stream, and its attention's length and mask.

    `mask` is [n_kv, n] (F16): 0 where a query may look, -inf elsewhere.
    """

    start: int
    n: int
    stream: int
    n_kv: int
    mask: Tensor


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What attention needs beside its input: where tokens are and whose they are.

    `positions` [n] (I32), `rows` [n] (I64) of the KV cache to write, `output` [n_head × head_dim_v, n] collects the
    streams' results when there are several.
    """

    graph: Graph
    cache: KVCache
    positions: Tensor
    rows: Tensor
    segments: tuple[Segment, ...]
    output: Tensor


class Family(ABC):
    """One architecture. Methods append to a graph; `x` is the residual stream [n_embd, n_tokens] (F32).

    A layer with experts is computed as attention, router, select; then the step runs the chosen experts and
    `combine`s them. Tensors are found by their GGUF names.
    """

    architecture: ClassVar[str]

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor]) -> None:
        self.spec = spec
        self.weights = weights

    @classmethod
    @abstractmethod
    def read_spec(cls, file: GgufFile) -> ModelSpec:
        """The model's shape, every tensor of the file checked. Raises ModelFileError."""

    def embed(self, c: Context, tokens: Tensor) -> Tensor:
        return c.get_rows(self.weights["token_embd.weight"], tokens)

    @abstractmethod
    def attention(self, c: Context, layer: int, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """`x` plus the layer's attention."""

    # What follows is the same in most families: softmax routing over one norm, SwiGLU, an output norm and head.

    def expert_input(self, c: Context, layer: int, x: Tensor) -> Tensor:
        """What the layer's router and experts (or its dense network) read: `x` after their norm."""
        return norm(c, x, self.weights[f"blk.{layer}.ffn_norm.weight"], self.spec.rms_eps)

    def router(self, c: Context, layer: int, normed: Tensor) -> Tensor:
        """Router logits [n_expert, n_tokens]."""
        return c.mul_mat(self.weights[f"blk.{layer}.ffn_gate_inp.weight"], normed)

    def select(self, c: Context, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Scores [n_expert, n_tokens] that routing weights are taken from, and the `k` chosen ids, best first."""
        scores = c.soft_max(logits)
        return scores, c.top_k(scores, k)

    def routing_weights(self, c: Context, scores: Tensor, ids: Tensor) -> Tensor:
        """Weights [1, k, n_tokens] of the chosen `ids` [k, n_tokens]."""
        return chosen_weights(c, scores, ids, normalise=self.spec.normalise_weights, scale=self.spec.weights_scale)

    def activation(self, c: Context, gate: Tensor, up: Tensor) -> Tensor:
        """What an expert feeds its down matrix."""
        return c.swiglu(gate, up)

    def dense_ffn(self, c: Context, layer: int, x: Tensor) -> Tensor:
        """`x` plus the feed-forward network of a layer without experts."""
        w, b = self.weights, f"blk.{layer}.ffn_"
        h = self.expert_input(c, layer, x)
        inner = c.swiglu(c.mul_mat(w[b + "gate.weight"], h), c.mul_mat(w[b + "up.weight"], h))
        return c.add(x, c.mul_mat(w[b + "down.weight"], inner))

    def head(self, c: Context, x: Tensor) -> Tensor:
        """Logits [n_vocab, n]."""
        h = norm(c, x, self.weights["output_norm.weight"], self.spec.rms_eps)
        return c.mul_mat(self.weights["token_embd.weight" if self.spec.tied_embeddings else "output.weight"], h)


def ffn_tensors(spec: ModelSpec, layer: int) -> dict[str, Shape]:
    """Names and shapes of a layer's router, or of its dense network where it has no experts."""
    b = f"blk.{layer}.ffn_"
    if layer in spec.moe_layers:
        return {b + "gate_inp.weight": (spec.n_embd, spec.n_expert)}
    inward, outward = (spec.n_embd, spec.n_ff), (spec.n_ff, spec.n_embd)
    return {b + "gate.weight": inward, b + "up.weight": inward, b + "down.weight": outward}


def norm(c: Context, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return c.mul(c.rms_norm(x, eps), weight)


def linear(c: Context, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = c.mul_mat(weight, x)
    return y if bias is None else c.add(y, bias)


def rotate(c: Context, x: Tensor, positions: Tensor, rope: RopeSpec, factors: Tensor | None = None) -> Tensor:
    """Rotary embedding of `x` [head_dim, n_head, n]; `factors` divide the frequencies (llama 3's rope_freqs)."""
    return c.rope(
        x, positions, factors, rope.n_dims, neox=rope.neox, n_ctx_orig=rope.n_ctx_orig, freq_base=rope.freq_base,
        freq_scale=rope.freq_scale, ext_factor=rope.ext_factor, attn_factor=rope.attn_factor,
        beta_fast=rope.beta_fast, beta_slow=rope.beta_slow,
    )  # fmt: skip


def attend(c: Context, layer: int, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, scale: float) -> Tensor:
    """Store `k` and `v`, then let `q` [head_dim, n_head, n] look at its own stream: [n_head × head_dim_v, n].

    Every stream has an attention node of its own, padded by its own length alone, so that its bits don't depend on
    company.
    """
    n = q.shape[2]
    cache, graph, spec = inputs.cache, inputs.graph, inputs.cache.spec
    k, v = c.reshape(k, spec.n_embd_k, n), c.reshape(v, spec.n_embd_v, n)
    graph.add(*cache.write(c, layer, k, v, inputs.rows))
    width = spec.n_head * spec.head_dim_v
    for segment in inputs.segments:
        part = q
        if len(inputs.segments) > 1:
            part = c.view(q, (q.shape[0], q.shape[1], segment.n), q.strides[1:3], segment.start * q.strides[2])
        keys, values = cache.read(c, layer, segment.stream, segment.n_kv)
        # ggml's flash attention rounds as it likes; plain products give llama.cpp's bits, for comparisons in float32
        attention = c.attention if keys.type == values.type == GgmlType.F32 else c.flash_attention
        out = attention(c.permute(part, 0, 2, 1, 3), keys, values, segment.mask, scale)
        out = c.reshape(out, width, segment.n)
        if len(inputs.segments) == 1:
            return out
        stride = inputs.output.strides[1]
        graph.add(c.cpy(out, c.view(inputs.output, (width, segment.n), (stride,), segment.start * stride)))
    return c.view(inputs.output, (width, n))


def chosen_weights(c: Context, scores: Tensor, ids: Tensor, *, normalise: bool, scale: float) -> Tensor:
    """The scores at `ids`, divided by their sum where the family says so, times `scale`: [1, k, n]."""
    n_expert, n = scores.shape[:2]
    k = ids.shape[0]
    weights = c.get_rows(c.reshape(scores, 1, n_expert, n), ids)
    if normalise:
        flat = c.reshape(weights, k, n)
        total = c.clamp(c.sum_rows(flat), 2.0**-14, float("inf"))  # llama.cpp's guard against a vanishing sum
        weights = c.reshape(c.div(flat, total), 1, k, n)
    return weights if scale == 1.0 else c.scale(weights, scale)


def combine(c: Context, x: Tensor, pairs: Tensor, weights: Tensor) -> Tensor:
    """`x` plus the weighted sum of expert outputs `pairs` [n_embd, k, n], always added in router order."""
    weighted = c.mul(pairs, weights)
    n_embd, k, n = weighted.shape[:3]
    total = None
    for i in range(k):
        one = c.view(weighted, (n_embd, n), (weighted.strides[2],), i * weighted.strides[1])
        total = one if total is None else c.add(total, one)
    assert total is not None
    if k == 1:
        total = c.cont(total)
    return c.add(x, total)

"""Arithmetic that families share, as graph fragments; knows one layer at a time and nothing of experts' whereabouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from sluice.ggml import Context, GgmlType, Graph, Tensor
from sluice.gguf import GgufFile
from sluice.models.kv_cache import KVCache
from sluice.models.recurrent import RecurrentState
from sluice.models.spec import DeltaNetSpec, ModelSpec, RopeSpec, Shape


@dataclass(frozen=True, slots=True)
class Reach:
    """Positions [first, first + n_kv) that attention spans, and `mask` [n_kv, n] (F16): 0 where a query may look, -inf
    elsewhere."""

    first: int
    n_kv: int
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """The columns [start, start + n) of a step that belong to one stream, and how far its attention reaches.

    `near` is the reach of layers with a window (the same as `all` in families without).
    """

    start: int
    n: int
    stream: int
    all: Reach
    near: Reach


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What attention needs beside its input: where tokens are and whose they are.

    `positions` [n] (I32), `rows` [n] (I64) of the KV cache to write, `output` collects the streams' results when there
    are several: room for the widest [width, n] of the model's layers.
    """

    graph: Graph
    cache: KVCache
    states: RecurrentState
    positions: Tensor
    rows: Tensor
    segments: tuple[Segment, ...]
    output: Tensor


class Family(ABC):
    """One architecture. Methods append to a graph; `x` is the residual stream [n_embd, n_tokens] (F32).

    A layer with experts is computed as attention, router, select; then the step runs the chosen experts, and the
    `shared` ones while those are read, and adds them up. Tensors are found by their GGUF names.
    """

    architecture: ClassVar[str]
    ffn_norm: ClassVar[str] = "ffn_norm"  # the norm before router and experts

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

    # What follows is the same in most families: one norm before routing, SwiGLU, an output norm and head.

    def expert_input(self, c: Context, layer: int, x: Tensor) -> Tensor:
        """What the layer's router and experts (or its dense network) read: `x` after their norm."""
        return norm(c, x, self.weights[f"blk.{layer}.{self.ffn_norm}.weight"], self.spec.rms_eps)

    def router(self, c: Context, layer: int, normed: Tensor) -> Tensor:
        """Router logits [n_expert, n_tokens]."""
        b = f"blk.{layer}.ffn_gate_inp."
        return linear(c, normed, self.weights[b + "weight"], self.weights.get(b + "bias"))

    def select(self, c: Context, layer: int, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Scores [n_expert, n_tokens] that routing weights are taken from, and the `k` chosen ids, best first."""
        scores = {"softmax": c.soft_max, "sigmoid": c.sigmoid, "chosen": lambda a: a}[self.spec.gating](logits)
        return scores, c.top_k(scores, k)

    def routing_weights(self, c: Context, scores: Tensor, ids: Tensor) -> Tensor:
        """Weights [1, k, n_tokens] of the chosen `ids` [k, n_tokens]."""
        return chosen_weights(c, self.spec, scores, ids)

    def shared(self, c: Context, layer: int, normed: Tensor) -> Tensor:
        """What the layer's shared experts add [n_embd, n_tokens]; called where the spec has some (`n_ff_shared`)."""
        return swiglu_ffn(c, self.weights, f"blk.{layer}.ffn_{{}}_shexp.weight", normed)

    def activation(self, c: Context, gate: Tensor, up: Tensor) -> Tensor:
        """What an expert feeds its down matrix."""
        return c.swiglu(gate, up)

    def dense_ffn(self, c: Context, layer: int, x: Tensor) -> Tensor:
        """`x` plus the feed-forward network of a layer without experts."""
        return c.add(x, swiglu_ffn(c, self.weights, f"blk.{layer}.ffn_{{}}.weight", self.expert_input(c, layer, x)))

    def head(self, c: Context, x: Tensor) -> Tensor:
        """Logits [n_vocab, n]."""
        h = norm(c, x, self.weights["output_norm.weight"], self.spec.rms_eps)
        return c.mul_mat(self.weights["token_embd.weight" if self.spec.tied_embeddings else "output.weight"], h)


def embedding_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Names and shapes of the embeddings, the output norm, and the head where the file has one."""
    tensors: dict[str, Shape] = {
        "token_embd.weight": (spec.n_embd, spec.n_vocab),
        "output_norm.weight": (spec.n_embd,),
    }
    return tensors if spec.tied_embeddings else tensors | {"output.weight": (spec.n_embd, spec.n_vocab)}


def attention_tensors(spec: ModelSpec, layer: int, *, head_norms: bool = False) -> dict[str, Shape]:
    """Names and shapes of a layer's grouped-query attention and its norms."""
    b = f"blk.{layer}.attn_"
    tensors: dict[str, Shape] = {
        b + "norm.weight": (spec.n_embd,),
        b + "q.weight": (spec.n_embd, spec.n_head * spec.head_dim),
        b + "k.weight": (spec.n_embd, spec.n_embd_k),
        b + "v.weight": (spec.n_embd, spec.n_embd_v),
        b + "output.weight": (spec.n_head * spec.head_dim_v, spec.n_embd),
    }
    return tensors | head_norm_tensors(spec, layer) if head_norms else tensors


def head_norm_tensors(spec: ModelSpec, layer: int) -> dict[str, Shape]:
    return {f"blk.{layer}.attn_{part}_norm.weight": (spec.head_dim,) for part in "qk"}


def attention_biases(spec: ModelSpec, layer: int) -> dict[str, Shape]:
    """Names and shapes of the biases that some files have."""
    b = f"blk.{layer}.attn_"
    return {
        b + "q.bias": (spec.n_head * spec.head_dim,),
        b + "k.bias": (spec.n_embd_k,),
        b + "v.bias": (spec.n_embd_v,),
        b + "output.bias": (spec.n_embd,),
    }


def ffn_tensors(spec: ModelSpec, layer: int, norm: str = Family.ffn_norm) -> dict[str, Shape]:
    """Names and shapes of a layer's norm, router and shared experts, or of its dense network where it has none."""
    b = f"blk.{layer}.ffn_"
    tensors: dict[str, Shape] = {f"blk.{layer}.{norm}.weight": (spec.n_embd,)}
    if layer not in spec.moe_layers:
        return tensors | _swiglu_tensors(b + "{}.weight", spec.n_embd, spec.n_ff)
    tensors[b + "gate_inp.weight"] = (spec.n_embd, spec.n_expert)
    if spec.n_ff_shared:
        tensors |= _swiglu_tensors(b + "{}_shexp.weight", spec.n_embd, spec.n_ff_shared)
    return tensors


def _swiglu_tensors(name: str, n_embd: int, n_ff: int) -> dict[str, Shape]:
    inward, outward = (n_embd, n_ff), (n_ff, n_embd)
    return {name.format("gate"): inward, name.format("up"): inward, name.format("down"): outward}


def swiglu_ffn(c: Context, weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """down(silu(gate x) × up x); `name` has a place for gate, up, down."""
    gate, up, down = (weights[name.format(part)] for part in ("gate", "up", "down"))
    return c.mul_mat(down, c.swiglu(c.mul_mat(gate, x), c.mul_mat(up, x)))


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


def attend(
    c: Context, layer: int, q: Tensor, k: Tensor, v: Tensor | None, inputs: AttentionInputs, scale: float,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Store `k` and `v`, then let `q` [head_dim, n_head, n] look at its own stream: [n_head × head_dim_v, n].

    Every stream has an attention node of its own, padded by its own length alone, so that its bits don't depend on
    company. `v` is None where a position's values are in its keys.
    """
    n = q.shape[2]
    cache, graph, spec = inputs.cache, inputs.graph, inputs.cache.spec
    k, v = c.reshape(k, spec.n_embd_k, n), None if v is None else c.reshape(v, spec.n_embd_v, n)
    graph.add(*cache.write(c, layer, k, v, inputs.rows))
    width = spec.n_head * spec.head_dim_v

    def one(segment: Segment) -> Tensor:
        part = q
        if len(inputs.segments) > 1:
            part = c.view(q, (q.shape[0], q.shape[1], segment.n), q.strides[1:3], segment.start * q.strides[2])
        reach = segment.near if layer in spec.windowed else segment.all
        keys, values = cache.read(c, layer, segment.stream, reach.first, reach.n_kv)
        # ggml's flash attention rounds as it likes; plain products give llama.cpp's bits, for comparisons in float32
        attention = c.attention if keys.type == values.type == GgmlType.F32 else c.flash_attention
        out = attention(c.permute(part, 0, 2, 1, 3), keys, values, reach.mask, scale, sinks)
        return c.reshape(out, width, segment.n)

    return each_stream(c, inputs, width, n, one)


def each_stream(c: Context, inputs: AttentionInputs, width: int, n: int, one: Callable[[Segment], Tensor]) -> Tensor:
    """What `one` makes [width, segment.n] of each segment, side by side: [width, n]."""
    if len(inputs.segments) == 1:
        return one(inputs.segments[0])
    for segment in inputs.segments:
        place = c.view(inputs.output, (width, segment.n), (), 4 * width * segment.start)
        inputs.graph.add(c.cpy(one(segment), place))
    return c.view(inputs.output, (width, n))


def convolve(
    c: Context, layer: int, index: int, x: Tensor, kernel: Tensor, inputs: AttentionInputs, segment: Segment
) -> Tensor:
    """A segment's columns of `x` [n_channels, n] convolved along time with what came before: [n_channels, segment.n].

    The `index`-th state of the layer keeps the last width - 1 inputs; `kernel` is [width, n_channels].
    """
    width, channels = kernel.shape[:2]
    columns = c.view(x, (channels, segment.n), x.strides[1:2], segment.start * x.strides[1])
    before = c.reshape(inputs.states.view(c, layer, index, segment.stream), width - 1, channels)
    whole = c.concat(before, c.permute(columns, 1, 0, 2, 3))  # [width - 1 + n, n_channels]
    last = c.view(whole, (width - 1, channels), whole.strides[1:2], 4 * segment.n)
    inputs.graph.add(c.cpy(last, before))
    return c.reshape(c.ssm_conv(whole, kernel), channels, segment.n)


def delta_net(
    c: Context, layer: int, d: DeltaNetSpec, mixed: Tensor, gate: Tensor, beta: Tensor, kernel: Tensor,
    inputs: AttentionInputs, eps: float,
) -> Tensor:  # fmt: skip
    """Linear attention by the gated delta rule: [value_dim, n]. Its states: the convolution's inputs, then the heads'.

    `mixed` [conv_dim, n] holds queries, keys and values before their convolution, `gate` [n_v_heads, n] (or
    [value_dim, n]) the logarithms of the decay, `beta` [n_v_heads, n] how much is written.
    """

    def one(segment: Segment) -> Tensor:
        n = segment.n
        qkv = c.silu(convolve(c, layer, 0, mixed, kernel, inputs, segment))
        heads, at = [], 0
        for n_heads in (d.n_k_heads, d.n_k_heads, d.n_v_heads):
            view = c.view(qkv, (d.head_dim, n_heads, n), (4 * d.head_dim, qkv.strides[1]), at)
            heads.append(view)
            at += 4 * d.head_dim * n_heads
        rates = []
        for rate in (gate, beta):
            per_head = rate.shape[0] // d.n_v_heads
            view = c.view(rate, (rate.shape[0], n), (), segment.start * rate.strides[1])
            rates.append(c.reshape(view, per_head, d.n_v_heads, n))
        before = inputs.states.view(c, layer, 1, segment.stream)
        before = c.reshape(before, d.head_dim, d.head_dim, d.n_v_heads)
        out, after = c.gated_delta_net(
            c.l2_norm(heads[0], eps), c.l2_norm(heads[1], eps), heads[2], rates[0], rates[1], before
        )
        inputs.graph.add(c.cpy(after, before))
        return c.reshape(out, d.value_dim, n)

    return each_stream(c, inputs, d.value_dim, mixed.shape[1], one)


def chosen_weights(c: Context, spec: ModelSpec, scores: Tensor, ids: Tensor) -> Tensor:
    """The scores at `ids`, made weights as the family's metadata says: [1, k, n]."""
    n_expert, n = scores.shape[:2]
    k = ids.shape[0]
    weights = c.get_rows(c.reshape(scores, 1, n_expert, n), ids)
    if spec.gating == "chosen":
        weights = c.reshape(c.soft_max(c.reshape(weights, k, n)), 1, k, n)
    if spec.normalise_weights:
        flat = c.reshape(weights, k, n)
        total = c.clamp(c.sum_rows(flat), 2.0**-14, float("inf"))  # llama.cpp's guard against a vanishing sum
        weights = c.reshape(c.div(flat, total), 1, k, n)
    return weights if spec.weights_scale == 1.0 else c.scale(weights, spec.weights_scale)


def weighted_sum(c: Context, pairs: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of expert outputs `pairs` [n_embd, k, n], always added in router order: [n_embd, n]."""
    weighted = c.mul(pairs, weights)
    n_embd, k, n = weighted.shape[:3]
    total = None
    for i in range(k):
        one = c.view(weighted, (n_embd, n), (weighted.strides[2],), i * weighted.strides[1])
        total = one if total is None else c.add(total, one)
    assert total is not None
    return c.cont(total) if k == 1 else total

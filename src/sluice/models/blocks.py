"""Arithmetic that families share, as graph fragments; knows one layer at a time and nothing of experts' whereabouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from sluice.ggml import Context, GgmlType, Graph, Tensor
from sluice.gguf import GgufFile
from sluice.models.kv_cache import KVCache
from sluice.models.recurrent import RecurrentState
from sluice.models.spec import DeltaNetSpec, KVShape, ModelSpec, RopeSpec, Shape


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
    output_norm: ClassVar[str] = "output_norm"

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor]) -> None:
        self.spec = spec
        self.weights = weights

    @classmethod
    @abstractmethod
    def read_spec(cls, file: GgufFile) -> ModelSpec:
        """The model's shape, every tensor of the file checked. Raises ModelFileError."""

    # What follows is the same in most families: one norm before attention and one before routing, SwiGLU, an output
    # norm and head.

    def embed(self, c: Context, tokens: Tensor) -> Tensor:
        return scaled(c, c.get_rows(self.weights["token_embd.weight"], tokens), self.spec.scales.embedding)

    def attention(self, c: Context, layer: int, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """`x` plus the layer's attention."""
        h = norm(c, x, self.weights[f"blk.{layer}.attn_norm.weight"], self.spec.rms_eps)
        return c.add(x, scaled(c, self.mix(c, layer, h, inputs), self.spec.scales.residual))

    def mix(self, c: Context, layer: int, h: Tensor, inputs: AttentionInputs) -> Tensor:
        """What the layer's attention makes of `h`, which is normed: [n_embd, n_tokens]."""
        return grouped_attention(c, self.spec, self.weights, layer, h, inputs)

    def expert_input(self, c: Context, layer: int, x: Tensor) -> Tensor:
        """What the layer's router and experts (or its dense network) read: `x` after their norm."""
        return norm(c, x, self.weights[f"blk.{layer}.{self.ffn_norm}.weight"], self.spec.rms_eps)

    def router_input(self, c: Context, layer: int, x: Tensor, normed: Tensor) -> Tensor:
        """What the layer's router reads [n_embd, n_tokens]; `normed` is what its experts read."""
        return normed

    def router(self, c: Context, layer: int, read: Tensor) -> Tensor:
        """Router logits [n_expert, n_tokens]; `read` is its `router_input`."""
        b = f"blk.{layer}.ffn_gate_inp."
        return linear(c, read, self.weights[b + "weight"], self.weights.get(b + "bias"))

    def select(self, c: Context, layer: int, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Scores [n_expert, n_tokens] that routing weights are taken from, and the `k` chosen ids, best first.

        The layer's `exp_probs_b.bias`, where the file has one, moves the choice and not the weights. A pure function of
        layer and logits: prefetching asks it about layers ahead.
        """
        scores = {"softmax": c.soft_max, "sigmoid": c.sigmoid, "chosen": lambda a: a}[self.spec.gating](logits)
        bias = self.weights.get(f"blk.{layer}.exp_probs_b.bias")
        wanted = scores if bias is None else c.add(scores, bias)
        if self.spec.n_groups > 1:
            wanted = within_groups(c, wanted, self.spec.n_groups, self.spec.n_groups_used)
        return scores, c.top_k(wanted, k)

    def routing_weights(self, c: Context, layer: int, scores: Tensor, ids: Tensor) -> Tensor:
        """Weights [1, k, n_tokens] of the chosen `ids` [k, n_tokens]."""
        return chosen_weights(c, self.spec, scores, ids)

    def shared(self, c: Context, layer: int, x: Tensor, normed: Tensor) -> Tensor:
        """What the layer's shared experts add [n_embd, n_tokens]; called where the spec has some (`n_ff_shared`).

        `normed` is what the routed experts read. They stand behind a sigmoid gate, one number a token, where the layer
        has one.
        """
        out = swiglu_ffn(c, self.weights, f"blk.{layer}.ffn_{{}}_shexp.weight", normed)
        gate = self.weights.get(f"blk.{layer}.ffn_gate_inp_shexp.weight")
        if gate is not None:
            out = c.mul(out, c.sigmoid(c.mul_mat(c.reshape(gate, self.spec.n_embd, 1), normed)))
        return scaled(c, out, self.spec.scales.residual)

    def combined(self, c: Context, layer: int, x: Tensor, routed: Tensor, shared: Tensor | None) -> Tensor:
        """`x` plus what a layer's `routed` experts, in sum, and its `shared` ones give."""
        return c.add(x, routed if shared is None else c.add(routed, shared))

    def activation(self, c: Context, gate: Tensor, up: Tensor) -> Tensor:
        """What an expert feeds its down matrix."""
        return c.swiglu(gate, up)

    def dense_ffn(self, c: Context, layer: int, x: Tensor) -> Tensor:
        """`x` plus the feed-forward network of a layer without experts."""
        out = swiglu_ffn(c, self.weights, f"blk.{layer}.ffn_{{}}.weight", self.expert_input(c, layer, x))
        return c.add(x, scaled(c, out, self.spec.scales.residual))

    def head(self, c: Context, x: Tensor) -> Tensor:
        """Logits [n_vocab, n]."""
        h = norm(c, x, self.weights[f"{self.output_norm}.weight"], self.spec.rms_eps)
        logits = c.mul_mat(self.weights["token_embd.weight" if self.spec.tied_embeddings else "output.weight"], h)
        logits, cap = scaled(c, logits, self.spec.scales.logits), self.spec.scales.cap
        return c.scale(c.tanh(c.scale(logits, 1 / cap)), cap) if cap else logits


def embedding_tensors(spec: ModelSpec, output_norm: str = Family.output_norm) -> dict[str, Shape]:
    """Names and shapes of the embeddings, the output norm, and the head where the file has one."""
    tensors: dict[str, Shape] = {
        "token_embd.weight": (spec.n_embd, spec.n_vocab),
        f"{output_norm}.weight": (spec.n_embd,),
    }
    return tensors if spec.tied_embeddings else tensors | {"output.weight": (spec.n_embd, spec.n_vocab)}


def attention_tensors(
    spec: ModelSpec, layer: int, *, head_norms: bool = False, fused: bool = False
) -> dict[str, Shape]:
    """Names and shapes of a layer's grouped-query attention and its norms; `fused`: queries, keys, values in one."""
    b, shape = f"blk.{layer}.attn_", spec.kv_shape(layer)
    widths = {"q": spec.n_head * shape.head_dim, "k": shape.width_k, "v": shape.width_v}
    if fused:
        widths = {"qkv": sum(widths.values())}
    tensors: dict[str, Shape] = {
        b + "norm.weight": (spec.n_embd,),
        **{f"{b}{m}.weight": (spec.n_embd, width) for m, width in widths.items()},
        b + "output.weight": (spec.n_head * shape.head_dim_v, spec.n_embd),
    }
    return tensors | head_norm_tensors(spec, layer) if head_norms else tensors


def head_norm_tensors(spec: ModelSpec, layer: int) -> dict[str, Shape]:
    """Names and shapes of norms of each head of q and k."""
    return {f"blk.{layer}.attn_{part}_norm.weight": (spec.kv_shape(layer).head_dim,) for part in "qk"}


def width_norm_tensors(spec: ModelSpec, layer: int) -> dict[str, Shape]:
    """Names and shapes of norms of q and k over all heads together."""
    b, shape = f"blk.{layer}.attn_", spec.kv_shape(layer)
    return {b + "q_norm.weight": (spec.n_head * shape.head_dim,), b + "k_norm.weight": (shape.width_k,)}


def attention_biases(spec: ModelSpec, layer: int) -> dict[str, Shape]:
    """Names and shapes of the biases that some files have."""
    b, shape = f"blk.{layer}.attn_", spec.kv_shape(layer)
    return {
        b + "q.bias": (spec.n_head * shape.head_dim,),
        b + "k.bias": (shape.width_k,),
        b + "v.bias": (shape.width_v,),
        b + "output.bias": (spec.n_embd,),
    }


def latent_tensors(spec: ModelSpec, layer: int) -> dict[str, Shape]:
    """Names and shapes of a layer's latent attention and its norms."""
    d = spec.latent
    assert d is not None
    b, n_q = f"blk.{layer}.attn_", spec.n_head * d.n_qk
    tensors: dict[str, Shape] = {
        b + "norm.weight": (spec.n_embd,),
        b + "kv_a_mqa.weight": (spec.n_embd, d.rank + d.n_rope),
        b + "kv_a_norm.weight": (d.rank,),
        b + "k_b.weight": (d.n_nope, d.rank, spec.n_head),
        b + "v_b.weight": (d.rank, d.n_v, spec.n_head),
        b + "output.weight": (spec.n_head * d.n_v, spec.n_embd),
    }
    if not d.q_rank:
        return tensors | {b + "q.weight": (spec.n_embd, n_q)}
    return tensors | {
        b + "q_a.weight": (spec.n_embd, d.q_rank),
        b + "q_a_norm.weight": (d.q_rank,),
        b + "q_b.weight": (d.q_rank, n_q),
    }


def ffn_tensors(
    spec: ModelSpec, layer: int, norm: str = Family.ffn_norm, *, shared_gate: bool = False
) -> dict[str, Shape]:
    """Names and shapes of a layer's norm, router and shared experts, or of its dense network where it has none.

    `shared_gate`: the shared experts have a gate.
    """
    b = f"blk.{layer}.ffn_"
    tensors: dict[str, Shape] = {f"blk.{layer}.{norm}.weight": (spec.n_embd,)}
    if layer not in spec.moe_layers:
        return tensors | _swiglu_tensors(b + "{}.weight", spec.n_embd, spec.n_ff)
    tensors[b + "gate_inp.weight"] = (spec.n_embd, spec.n_expert)
    if spec.n_ff_shared:
        tensors |= _swiglu_tensors(b + "{}_shexp.weight", spec.n_embd, spec.n_ff_shared)
        if shared_gate:
            tensors[b + "gate_inp_shexp.weight"] = (spec.n_embd,)
    return tensors


def selection_bias(spec: ModelSpec, layer: int) -> dict[str, Shape]:
    """Name and shape of what is added to a layer's scores for the choice alone; none where it has no experts."""
    return {f"blk.{layer}.exp_probs_b.bias": (spec.n_expert,)} if layer in spec.moe_layers else {}


def _swiglu_tensors(name: str, n_embd: int, n_ff: int) -> dict[str, Shape]:
    inward, outward = (n_embd, n_ff), (n_ff, n_embd)
    return {name.format("gate"): inward, name.format("up"): inward, name.format("down"): outward}


def swiglu_ffn(c: Context, weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """down(silu(gate x) × up x); `name` has a place for gate, up, down."""
    gate, up, down = (weights[name.format(part)] for part in ("gate", "up", "down"))
    return c.mul_mat(down, c.swiglu(c.mul_mat(gate, x), c.mul_mat(up, x)))


def norm(c: Context, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return c.mul(c.rms_norm(x, eps), weight)


def scaled(c: Context, x: Tensor, factor: float) -> Tensor:
    """`x` times `factor`, itself where that is one."""
    return x if factor == 1.0 else c.scale(x, factor)


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


def split_qkv(c: Context, n_head: int, shape: KVShape, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The queries, keys (views) and values (a copy) [head_dim, heads, n] in the columns of `qkv`."""
    at, parts, n_kv = 0, [], shape.n_head_kv
    for n_heads, dim in ((n_head, shape.head_dim), (n_kv, shape.head_dim), (n_kv, shape.head_dim_v)):
        parts.append(c.view(qkv, (dim, n_heads, qkv.shape[1]), (4 * dim, qkv.strides[1]), 4 * at))
        at += n_heads * dim
    return parts[0], parts[1], c.cont(parts[2])


def grouped_attention(
    c: Context, spec: ModelSpec, weights: Mapping[str, Tensor], layer: int, h: Tensor, inputs: AttentionInputs, *,
    rope_first: bool = False,
) -> Tensor:  # fmt: skip
    """Grouped-query attention of `h`, which is normed, through its output matrix: [n_embd, n].

    One matrix of queries, keys and values, biases, norms of q and k, sinks, and frequency factors are used where the
    file has them. A norm is taken over each head, or over all together if it is as wide as they; with `rope_first`,
    over each head after its rotation.
    """
    b, n, shape = f"blk.{layer}.attn_", h.shape[1], spec.kv_shape(layer)
    factors, fused = weights.get("rope_freqs.weight"), weights.get(b + "qkv.weight")
    if fused is not None:
        q, k, v = split_qkv(c, spec.n_head, shape, c.mul_mat(fused, h))
    else:
        q, k, v = (linear(c, h, weights[f"{b}{m}.weight"], weights.get(f"{b}{m}.bias")) for m in "qkv")

    def rotated(y: Tensor, part: str, n_heads: int) -> Tensor:
        scale = weights.get(f"{b}{part}_norm.weight")
        if scale is not None and scale.shape[0] == y.shape[0] and not rope_first:
            y, scale = norm(c, y, scale, spec.rms_eps), None
        if fused is None:
            y = c.reshape(y, shape.head_dim, n_heads, n)
        if scale is not None and not rope_first:
            y, scale = norm(c, y, scale, spec.rms_eps), None
        y = rotate(c, y, inputs.positions, spec.rope_of(layer), factors)
        return y if scale is None else norm(c, y, scale, spec.rms_eps)

    q, k = rotated(q, "q", spec.n_head), rotated(k, "k", shape.n_head_kv)
    scale = spec.scales.scores or shape.head_dim**-0.5
    out = attend(c, layer, q, k, v, inputs, scale, weights.get(b + "sinks.weight"))
    return linear(c, out, weights[b + "output.weight"], weights.get(b + "output.bias"))


# From so many rows on, ggml's flash attention on processors works in tiles, if keys and values are float16 or float32.
# Others it takes row by row: converting them first is several times faster.
TILED_ROWS = 64


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
    shape = spec.kv_shape(layer)
    k, v = c.reshape(k, shape.width_k, n), None if v is None else c.reshape(v, shape.width_v, n)
    graph.add(*cache.write(c, layer, k, v, inputs.rows))
    width = spec.n_head * shape.head_dim_v

    def one(segment: Segment) -> Tensor:
        part = q
        if len(inputs.segments) > 1:
            part = c.view(q, (q.shape[0], q.shape[1], segment.n), q.strides[1:3], segment.start * q.strides[2])
        reach = segment.near if layer in spec.windowed else segment.all
        keys, values = cache.read(c, layer, segment.stream, reach.first, reach.n_kv)
        # ggml's flash attention rounds as it likes; plain products give llama.cpp's bits, for comparisons in float32
        attention = c.attention if keys.type == values.type == GgmlType.F32 else c.flash_attention
        if segment.n >= TILED_ROWS and cache.converts:
            keys, values = c.float32(keys), c.float32(values)
        out = attention(c.permute(part, 0, 2, 1, 3), keys, values, reach.mask, scale, sinks)
        return c.reshape(out, width, segment.n)

    return each_stream(c, inputs, width, n, one)


def latent_parts(
    c: Context, spec: ModelSpec, weights: Mapping[str, Tensor], layer: int, h: Tensor, inputs: AttentionInputs
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What latent attention makes of `h`: queries without position [n_nope, n_head, n] and rotated [n_rope, n_head, n],
    latent vectors [rank, n], and the rotated keys that all heads share [n_rope, 1, n]."""
    d, b, n = spec.latent, f"blk.{layer}.attn_", h.shape[1]
    assert d is not None
    if d.q_rank:
        compressed = norm(c, c.mul_mat(weights[b + "q_a.weight"], h), weights[b + "q_a_norm.weight"], spec.rms_eps)
        q = c.mul_mat(weights[b + "q_b.weight"], compressed)
    else:
        q = c.mul_mat(weights[b + "q.weight"], h)
    strides = (4 * d.n_qk, q.strides[1])
    q_nope = c.view(q, (d.n_nope, spec.n_head, n), strides)
    q_rope = rotate(c, c.view(q, (d.n_rope, spec.n_head, n), strides, 4 * d.n_nope), inputs.positions, spec.rope)
    kv = c.mul_mat(weights[b + "kv_a_mqa.weight"], h)
    latent = norm(c, c.view(kv, (d.rank, n), kv.strides[1:2]), weights[b + "kv_a_norm.weight"], spec.rms_eps)
    k_rope = c.view(kv, (d.n_rope, 1, n), (kv.strides[1], kv.strides[1]), 4 * d.rank)
    return q_nope, q_rope, latent, rotate(c, k_rope, inputs.positions, spec.rope)


def latent_attention(
    c: Context, spec: ModelSpec, weights: Mapping[str, Tensor], layer: int, h: Tensor, inputs: AttentionInputs
) -> Tensor:
    """Multi-head latent attention of `h`, which is normed, before its output matrix: [n_head × n_v, n].

    One head of keys, whose first `rank` numbers are the values too, serves all queries: the matrices that would make
    each head's keys and values of them are applied to queries and results instead.
    Source: arXiv 2405.04434, 2.1.2.
    """
    d, b, n = spec.latent, f"blk.{layer}.attn_", h.shape[1]
    assert d is not None
    q_nope, q_rope, latent, k_rope = latent_parts(c, spec, weights, layer, h, inputs)
    absorbed = c.mul_mat(weights[b + "k_b.weight"], c.permute(q_nope, 0, 2, 1, 3))  # [rank, n, n_head]
    q = c.concat(c.permute(absorbed, 0, 2, 1, 3), q_rope)
    k = c.concat(c.reshape(latent, d.rank, 1, n), k_rope)
    out = c.reshape(attend(c, layer, q, k, None, inputs, d.scale), d.rank, spec.n_head, n)
    out = c.mul_mat(weights[b + "v_b.weight"], c.permute(out, 0, 2, 1, 3))  # [n_v, n, n_head]
    return c.reshape(c.cont(c.permute(out, 0, 2, 1, 3)), spec.n_head * d.n_v, n)


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

    def heads(segment: Segment) -> list[Tensor]:
        qkv = c.silu(convolve(c, layer, 0, mixed, kernel, inputs, segment))
        views, at = [], 0
        for n_heads in (d.n_k_heads, d.n_k_heads, d.n_v_heads):
            views.append(c.view(qkv, (d.head_dim, n_heads, segment.n), (4 * d.head_dim, qkv.strides[1]), at))
            at += 4 * d.head_dim * n_heads
        if d.tiled:  # as ggml's delta rule pairs heads
            return views
        each, row = d.n_v_heads // d.n_k_heads, 4 * d.head_dim
        like = c.view(views[2], (d.head_dim, each, d.n_k_heads, segment.n), (row, row * each, qkv.strides[1]))
        for i in range(2):
            apart = c.view(views[i], (d.head_dim, 1, d.n_k_heads, segment.n), (row, row, qkv.strides[1]))
            views[i] = c.reshape(c.repeat(apart, like), d.head_dim, d.n_v_heads, segment.n)
        return views

    return _delta_rule(c, layer, 1, d, heads, gate, beta, inputs, eps)


def delta_net_apart(
    c: Context, layer: int, d: DeltaNetSpec, projected: Sequence[Tensor], gate: Tensor, beta: Tensor,
    kernels: Sequence[Tensor], inputs: AttentionInputs, eps: float,
) -> Tensor:  # fmt: skip
    """`delta_net` of queries, keys and values that come apart, each with its kernel: states are three, then the heads'.

    All have as many heads; a kernel may have dimensions of one between width and channels, as files store them.
    """

    flat = [c.reshape(kernel, d.conv_width, d.value_dim) for kernel in kernels]

    def heads(segment: Segment) -> list[Tensor]:
        each = []
        for index, (x, kernel) in enumerate(zip(projected, flat, strict=True)):
            y = c.silu(convolve(c, layer, index, x, kernel, inputs, segment))
            each.append(c.reshape(y, d.head_dim, d.n_v_heads, segment.n))
        return each

    return _delta_rule(c, layer, 3, d, heads, gate, beta, inputs, eps)


def _delta_rule(
    c: Context, layer: int, index: int, d: DeltaNetSpec, heads: Callable[[Segment], list[Tensor]], gate: Tensor,
    beta: Tensor, inputs: AttentionInputs, eps: float,
) -> Tensor:  # fmt: skip
    """The gated delta rule over queries, keys and values [head_dim, heads, n], which `heads` makes of a segment."""

    def one(segment: Segment) -> Tensor:
        q, k, v = heads(segment)
        rates = []
        for rate in (gate, beta):
            per_head = rate.shape[0] // d.n_v_heads
            view = c.view(rate, (rate.shape[0], segment.n), (), segment.start * rate.strides[1])
            rates.append(c.reshape(view, per_head, d.n_v_heads, segment.n))
        before = inputs.states.view(c, layer, index, segment.stream)
        before = c.reshape(before, d.head_dim, d.head_dim, d.n_v_heads)
        out, after = c.gated_delta_net(c.l2_norm(q, eps), c.l2_norm(k, eps), v, rates[0], rates[1], before)
        inputs.graph.add(c.cpy(after, before))
        return c.reshape(out, d.value_dim, segment.n)

    return each_stream(c, inputs, d.value_dim, gate.shape[1], one)


def within_groups(c: Context, scores: Tensor, n_groups: int, n_used: int) -> Tensor:
    """`scores` [n_expert, n], minus infinity outside the `n_used` groups whose two best experts sum to most.

    Source: DeepSeek-V3's router, arXiv 2412.19437.
    """
    n_expert, n = scores.shape[:2]
    size = n_expert // n_groups
    groups = c.reshape(scores, size, n_groups, n)
    two = c.get_rows(c.reshape(groups, 1, size, n_groups, n), c.top_k(groups, 2))  # [1, 2, n_groups, n]
    sums = c.reshape(c.sum_rows(c.reshape(two, 2, n_groups, n)), n_groups, n)
    best = c.top_k(sums, n_used)  # [n_used, n]
    kept = c.set_rows(c.fill(groups, float("-inf")), c.get_rows(groups, best), best)
    return c.reshape(kept, n_expert, n)


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
    return scaled(c, weights, spec.weights_scale)


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

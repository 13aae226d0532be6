"""The models that synth.py can write: their shapes, metadata and tensors, as published. Draws nothing, writes nothing.

A layer is a list of `Tensor`s: what to draw, not the drawn values. All matrices give outputs of about unit variance for
inputs of unit variance, except those that write to the residual stream, which are small: the token's embedding rules
the stream, and so the routing, in every family.

Sources: Qwen3 and gpt-oss, their config.json; Qwen3.6, the metadata of published GGUF files; Ling 3.0, the config and
tensor shapes that inference engines ship for it. Which tensor has which type follows llama.cpp's Q4_K_M, and ggml-org's
own file of gpt-oss. Multi-token-prediction and vision tensors are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import gguf
import numpy as np

T = gguf.GGMLQuantizationType

Metadata = dict[str, bool | int | float | str | list[int]]

# Standard deviations of what is added to the residual stream, whose own is 1.
ATTENTION_GAIN, EXPERT_GAIN, BIAS = 0.02, 0.05, 0.002
HYBRID_PERIOD = 4  # three recurrent layers, then one of attention
CONV_KERNEL = 4


class Role(Enum):
    SHARED = "one draw, the same in every layer"
    UP = "a stack of experts, from the pool of gate and up matrices"
    DOWN = "a stack of experts, from the pool of down matrices"
    ROUTER = "drawn anew in every layer"
    ROUTER_BIAS = "drawn anew in every layer, after all routers"


class Tensor(NamedTuple):
    """What to draw: `mean` plus `scale` times normal numbers, of numpy's `shape` (rows before columns)."""

    name: str
    shape: tuple[int, ...]
    type: T = T.F32
    scale: float = 0.0
    mean: float = 0.0
    role: Role = Role.SHARED


@dataclass(frozen=True)
class Shape:
    """What the command line can change of a model."""

    layers: int
    experts: int
    ff: int  # of an expert
    dim: int
    top_k: int
    heads: int
    kv_heads: int
    vocab: int


@dataclass(frozen=True)
class Model:
    """One model: `a` and `b` are the parts of the common and the cluster's direction in an embedding."""

    arch: str
    shape: Shape
    metadata: Callable[[Shape], Metadata]
    layer: Callable[[Shape, int], Iterator[Tensor]]
    pre: str  # pre-tokenizer
    a: float = 0.6
    b: float = 0.6
    embedding: T = T.Q4_K
    head: T = T.Q6_K
    file_type: gguf.LlamaFileType = gguf.LlamaFileType.MOSTLY_Q4_K_M
    least_layers: int = 1  # fewer would lack a kind of layer
    groups: int = 1  # of experts, of which a token can choose from `groups_used`
    groups_used: int = 1
    # From router logits [n, n_experts] and the layer's bias to the scores whose largest are chosen
    scores: Callable[[np.ndarray, np.ndarray], np.ndarray] = np.add


# --- what families share


def norm(name: str, n: int) -> Tensor:
    return Tensor(f"{name}.weight", (n,), mean=1.0)


def matrix(name: str, rows: int, columns: int, t: T = T.F32, gain: float = 1.0, stack: tuple[int, ...] = ()) -> Tensor:
    """Outputs of standard deviation `gain`, for inputs of 1. `stack` is its leading dimensions: one of each head."""
    return Tensor(f"{name}.weight", (*stack, rows, columns), t, gain * columns**-0.5)


def down_type(layer: int) -> T:
    """llama.cpp's Q4_K_M gives about half of the layers the larger type."""
    return T.Q6_K if layer % 2 == 0 else T.Q4_K


def common_metadata(
    s: Shape, *, context: int, ff: int | None, head_dim: tuple[int, int], rope: float, eps: float, kv: int | list[int]
) -> Metadata:  # fmt: skip
    """The keys of every family; `ff` is the dense feed-forward length, `head_dim` that of keys and of values."""
    dense: Metadata = {} if ff is None else {"feed_forward_length": ff}
    return {
        "context_length": context,
        "embedding_length": s.dim,
        "block_count": s.layers,
        **dense,
        "attention.head_count": s.heads,
        "attention.head_count_kv": kv,
        "attention.key_length": head_dim[0],
        "attention.value_length": head_dim[1],
        "rope.freq_base": rope,
        "attention.layer_norm_rms_epsilon": eps,
        "expert_count": s.experts,
        "expert_used_count": s.top_k,
        "expert_feed_forward_length": s.ff,
    }


def attention(s: Shape, head_dim: int, *, q_parts: int = 1, small: T = T.Q4_K, large: T = T.Q6_K) -> Iterator[Tensor]:
    """Grouped-query attention; `q_parts` is 2 where the query projection yields the output's gate too."""
    yield matrix("attn_q", s.heads * head_dim * q_parts, s.dim, small)
    yield matrix("attn_k", s.kv_heads * head_dim, s.dim, small)
    yield matrix("attn_v", s.kv_heads * head_dim, s.dim, large)
    yield matrix("attn_output", s.dim, s.heads * head_dim, small, ATTENTION_GAIN)


def head_norms(head_dim: int) -> Iterator[Tensor]:
    yield norm("attn_q_norm", head_dim)
    yield norm("attn_k_norm", head_dim)


def router(s: Shape, scale: float = 2.0) -> Tensor:
    """Logits of standard deviation `scale`."""
    return matrix("ffn_gate_inp", s.experts, s.dim, gain=scale)._replace(role=Role.ROUTER)


def experts(s: Shape, up: T, down: T, routed_scale: float = 1.0) -> Iterator[Tensor]:
    """The routed experts' three stacks; `routed_scale` is what the family multiplies their sum with."""
    for name in ("ffn_gate_exps", "ffn_up_exps"):
        yield matrix(name, s.ff, s.dim, up, stack=(s.experts,))._replace(role=Role.UP)
    gain = EXPERT_GAIN / routed_scale
    yield matrix("ffn_down_exps", s.dim, s.ff, down, gain, (s.experts,))._replace(role=Role.DOWN)


def dense_ffn(s: Shape, ff: int, suffix: str = "") -> Iterator[Tensor]:
    """A feed-forward block that every token passes: a dense layer's, or the shared expert."""
    yield matrix(f"ffn_gate{suffix}", ff, s.dim, T.Q4_K)
    yield matrix(f"ffn_up{suffix}", ff, s.dim, T.Q4_K)
    yield matrix(f"ffn_down{suffix}", s.dim, ff, T.Q6_K, EXPERT_GAIN)


# --- qwen3moe: Qwen3-30B-A3B, Qwen3-235B-A22B

QWEN3_HEAD = 128


def qwen3_metadata(s: Shape) -> Metadata:
    heads = (QWEN3_HEAD, QWEN3_HEAD)
    return common_metadata(s, context=32768, ff=s.ff * 8, head_dim=heads, rope=1e6, eps=1e-6, kv=s.kv_heads)


def qwen3_layer(s: Shape, layer: int) -> Iterator[Tensor]:
    yield norm("attn_norm", s.dim)
    yield norm("ffn_norm", s.dim)
    yield from attention(s, QWEN3_HEAD)
    yield from head_norms(QWEN3_HEAD)
    yield router(s)
    yield from experts(s, T.Q4_K, down_type(layer))


# --- qwen35moe: Qwen3.5 and Qwen3.6-35B-A3B

QWEN35_HEAD, QWEN35_ROTATED = 256, 64
DELTA_HEAD, DELTA_K_HEADS, DELTA_V_HEADS = 128, 16, 32  # of the gated delta net


def qwen35_metadata(s: Shape) -> Metadata:
    heads = (QWEN35_HEAD, QWEN35_HEAD)
    return common_metadata(s, context=262144, ff=None, head_dim=heads, rope=1e7, eps=1e-6, kv=s.kv_heads) | {
        "expert_shared_feed_forward_length": s.ff,
        "rope.dimension_sections": [11, 11, 10, 0],
        "rope.dimension_count": QWEN35_ROTATED,
        "ssm.conv_kernel": CONV_KERNEL,
        "ssm.state_size": DELTA_HEAD,
        "ssm.group_count": DELTA_K_HEADS,
        "ssm.time_step_rank": DELTA_V_HEADS,
        "ssm.inner_size": DELTA_HEAD * DELTA_V_HEADS,
        "full_attention_interval": HYBRID_PERIOD,
    }


def qwen35_layer(s: Shape, layer: int) -> Iterator[Tensor]:
    yield norm("attn_norm", s.dim)
    yield norm("post_attention_norm", s.dim)
    if is_attention(layer):
        yield from attention(s, QWEN35_HEAD, q_parts=2)
        yield from head_norms(QWEN35_HEAD)
    else:
        inner = DELTA_HEAD * DELTA_V_HEADS
        mixed = inner + 2 * DELTA_HEAD * DELTA_K_HEADS  # queries, keys, values
        yield matrix("attn_qkv", mixed, s.dim, T.Q5_K)
        yield matrix("attn_gate", inner, s.dim, T.Q4_K)
        yield matrix("ssm_conv1d", mixed, CONV_KERNEL)
        yield matrix("ssm_alpha", DELTA_V_HEADS, s.dim, T.Q8_0)
        yield matrix("ssm_beta", DELTA_V_HEADS, s.dim, T.Q8_0)
        # A head's state decays by exp(a × softplus(alpha + dt)) a token: to a half in some tens of tokens.
        yield Tensor("ssm_dt.bias", (DELTA_V_HEADS,), scale=0.5, mean=-5.0)
        yield Tensor("ssm_a", (DELTA_V_HEADS,), scale=0.5, mean=-4.0)
        yield norm("ssm_norm", DELTA_HEAD)
        yield matrix("ssm_out", s.dim, inner, T.Q4_K, ATTENTION_GAIN)
    yield router(s)
    yield from experts(s, T.Q4_K, down_type(layer))
    yield Tensor("ffn_gate_inp_shexp.weight", (s.dim,), scale=s.dim**-0.5)
    yield from dense_ffn(s, s.ff, "_shexp")


def is_attention(layer: int) -> bool:
    """Whether a hybrid's layer is one of full attention."""
    return layer % HYBRID_PERIOD == HYBRID_PERIOD - 1


# --- bailingmoe3: Ling 3.0

KDA_HEAD = 128
Q_RANK, KV_RANK = 256, 512  # of multi-head latent attention
NOPE, ROTATED, V_HEAD = 128, 64, 128
GROUPS, GROUPS_USED = 8, 4
LING_DENSE_LAYERS, LING_SCALE = 1, 2.5


def ling_metadata(s: Shape) -> Metadata:
    kv = [int(is_attention(layer)) for layer in range(s.layers)]
    heads = (KV_RANK + ROTATED, KV_RANK)
    return common_metadata(s, context=131072, ff=3 * s.dim, head_dim=heads, rope=6e6, eps=1e-6, kv=kv) | {
        "vocab_size": s.vocab,
        "attention.q_lora_rank": Q_RANK,
        "attention.kv_lora_rank": KV_RANK,
        "attention.key_length_mla": NOPE + ROTATED,
        "attention.value_length_mla": V_HEAD,
        "rope.dimension_count": ROTATED,
        "ssm.conv_kernel": CONV_KERNEL,
        "kda.head_dim": KDA_HEAD,
        "kda.safe_gate": True,
        "kda.gate_lower_bound": -5.0,
        "leading_dense_block_count": LING_DENSE_LAYERS,
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": s.ff,
        "expert_weights_scale": LING_SCALE,
        "expert_weights_norm": True,
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
        "expert_group_count": GROUPS,
        "expert_group_used_count": GROUPS_USED,
    }


def ling_layer(s: Shape, layer: int) -> Iterator[Tensor]:
    yield norm("attn_norm", s.dim)
    yield norm("ffn_norm", s.dim)
    yield from latent_attention(s) if is_attention(layer) else delta_attention(s)
    if layer < LING_DENSE_LAYERS:
        yield from dense_ffn(s, 3 * s.dim)
        return
    yield router(s, scale=1.0)  # twice that would saturate the sigmoid of all that are chosen
    yield Tensor("exp_probs_b.bias", (s.experts,), scale=0.02, role=Role.ROUTER_BIAS)
    yield from experts(s, T.Q4_K, down_type(layer), LING_SCALE)
    yield from dense_ffn(s, s.ff, "_shexp")


def delta_attention(s: Shape) -> Iterator[Tensor]:
    """Kimi delta attention, its forget and output gates of full rank."""
    inner = s.heads * KDA_HEAD
    for part, t in (("q", T.Q4_K), ("k", T.Q4_K), ("v", T.Q6_K)):
        yield matrix(f"attn_{part}", inner, s.dim, t)
        yield matrix(f"ssm_conv1d_{part}", 1, CONV_KERNEL, stack=(1, inner))
    yield matrix("ssm_f_a", inner, s.dim, T.Q4_K)
    yield matrix("ssm_g_a", inner, s.dim, T.Q4_K)
    yield matrix("ssm_beta", s.heads, s.dim, T.Q8_0)
    # A channel's state decays by exp(-5 × sigmoid(a × (f + dt))) a token: to a half in some tens of tokens.
    yield Tensor("ssm_dt.bias", (inner,), scale=0.5, mean=-5.0)
    yield Tensor("ssm_a", (s.heads, 1), scale=0.1, mean=1.0)
    yield norm("ssm_norm", KDA_HEAD)
    yield matrix("attn_output", s.dim, inner, T.Q4_K, ATTENTION_GAIN)


def latent_attention(s: Shape) -> Iterator[Tensor]:
    """Multi-head latent attention, with a gate per head. Rows of 128 weights hold no K-quantisation."""
    yield matrix("attn_q_a", Q_RANK, s.dim, T.Q4_K)
    yield norm("attn_q_a_norm", Q_RANK)
    yield matrix("attn_q_b", s.heads * (NOPE + ROTATED), Q_RANK, T.Q4_K)
    yield matrix("attn_kv_a_mqa", KV_RANK + ROTATED, s.dim, T.Q8_0)
    yield norm("attn_kv_a_norm", KV_RANK)
    yield matrix("attn_k_b", KV_RANK, NOPE, T.Q8_0, stack=(s.heads,))
    yield matrix("attn_v_b", V_HEAD, KV_RANK, T.Q8_0, stack=(s.heads,))
    yield matrix("attn_gate", s.heads, s.dim, T.Q8_0)
    yield matrix("attn_output", s.dim, s.heads * V_HEAD, T.Q4_K, ATTENTION_GAIN)


def grouped_sigmoids(logits: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Sigmoids plus bias; minus infinity outside the groups whose two best add up to most."""
    scores = 1 / (1 + np.exp(-logits)) + bias
    grouped = scores.reshape(len(scores), GROUPS, -1)
    of_group = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
    unused = np.argsort(of_group, axis=1)[:, :-GROUPS_USED]
    np.put_along_axis(grouped, unused[:, :, None], -np.inf, axis=1)
    return grouped.reshape(scores.shape)


# --- gpt-oss

OSS_HEAD = 64


def oss_metadata(s: Shape) -> Metadata:
    heads = (OSS_HEAD, OSS_HEAD)
    return common_metadata(s, context=131072, ff=s.ff, head_dim=heads, rope=150000.0, eps=1e-5, kv=s.kv_heads) | {
        "attention.sliding_window": 128,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
    }


def oss_layer(s: Shape, layer: int) -> Iterator[Tensor]:
    yield norm("attn_norm", s.dim)
    yield norm("post_attention_norm", s.dim)
    projections = list(attention(s, OSS_HEAD, small=T.Q8_0, large=T.Q8_0))
    stacks = list(experts(s, T.MXFP4, T.MXFP4))
    yield from projections
    yield from (bias_of(tensor) for tensor in projections)
    yield Tensor("attn_sinks.weight", (s.heads,), scale=1.0)
    yield router(s)
    yield Tensor("ffn_gate_inp.bias", (s.experts,), scale=0.1, role=Role.ROUTER_BIAS)
    yield from stacks
    yield from (bias_of(tensor) for tensor in stacks)


def bias_of(tensor: Tensor) -> Tensor:
    """Of a matrix, [rows]; of a stack, [n_experts, rows]."""
    return Tensor(tensor.name.replace(".weight", ".bias"), tensor.shape[:-1], scale=BIAS)


# a and b: such that an LRU over 13.4 % of the experts hits about 65 % in each (see synth.py). The shapes but the first,
# which keeps a small vocabulary, have as many weights as is published: 34.7, 7.89, 20.9 billion, and 12 layers of 94.
MODELS = {
    "qwen3-30b": Model(
        "qwen3moe",
        Shape(layers=48, experts=128, ff=768, dim=2048, top_k=8, heads=32, kv_heads=4, vocab=32000),  # truly 151936
        qwen3_metadata,
        qwen3_layer,
        "qwen2",
        embedding=T.Q6_K,
    ),
    "qwen3.6-35b": Model(
        "qwen35moe",
        Shape(layers=40, experts=256, ff=512, dim=2048, top_k=8, heads=16, kv_heads=2, vocab=248320),
        qwen35_metadata,
        qwen35_layer,
        "qwen35",
        a=0.55,
        b=0.55,
        least_layers=HYBRID_PERIOD,
    ),
    "ling-3.0-tiny": Model(
        "bailingmoe3",
        Shape(layers=24, experts=128, ff=512, dim=1536, top_k=8, heads=16, kv_heads=1, vocab=157184),
        ling_metadata,
        ling_layer,
        "bailingmoe2",
        a=0.62,
        least_layers=HYBRID_PERIOD,
        groups=GROUPS,
        groups_used=GROUPS_USED,
        scores=grouped_sigmoids,
    ),
    "gpt-oss-20b": Model(
        "gpt-oss",
        Shape(layers=24, experts=32, ff=2880, dim=2880, top_k=4, heads=64, kv_heads=8, vocab=201088),
        oss_metadata,
        oss_layer,
        "gpt-4o",
        a=0.68,
        b=0.65,
        embedding=T.Q8_0,
        head=T.Q8_0,
        file_type=gguf.LlamaFileType.MOSTLY_MXFP4_MOE,
    ),
    "qwen3-235b": Model(
        "qwen3moe",
        Shape(layers=12, experts=128, ff=1536, dim=4096, top_k=8, heads=64, kv_heads=4, vocab=151936),  # of 94 layers
        qwen3_metadata,
        qwen3_layer,
        "qwen2",
    ),
}

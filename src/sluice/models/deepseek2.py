"""DeepSeek V2, V3, R1 and what is built like them (GGUF architecture `deepseek2`): V2-Lite, Kimi-K2, GLM-4.7-Flash,
Moonlight, GigaChat. Knows its graphs only.

Pre-norm decoder; multi-head latent attention, rope on interleaved pairs of a part of each head, yarn with a factor of
its own on attention's scores; leading dense layers. Softmax or sigmoid routing, perhaps with a bias per expert that
moves the choice, within the best groups of experts; weights normalised and scaled as the file says; shared experts.
Files of before April 2025 have keys and values in one matrix (attn_kv_b): then all heads' keys and values are kept.
Layers for multi-token prediction may follow and are left in the file.
Source: arXiv 2405.04434 and 2412.19437; groups are ranked by their best two in V2 as well, as llama.cpp does it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from sluice.ggml import Context, Tensor
from sluice.gguf import GgufFile
from sluice.models import blocks
from sluice.models.blocks import AttentionInputs, Family
from sluice.models.spec import (
    LatentSpec,
    Metadata,
    ModelSpec,
    Shape,
    check_tensors,
    decoder_spec,
    with_latent_attention,
)


class DeepSeek2(Family):
    """`deepseek2`."""

    architecture = "deepseek2"

    @classmethod
    def read_spec(cls, file: GgufFile) -> ModelSpec:
        meta = Metadata(file)
        s = decoder_spec(file, neox=False, normalise_weights=meta.flag("expert_weights_norm", False))
        leading = meta.integer("leading_dense_block_count", 0, low=0, high=s.n_layers)
        if without := set(range(leading, s.n_layers)) - set(s.moe_layers):
            raise meta.fail("leading_dense_block_count", f"is {leading}, but layer {min(without)} has no experts")
        if meta.number("attention.temperature_scale", 0.0):
            raise meta.fail("attention.temperature_scale", "is set, which Sluice does not know in this architecture")
        biased = any(f"blk.{i}.exp_probs_b.bias" in file.tensors for i in s.moe_layers)
        s = replace(
            s,
            gating=meta.gating("sigmoid" if biased else "softmax"),  # files of before V3, and some of GLM's, don't say
            n_ff_shared=meta.integer("expert_shared_count", 0, low=0, high=4096) * s.n_ff_expert,
        )
        folded = meta.get("attention.key_length_mla") is not None
        s = _with_yarn(meta, with_latent_attention(meta, s) if folded else _with_unfolded_keys(meta, s))
        wanted = blocks.embedding_tensors(s)
        optional: dict[str, Shape] = {}
        for i in range(s.n_layers):
            wanted |= blocks.latent_tensors(s, i) | blocks.ffn_tensors(s, i)
            optional |= blocks.selection_bias(s, i)
            if not folded:
                (n_nope, rank, n_head), (_, n_v, _) = (wanted.pop(f"blk.{i}.attn_{m}_b.weight") for m in "kv")
                wanted[f"blk.{i}.attn_kv_b.weight"] = (rank, n_head * (n_nope + n_v))
        return check_tensors(file, s, wanted, optional)

    def mix(self, c: Context, layer: int, h: Tensor, inputs: AttentionInputs) -> Tensor:
        s, w = self.spec, self.weights
        attention = blocks.latent_attention if s.values_in_keys else _unfolded_attention
        return c.mul_mat(w[f"blk.{layer}.attn_output.weight"], attention(c, s, w, layer, h, inputs))


def _unfolded_attention(
    c: Context, s: ModelSpec, weights: Mapping[str, Tensor], layer: int, h: Tensor, inputs: AttentionInputs
) -> Tensor:
    """Attention over the keys and values of every head, made of the latent vectors: [n_head × n_v, n]."""
    d, n = s.latent, h.shape[1]
    assert d is not None
    q_nope, q_rope, latent, k_rope = blocks.latent_parts(c, s, weights, layer, h, inputs)
    kv = c.mul_mat(weights[f"blk.{layer}.attn_kv_b.weight"], latent)  # of each head n_nope of its key, then its value
    strides = (4 * (d.n_nope + d.n_v), kv.strides[1])
    k_nope = c.view(kv, (d.n_nope, s.n_head, n), strides)
    v = c.cont(c.view(kv, (d.n_v, s.n_head, n), strides, 4 * d.n_nope))
    q, k = c.concat(q_nope, q_rope), c.concat(k_nope, c.repeat(k_rope, q_rope))
    return blocks.attend(c, layer, q, k, v, inputs, d.scale)


def _with_unfolded_keys(meta: Metadata, s: ModelSpec) -> ModelSpec:
    """The spec of a file that knows nothing of keeping latent vectors."""
    if s.n_head_kv != s.n_head:
        raise meta.fail(
            "attention.head_count_kv", f"is {s.n_head_kv}, not {s.n_head}, and attention.key_length_mla is missing"
        )
    if s.head_dim <= s.rope.n_dims:
        raise meta.fail(
            "attention.key_length", f"is {s.head_dim}, of which rope.dimension_count rotates {s.rope.n_dims}"
        )
    latent = LatentSpec(
        rank=meta.integer("attention.kv_lora_rank", high=4096),
        q_rank=meta.integer("attention.q_lora_rank", 0, low=0),
        n_nope=s.head_dim - s.rope.n_dims,
        n_rope=s.rope.n_dims,
        n_v=s.head_dim_v,
        scale=s.head_dim**-0.5,
    )
    return replace(s, latent=latent)


def _with_yarn(meta: Metadata, s: ModelSpec) -> ModelSpec:
    """The spec with yarn's magnitudes as this family has them: on the scores, by a multiplier that the file gives.

    ggml's rope multiplies by 1 + 0.1 ln(factor); with a multiplier that is taken back. Files store a tenth of it.
    """
    assert s.latent is not None
    multiplier = meta.number("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
    if not 0 <= multiplier <= 100:
        raise meta.fail("rope.scaling.yarn_log_multiplier", f"is {multiplier / 10}, not from 0 to 10")
    stretch = 0.1 * math.log(max(1.0, 1.0 / s.rope.freq_scale))
    rope = s.rope
    if rope.ext_factor and multiplier:
        rope = replace(rope, attn_factor=rope.attn_factor / (1 + stretch))
    magnitude = rope.attn_factor * (1 + stretch) * (1 + multiplier * stretch)
    return replace(s, rope=rope, latent=replace(s.latent, scale=s.latent.scale * magnitude * magnitude))

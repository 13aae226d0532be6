"""Qwen3.5 MoE (GGUF architecture `qwen35moe`): Qwen3.5-35B-A3B, Qwen3.6-35B-A3B and larger. Knows its graphs only.

Three of four layers mix tokens by the gated delta rule (linear attention with a state), the fourth by grouped-query
attention whose output is gated; an RMS norm on every head of q and k, rope on a part of each head (neox; the sections
of its multimodal form coincide for text). Softmax routing, weights normalised over the chosen, and a shared expert
behind a sigmoid gate of its own. A layer for multi-token prediction may follow and is left in the file.
Source: https://huggingface.co/docs/transformers/model_doc/qwen3_5_moe and arXiv 2412.06464.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from sluice.ggml import Context, Tensor
from sluice.gguf import GgufFile
from sluice.models import blocks
from sluice.models.blocks import AttentionInputs, Family
from sluice.models.spec import DeltaNetSpec, Metadata, ModelSpec, Shape, check_tensors, decoder_spec


class Qwen35Moe(Family):
    """`qwen35moe`."""

    architecture = "qwen35moe"
    ffn_norm = "post_attention_norm"
    tiled: ClassVar[bool] = True  # see DeltaNetSpec

    @classmethod
    def read_spec(cls, file: GgufFile) -> ModelSpec:
        meta = Metadata(file)
        s = decoder_spec(file, neox=True, normalise_weights=True)
        delta = replace(_delta_net(meta), tiled=cls.tiled)
        s = replace(
            s,
            n_ff_shared=meta.integer("expert_shared_feed_forward_length", s.n_ff),
            delta=delta,
            recurrent={i: delta.state for i in _recurrent_layers(meta, s.n_layers)},
        )
        if not s.attending:
            raise meta.fail("attention.recurrent_layers (or full_attention_interval)", "leaves no layer to attend")
        _check_sections(meta, s)
        wanted = blocks.embedding_tensors(s)
        for i in range(s.n_layers):
            b = f"blk.{i}."
            wanted |= blocks.ffn_tensors(s, i, cls.ffn_norm, shared_gate=True)
            if i in s.recurrent:
                wanted |= cls.delta_tensors(file, s, delta, i)
            else:
                wanted |= blocks.attention_tensors(s, i, head_norms=True)
                wanted[b + "attn_q.weight"] = (s.n_embd, 2 * s.n_head * s.head_dim)  # queries and gates, by head
        return check_tensors(file, s, wanted, {})

    def mix(self, c: Context, layer: int, h: Tensor, inputs: AttentionInputs) -> Tensor:
        attention = self._linear_attention if layer in self.spec.recurrent else self._gated_attention
        return attention(c, layer, h, inputs)

    def _gated_attention(self, c: Context, layer: int, h: Tensor, inputs: AttentionInputs) -> Tensor:
        s, w, b = self.spec, self.weights, f"blk.{layer}.attn_"
        n, d = h.shape[1], s.head_dim
        both = c.mul_mat(w[b + "q.weight"], h)  # of each head d numbers of its query, then d of its gate
        strides = (8 * d, both.strides[1])
        q = c.cont(c.view(both, (d, s.n_head, n), strides))
        gate = c.cont(c.view(both, (d, s.n_head, n), strides, 4 * d))
        k = c.reshape(c.mul_mat(w[b + "k.weight"], h), d, s.n_head_kv, n)
        v = c.mul_mat(w[b + "v.weight"], h)
        q = blocks.rotate(c, blocks.norm(c, q, w[b + "q_norm.weight"], s.rms_eps), inputs.positions, s.rope)
        k = blocks.rotate(c, blocks.norm(c, k, w[b + "k_norm.weight"], s.rms_eps), inputs.positions, s.rope)
        out = blocks.attend(c, layer, q, k, v, inputs, d**-0.5)
        gate = c.sigmoid(c.reshape(gate, s.n_head * d, n))
        return c.mul_mat(w[b + "output.weight"], c.mul(out, gate))

    def _linear_attention(self, c: Context, layer: int, h: Tensor, inputs: AttentionInputs) -> Tensor:
        s, w, b = self.spec, self.weights, f"blk.{layer}."
        assert s.delta is not None
        d, n = s.delta, h.shape[1]
        mixed, z = self.mixed_and_gate(c, layer, h)
        beta, alpha = self.beta_and_alpha(c, layer, h)
        rate = c.softplus(c.add(alpha, w[b + "ssm_dt.bias"]))
        decay = c.mul(rate, w[b + "ssm_a"])  # logarithms, negative
        kernel = w[b + "ssm_conv1d.weight"]
        out = blocks.delta_net(c, layer, d, mixed, decay, c.sigmoid(beta), kernel, inputs, s.rms_eps)
        normed = blocks.norm(c, c.reshape(out, d.head_dim, d.n_v_heads, n), w[b + "ssm_norm.weight"], s.rms_eps)
        gated = c.mul(normed, c.silu(c.reshape(z, d.head_dim, d.n_v_heads, n)))
        return c.mul_mat(w[b + "ssm_out.weight"], c.reshape(gated, d.value_dim, n))

    def mixed_and_gate(self, c: Context, layer: int, h: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys and values [conv_dim, n], and the gate of the output [value_dim, n]."""
        b = f"blk.{layer}.attn_"
        return c.mul_mat(self.weights[b + "qkv.weight"], h), c.mul_mat(self.weights[b + "gate.weight"], h)

    def beta_and_alpha(self, c: Context, layer: int, h: Tensor) -> tuple[Tensor, Tensor]:
        """What decides how much is written, and how much is kept [n_v_heads, n]."""
        b = f"blk.{layer}.ssm_"
        return c.mul_mat(self.weights[b + "beta.weight"], h), c.mul_mat(self.weights[b + "alpha.weight"], h)

    @classmethod
    def delta_tensors(cls, file: GgufFile, s: ModelSpec, d: DeltaNetSpec, layer: int) -> dict[str, Shape]:
        """Names and shapes of a recurrent layer's tensors and of the norm before them."""
        b = f"blk.{layer}."
        return {
            b + "attn_norm.weight": (s.n_embd,),
            b + "attn_qkv.weight": (s.n_embd, d.conv_dim),
            b + "attn_gate.weight": (s.n_embd, d.value_dim),
            b + "ssm_conv1d.weight": (d.conv_width, d.conv_dim),
            b + "ssm_dt.bias": (d.n_v_heads,),
            b + "ssm_a": (d.n_v_heads,),
            b + "ssm_beta.weight": (s.n_embd, d.n_v_heads),
            b + "ssm_alpha.weight": (s.n_embd, d.n_v_heads),
            b + "ssm_norm.weight": (d.head_dim,),
            b + "ssm_out.weight": (d.value_dim, s.n_embd),
        }


def _delta_net(meta: Metadata) -> DeltaNetSpec:
    head_dim = meta.integer("ssm.state_size", high=1024)
    n_k, n_v = meta.integer("ssm.group_count", high=4096), meta.integer("ssm.time_step_rank", high=4096)
    if n_v % n_k:
        raise meta.fail("ssm.group_count", f"is {n_k}, which does not divide {n_v} value heads")
    if (inner := meta.integer("ssm.inner_size")) != head_dim * n_v:
        raise meta.fail("ssm.inner_size", f"is {inner}, not {n_v} heads of {head_dim}")
    return DeltaNetSpec(n_k, n_v, head_dim, meta.integer("ssm.conv_kernel", low=2, high=64))


def _check_sections(meta: Metadata, s: ModelSpec) -> None:
    """For text all sections of the rotated pairs hold the same position, so only their sum counts."""
    sections = meta.get("rope.dimension_sections", [s.rope.n_dims // 2])
    if not isinstance(sections, list) or not all(isinstance(n, int) and n >= 0 for n in sections):
        raise meta.fail("rope.dimension_sections", "is no list of whole numbers")
    if sum(sections) != s.rope.n_dims // 2:
        raise meta.fail("rope.dimension_sections", f"has {sum(sections)} pairs, rope.dimension_count {s.rope.n_dims}")


def _recurrent_layers(meta: Metadata, n_layers: int) -> tuple[int, ...]:
    """As the file lists them, or all but every fourth (or `full_attention_interval`-th)."""
    if meta.get("attention.recurrent_layers") is not None:
        return meta.marked_layers("attention.recurrent_layers", n_layers, "it is recurrent")
    interval = meta.integer("full_attention_interval", 4, high=4096)
    return tuple(i for i in range(n_layers) if (i + 1) % interval)

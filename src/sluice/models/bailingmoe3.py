"""Ling 3.0 (GGUF architecture `bailingmoe3`): Ling-3.0-tiny, Ling-3.0-Flash. Knows its graphs only.

Most layers mix tokens by Kimi's delta rule (linear attention with a state, whose every number decays at a rate of its
own, bounded below), the others by multi-head latent attention, each head's output behind a sigmoid gate; rope on
interleaved pairs of a part of each head. Leading dense layers, then routing as in Ling 2.0: sigmoid scores, a bias per
expert for the choice alone, the best groups of experts, weights normalised and scaled, shared experts beside them. A
layer for multi-token prediction may follow and is left in the file.
Source: https://huggingface.co/docs/transformers/model_doc/bailing_hybrid, arXiv 2510.26692 and 2405.04434.
"""

from __future__ import annotations

from dataclasses import replace

from sluice.ggml import Context, Tensor
from sluice.gguf import GgufFile
from sluice.models import blocks
from sluice.models.blocks import AttentionInputs, Family
from sluice.models.spec import (
    DeltaNetSpec,
    Metadata,
    ModelSpec,
    Shape,
    check_tensors,
    decoder_spec,
    with_latent_attention,
)


class BailingMoe3(Family):
    """`bailingmoe3`."""

    architecture = "bailingmoe3"

    @classmethod
    def read_spec(cls, file: GgufFile) -> ModelSpec:
        meta = Metadata(file)
        normalised = meta.flag("expert_weights_norm", False)
        s = decoder_spec(file, neox=False, normalise_weights=normalised, some_without_keys=True)
        n_shared = meta.integer("expert_shared_count", high=4096)
        delta = _delta_net(meta, s.n_head)
        s = replace(
            s,
            gating=meta.gating(),
            n_ff_shared=meta.integer("expert_shared_feed_forward_length", s.n_ff_expert * n_shared),
            # what the file calls the length of values is the delta rule's
            head_dim_v=meta.integer("attention.kv_lora_rank", high=4096),
            delta=delta,
            recurrent={i: _states(delta) for i in meta.layers_without_keys(s.n_layers)},
        )
        s = with_latent_attention(meta, s)
        wanted = blocks.embedding_tensors(s)
        for i in range(s.n_layers):
            wanted |= blocks.ffn_tensors(s, i) | blocks.selection_bias(s, i)
            if i in s.recurrent:
                wanted |= _delta_tensors(s, delta, i)
            else:
                wanted |= blocks.latent_tensors(s, i)
                wanted[f"blk.{i}.attn_gate.weight"] = (s.n_embd, s.n_head)
        return check_tensors(file, s, wanted, {})

    def mix(self, c: Context, layer: int, h: Tensor, inputs: AttentionInputs) -> Tensor:
        attention = self._linear_attention if layer in self.spec.recurrent else self._latent_attention
        return c.mul_mat(self.weights[f"blk.{layer}.attn_output.weight"], attention(c, layer, h, inputs))

    def _latent_attention(self, c: Context, layer: int, h: Tensor, inputs: AttentionInputs) -> Tensor:
        s, w, n = self.spec, self.weights, h.shape[1]
        assert s.latent is not None
        out = blocks.latent_attention(c, s, w, layer, h, inputs)
        gate = c.sigmoid(c.reshape(c.mul_mat(w[f"blk.{layer}.attn_gate.weight"], h), 1, s.n_head, n))
        out = c.mul(c.reshape(out, s.latent.n_v, s.n_head, n), gate)
        return c.reshape(out, s.n_head * s.latent.n_v, n)

    def _linear_attention(self, c: Context, layer: int, h: Tensor, inputs: AttentionInputs) -> Tensor:
        s, w, b, n = self.spec, self.weights, f"blk.{layer}.", h.shape[1]
        assert s.delta is not None
        d = s.delta
        projected = [c.mul_mat(w[f"{b}attn_{m}.weight"], h) for m in "qkv"]
        kernels = [w[f"{b}ssm_conv1d_{m}.weight"] for m in "qkv"]
        rate = c.reshape(c.add(c.mul_mat(w[b + "ssm_f_a.weight"], h), w[b + "ssm_dt.bias"]), d.head_dim, d.n_v_heads, n)
        decay = c.scale(c.sigmoid(c.mul(rate, w[b + "ssm_a"])), d.lowest)  # logarithms, negative
        beta = c.sigmoid(c.mul_mat(w[b + "ssm_beta.weight"], h))
        out = blocks.delta_net_apart(
            c, layer, d, projected, c.reshape(decay, d.value_dim, n), beta, kernels, inputs, s.rms_eps
        )
        normed = blocks.norm(c, c.reshape(out, d.head_dim, d.n_v_heads, n), w[b + "ssm_norm.weight"], s.rms_eps)
        gate = c.sigmoid(c.mul_mat(w[b + "ssm_g_a.weight"], h))
        return c.mul(c.reshape(normed, d.value_dim, n), gate)


def _delta_net(meta: Metadata, n_head: int) -> DeltaNetSpec:
    if not meta.flag("kda.safe_gate", False):
        raise meta.fail("kda.safe_gate", "is not true, which this family does not use")
    if (lowest := meta.number("kda.gate_lower_bound")) >= 0:
        raise meta.fail("kda.gate_lower_bound", f"is {lowest}, not negative")
    head_dim = meta.integer("kda.head_dim", high=1024)
    return DeltaNetSpec(n_head, n_head, head_dim, meta.integer("ssm.conv_kernel", low=2, high=64), lowest)


def _states(d: DeltaNetSpec) -> tuple[int, ...]:
    """Numbers that a layer keeps of a stream: inputs of three convolutions, the heads' matrices."""
    conv, heads = d.state
    return (conv // 3, conv // 3, conv // 3, heads)


def _delta_tensors(s: ModelSpec, d: DeltaNetSpec, layer: int) -> dict[str, Shape]:
    b = f"blk.{layer}."
    return {
        b + "attn_norm.weight": (s.n_embd,),
        **{f"{b}attn_{m}.weight": (s.n_embd, d.value_dim) for m in "qkv"},
        **{f"{b}ssm_conv1d_{m}.weight": (d.conv_width, 1, d.value_dim) for m in "qkv"},
        b + "ssm_f_a.weight": (s.n_embd, d.value_dim),
        b + "ssm_dt.bias": (d.value_dim,),
        b + "ssm_a": (1, d.n_v_heads),
        b + "ssm_beta.weight": (s.n_embd, d.n_v_heads),
        b + "ssm_g_a.weight": (s.n_embd, d.value_dim),
        b + "ssm_norm.weight": (d.head_dim,),
        b + "attn_output.weight": (d.value_dim, s.n_embd),
    }

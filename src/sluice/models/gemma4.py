"""Gemma 4 with experts (GGUF architecture `gemma4`): Gemma-4-26B-A4B. Knows its graphs only.

Decoder with norms before and after attention and feed-forward, each layer's output scaled by a number of its own. Most
layers look back a window only, with heads and rope (neox) of their own; the others have wider and fewer KV heads, whose
values may be the keys before their norm, and rotate a part of each head by factors. An RMS norm on every head of q, k
and v. Beside the routed experts a dense network, each with norms of its own; the router reads the layer's input under a
scale, softmax, weights normalised over the chosen, then scaled by expert. Embeddings are scaled, logits capped. GELU
comes from ggml's table of half-precision floats: that alone puts logits 5e-4 from transformers'. Dense models and those
with embeddings for each layer (E2B, E4B) are refused.
Source: https://huggingface.co/docs/transformers/model_doc/gemma4.
"""

from __future__ import annotations

import math
from dataclasses import replace

from sluice.errors import ModelFileError
from sluice.ggml import Context, Tensor
from sluice.gguf import GgufFile
from sluice.models import blocks
from sluice.models.blocks import AttentionInputs, Family, norm
from sluice.models.spec import KVShape, Metadata, ModelSpec, ScaleSpec, Shape, check_tensors, decoder_spec

FACTORS = "rope_freqs.weight"


class Gemma4(Family):
    """`gemma4`."""

    architecture = "gemma4"
    ffn_norm = "pre_ffw_norm_2"

    @classmethod
    def read_spec(cls, file: GgufFile) -> ModelSpec:
        meta = Metadata(file)
        _refuse_other_variants(meta)
        windowed = meta.marked_layers("attention.sliding_window_pattern", meta.n_layers(), "it has a window")
        meta.integer("attention.key_length", high=1024)  # required: heads are not as wide as others' are by default
        s = decoder_spec(file, neox=True, normalise_weights=True, apart=windowed)
        if dense := set(range(s.n_layers)) - set(s.moe_layers):
            raise ModelFileError(
                f"{meta.path}: layer {min(dense)} has no experts, unlike others: this gemma4 variant is not supported"
            )
        near = _near_shape(meta, s, windowed)
        n_dims = meta.rotated("rope.dimension_count_swa", near.head_dim)
        near_rope = replace(s.rope, n_dims=n_dims, freq_base=meta.rope_base("rope.freq_base_swa"), freq_scale=1.0)
        cap = meta.number("final_logit_softcapping")  # required: by default llama.cpp takes 30 and transformers none
        if cap < 0:
            raise meta.fail("final_logit_softcapping", "is negative")
        s = replace(
            s,
            window=meta.integer("attention.sliding_window", high=1 << 30),
            windowed=windowed,
            kv_shapes=dict.fromkeys(windowed, near),
            near_rope=near_rope,
            n_ff_shared=s.n_ff,
            scales=ScaleSpec(embedding=math.sqrt(s.n_embd), cap=cap),
        )
        wanted = blocks.embedding_tensors(s) | {FACTORS: (s.head_dim // 2,)}
        optional: dict[str, Shape] = {}
        for i in range(s.n_layers):
            wanted |= blocks.attention_tensors(s, i, head_norms=True) | _ffn_tensors(s, i)
            if i not in windowed:  # without a matrix for them, values are made of the keys'
                name = f"blk.{i}.attn_v.weight"
                optional[name] = wanted.pop(name)
        return check_tensors(file, s, wanted, optional)

    def mix(self, c: Context, layer: int, h: Tensor, inputs: AttentionInputs) -> Tensor:
        s, w, b, n = self.spec, self.weights, f"blk.{layer}.attn_", h.shape[1]
        shape, rope = s.kv_shape(layer), s.rope_of(layer)
        factors = None if layer in s.windowed else w[FACTORS]

        def heads(part: str, n_heads: int) -> Tensor:
            return c.reshape(c.mul_mat(w[f"{b}{part}.weight"], h), shape.head_dim, n_heads, n)

        def rotated(y: Tensor, part: str) -> Tensor:
            return blocks.rotate(c, norm(c, y, w[f"{b}{part}_norm.weight"], s.rms_eps), inputs.positions, rope, factors)

        q, k = heads("q", s.n_head), heads("k", shape.n_head_kv)
        v = heads("v", shape.n_head_kv) if b + "v.weight" in w else k
        q, k, v = rotated(q, "q"), rotated(k, "k"), c.rms_norm(v, s.rms_eps)
        out = c.mul_mat(w[b + "output.weight"], blocks.attend(c, layer, q, k, v, inputs, scale=1.0))
        return norm(c, out, w[f"blk.{layer}.post_attention_norm.weight"], s.rms_eps)

    def router_input(self, c: Context, layer: int, x: Tensor, normed: Tensor) -> Tensor:
        s, scale = self.spec, self.weights[f"blk.{layer}.ffn_gate_inp.scale"]
        return c.mul(c.scale(c.rms_norm(x, s.rms_eps), 1 / math.sqrt(s.n_embd)), scale)

    def routing_weights(self, c: Context, layer: int, scores: Tensor, ids: Tensor) -> Tensor:
        k, n = ids.shape[:2]
        scales = c.reshape(self.weights[f"blk.{layer}.ffn_down_exps.scale"], 1, self.spec.n_expert)
        chosen = c.reshape(c.get_rows(scales, c.reshape(ids, k * n)), 1, k, n)
        return c.mul(super().routing_weights(c, layer, scores, ids), chosen)

    def shared(self, c: Context, layer: int, x: Tensor, normed: Tensor) -> Tensor:
        """The dense network, which reads `x` under a norm of its own."""
        w, b, eps = self.weights, f"blk.{layer}.", self.spec.rms_eps
        h = norm(c, x, w[b + "ffn_norm.weight"], eps)
        gate, up = (c.mul_mat(w[f"{b}ffn_{part}.weight"], h) for part in ("gate", "up"))
        out = c.mul_mat(w[b + "ffn_down.weight"], self.activation(c, gate, up))
        return norm(c, out, w[b + "post_ffw_norm_1.weight"], eps)

    def combined(self, c: Context, layer: int, x: Tensor, routed: Tensor, shared: Tensor | None) -> Tensor:
        w, b, eps = self.weights, f"blk.{layer}.", self.spec.rms_eps
        assert shared is not None
        both = c.add(shared, norm(c, routed, w[b + "post_ffw_norm_2.weight"], eps))
        added = c.add(norm(c, both, w[b + "post_ffw_norm.weight"], eps), x)
        return c.mul(added, w[b + "layer_output_scale.weight"])

    def activation(self, c: Context, gate: Tensor, up: Tensor) -> Tensor:
        return c.geglu(gate, up)


def _refuse_other_variants(meta: Metadata) -> None:
    for key, what in (
        ("embedding_length_per_layer_input", "embeddings for each layer (E2B, E4B)"),
        ("attention.shared_kv_layers", "layers that share others' keys and values (E2B, E4B)"),
    ):
        if meta.integer(key, 0, low=0):
            raise ModelFileError(
                f"{meta.path}: a gemma4 with {what}, as {meta.architecture}.{key} says: Sluice runs only the variants "
                "with experts, run this one with llama.cpp"
            )


def _near_shape(meta: Metadata, s: ModelSpec, windowed: tuple[int, ...]) -> KVShape:
    """What the layers with a window keep of a position: their KV heads are as many in each, and wide as a key says."""
    if s.head_dim_v != s.head_dim:
        raise meta.fail("attention.value_length", f"is {s.head_dim_v}, not {s.head_dim} as attention.key_length")
    head_dim = meta.integer("attention.key_length_swa", high=1024)
    if (head_dim_v := meta.integer("attention.value_length_swa", high=1024)) != head_dim:
        raise meta.fail("attention.value_length_swa", f"is {head_dim_v}, not {head_dim} as attention.key_length_swa")
    each = meta.per_layer("attention.head_count_kv", s.n_layers, s.n_head, high=s.n_head)
    counts = sorted({each[i] for i in windowed} or {s.n_head_kv})
    if len(counts) > 1 or s.n_head % counts[0]:
        raise meta.fail("attention.head_count_kv", f"is {counts} in layers with a window, of {s.n_head} heads")
    return KVShape(counts[0], head_dim, head_dim)


def _ffn_tensors(s: ModelSpec, layer: int) -> dict[str, Shape]:
    """Names and shapes of what follows a layer's attention."""
    b = f"blk.{layer}."
    norms = ("post_attention_norm", "ffn_norm", "post_ffw_norm", "post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2")
    return {
        **{f"{b}{name}.weight": (s.n_embd,) for name in norms},
        b + "layer_output_scale.weight": (1,),
        b + "ffn_gate_inp.weight": (s.n_embd, s.n_expert),
        b + "ffn_gate_inp.scale": (s.n_embd,),
        b + "ffn_down_exps.scale": (s.n_expert,),
        b + "ffn_gate.weight": (s.n_embd, s.n_ff),
        b + "ffn_up.weight": (s.n_embd, s.n_ff),
        b + "ffn_down.weight": (s.n_ff, s.n_embd),
    }

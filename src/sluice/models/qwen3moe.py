"""Qwen3 MoE (GGUF architecture `qwen3moe`): Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder. Knows its graphs only.

Pre-norm decoder; grouped-query attention with an RMS norm on every head of q and k before rope (neox);
softmax routing, weights normalised over the chosen; SwiGLU experts.
Source: https://huggingface.co/docs/transformers/model_doc/qwen3_moe and arXiv 2505.09388.
"""

from __future__ import annotations

from sluice.ggml import Context, Tensor
from sluice.gguf import GgufFile
from sluice.models import blocks
from sluice.models.blocks import AttentionInputs, Family
from sluice.models.spec import ModelSpec, check_tensors, decoder_spec


class Qwen3Moe(Family):
    """`qwen3moe`."""

    architecture = "qwen3moe"

    @classmethod
    def read_spec(cls, file: GgufFile) -> ModelSpec:
        s = decoder_spec(file, neox=True, normalise_weights=True)
        wanted = blocks.embedding_tensors(s)
        for i in range(s.n_layers):
            wanted |= blocks.attention_tensors(s, i, head_norms=True) | blocks.ffn_tensors(s, i)
        return check_tensors(file, s, wanted, {})

    def attention(self, c: Context, layer: int, x: Tensor, inputs: AttentionInputs) -> Tensor:
        s, w, b = self.spec, self.weights, f"blk.{layer}."
        n = x.shape[1]
        h = blocks.norm(c, x, w[b + "attn_norm.weight"], s.rms_eps)
        q = c.reshape(c.mul_mat(w[b + "attn_q.weight"], h), s.head_dim, s.n_head, n)
        k = c.reshape(c.mul_mat(w[b + "attn_k.weight"], h), s.head_dim, s.n_head_kv, n)
        v = c.mul_mat(w[b + "attn_v.weight"], h)
        q = blocks.rotate(c, blocks.norm(c, q, w[b + "attn_q_norm.weight"], s.rms_eps), inputs.positions, s.rope)
        k = blocks.rotate(c, blocks.norm(c, k, w[b + "attn_k_norm.weight"], s.rms_eps), inputs.positions, s.rope)
        out = blocks.attend(c, layer, q, k, v, inputs, s.head_dim**-0.5)
        return c.add(x, c.mul_mat(w[b + "attn_output.weight"], out))

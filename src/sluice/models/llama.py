"""Llama with experts (GGUF architecture `llama`): Mixtral's layout, and models upcycled into it. Knows its graphs only.

Pre-norm decoder; grouped-query attention, rope on interleaved pairs, llama 3's frequency factors where the file has
them; softmax routing, weights normalised over the chosen; SwiGLU experts.
Source: arXiv 2401.04088 and https://huggingface.co/docs/transformers/model_doc/mixtral.
"""

from __future__ import annotations

from sluice.ggml import Context, Tensor
from sluice.gguf import GgufFile
from sluice.models import blocks
from sluice.models.blocks import AttentionInputs, Family
from sluice.models.spec import ModelSpec, Shape, check_tensors, decoder_spec


class Llama(Family):
    """`llama` with an expert count."""

    architecture = "llama"

    @classmethod
    def read_spec(cls, file: GgufFile) -> ModelSpec:
        s = decoder_spec(file, neox=False, normalise_weights=True)
        wanted = blocks.embedding_tensors(s)
        optional: dict[str, Shape] = {"rope_freqs.weight": (s.rope.n_dims // 2,)}
        for i in range(s.n_layers):
            wanted |= blocks.attention_tensors(s, i) | blocks.ffn_tensors(s, i)
            optional |= blocks.attention_biases(s, i)
        return check_tensors(file, s, wanted, optional)

    def attention(self, c: Context, layer: int, x: Tensor, inputs: AttentionInputs) -> Tensor:
        s, w, b = self.spec, self.weights, f"blk.{layer}.attn_"
        n = x.shape[1]
        h = blocks.norm(c, x, w[b + "norm.weight"], s.rms_eps)
        q, k, v = (blocks.linear(c, h, w[f"{b}{m}.weight"], w.get(f"{b}{m}.bias")) for m in "qkv")
        factors = w.get("rope_freqs.weight")
        q = blocks.rotate(c, c.reshape(q, s.head_dim, s.n_head, n), inputs.positions, s.rope, factors)
        k = blocks.rotate(c, c.reshape(k, s.head_dim, s.n_head_kv, n), inputs.positions, s.rope, factors)
        out = blocks.attend(c, layer, q, k, v, inputs, s.head_dim**-0.5)
        return c.add(x, blocks.linear(c, out, w[b + "output.weight"], w.get(b + "output.bias")))

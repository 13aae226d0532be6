"""LFM2 MoE (GGUF architecture `lfm2moe`): LFM2-8B-A1B, LFM2-24B-A2B. Knows its graphs only.

Most layers mix tokens by a gated convolution over the last few positions, whose inputs are their state; the others by
grouped-query attention with an RMS norm on every head of q and k before rope (neox). Leading dense layers. Routing by
sigmoid scores: a bias per expert moves the choice alone; weights are the scores, normalised over the chosen.
Source: https://huggingface.co/docs/transformers/model_doc/lfm2_moe and arXiv 2511.23404.
"""

from __future__ import annotations

from dataclasses import replace

from sluice.ggml import Context, Tensor
from sluice.gguf import GgufFile
from sluice.models import blocks
from sluice.models.blocks import AttentionInputs, Family, Segment
from sluice.models.spec import Metadata, ModelSpec, Shape, check_tensors, decoder_spec


class Lfm2Moe(Family):
    """`lfm2moe`."""

    architecture = "lfm2moe"
    output_norm = "token_embd_norm"

    @classmethod
    def read_spec(cls, file: GgufFile) -> ModelSpec:
        meta = Metadata(file)
        normalised = meta.flag("expert_weights_norm", True)
        s = decoder_spec(file, neox=True, normalise_weights=normalised, some_without_keys=True)
        width = meta.integer("shortconv.l_cache", low=2, high=64)
        states = {i: ((width - 1) * s.n_embd,) for i in meta.layers_without_keys(s.n_layers)}
        s = replace(s, gating=meta.gating(), short_conv=width, recurrent=states)
        wanted = blocks.embedding_tensors(s, cls.output_norm)
        for i in range(s.n_layers):
            wanted |= blocks.ffn_tensors(s, i) | blocks.selection_bias(s, i)
            wanted |= _conv_tensors(s, i) if i in s.recurrent else blocks.attention_tensors(s, i, head_norms=True)
        return check_tensors(file, s, wanted, {})

    def mix(self, c: Context, layer: int, h: Tensor, inputs: AttentionInputs) -> Tensor:
        if layer not in self.spec.recurrent:
            return super().mix(c, layer, h, inputs)
        w, n_embd, n = self.weights, self.spec.n_embd, h.shape[1]
        parts = c.mul_mat(w[f"blk.{layer}.shortconv.in_proj.weight"], h)
        before, after, values = (c.view(parts, (n_embd, n), parts.strides[1:2], 4 * n_embd * i) for i in range(3))
        gated = c.mul(before, values)
        kernel = w[f"blk.{layer}.shortconv.conv.weight"]

        def one(segment: Segment) -> Tensor:
            return blocks.convolve(c, layer, 0, gated, kernel, inputs, segment)

        mixed = c.mul(after, blocks.each_stream(c, inputs, n_embd, n, one))
        return c.mul_mat(w[f"blk.{layer}.shortconv.out_proj.weight"], mixed)


def _conv_tensors(s: ModelSpec, layer: int) -> dict[str, Shape]:
    b = f"blk.{layer}."
    return {
        b + "attn_norm.weight": (s.n_embd,),
        b + "shortconv.conv.weight": (s.short_conv, s.n_embd),
        b + "shortconv.in_proj.weight": (s.n_embd, 3 * s.n_embd),  # the gate before, the gate after, what is convolved
        b + "shortconv.out_proj.weight": (s.n_embd, s.n_embd),
    }

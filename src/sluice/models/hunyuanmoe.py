"""Hunyuan MoE (GGUF architecture `hunyuan-moe`): Hunyuan-A13B. Knows its graphs only.

Pre-norm decoder; grouped-query attention, rope (neox) and after it an RMS norm on every head of q and k; softmax
routing, weights normalised over the chosen; a shared expert.
Source: https://huggingface.co/docs/transformers/model_doc/hunyuan_v1_moe.
"""

from __future__ import annotations

from dataclasses import replace

from sluice.ggml import Context, Tensor
from sluice.gguf import GgufFile
from sluice.models import blocks
from sluice.models.blocks import AttentionInputs, Family
from sluice.models.spec import Metadata, ModelSpec, Shape, check_tensors, decoder_spec


class HunyuanMoe(Family):
    """`hunyuan-moe`."""

    architecture = "hunyuan-moe"

    @classmethod
    def read_spec(cls, file: GgufFile) -> ModelSpec:
        s = decoder_spec(file, neox=True, normalise_weights=True)
        s = replace(s, n_ff_shared=Metadata(file).integer("expert_shared_feed_forward_length", s.n_ff))
        wanted = blocks.embedding_tensors(s)
        optional: dict[str, Shape] = {}
        for i in range(s.n_layers):
            wanted |= blocks.attention_tensors(s, i, head_norms=True) | blocks.ffn_tensors(s, i)
            optional |= blocks.attention_biases(s, i)
        return check_tensors(file, s, wanted, optional)

    def mix(self, c: Context, layer: int, h: Tensor, inputs: AttentionInputs) -> Tensor:
        return blocks.grouped_attention(c, self.spec, self.weights, layer, h, inputs, rope_first=True)

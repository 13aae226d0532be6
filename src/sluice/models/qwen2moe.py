"""Qwen2 MoE (GGUF architecture `qwen2moe`): Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B. Knows its graphs only.

Pre-norm decoder; grouped-query attention with biases, rope (neox); softmax routing, weights as the softmax gives them;
SwiGLU experts, and a shared one behind a sigmoid gate of its own.
Source: https://huggingface.co/docs/transformers/model_doc/qwen2_moe and arXiv 2407.10671.
"""

from __future__ import annotations

from dataclasses import replace

from sluice.gguf import GgufFile
from sluice.models import blocks
from sluice.models.blocks import Family
from sluice.models.spec import Metadata, ModelSpec, Shape, check_tensors, decoder_spec


class Qwen2Moe(Family):
    """`qwen2moe`."""

    architecture = "qwen2moe"

    @classmethod
    def read_spec(cls, file: GgufFile) -> ModelSpec:
        meta = Metadata(file)
        s = decoder_spec(file, neox=True, normalise_weights=False)
        # files from before these two keys existed have only the length of the shared expert, the routed ones together
        s = replace(
            s,
            n_ff_expert=meta.integer("expert_feed_forward_length", s.n_ff // s.top_k),
            n_ff_shared=meta.integer("expert_shared_feed_forward_length", s.n_ff),
        )
        wanted = blocks.embedding_tensors(s)
        optional: dict[str, Shape] = {}
        for i in range(s.n_layers):
            wanted |= blocks.attention_tensors(s, i) | blocks.ffn_tensors(s, i, shared_gate=True)
            optional |= blocks.attention_biases(s, i)
        return check_tensors(file, s, wanted, optional)

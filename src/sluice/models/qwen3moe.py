"""Qwen3 MoE (GGUF architecture `qwen3moe`): Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder. Knows its graphs only.

Pre-norm decoder; grouped-query attention with an RMS norm on every head of q and k before rope (neox);
softmax routing, weights normalised over the chosen; SwiGLU experts.
Source: https://huggingface.co/docs/transformers/model_doc/qwen3_moe and arXiv 2505.09388.
"""

from __future__ import annotations

from sluice.gguf import GgufFile
from sluice.models import blocks
from sluice.models.blocks import Family
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

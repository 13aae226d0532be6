"""Llama with experts (GGUF architecture `llama`): Mixtral's layout, and models upcycled into it. Knows its graphs only.

Pre-norm decoder; grouped-query attention, rope on interleaved pairs, llama 3's frequency factors where the file has
them; softmax routing, weights normalised over the chosen; SwiGLU experts.
Source: arXiv 2401.04088 and https://huggingface.co/docs/transformers/model_doc/mixtral.
"""

from __future__ import annotations

from dataclasses import replace

from sluice.gguf import GgufFile
from sluice.models import blocks
from sluice.models.blocks import Family
from sluice.models.spec import ModelSpec, Shape, check_tensors, decoder_spec


class Llama(Family):
    """`llama` with an expert count."""

    architecture = "llama"

    @classmethod
    def read_spec(cls, file: GgufFile) -> ModelSpec:
        s = decoder_spec(file, neox=False, normalise_weights=True)
        s = replace(s, n_ff_expert=s.n_ff)  # one length for dense and routed networks
        wanted = blocks.embedding_tensors(s)
        optional: dict[str, Shape] = {"rope_freqs.weight": (s.rope.n_dims // 2,)}
        for i in range(s.n_layers):
            wanted |= blocks.attention_tensors(s, i) | blocks.ffn_tensors(s, i)
            optional |= blocks.attention_biases(s, i)
        return check_tensors(file, s, wanted, optional)

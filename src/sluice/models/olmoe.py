"""OLMoE (GGUF architecture `olmoe`): OLMoE-1B-7B. Knows its graphs only.

Pre-norm decoder; attention with an RMS norm over all heads of q together, and of k, before rope (neox); softmax
routing, weights as the softmax gives them; SwiGLU experts.
Source: https://huggingface.co/docs/transformers/model_doc/olmoe and arXiv 2409.02060.
"""

from __future__ import annotations

from dataclasses import replace

from sluice.gguf import GgufFile
from sluice.models import blocks
from sluice.models.blocks import Family
from sluice.models.spec import Metadata, ModelSpec, check_tensors, decoder_spec


class Olmoe(Family):
    """`olmoe`."""

    architecture = "olmoe"

    @classmethod
    def read_spec(cls, file: GgufFile) -> ModelSpec:
        s = decoder_spec(file, neox=True, normalise_weights=False)
        s = replace(s, n_ff_expert=Metadata(file).integer("feed_forward_length"))
        wanted = blocks.embedding_tensors(s)
        for i in range(s.n_layers):
            wanted |= blocks.attention_tensors(s, i) | blocks.width_norm_tensors(s, i) | blocks.ffn_tensors(s, i)
        return check_tensors(file, s, wanted, {})

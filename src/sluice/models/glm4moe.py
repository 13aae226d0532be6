"""GLM-4.5 (GGUF architecture `glm4moe`): GLM-4.5, 4.6, 4.7, their Air and V forms, Solar Open. Knows its graphs only.

Pre-norm decoder; grouped-query attention with biases, an RMS norm on every head of q and k in the larger models, rope
on a part of each head (neox; the sections of its multimodal form coincide for text); leading dense layers. Routing by
sigmoid scores: a bias per expert moves the choice alone; weights are the scores, normalised over the chosen and scaled;
shared experts beside them. A layer for multi-token prediction may follow and is left in the file.
Source: https://huggingface.co/docs/transformers/model_doc/glm4_moe and arXiv 2508.06471.
"""

from __future__ import annotations

from dataclasses import replace

from sluice.gguf import GgufFile
from sluice.models import blocks
from sluice.models.blocks import Family
from sluice.models.spec import Metadata, ModelSpec, Shape, check_tensors, decoder_spec


class Glm4Moe(Family):
    """`glm4moe`."""

    architecture = "glm4moe"
    ffn_norm = "post_attention_norm"

    @classmethod
    def read_spec(cls, file: GgufFile) -> ModelSpec:
        meta = Metadata(file)
        s = decoder_spec(file, neox=True, normalise_weights=meta.flag("expert_weights_norm", False))
        n_shared = meta.integer("expert_shared_count", low=0, high=4096)
        s = replace(s, gating=meta.gating("sigmoid"), n_ff_shared=s.n_ff_expert * n_shared)
        wanted = blocks.embedding_tensors(s)
        optional: dict[str, Shape] = {}
        for i in range(s.n_layers):
            wanted |= blocks.attention_tensors(s, i) | blocks.ffn_tensors(s, i, cls.ffn_norm)
            wanted |= blocks.selection_bias(s, i)
            optional |= blocks.attention_biases(s, i) | blocks.head_norm_tensors(s, i)
        return check_tensors(file, s, wanted, optional)

"""Ling 2.0 (GGUF architecture `bailingmoe2`): Ling-mini, Ling-flash, Ling-1T, Ring, Sarvam. Knows its graphs only.

Pre-norm decoder; grouped-query attention from one matrix of queries, keys and values, an RMS norm on every head of q
and k before rope (neox, on a part of each head); leading dense layers. Routing by sigmoid scores: a bias per expert
moves the choice, which is limited to the best groups of experts; weights are the scores, normalised over the chosen and
scaled; shared experts beside them. A layer for multi-token prediction may follow and is left in the file.
Source: arXiv 2510.22115 and https://huggingface.co/inclusionAI/Ling-mini-2.0.
"""

from __future__ import annotations

from dataclasses import replace

from sluice.gguf import GgufFile
from sluice.models import blocks
from sluice.models.blocks import Family
from sluice.models.spec import Metadata, ModelSpec, Shape, check_tensors, decoder_spec


class BailingMoe2(Family):
    """`bailingmoe2`."""

    architecture = "bailingmoe2"

    @classmethod
    def read_spec(cls, file: GgufFile) -> ModelSpec:
        meta = Metadata(file)
        s = decoder_spec(file, neox=True, normalise_weights=meta.flag("expert_weights_norm", False))
        n_ff_shared = meta.integer("expert_shared_feed_forward_length", s.n_ff_expert)
        n_shared = meta.integer("expert_shared_count", high=4096)
        s = replace(s, gating=meta.gating(), n_ff_shared=n_ff_shared * n_shared)
        wanted = blocks.embedding_tensors(replace(s, tied_embeddings=False))
        optional: dict[str, Shape] = {}
        for i in range(s.n_layers):
            wanted |= blocks.attention_tensors(s, i, head_norms=True, fused=True) | blocks.ffn_tensors(s, i)
            optional |= blocks.selection_bias(s, i)
        return check_tensors(file, s, wanted, optional)

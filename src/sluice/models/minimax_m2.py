"""MiniMax-M2 (GGUF architecture `minimax-m2`): MiniMax-M2, M2.1, M2.5. Knows its graphs only.

Pre-norm decoder; grouped-query attention with an RMS norm over all heads of q together, and of k, before rope (neox, on
a part of each head). Routing by sigmoid scores: a bias per expert moves the choice alone; weights are the scores,
normalised over the chosen; SwiGLU experts.
Source: https://huggingface.co/docs/transformers/model_doc/minimax_m2.
"""

from __future__ import annotations

from dataclasses import replace

from sluice.gguf import GgufFile
from sluice.models import blocks
from sluice.models.blocks import Family
from sluice.models.spec import Metadata, ModelSpec, check_tensors, decoder_spec


class MiniMaxM2(Family):
    """`minimax-m2`."""

    architecture = "minimax-m2"

    @classmethod
    def read_spec(cls, file: GgufFile) -> ModelSpec:
        meta = Metadata(file)
        s = decoder_spec(file, neox=True, normalise_weights=meta.flag("expert_weights_norm", True))
        s = replace(s, gating=meta.gating())
        wanted = blocks.embedding_tensors(s)
        for i in range(s.n_layers):
            wanted |= blocks.attention_tensors(s, i) | blocks.width_norm_tensors(s, i)
            wanted |= blocks.ffn_tensors(s, i) | blocks.selection_bias(s, i)
        return check_tensors(file, s, wanted, {})

"""ERNIE 4.5 MoE (GGUF architecture `ernie4_5-moe`): ERNIE-4.5-21B-A3B, 300B-A47B. Knows its graphs only.

Pre-norm decoder; grouped-query attention, rope on interleaved pairs; leading dense layers, and maybe some between.
Softmax routing: a bias per expert moves the choice alone; weights normalised over the chosen; shared experts.
Source: https://huggingface.co/docs/transformers/model_doc/ernie4_5_moe.
"""

from __future__ import annotations

from dataclasses import replace

from sluice.gguf import GgufFile
from sluice.models import blocks
from sluice.models.blocks import Family
from sluice.models.spec import Metadata, ModelSpec, Shape, check_tensors, decoder_spec


class Ernie45Moe(Family):
    """`ernie4_5-moe`."""

    architecture = "ernie4_5-moe"

    @classmethod
    def read_spec(cls, file: GgufFile) -> ModelSpec:
        meta = Metadata(file)
        s = decoder_spec(file, neox=False, normalise_weights=True)
        s = replace(s, n_ff_shared=meta.integer("expert_shared_feed_forward_length", 0, low=0))
        leading = meta.integer("leading_dense_block_count", 0, low=0, high=s.n_layers)
        step = meta.integer("interleave_moe_layer_step", high=s.n_layers)
        if s.moe_layers != tuple(i for i in range(leading, s.n_layers) if (i + 1) % step == 0):
            what = f"is {step} and leading_dense_block_count {leading}, which its layers with experts contradict"
            raise meta.fail("interleave_moe_layer_step", what)
        wanted = blocks.embedding_tensors(s)
        optional: dict[str, Shape] = {}
        for i in range(s.n_layers):
            wanted |= blocks.attention_tensors(s, i) | blocks.ffn_tensors(s, i)
            optional |= blocks.attention_biases(s, i) | blocks.selection_bias(s, i)
        return check_tensors(file, s, wanted, optional)

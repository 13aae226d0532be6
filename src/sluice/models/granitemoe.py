"""Granite MoE (GGUF architecture `granitemoe`): Granite 3.0 and 3.1 1B-A400M, 3B-A800M. Knows its graphs only.

Pre-norm decoder; grouped-query attention, rope on interleaved pairs; softmax routing, weights normalised over the
chosen; shared experts in some. Embeddings, attention scores, what each layer adds, and logits are scaled by constants.
Source: https://huggingface.co/docs/transformers/model_doc/granitemoe.
"""

from __future__ import annotations

from dataclasses import replace

from sluice.gguf import GgufFile
from sluice.models import blocks
from sluice.models.blocks import Family
from sluice.models.spec import Metadata, ModelSpec, ScaleSpec, Shape, check_tensors, decoder_spec


class GraniteMoe(Family):
    """`granitemoe`."""

    architecture = "granitemoe"

    @classmethod
    def read_spec(cls, file: GgufFile) -> ModelSpec:
        meta = Metadata(file)
        s = decoder_spec(file, neox=False, normalise_weights=True)
        if not meta.flag("rope.scaling.finetuned", True):
            raise meta.fail("rope.scaling.finetuned", "is false: Sluice knows no granitemoe without rope")
        divisor = meta.number("logit_scale")
        if divisor == 0:
            raise meta.fail("logit_scale", "is 0")
        # 0 stands for none, as in a file that leaves it out
        residual = meta.number("residual_scale", 0.0) or 1.0
        scales = ScaleSpec(
            embedding=meta.number("embedding_scale", 0.0) or 1.0,
            residual=residual,
            scores=meta.number("attention.scale", 0.0),
            logits=1 / divisor,
        )
        n_ff_shared = meta.integer("expert_shared_feed_forward_length", 0, low=0)
        # experts' outputs are scaled through their weights
        s = replace(
            s, n_ff_expert=meta.integer("feed_forward_length"), n_ff_shared=n_ff_shared, scales=scales,
            weights_scale=s.weights_scale * residual,
        )  # fmt: skip
        wanted = blocks.embedding_tensors(s)
        optional: dict[str, Shape] = {"rope_freqs.weight": (s.rope.n_dims // 2,)}
        for i in range(s.n_layers):
            wanted |= blocks.attention_tensors(s, i) | blocks.ffn_tensors(s, i)
            optional |= blocks.attention_biases(s, i)
        return check_tensors(file, s, wanted, optional)

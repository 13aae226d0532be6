"""OpenAI's open-weight MoE (GGUF architecture `gpt-oss`): gpt-oss-20b, gpt-oss-120b. Knows its graphs only.

Pre-norm decoder with a bias on every linear map; grouped-query attention with a learned sink per head, rope (neox,
yarn), every other layer looking back a window only; softmax over the chosen router logits; experts with a clamped
SwiGLU. As in llama.cpp, yarn's ramp begins and ends at whole dimensions; the original's does not (`truncate`).
Source: https://huggingface.co/docs/transformers/model_doc/gpt_oss and arXiv 2508.10925.
"""

from __future__ import annotations

from dataclasses import replace

from sluice.ggml import Context, Tensor
from sluice.gguf import GgufFile
from sluice.models import blocks
from sluice.models.blocks import Family
from sluice.models.spec import Metadata, ModelSpec, Shape, check_tensors, decoder_spec

# The activation's constants, which no file names.
ALPHA = 1.702
LIMIT = 7.0
WINDOW_PERIOD = 2  # of so many layers, all but the last have a window, unless the file says otherwise


class GptOss(Family):
    """`gpt-oss`."""

    architecture = "gpt-oss"
    ffn_norm = "post_attention_norm"

    @classmethod
    def read_spec(cls, file: GgufFile) -> ModelSpec:
        meta = Metadata(file)
        s = decoder_spec(file, neox=True, normalise_weights=False)
        if meta.number("rope.freq_base_swa", s.rope.freq_base) != s.rope.freq_base:
            raise meta.fail("rope.freq_base_swa", "is not rope.freq_base, which this family does not use")
        s = replace(
            s,
            gating="chosen",
            window=meta.integer("attention.sliding_window", high=1 << 30),
            windowed=_windowed_layers(meta, s.n_layers),
            expert_biases=True,
        )
        wanted = blocks.embedding_tensors(s)
        for i in range(s.n_layers):
            wanted |= blocks.attention_tensors(s, i) | blocks.attention_biases(s, i)
            wanted |= blocks.ffn_tensors(s, i, cls.ffn_norm) | _own_tensors(s, i)
        return check_tensors(file, s, wanted, {})

    def activation(self, c: Context, gate: Tensor, up: Tensor) -> Tensor:
        return c.swiglu_oai(gate, up, ALPHA, LIMIT)


def _windowed_layers(meta: Metadata, n_layers: int) -> tuple[int, ...]:
    """As the file lists them, or all but every second (or `sliding_window_pattern`-th)."""
    if isinstance(meta.get("attention.sliding_window_pattern"), list):
        return meta.marked_layers("attention.sliding_window_pattern", n_layers, "it has a window")
    period = meta.integer("attention.sliding_window_pattern", WINDOW_PERIOD, low=0, high=4096)
    return tuple(i for i in range(n_layers) if period == 0 or (i + 1) % period)


def _own_tensors(s: ModelSpec, layer: int) -> dict[str, Shape]:
    """Names and shapes of the sinks and, in a layer with experts, the biases of router and experts."""
    b = f"blk.{layer}."
    sinks: dict[str, Shape] = {b + "attn_sinks.weight": (s.n_head,)}
    if layer not in s.moe_layers:
        return sinks
    return sinks | {
        b + "ffn_gate_inp.bias": (s.n_expert,),
        b + "ffn_gate_exps.bias": (s.n_ff_expert, s.n_expert),
        b + "ffn_up_exps.bias": (s.n_ff_expert, s.n_expert),
        b + "ffn_down_exps.bias": (s.n_embd, s.n_expert),
    }

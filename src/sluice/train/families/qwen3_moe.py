"""Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder (transformers' `qwen3_moe`): softmax over all experts.

Weights are normalised over the chosen where the configuration says so, as the published models' do, and as engines take
for granted of GGUF's `qwen3moe`. Knows its router only.
"""

from __future__ import annotations

from operator import attrgetter

from sluice.train.families.base import Family

QWEN3_MOE = Family("qwen3_moe", "qwen3moe", router="mlp.gate", normalises=attrgetter("norm_topk_prob"))

"""Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B (transformers' `qwen2_moe`): softmax over all experts.

Weights are normalised over the chosen where the configuration says so, which the published models' don't, nor do
engines for GGUF's `qwen2moe`. A shared expert stands beside the routed ones. Knows its router only.
"""

from __future__ import annotations

from operator import attrgetter

from sluice.train.families.base import Family

QWEN2_MOE = Family("qwen2_moe", "qwen2moe", router="mlp.gate", normalises=attrgetter("norm_topk_prob"))

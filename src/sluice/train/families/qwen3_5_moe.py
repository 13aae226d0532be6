"""Qwen3.5 and Qwen3.6 MoE (transformers' `qwen3_5_moe`): softmax over all, weights normalised over the chosen.

Most layers mix tokens by linear attention; a shared expert stands beside the routed ones. Knows its router only.
"""

from __future__ import annotations

from sluice.train.families.base import Family

QWEN3_5_MOE = Family("qwen3_5_moe", "qwen35moe", router="mlp.gate", normalises=lambda config: True)

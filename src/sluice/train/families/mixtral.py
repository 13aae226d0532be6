"""Mixtral 8x7B and 8x22B (transformers' `mixtral`): softmax over all experts, weights normalised over the chosen.

Weights stay float32 whatever the logits are. GGUF has these models as `llama` with experts. Knows its router only.
"""

from __future__ import annotations

from sluice.train.families.base import Family

MIXTRAL = Family("mixtral", "llama", router="mlp.gate", normalises=lambda config: True, wide=True)

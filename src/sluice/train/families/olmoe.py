"""OLMoE-1B-7B (transformers' `olmoe`): softmax over all experts.

Weights are normalised over the chosen where the configuration says so, which the published models' don't, nor do
engines for GGUF's `olmoe`. Knows its router only.
"""

from __future__ import annotations

from operator import attrgetter

from sluice.train.families.base import Family

OLMOE = Family("olmoe", "olmoe", router="mlp.gate", normalises=attrgetter("norm_topk_prob"))

"""The model families that can be trained, by transformers' model type; another is refused by name."""

from __future__ import annotations

from typing import Any

from sluice.errors import InputError
from sluice.train.families.base import Family, config_of, decoder, text_config
from sluice.train.families.mixtral import MIXTRAL
from sluice.train.families.olmoe import OLMOE
from sluice.train.families.qwen2_moe import QWEN2_MOE
from sluice.train.families.qwen3_5_moe import QWEN3_5_MOE
from sluice.train.families.qwen3_moe import QWEN3_MOE

__all__ = ["FAMILIES", "Family", "config_of", "decoder", "family_of", "text_config"]

FAMILIES = {family.model_type: family for family in (QWEN3_MOE, QWEN2_MOE, OLMOE, MIXTRAL, QWEN3_5_MOE)}


def family_of(model_or_config: Any) -> Family:
    """The family of a model of transformers', or of its configuration. Raises InputError, listing the choices."""
    name = str(getattr(config_of(model_or_config), "model_type", None))
    family = FAMILIES.get(name.removesuffix("_text"))  # the text part of a model that also sees
    if family is None:
        raise InputError(f"{name[:60]!r} models can't be trained: choose one of {', '.join(sorted(FAMILIES))}")
    return family

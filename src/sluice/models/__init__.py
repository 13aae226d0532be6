"""Model families, one file per GGUF architecture; a family knows its graphs, not where its experts are."""

from __future__ import annotations

from sluice.errors import ModelFileError
from sluice.gguf import GgufFile
from sluice.models.blocks import Family
from sluice.models.llama import Llama
from sluice.models.qwen3moe import Qwen3Moe
from sluice.models.qwen35moe import Qwen35Moe
from sluice.models.spec import ModelSpec

FAMILIES: dict[str, type[Family]] = {family.architecture: family for family in (Llama, Qwen3Moe, Qwen35Moe)}


def family_of(file: GgufFile) -> type[Family]:
    """The family that runs `file`. Raises ModelFileError listing those known."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ModelFileError(f"{file.paths[0]}: names no architecture (general.architecture): convert the model again")
    if name not in FAMILIES:
        raise ModelFileError(
            f"{file.paths[0]}: architecture {name!r} is not supported: Sluice runs {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[name]


__all__ = ["FAMILIES", "Family", "ModelSpec", "family_of"]

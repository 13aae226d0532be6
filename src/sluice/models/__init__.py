"""Model families, one file per GGUF architecture; a family knows its graphs, not where its experts are."""

from __future__ import annotations

from sluice.errors import ModelFileError
from sluice.gguf import GgufFile
from sluice.models.bailingmoe2 import BailingMoe2
from sluice.models.bailingmoe3 import BailingMoe3
from sluice.models.blocks import Family
from sluice.models.deepseek2 import DeepSeek2
from sluice.models.ernie45moe import Ernie45Moe
from sluice.models.gemma4 import Gemma4
from sluice.models.glm4moe import Glm4Moe
from sluice.models.gpt_oss import GptOss
from sluice.models.granitemoe import GraniteMoe
from sluice.models.hunyuanmoe import HunyuanMoe
from sluice.models.lfm2moe import Lfm2Moe
from sluice.models.llama import Llama
from sluice.models.minimax_m2 import MiniMaxM2
from sluice.models.olmoe import Olmoe
from sluice.models.qwen2moe import Qwen2Moe
from sluice.models.qwen3moe import Qwen3Moe
from sluice.models.qwen3next import Qwen3Next
from sluice.models.qwen35moe import Qwen35Moe
from sluice.models.spec import ModelSpec

FAMILIES: dict[str, type[Family]] = {
    family.architecture: family
    for family in (
        Llama,
        Qwen2Moe,
        Olmoe,
        Qwen3Moe,
        Qwen35Moe,
        GptOss,
        BailingMoe2,
        BailingMoe3,
        DeepSeek2,
        Glm4Moe,
        Lfm2Moe,
        Qwen3Next,
        MiniMaxM2,
        Ernie45Moe,
        HunyuanMoe,
        GraniteMoe,
        Gemma4,
    )
}


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

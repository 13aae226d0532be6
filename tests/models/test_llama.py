"""Llama with experts: Mixtral's layout, rope on interleaved pairs.

More of it (llama 3's frequency factors, transformers, the upcycled demo model) is in tests/engine.
"""

from __future__ import annotations

from typing import Any, ClassVar

import plain_decoder as plain
from family_file import FamilyFile
from family_tests import Options, RefusalTests
from plain_decoder import BLOCKS_OF_256, Sizes
from tiny import T


def llama(**options: Any) -> FamilyFile:
    s = Sizes(**{"eps": 1e-5, **options})
    file = plain.begun("llama", s, pre="llama-bpe")
    file.metadata({"feed_forward_length": s.n_ff, "rope.dimension_count": s.n_rot})
    for layer in range(s.n_layers):
        plain.add_attention(file, f"blk.{layer}.", s)
        plain.add_ffn(file, layer, s)
    return file


QUANTISED: dict[str, dict[str, Any]] = {
    "Q4_K": {**BLOCKS_OF_256, "n_head": 8, "expert_type": T.Q4_K, "down_type": T.Q6_K, "dense_type": T.Q8_0},
    "MXFP4": {"expert_type": T.MXFP4, "dense_type": T.Q8_0},
}


class TestLlama(RefusalTests):
    QUANTISED = QUANTISED
    FLOAT32: ClassVar[dict[str, Options]] = {"three heads": {}}
    AFRESH = "MXFP4"
    OPTIONAL = frozenset({"vocab_size", "rope.freq_base", "rope.dimension_count", "feed_forward_length"})

    @staticmethod
    def make(**options: Any) -> FamilyFile:
        return llama(**options)

    def small(self) -> FamilyFile:
        return llama(n_layers=2, n_expert=4, top_k=2)

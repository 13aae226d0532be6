"""OLMoE: norms over all heads of queries together, and of keys; routing weights that don't add up to one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plain_decoder as plain
import pytest
from family_file import FamilyFile
from family_tests import RefusalTests
from parity import assert_transformers
from plain_decoder import BLOCKS_OF_256, Sizes
from tiny import T


def olmoe(**options: Any) -> tuple[FamilyFile, Sizes]:
    """A file; llama.cpp wants as many heads of keys as of queries."""
    s = Sizes(**{"n_head_kv": 3, "eps": 1e-5, **options})
    file = plain.begun("olmoe", s, pre="olmo")
    file.metadata({"feed_forward_length": s.n_ff})
    for layer in range(s.n_layers):
        plain.add_attention(file, f"blk.{layer}.", s, norms="width")
        plain.add_ffn(file, layer, s)
    return file, s


FLOAT32: dict[str, dict[str, Any]] = {"three heads": {}, "one expert a token": {"top_k": 1, "n_layers": 2}}
QUANTISED: dict[str, dict[str, Any]] = {
    "Q4_K": {**BLOCKS_OF_256, "n_head": 4, "n_head_kv": 4, "head_dim": 64,
             "expert_type": T.Q4_K, "down_type": T.Q6_K, "dense_type": T.Q8_0},
    "Q8_0": {"expert_type": T.Q8_0, "dense_type": T.Q8_0, "router_type": T.BF16},
    "MXFP4": {"expert_type": T.MXFP4, "dense_type": T.F16, "n_layers": 4},
}  # fmt: skip
OPTIONAL = {"vocab_size", "rope.freq_base", "attention.head_count_kv"}


class TestOlmoe(RefusalTests):
    FLOAT32, QUANTISED = FLOAT32, QUANTISED
    OPTIONAL = OPTIONAL
    GREEDY = FLOAT32["three heads"] | {"seed": 1}

    @staticmethod
    def make(**options: Any) -> FamilyFile:
        return olmoe(**options)[0]

    def small(self) -> FamilyFile:
        return self.make(n_layers=2, n_expert=4, top_k=2)


@pytest.mark.parametrize("n_head_kv", [3, 1])
def test_agrees_with_transformers(tmp_path: Path, n_head_kv: int) -> None:
    file, s = olmoe(n_head_kv=n_head_kv)
    model = file.write(tmp_path / "m.gguf")
    config = plain.transformers_config(file, s) | {"num_experts": s.n_expert, "intermediate_size": s.n_ff}
    state = plain.transformers_state(model.weights, s.n_layers)
    assert_transformers(model, "OlmoeForCausalLM", config, state)

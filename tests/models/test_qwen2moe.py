"""Qwen2 MoE: attention biases, a gated shared expert, routing weights that don't add up to one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import plain_decoder as plain
from family_file import FamilyFile
from family_tests import RefusalTests
from parity import assert_transformers, weight_of_tensors
from plain_decoder import BLOCKS_OF_256, Sizes
from tiny import T


def qwen2moe(*, old: bool = False, **options: Any) -> tuple[FamilyFile, Sizes]:
    """A file. `old`: without the experts' own lengths, which follow from that of the dense network."""
    s = Sizes(**{"n_ff_shared": 96, **options})
    file = plain.begun("qwen2moe", s, pre="qwen2")
    if not old:
        file.metadata({"expert_feed_forward_length": s.n_ff, "expert_shared_feed_forward_length": s.n_ff_shared})
    for layer in range(s.n_layers):
        plain.add_attention(file, f"blk.{layer}.", s, biases=True)
        plain.add_ffn(file, layer, s, shared_gate=True)
    return file, s


FLOAT32: dict[str, dict[str, Any]] = {
    "one head of keys": {},
    "lengths of old files": {"old": True, "n_ff": 32, "n_ff_dense": 96, "n_ff_shared": 96, "n_head_kv": 3},
}
QUANTISED: dict[str, dict[str, Any]] = {
    "Q4_K": {**BLOCKS_OF_256, "n_ff_shared": 256, "n_head": 4, "n_head_kv": 2, "head_dim": 64,
             "expert_type": T.Q4_K, "down_type": T.Q6_K, "dense_type": T.Q8_0},
    # llama.cpp writes the shared gate's sigmoid as silu(x) / x, a last bit apart, which 8 bits can turn into a step;
    # with this seed they don't
    "Q8_0": {"expert_type": T.Q8_0, "dense_type": T.Q8_0, "router_type": T.BF16, "seed": 1},
    "MXFP4": {"expert_type": T.MXFP4, "dense_type": T.F16, "n_layers": 4},
}  # fmt: skip
OPTIONAL = {"vocab_size", "rope.freq_base", "feed_forward_length", "expert_feed_forward_length"}


class TestQwen2Moe(RefusalTests):
    FLOAT32, QUANTISED = FLOAT32, QUANTISED
    OPTIONAL = OPTIONAL
    GREEDY = FLOAT32["one head of keys"]

    @staticmethod
    def make(**options: Any) -> FamilyFile:
        return qwen2moe(**options)[0]

    def small(self) -> FamilyFile:
        return self.make(n_layers=2, n_expert=4, top_k=2)

    def may_lack(self, name: str) -> bool:
        return name == "output.weight" or ".bias" in name

    def test_every_tensor_matters(self, tmp_path: Path) -> None:
        changes = weight_of_tensors(self.small(), tmp_path)
        # llama.cpp divides by what a gate of zeros gives
        assert all(math.isnan(change) or change > self.MATTERS for change in changes.values()), changes


def test_agrees_with_transformers(tmp_path: Path) -> None:
    file, s = qwen2moe()
    model = file.write(tmp_path / "m.gguf")
    names = {f"ffn_{part}_shexp.weight": f"mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")}
    names["ffn_gate_inp_shexp.weight"] = "mlp.shared_expert_gate.weight"
    weights = {k: w[None] if k.endswith("inp_shexp.weight") else w for k, w in model.weights.items()}
    config = plain.transformers_config(file, s) | {
        "num_experts": s.n_expert,
        "moe_intermediate_size": s.n_ff,
        "shared_expert_intermediate_size": s.n_ff_shared,
    }
    state = plain.transformers_state(weights, s.n_layers, names)
    assert_transformers(model, "Qwen2MoeForCausalLM", config, state)

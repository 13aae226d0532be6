"""Llama with experts: Mixtral's layout, rope on interleaved pairs.

More of it (llama 3's frequency factors, transformers, the upcycled demo model) is in tests/engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plain_decoder as plain
import pytest
from family_file import FamilyFile, FamilyModel
from parity import assert_parity, batch_parity, greedy_pair, logits_parity, weight_of_tensors
from plain_decoder import BLOCKS_OF_256, Sizes
from refusals import assert_spoilt_metadata_is_refused, assert_spoilt_tensors_are_refused
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


def written(folder: Path, options: dict[str, Any]) -> FamilyModel:
    """The file of `options`, in two shards."""
    return llama(**options).write(folder / "m.gguf", split=2)


def small() -> FamilyFile:
    return llama(n_layers=2, n_expert=4, top_k=2)


def test_float32_agrees_with_llamacpp(tmp_path: Path) -> None:
    model = written(tmp_path, {})
    assert_parity([*logits_parity(model, float32=True), batch_parity(model, float32=True)], float32=True)


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_agrees_with_llamacpp(tmp_path: Path, name: str) -> None:
    model = written(tmp_path, QUANTISED[name])
    assert_parity([*logits_parity(model, float32=False), batch_parity(model, float32=False)], float32=False)


def test_greedy_tokens_are_those_of_llamacpp(tmp_path: Path) -> None:
    ours, theirs = greedy_pair(written(tmp_path, {}))
    assert ours == theirs and len(set(ours)) > 8


def test_every_tensor_matters(tmp_path: Path) -> None:
    changes = weight_of_tensors(small(), tmp_path)
    assert all(change > 0.02 for change in changes.values()), changes


def test_a_tensor_that_is_missing_misshapen_or_unknown_is_named(tmp_path: Path) -> None:
    assert_spoilt_tensors_are_refused(small, tmp_path, may_lack=lambda it: it == "output.weight")


def test_metadata_that_is_missing_or_disagrees_with_the_tensors_is_refused(tmp_path: Path) -> None:
    optional = {"vocab_size", "rope.freq_base", "rope.dimension_count", "feed_forward_length"}
    assert_spoilt_metadata_is_refused(small, tmp_path, optional=optional)

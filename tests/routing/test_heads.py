"""Heads compute what their definition says, with the same bits in any batch, in the memory they announce."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from made_heads import defined_logits, made_file, made_info, made_tensors
from run_heads import LIBRARY, computed, distance, logits, states

from sluice.errors import InputError
from sluice.routing import Heads, head_bytes
from sluice.routing.heads import MAX_LOGIT
from sluice.routing.prerouter_file import MAX_NUMBER

SHAPES = [  # d, hidden, experts, k, tokens
    (24, 16, 8, 2, 1), (24, 16, 8, 8, 5), (96, 33, 60, 4, 3), (64, 1, 4, 1, 2), (1, 7, 3, 1, 9), (2048, 512, 128, 8, 1),
    (512, 128, 256, 8, 33),
]  # fmt: skip


@pytest.mark.parametrize(("d", "hidden", "n_expert", "k", "n"), SHAPES)
def test_heads_compute_their_definition(tmp_path: Path, d: int, hidden: int, n_expert: int, k: int, n: int) -> None:
    info = made_info(n_embd=d, n_expert=n_expert, top_k=k, owners=(2, 3), first_predicted=3)
    tensors = made_tensors(info, hidden)
    h, here, before = states(info, n, k)
    with Heads(LIBRARY, made_file(tmp_path / "h.safetensors", info, tensors)) as heads:
        heads.load()
        assert heads.predicts == {2: 3, 3: 4}
        assert not heads.reads_before(2) and heads.reads_before(3)  # layer 1 has no experts
        for owner, ids in ((2, None), (3, before)):
            expected = defined_logits(tensors, owner, n_expert, h, here, ids)
            assert distance(logits(heads, owner, h, here, ids, threads=2), expected) <= 1e-5


def test_every_part_matters_to_the_logits(tmp_path: Path) -> None:
    """Or the comparison with the definition would show nothing."""
    info = made_info()
    tensors = made_tensors(info)
    h, here, before = states(info, 4, 2)
    expected = defined_logits(tensors, 3, 8, h, here, before)
    for name in info.shapes(3, 16):
        without = tensors | {name: np.zeros_like(tensors[name])}
        assert distance(defined_logits(without, 3, 8, h, here, before), expected) > 0.01, name
    assert distance(defined_logits(tensors, 3, 8, h, before, here), expected) > 0.01
    assert distance(defined_logits(tensors, 3, 8, h, here, None), expected) > 0.01


def test_float16_heads_take_half_the_memory(tmp_path: Path) -> None:
    info = made_info(n_embd=256)
    tensors = made_tensors(info, 64, dtype=np.float16)
    h, here, before = states(info, 6, 2)
    with Heads(LIBRARY, made_file(tmp_path / "h.safetensors", info, tensors)) as heads:
        heads.load()
        wide = made_file(tmp_path / "w.safetensors", info, {name: a.astype(np.float32) for name, a in tensors.items()})
        assert 0.5 <= heads.n_bytes / head_bytes(wide) < 0.52
        # ggml rounds what a float16 matrix is multiplied with to float16 too: 2⁻¹¹ of each number
        expected = defined_logits(tensors, 3, 8, h, here, before)
        assert distance(logits(heads, 3, h, here, before), expected) <= 1e-3


def test_logits_are_numbers_whatever_heads_sum_up(tmp_path: Path) -> None:
    """A float16 head makes infinities of what is too large for that; ggml can't sort what is no number."""
    info = made_info()
    tensors = made_tensors(info, dtype=np.float16)
    tensors["blk.3.fc1.weight"] = np.where(tensors["blk.3.fc1.weight"] > 0, MAX_NUMBER, -MAX_NUMBER).astype(np.float16)
    tensors["blk.3.fc2.weight"][::2, ::2] = 0  # times infinity is no number
    h, here, before = states(info, 4, 2)
    with Heads(LIBRARY, made_file(tmp_path / "h.safetensors", info, tensors)) as heads:
        heads.load()
        found = logits(heads, 3, h, here, before)
        assert np.isfinite(found).all() and np.abs(found).max() == np.float32(MAX_LOGIT)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_token_has_the_same_bits_in_any_company_and_on_any_threads(tmp_path: Path, dtype: type) -> None:
    info = made_info(n_embd=192, n_expert=40, top_k=6)
    h, here, before = states(info, 37, 6)
    with Heads(LIBRARY, made_file(tmp_path / "h.safetensors", info, hidden=72, dtype=dtype)) as heads:
        heads.load()
        together = logits(heads, 3, h, here, before, threads=2)
        for i in range(len(h)):
            alone = logits(heads, 3, h[i : i + 1], here[i : i + 1], before[i : i + 1])
            assert np.array_equal(alone[0], together[i]), i


def test_ids_filled_up_with_none_are_no_experts(tmp_path: Path) -> None:
    info = made_info()
    tensors = made_tensors(info)
    h, here, before = states(info, 5, 3)
    with Heads(LIBRARY, made_file(tmp_path / "h.safetensors", info, tensors)) as heads:
        heads.load()
        here[:, 1:], before[2:] = heads.none, heads.none
        expected = defined_logits(tensors, 3, 8, h, here, before)
        assert distance(logits(heads, 3, h, here, before), expected) <= 1e-5
        fewer = logits(heads, 3, h[2:], here[2:, :1], before[2:])
        assert np.array_equal(fewer, logits(heads, 3, h, here, before)[2:])


def test_ids_may_come_straight_from_a_choice(tmp_path: Path) -> None:
    """Which is a view with gaps between its columns."""
    info = made_info(n_expert=16, top_k=4)
    tensors = made_tensors(info)
    h, _, before = states(info, 5, 4)
    scores = np.random.default_rng(2).standard_normal((5, 16), dtype=np.float32)
    with Heads(LIBRARY, made_file(tmp_path / "h.safetensors", info, tensors)) as heads:
        heads.load()
        got = computed(lambda c, h, scores, b: heads.logits(c, 3, h, c.top_k(scores, 4), b), h, scores, before)
        chosen = np.argsort(-scores, axis=1)[:, :4]
        assert distance(got, defined_logits(tensors, 3, 16, h, chosen, before)) <= 1e-5


def test_bytes_are_known_before_and_unused_heads_take_none(tmp_path: Path) -> None:
    info = made_info(owners=(0, 2, 3, 4), first_predicted=3)  # 0 predicts a layer before that, 4 none
    file = made_file(tmp_path / "h.safetensors", info, hidden=16)
    d, n, hidden = 24, 8, 16
    each = (hidden * d, hidden, hidden * (n + 1), hidden * n, n, n * d)
    place = [-(-4 * numbers // 64) * 64 for numbers in each]
    assert head_bytes(file) == 2 * sum(place) + place[2]  # layer 1, before owner 2, has no experts
    with Heads(LIBRARY, file) as heads:
        assert heads.predicts == {2: 3, 3: 4}
        assert heads.n_bytes == head_bytes(file)


def test_loading_by_small_pieces_brings_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = made_info()
    tensors = made_tensors(info, 16)
    h, here, before = states(info, 3, 2)
    monkeypatch.setattr("sluice.routing.prerouter_file.PIECE_BYTES", 500)
    with Heads(LIBRARY, made_file(tmp_path / "h.safetensors", info, tensors)) as heads:
        heads.load()
        assert len(heads.file.pieces("blk.3.fc1.weight")) == 6  # 3 rows of 40 numbers each, and what is left
        assert distance(logits(heads, 3, h, here, before), defined_logits(tensors, 3, 8, h, here, before)) <= 1e-5


@pytest.mark.parametrize(("value", "named"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf"), (-7e4, "-7e+04")])
@pytest.mark.parametrize("part", ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "skip.weight", "skip.bias"])
def test_what_is_no_number_is_refused(tmp_path: Path, part: str, value: float, named: str) -> None:
    info = made_info()
    tensors = made_tensors(info)
    tensors[f"blk.2.{part}"].flat[-1] = value
    file = made_file(tmp_path / "h.safetensors", info, tensors)
    row = len(tensors[f"blk.2.{part}"]) - 1
    complaint = re.escape(f"tensor blk.2.{part} has {named} in row {row}, not a number")
    with Heads(LIBRARY, file) as heads, pytest.raises(InputError, match=complaint):
        heads.load()
    with pytest.raises(InputError, match=complaint):
        file.check_numbers()


def test_the_experts_before_are_given_exactly_where_there_are_some(tmp_path: Path) -> None:
    h, here, before = states(made_info(), 2, 2)
    with Heads(LIBRARY, made_file(tmp_path / "h.safetensors")) as heads:
        heads.load()
        with pytest.raises(AssertionError):
            logits(heads, 3, h, here, None)
        with pytest.raises(AssertionError):
            logits(heads, 2, h, here, before)

"""Windows score every token of a text once, after enough of the text, and never feed more than fits."""

from __future__ import annotations

import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import T, write_tiny

from sluice.engine import Engine
from sluice.errors import InputError, ModelFileError
from sluice.eval.windows import each_scored, log_softmax, n_scored, overlap, windows

SMALL: dict[str, Any] = {
    "n_layers": 2,
    "n_embd": 64,
    "n_head": 2,
    "n_head_kv": 1,
    "head_dim": 32,
    "n_ff_exp": 96,
    "expert_type": T.Q8_0,
}


@given(st.integers(2, 600), st.integers(2, 80), st.integers(0, 1))
def test_every_token_is_scored_once_after_enough_of_the_text(n: int, ctx: int, lead: int) -> None:
    cut = list(windows(n, ctx, lead))
    scored = [token for window in cut for token in range(window.first, window.stop)]
    assert scored == list(range(1 - lead, n))
    assert len(scored) == n_scored(n, lead)
    shared = overlap(ctx, lead)
    for i, window in enumerate(cut):
        fed = lead + window.stop - 1 - window.start
        assert window.stop - window.first <= fed <= ctx
        assert window.start == (0 if i == 0 else window.first - shared)
    assert all(window.stop - 1 - window.start + lead == ctx for window in cut[:-1])  # only the last is short
    assert all(before.stop == after.first for before, after in pairwise(cut))


def test_windows_by_hand() -> None:
    assert [(w.start, w.first, w.stop) for w in windows(10, 4, 0)] == [(0, 1, 5), (3, 5, 8), (6, 8, 10)]
    assert [(w.start, w.first, w.stop) for w in windows(6, 4, 1)] == [(0, 0, 4), (3, 4, 6)]


@pytest.mark.parametrize(
    "n, ctx, lead, said",
    [
        (0, 8, 0, "0 tokens, too few to be scored: give at least 2"),
        (1, 8, 0, "1 tokens, too few to be scored: give at least 2"),
        (0, 8, 1, "give at least 1"),
        (5, 1, 1, "--ctx 1 leaves no room"),
    ],
)
def test_what_can_not_be_scored_is_refused(n: int, ctx: int, lead: int, said: str) -> None:
    with pytest.raises(InputError, match=said):
        list(windows(n, ctx, lead))


@pytest.mark.parametrize("lead", [(), (7,)])
def test_each_token_gets_the_logits_after_those_before_it(tmp_path: Path, lead: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    texts = {"a": rng.integers(0, 397, 70).tolist(), "b": rng.integers(0, 397, 9).tolist()}
    seen: dict[str, list[tuple[int, np.ndarray]]] = {}
    path = write_tiny(tmp_path / "m.gguf", **SMALL).path
    with Engine.open(path, ctx=24, threads=1, expert_slots=16) as engine:
        calls: list[tuple[float, float]] = []
        each_scored(
            engine, texts, lambda name: lambda token, row: seen.setdefault(name, []).append((token, row.copy())),
            lead=lead, progress=lambda done, total: calls.append((done, total)),
        )  # fmt: skip
        for name, ids in texts.items():
            assert [token for token, _ in seen[name]] == ids[1 - len(lead) :]
            rows = iter(seen[name])
            for window in windows(len(ids), 24, len(lead)):
                fed = [*lead, *ids[window.start : window.stop - 1]]
                expected = engine.logits(fed)[len(fed) - (window.stop - window.first) :]
                for row in expected:
                    assert np.array_equal(next(rows)[1], row)
    total = sum(n_scored(len(ids), len(lead)) for ids in texts.values())
    assert calls[-1] == (total, total)


def test_long_windows_hold_one_chunk_of_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.random.default_rng(4).integers(0, 397, 1500).tolist()
    before: list[weakref.ref[np.ndarray]] = []
    path = write_tiny(tmp_path / "m.gguf", n_ctx=4096, **SMALL).path
    with Engine.open(path, ctx=1300, threads=1, expert_slots=16) as engine:
        step = engine._step

        def watched(*arguments: object) -> np.ndarray:
            assert all(ref() is None for ref in before)
            logits = step(*arguments)  # type: ignore[arg-type]
            before.append(weakref.ref(logits))
            return logits

        monkeypatch.setattr(engine, "_step", watched)
        scored: list[int] = []
        each_scored(engine, {"a": ids}, lambda name: lambda token, row: scored.append(token))
    assert scored == ids[1:]
    assert len(before) > 3


def test_log_softmax() -> None:
    assert log_softmax(np.array([800.0, 0.0, -800.0], np.float32)).tolist() == [0.0, -800.0, -1600.0]
    found = log_softmax(np.array([0.5, 1.5, -2.0], np.float32))
    assert np.exp(found).sum() == pytest.approx(1, abs=1e-15)
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(ModelFileError, match="no numbers"):
            log_softmax(np.array([0.0, bad], np.float32))

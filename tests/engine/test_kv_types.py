"""Quantised keys and values in prompts: many rows at once see what their tokens see one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import opened
from tiny import T, write_tiny

from sluice.models import blocks

# What keys and values lose to rounding, relative L2 of the logits; float32 weights add nothing to that
LOST = {"q8_0": 0.02, "q4_0": 0.3, "q8_0,q4_0": 0.2, "f16,q8_0": 0.02, "q8_0,f32": 0.02}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens take every expert, so that no rounding changes a route."""
    path = tmp_path_factory.mktemp("m") / "m.gguf"
    return write_tiny(
        path, n_embd=64, n_ff_exp=64, head_dim=32, n_expert=4, top_k=4, expert_type=T.F32, dense_type=T.F32
    ).path  # fmt: skip


def after(path: Path, kv: str, ids: list[int], *, together: bool) -> np.ndarray:
    """Logits after `ids`, fed at once or one by one."""
    with opened(path, kv=kv) as engine, engine.session() as session:
        if together:
            return session.feed(ids).copy()
        logits = session.feed(ids[:1])
        for token in ids[1:]:
            logits = engine.decode([session], [token])[0]
        return logits.copy()


@pytest.mark.parametrize("kv", LOST)
@pytest.mark.parametrize("n", [blocks.TILED_ROWS - 1, blocks.TILED_ROWS, 200])
def test_a_prompt_sees_what_its_tokens_see(model: Path, kv: str, n: int) -> None:
    ids = np.random.default_rng(n).integers(0, 400, n).tolist()
    exact = after(model, "f32", ids, together=True)
    at_once, one_by_one = after(model, kv, ids, together=True), after(model, kv, ids, together=False)

    def apart(found: np.ndarray) -> float:
        return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))

    assert 0 < apart(at_once) < LOST[kv] and 0 < apart(one_by_one) < LOST[kv]


def test_many_rows_read_converted_keys(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits change where they are not converted, and only from the number of rows on from which they are."""
    few, many = ([7] * n for n in (blocks.TILED_ROWS - 1, blocks.TILED_ROWS))
    found = [after(model, "q4_0", ids, together=True) for ids in (few, many)]
    monkeypatch.setattr(blocks, "TILED_ROWS", 1 << 30)
    plain = [after(model, "q4_0", ids, together=True) for ids in (few, many)]
    assert np.array_equal(found[0], plain[0]) and not np.array_equal(found[1], plain[1])

"""Every family on a second device: what it computes there is what the processor does, within rounding."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.harness import opened
from family_tests import FamilyTests
from parity import token_ids

from sluice.ggml import devices, load_library

FAMILIES = [
    path.stem for path in sorted(Path(__file__).parent.glob("test_*.py"))
    if path != Path(__file__) and "    FLOAT32" in path.read_text(encoding="utf-8")
]  # fmt: skip
# Devices multiply in half precision. Where two experts of a router are nearly tied, that may choose the other one: a
# row then is far away, and so are those that attend to it. So the middle row is held to the bound, and most others.
MIDDLE, MOST = 1e-2, 0.75


def family(name: str) -> FamilyTests:
    """The tests of a family, imported here so that they are not collected again."""
    module = importlib.import_module(name)
    found = [
        each for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, FamilyTests) and hasattr(each, "FLOAT32")
    ]  # fmt: skip
    return found[0]()


def test_families_are_found() -> None:
    assert len(FAMILIES) >= 16


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_the_processors(tmp_path: Path, vulkan_ggml: Path, name: str) -> None:
    its = family(name)
    model = its.written(tmp_path, next(iter(its.FLOAT32.values())))
    ids = token_ids(48)

    def logits(**options: Any) -> np.ndarray:
        with opened(model.path, ggml=vulkan_ggml, kv="f32", **options) as engine:
            fed = engine.logits(ids[:40])
            with engine.session() as session:
                rows = [session.feed(ids[:40]).copy()]
                rows += [engine.decode([session], [token])[0].copy() for token in ids[40:]]
        return np.concatenate([fed, np.stack(rows)])

    device = devices(load_library(vulkan_ggml))[0].name
    found, expected = logits(device=device, upload_from=5, expert_slots=model.top_k + 2), logits(device="cpu")
    assert np.isfinite(found).all()
    apart = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.median(apart) < MIDDLE and (apart < 2 * MIDDLE).mean() >= MOST, apart.round(4).tolist()

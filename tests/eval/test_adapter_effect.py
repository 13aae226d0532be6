"""The share of an adapter's effect on predictions that survives: known for merges made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from sluice.eval.adapter_effect import Effect


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.logaddexp.reduce(logits)


def effect(share: float, *, beside: float = 0.0, size: float = 0.01) -> Effect:
    """Of merges that make `share` of the change, and `beside` it one that has nothing to do with it."""
    rng, found = np.random.default_rng(0), Effect()
    for _ in range(200):
        base, change, other = rng.standard_normal((3, 500))
        found.add(
            log_softmax(base), log_softmax(base + size * change),
            log_softmax(base + size * (share * change + beside * other)),
        )  # fmt: skip
    return found


@pytest.mark.parametrize("share", [0.0, 0.18, 1.0, 1.5])
def test_the_share_of_a_change_is_found(share: float) -> None:
    assert effect(share).as_dict()["share"] == pytest.approx(share, abs=0.01)
    assert effect(share, beside=1.0).as_dict()["share"] == pytest.approx(share, abs=0.02)


def test_divergences() -> None:
    whole, none = effect(1.0).as_dict(), effect(0.0).as_dict()
    assert whole["tokens"] == 200
    assert whole["kl"]["unmerged_to_merged"] == 0 and whole["kl"]["merged"] == whole["kl"]["unmerged"] > 0
    assert none["kl"]["merged"] == 0 and none["kl"]["unmerged_to_merged"] == pytest.approx(
        whole["kl"]["merged"], rel=0.05
    )
    found = effect(1.0)
    assert found.square / 2 / found.tokens == pytest.approx(whole["kl"]["unmerged"], rel=0.05)


def test_no_effect_has_no_share() -> None:
    found = Effect()
    found.add(*[log_softmax(np.arange(4.0))] * 3)
    assert found.as_dict() == {
        "tokens": 1,
        "share": None,
        "kl": dict.fromkeys(("unmerged", "merged", "unmerged_to_merged"), 0.0),
    }

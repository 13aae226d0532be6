"""KL between two engines: exactly 0 for equal ones, the textbook's sum for others, refused where it has no meaning."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import CORPUS, T, write_tiny

from sluice.engine import Engine
from sluice.errors import InputError, SluiceError
from sluice.eval.divergence import Difference, Recorded, compare, record, spooled_bytes, together
from sluice.eval.perplexity import perplexity
from sluice.eval.windows import lead_of, tokenize

SMALL: dict[str, Any] = {
    "n_layers": 2,
    "n_embd": 64,
    "n_head": 2,
    "n_head_kv": 1,
    "head_dim": 32,
    "n_ff_exp": 96,
    "expert_type": T.Q8_0,
}
TEXTS = {"a": CORPUS[:200], "b": CORPUS[200:260]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("divergence") / "m.gguf", top_k=3, **SMALL).path


def opened(path: Path, **options: Any) -> Engine:
    return Engine.open(path, **{"ctx": 32, "threads": 1, "expert_slots": 12, **options})


def recorded(path: Path, **options: Any) -> Recorded:
    with opened(path, **options) as engine:
        ids = tokenize(engine, TEXTS)
        file = io.BytesIO()
        found = record(engine, ids, file)
        assert len(file.getvalue()) == spooled_bytes(engine, ids)
    return found


@pytest.mark.parametrize("options", [{"top_k_experts": 3}, {"expert_slots": 3, "prefetch": False}], ids=str)
def test_equal_engines_differ_by_exactly_nothing(model: Path, options: dict[str, Any]) -> None:
    reference = recorded(model)
    with opened(model, **options) as engine:
        found = compare(engine, reference)
    for name, difference in found.items():
        assert difference.kl == [0.0] * (len(reference.texts[name]) - 1)
        assert difference.as_dict() | {"tokens": 0, "ppl": 0, "ppl_reference": 0} == {
            "tokens": 0, "kl": {"mean": 0.0, "median": 0.0, "p95": 0.0, "max": 0.0}, "same_top": 1.0,
            "ppl": 0, "ppl_reference": 0, "ppl_change": 0.0,
        }  # fmt: skip


@pytest.mark.parametrize("options", [{"top_k_experts": 1}, {"kv": "q4_0"}], ids=str)
def test_it_is_the_sum_over_the_vocabulary(model: Path, options: dict[str, Any]) -> None:
    reference = recorded(model)
    with opened(model, **options) as engine:
        found = compare(engine, reference)
        ids = list(reference.texts["b"])[:32]
        theirs = engine.logits(ids)
        assert perplexity(engine, reference.texts)["b"] == found["b"].other
    with opened(model) as engine:
        ours = engine.logits(ids)
        assert perplexity(engine, reference.texts)["b"] == found["b"].reference
    p, q = (
        np.exp(x - np.logaddexp.reduce(x, axis=1, keepdims=True)) for x in (ours.astype(float), theirs.astype(float))
    )
    expected = (p * np.log(p / q)).sum(axis=1)
    # the first window of b: the rows after its first 32 tokens, of which each predicts the next
    n = min(32, len(reference.texts["b"]) - 1)
    assert found["b"].kl[:n] == pytest.approx(expected[:n].tolist(), rel=1e-9, abs=1e-12)
    assert min(found["a"].kl) >= 0 and max(found["a"].kl) > 1e-6
    same = (ours.argmax(axis=1) == theirs.argmax(axis=1))[:n]
    assert found["b"].same >= same.sum()


def test_a_summary_by_hand() -> None:
    one, other = Difference([0.0, 4.0], 1), Difference([1.0, 3.0, 2.0], 3)
    for difference, losses in ((one, (1.0, 2.0)), (other, (1.0, 1.0, 1.0))):
        for loss in losses:
            difference.reference.add(-loss)
            difference.other.add(-2 * loss)
    both = together([one, other]).as_dict()
    assert both["kl"] == {"mean": 2.0, "median": 2.0, "p95": pytest.approx(3.8), "max": 4.0}
    assert (both["tokens"], both["same_top"]) == (5, 0.8)
    assert both["ppl"] == pytest.approx(math.exp(12 / 5))
    assert both["ppl_change"] == pytest.approx(math.exp(6 / 5) - 1)


def test_the_reference_says_what_is_fed_before_a_window(model: Path) -> None:
    with opened(model) as engine:
        engine.tokenizer.add_bos = True
        reference = record(engine, tokenize(engine, TEXTS), io.BytesIO())
        assert reference.lead == lead_of(engine) != ()
    with opened(model) as engine:
        found = compare(engine, reference)
    assert found["a"].kl == [0.0] * len(reference.texts["a"])


def test_other_vocabularies_are_refused(model: Path, tmp_path: Path) -> None:
    reference = recorded(model)
    wide = write_tiny(tmp_path / "v.gguf", n_vocab=416, top_k=3, **SMALL).path
    with opened(wide) as engine, pytest.raises(InputError, match="different vocabularies"):
        compare(engine, reference)
    other_words = replace(reference, vocabulary=replace(reference.vocabulary, digest="0" * 64))
    with opened(model) as engine, pytest.raises(InputError, match="different vocabularies"):
        compare(engine, other_words)


def test_another_model_of_the_same_vocabulary_is_not(model: Path, tmp_path: Path) -> None:
    reference = recorded(model)
    with opened(write_tiny(tmp_path / "s.gguf", seed=1, **SMALL).path) as engine:
        found = compare(engine, reference)
    assert np.mean(found["a"].kl) > 0.1


def test_another_context_is_refused(model: Path) -> None:
    reference = recorded(model)
    with opened(model, ctx=64) as engine, pytest.raises(InputError, match="context is 32 and the other's 64"):
        compare(engine, reference)


def test_a_file_that_ends_early_is_no_comparison(model: Path) -> None:
    reference = recorded(model)
    reference.file.seek(-4, io.SEEK_END)
    reference.file.truncate()
    with opened(model) as engine, pytest.raises(SluiceError, match="end too early"):
        compare(engine, reference)

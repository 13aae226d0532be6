"""Perplexity against llama.cpp's logits on the same windows, and by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from oracles import llamacpp_logits
from tiny import CORPUS, T, write_tiny

from sluice.engine import Engine
from sluice.errors import InputError, ModelFileError
from sluice.eval.perplexity import Tally, perplexity, pooled
from sluice.eval.windows import lead_of, log_softmax, tokenize, windows

CTX = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unquantised, so that activations are not rounded to 8 bits and figures can be compared closely."""
    folder = tmp_path_factory.mktemp("perplexity")
    return write_tiny(folder / "m.gguf", expert_type=T.F32, dense_type=T.F32).path


def opened(path: Path, **options: object) -> Engine:
    return Engine.open(path, **{"ctx": CTX, "kv": "f32", "threads": 1, "expert_slots": 12, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("bos", [False, True])
def test_it_is_that_of_llamacpps_logits(model: Path, bos: bool) -> None:
    with opened(model) as engine:
        engine.tokenizer.add_bos = bos
        ids = tokenize(engine, {"text": CORPUS})["text"][:150]
        lead = list(lead_of(engine))
        assert len(lead) == bos
        tally = perplexity(engine, {"text": ids})["text"]
    losses = []
    for window in windows(len(ids), CTX, len(lead)):
        fed = [*lead, *ids[window.start : window.stop - 1]]
        rows = llamacpp_logits(model, fed, chunk=1)[-(window.stop - window.first) :]
        losses += [-log_softmax(row)[t] for row, t in zip(rows, ids[window.first : window.stop], strict=True)]
    assert tally.tokens == len(losses) == len(ids) - (not bos)
    # float32 sums in another order; a token's loss differs by about 1e-5, their mean by less
    assert tally.ppl == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)
    assert tally.ppl_error == pytest.approx(tally.ppl * np.std(losses, ddof=1) / math.sqrt(len(losses)), rel=1e-3)


def test_texts_are_scored_apart_and_pooled_by_token(model: Path) -> None:
    with opened(model) as engine:
        ids = tokenize(engine, {"a": CORPUS[:300], "b": CORPUS[300:420]})
        both = perplexity(engine, ids)
        alone = {name: perplexity(engine, {name: text})[name] for name, text in ids.items()}
    assert both == alone
    total = pooled(both.values())
    assert total.tokens == sum(len(text) - 1 for text in ids.values())
    expected = sum(math.log(one.ppl) * one.tokens for one in both.values()) / total.tokens
    assert math.log(total.ppl) == pytest.approx(expected)
    assert min(one.ppl for one in both.values()) < total.ppl < max(one.ppl for one in both.values())


def test_the_pool_does_not_change_it(model: Path) -> None:
    with opened(model, expert_slots=4, policy="lfu", prefetch=False) as engine:
        ids = tokenize(engine, {"a": CORPUS[:400]})
        small = perplexity(engine, ids)
    with opened(model, expert_slots=24) as engine:
        assert perplexity(engine, ids) == small


def test_control_tokens_in_a_text_are_text(model: Path) -> None:
    with opened(model) as engine:
        [ids] = tokenize(engine, {"a": "<|im_end|>"}).values()
        assert len(ids) > 1 and not any(engine.tokenizer.is_control(i) for i in ids)


def test_a_short_text_is_refused_by_name(model: Path) -> None:
    with opened(model) as engine, pytest.raises(InputError, match="code: the text has 1 tokens, too few"):
        tokenize(engine, {"prose": CORPUS, "code": "e"})


def test_a_tally_by_hand() -> None:
    tally = Tally()
    for p in (0.5, 0.25, 0.125):
        tally.add(math.log(p))
    assert tally.ppl == pytest.approx(4)
    assert tally.ppl_error == pytest.approx(4 * math.log(2) / math.sqrt(3))
    tally.add(-1e9)
    with pytest.raises(ModelFileError, match="damaged"):
        _ = tally.ppl
    one = Tally()
    one.add(-1.0)
    assert one.as_dict() == {"ppl": pytest.approx(math.e), "ppl_error": None, "tokens": 1}

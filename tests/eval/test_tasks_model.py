"""An engine as lm-eval's model: what it answers is what the engine computes, whoever else is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import CORPUS, write_tiny

from sluice.engine import Engine
from sluice.errors import InputError
from sluice.eval.perplexity import perplexity
from sluice.eval.windows import log_softmax

pytest.importorskip("lm_eval", reason="needs the extra [eval]")

from lm_eval.api.instance import Instance

from sluice.eval.task_model import EngineLM

CTX = 96
PAIRS = [
    ("the river runs", " under the old bridge"), ("the river runs", " away"), ("the river runs", " in the morning"),
    ("they sing while they work", " and"), ("", "the water is cold"), ("nothing here has changed ", "for a hundred"),
]  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tasks") / "tiny.gguf").path


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with Engine.open(path, threads=1, expert_slots=24, ctx=CTX, streams=3) as opened:
        yield opened


def asked(kind: Any, *arguments: Any) -> list[Instance]:
    return [Instance(kind, {}, arguments=each, idx=i) for i, each in enumerate(arguments)]


def test_likelihoods_are_the_engines(engine: Engine) -> None:
    found = EngineLM(engine).loglikelihood(asked("loglikelihood", *PAIRS))
    encode = engine.tokenizer.encode
    for (context, continuation), (total, likeliest) in zip(PAIRS, found, strict=True):
        if context.endswith(" "):
            context, continuation = context[:-1], " " + continuation
        before = encode(context) if context else [engine.tokenizer.bos_id or 0]
        ids = encode(context + continuation)[len(encode(context)) :]
        rows = engine.logits([*before, *ids])[len(before) - 1 : -1]
        assert total == pytest.approx(sum(log_softmax(row)[id] for row, id in zip(rows, ids, strict=True)), abs=2e-3)
        assert likeliest == all(int(row.argmax()) == id for row, id in zip(rows, ids, strict=True))


def test_company_changes_nothing(path: Path, engine: Engine) -> None:
    together = EngineLM(engine).loglikelihood(asked("loglikelihood", *PAIRS))
    with Engine.open(path, threads=1, expert_slots=12, ctx=CTX) as alone:
        assert EngineLM(alone).loglikelihood(asked("loglikelihood", *PAIRS)) == together
        assert [EngineLM(alone).loglikelihood(asked("loglikelihood", each))[0] for each in PAIRS] == together


def test_a_context_is_a_prompt_and_an_answer_is_decoded(path: Path) -> None:
    with Engine.open(path, threads=1, expert_slots=24, ctx=CTX, streams=2) as engine:
        progress: list[tuple[float, float]] = []
        lm = EngineLM(engine, progress=lambda done, of: progress.append((done, of)))
        lm.loglikelihood(asked("loglikelihood", *PAIRS[:3]))
        encode = engine.tokenizer.encode
        context = len(encode(PAIRS[0][0]))
        stats = engine.stats()
        assert stats["prefill"]["tokens"] == context  # once for three answers
        assert stats["decode"]["tokens"] == sum(len(encode(a + b)) - context - 1 for a, b in PAIRS[:3])
        assert {of for _, of in progress} == {3}
        assert engine.session().tokens == []  # all streams were given back


def test_generation_is_the_engines(engine: Engine) -> None:
    prompts = ["the river", "they sing", "nothing here", "in the evening they"]
    given = {"until": ["\n"], "max_gen_toks": 9, "do_sample": False, "temperature": 0.0}
    found = EngineLM(engine).generate_until(asked("generate_until", *((each, given) for each in prompts)))
    assert found == ["".join(t.text for t in engine.generate(each, 9, raw=True, temperature=0, stop="\n"))
                     for each in prompts]  # fmt: skip
    stop = found[0][3]
    [cut] = EngineLM(engine).generate_until(asked("generate_until", (prompts[0], given | {"until": stop})))
    assert cut == found[0].partition(stop)[0]
    drawn = [
        EngineLM(engine).generate_until(asked("generate_until", (each, {"temperature": 2.0, "max_gen_toks": 9})))
        for each in (prompts[0], prompts[0], prompts[1])
    ]
    assert drawn[0] == drawn[1] != found[:1]
    with pytest.raises(InputError, match="num_beams is not served"):
        EngineLM(engine).generate_until(asked("generate_until", ("x", {"num_beams": 2})))


def test_whole_texts_have_their_perplexity(engine: Engine) -> None:
    text = CORPUS[:600]
    [total] = EngineLM(engine).loglikelihood_rolling(asked("loglikelihood_rolling", (text,)))
    ids = engine.tokenizer.encode(text, bos=False)
    assert len(ids) > CTX
    tally = perplexity(engine, {"": [engine.tokenizer.bos_id or 0, *ids]})[""]
    assert tally.tokens == len(ids)
    assert total == pytest.approx(-tally.loss, rel=0.02)  # windows begin elsewhere


def test_what_does_not_fit_loses_its_beginning(engine: Engine) -> None:
    lm = EngineLM(engine)
    long = " ".join(CORPUS.split() * 3)
    [(total, _)] = lm.loglikelihood(asked("loglikelihood", (long, " river runs")))
    ids = engine.tokenizer.encode(long + " river runs")
    n = len(ids) - len(engine.tokenizer.encode(long))
    with engine.session() as session:
        expected = log_softmax(session.feed(ids[-CTX - 1 : -n]))[ids[-n]]
        for id, following in pairwise(ids[-n:]):
            expected += log_softmax(engine.decode([session], [id])[0])[following]
        assert session.n_left == 0
    assert total == expected and lm.truncated == 1
    assert len(lm.generate_until(asked("generate_until", (long, {"max_gen_toks": 5})))[0]) > 0 and lm.truncated == 2
    with pytest.raises(InputError, match="leaves no room for its question"):
        lm.loglikelihood(asked("loglikelihood", ("the", " " + long)))
    with pytest.raises(InputError, match="has no tokens of its own"):
        lm.loglikelihood(asked("loglikelihood", ("the river", "")))


def test_chat_goes_through_the_template(engine: Engine) -> None:
    lm = EngineLM(engine, chat=True)
    text = lm.apply_chat_template([{"role": "user", "content": "the river"}])
    assert text == "<|im_start|>user\nthe river<|im_end|>\n<|im_start|>assistant\n"
    assert lm.tok_encode(text) == engine.encode_chat([{"role": "user", "content": "the river"}])
    assert lm.chat_template(True) == engine.tokenizer.chat_template
    assert EngineLM(engine).tok_encode(text) != lm.tok_encode(text)  # control tokens are text there
    assert np.isfinite(lm.loglikelihood(asked("loglikelihood", (text, "the")))[0][0])

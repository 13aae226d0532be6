"""Sessions take a stream and give it back; recurrent ones can be rewound, and not used after a step that failed."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import assert_same_bits, opened
from tiny import T, write_tiny

from sluice.engine.workspace import CHUNK
from sluice.errors import InputError, ModelFileError
from sluice.text.sampling import Sampler, SamplingParams

SMALL: dict[str, Any] = {"n_layers": 2, "n_embd": 64, "n_head": 2, "n_head_kv": 1, "head_dim": 32, "n_ff_exp": 96}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("sessions") / "m.gguf", expert_type=T.Q8_0, **SMALL).path


def test_streams_come_back_however_a_session_ends(model: Path) -> None:
    with opened(model, expert_slots=16, streams=2) as engine:
        for _ in range(3):
            with engine.session():
                engine.session().feed([1, 2])  # dropped without a word
            gc.collect()
            assert sorted(engine.free_streams) == [0, 1]
        first, _second = engine.session(), engine.session()
        with pytest.raises(InputError, match="all 2 streams"):
            engine.session()
        first.close()
        first.close()
        assert len(engine.free_streams) == 1
        with pytest.raises(InputError, match="closed"):
            first.feed([1])


def test_an_empty_step_is_refused(model: Path) -> None:
    with opened(model, expert_slots=16) as engine, pytest.raises(InputError, match="at least one session"):
        engine.decode([], [])


def test_damaged_weights_are_the_files_fault() -> None:
    with pytest.raises(ModelFileError, match="damaged weights"):
        Sampler(SamplingParams()).sample(np.array([0.0, np.nan], np.float32), [])


def test_rewind_forgets_what_came_after(model: Path) -> None:
    with opened(model, expert_slots=16) as engine, engine.session() as session:
        expected = session.feed([5, 6, 7, 8]).copy()
        session.rewind(2)
        assert session.tokens == [5, 6]
        session.feed([9])
        session.rewind(2)
        session.feed([7])
        assert_same_bits(engine.decode([session], [8]), expected[None], "after a rewind")


def ids_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 60, n).tolist()


def test_a_prompt_fed_step_by_step_is_the_same(model: Path) -> None:
    ids = ids_of(CHUNK + 30)
    with opened(model, expert_slots=16, streams=2, ctx=1024) as engine:
        with engine.session() as session:
            expected = session.feed(ids).copy()
        with engine.session() as first, engine.session() as second:
            assert engine.prefill_step([(first, ids[:CHUNK])], []).shape[0] == 0
            logits = engine.prefill_step([(second, ids[:9]), (first, ids[CHUNK:])], [1])
            assert_same_bits(logits, expected[None], "step by step, in company")
            assert first.reusable == CHUNK and second.reusable == 0
            for parts, complaint in (
                ([(second, ids[:CHUNK])], "across a multiple"),
                ([(first, ids[:300]), (second, ids[:300])], "at most 512"),
                ([(second, [])], "nothing to feed"),
            ):
                with pytest.raises(InputError, match=complaint):
                    engine.prefill_step(parts, [])
            assert len(second.tokens) == 9


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_whole_chunks_are_taken_over_bit_for_bit(model: Path, kv: str) -> None:
    ids, ending = ids_of(2 * CHUNK + 7), ids_of(40, 1)
    with opened(model, expert_slots=16, streams=3, ctx=2048, kv=kv) as engine:
        with engine.session() as alone:
            expected = alone.feed(ids[: 2 * CHUNK] + ending).copy()
        with engine.session() as first, engine.session() as second, engine.session() as third:
            first.feed(ids)
            assert first.reusable == 2 * CHUNK
            second.copy(first, 2 * CHUNK)
            assert second.tokens == ids[: 2 * CHUNK] and second.reusable == 2 * CHUNK
            assert_same_bits(second.feed(ending), expected, "after taking tokens over")
            third.copy(second, CHUNK)
            assert_same_bits(third.feed(ids[CHUNK : 2 * CHUNK] + ending), expected, "from one that took them over")
            for source, n, complaint in ((first, CHUNK, "before it has any"), (None, CHUNK, "before it has any")):
                with pytest.raises(InputError, match=complaint):
                    second.copy(source or second, n)
            third.rewind(0)
            engine.decode([second], [7])
            third.copy(second)
            assert third.tokens == second.tokens and third.reusable == second.reusable
            logits = engine.decode([second, third], [9, 9])
            assert_same_bits(logits[1:], logits[:1], "after taking over all, decoded ones too")
            second.rewind(CHUNK + 5)
            assert second.reusable == CHUNK
            third.rewind(0)
            for n in (5, 2 * CHUNK, -CHUNK):
                with pytest.raises(InputError, match="can't take"):
                    third.copy(second, n)


def test_tokens_decoded_or_fed_in_pieces_are_not_reusable(model: Path) -> None:
    ids = ids_of(CHUNK)
    with opened(model, expert_slots=16, ctx=1024) as engine, engine.session() as session:
        session.feed(ids[:100])
        session.feed(ids[100:])
        assert session.reusable == 0
        session.feed(ids)
        assert session.reusable == 0  # what came before it was not
        session.rewind(0)
        session.feed(ids)
        engine.decode([session], [3])
        assert session.reusable == CHUNK

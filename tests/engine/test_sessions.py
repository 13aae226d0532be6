"""Sessions take a stream and give it back; recurrent ones can be rewound, and not used after a step that failed."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import assert_same_bits, opened
from tiny import T, write_tiny

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

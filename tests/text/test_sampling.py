"""Sampling against a plain reference in float64, and its promises: seeds, ties, refusals."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sluice.errors import InputError, SluiceError
from sluice.text.sampling import Sampler, SamplingParams


def kept_by_reference(logits: np.ndarray, params: SamplingParams) -> tuple[dict[int, float], float]:
    """Probability of each token that the chain keeps, sorting everything; and how near a cut came to being another."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.sample_top_k:
        order = order[: params.sample_top_k]
    likeliest = float(logits[order[0]])
    order.sort(key=lambda i: (-math.exp(float(logits[i]) - likeliest), i))  # logits apart may be equal as shares
    weights = [math.exp(float(logits[i]) - likeliest) for i in order]
    margin = math.inf
    if params.top_p < 1:
        total, so_far, n = sum(weights), 0.0, 0
        while so_far < params.top_p * total:
            so_far += weights[n]
            n += 1
            margin = min(margin, abs(so_far / total - params.top_p))
            if n == len(weights):
                break
        order, weights = order[:n], weights[:n]
    if params.min_p:
        margin = min([margin, *(abs(w - params.min_p) for w in weights)])
        order = [i for i, w in zip(order, weights, strict=True) if w >= params.min_p]
    scaled = [math.exp((float(logits[i]) - float(logits[order[0]])) / params.temperature) for i in order]
    return {i: w / sum(scaled) for i, w in zip(order, scaled, strict=True)}, margin


_LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=80).map(lambda x: np.array(x, np.float32))
_PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 3),
    sample_top_k=st.integers(0, 90),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    seed=st.integers(0, 2**64),
)


@given(logits=_LOGITS, params=_PARAMS)
def test_draws_by_the_reference_distribution(logits: np.ndarray, params: SamplingParams) -> None:
    kept, margin = kept_by_reference(logits, params)
    assume(margin > 1e-9)  # else rounding decides what is kept
    u = float((int(np.random.PCG64(params.seed).random_raw()) >> 11) * 2.0**-53)
    got = Sampler(params).sample(logits, [])
    assert got in kept
    below = sum(p for i, p in sorted(kept.items()) if i < got)
    assert below - 1e-9 <= u <= below + kept[got] + 1e-9, "the draw falls on the token, tokens laid out by id"


@given(logits=_LOGITS, params=_PARAMS)
def test_the_same_seed_gives_the_same_tokens(logits: np.ndarray, params: SamplingParams) -> None:
    one, other = Sampler(params), Sampler(params)
    before = logits.copy()
    assert [one.sample(logits, []) for _ in range(5)] == [other.sample(logits, []) for _ in range(5)]
    assert np.array_equal(before, logits), "the caller's logits are left alone"


def test_large_vocabularies_draw_by_the_same_rule() -> None:
    """Borders of blocks and all levels of the nucleus search are crossed: 6,000 logits, from flat to peaked."""
    rng = np.random.default_rng(0)
    for spread in (0.01, 1.0, 4.0):
        logits = (rng.standard_normal(6_001) * spread).astype(np.float32)
        for plain in (
            SamplingParams(top_p=1.0),
            SamplingParams(),
            SamplingParams(sample_top_k=700, top_p=0.9),
            SamplingParams(min_p=0.02, temperature=1.3),
        ):
            for seed in range(3):
                params = replace(plain, seed=seed)
                kept, _ = kept_by_reference(logits, params)
                u = float((int(np.random.PCG64(seed).random_raw()) >> 11) * 2.0**-53)
                got = Sampler(params).sample(logits, [])
                below = math.fsum(p for i, p in kept.items() if i < got)
                assert below - 1e-9 <= u <= below + kept[got] + 1e-9


def test_known_tokens_for_a_seed() -> None:
    """Pins the generator and its use: these must not change between releases or machines."""
    logits = np.linspace(-3, 3, 1000, dtype=np.float32)
    sampler = Sampler(SamplingParams(seed=42))
    assert [sampler.sample(logits, []) for _ in range(8)] == [970, 906, 982, 958, 740, 997, 968, 972]


def test_frequencies_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    sampler = Sampler(SamplingParams(temperature=1, top_p=1, seed=7))
    counts = Counter(sampler.sample(logits, []) for _ in range(20_000))
    assert np.allclose([counts[i] / 20_000 for i in range(3)], [0.5, 0.3, 0.2], atol=0.015)


def test_temperature_comes_after_the_cuts() -> None:
    """llama.cpp's order: a high temperature must not let more tokens through top_p."""
    logits = np.array([10.0, 5.0, 0.0], np.float32)
    sampler = Sampler(SamplingParams(temperature=100, top_p=0.95, seed=1))
    assert {sampler.sample(logits, []) for _ in range(200)} == {0}


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert Sampler(SamplingParams(temperature=0)).sample(np.array([1, 3, 3, 2], np.float32), []) == 1


def test_equal_logits_are_cut_by_id() -> None:
    sampler = Sampler(SamplingParams(sample_top_k=3, top_p=1, seed=0))
    assert {sampler.sample(np.zeros(2000, np.float32), []) for _ in range(200)} == {0, 1, 2}


def test_repetition_penalty() -> None:
    logits = np.array([2.0, 1.9, -1.0, -1.1], np.float32)
    greedy = Sampler(SamplingParams(temperature=0, repeat_penalty=1.5))
    assert greedy.sample(logits, []) == 0
    assert greedy.sample(logits, [0]) == 1, "positive logits are divided"
    assert greedy.sample(logits, [0, 0, 0, 1]) == 0, "once per token, not per occurrence"
    below = np.array([-1.0, -1.1], np.float32)
    assert greedy.sample(below, np.array([0])) == 1, "negative logits are multiplied"  # pyright: ignore[reportArgumentType]
    near = Sampler(SamplingParams(temperature=0, repeat_penalty=1.5, repeat_last_n=1))
    assert near.sample(logits, [0, 3]) == 0, "only the last repeat_last_n count"
    assert Sampler(SamplingParams(temperature=0, repeat_penalty=1.5, repeat_last_n=0)).sample(logits, [0]) == 0
    far = Sampler(SamplingParams(temperature=0, repeat_penalty=1.5, repeat_last_n=-1))
    assert far.sample(logits, [0] + [3] * 99) == 1
    with pytest.raises(InputError, match="outside the vocabulary"):
        greedy.sample(logits, [4])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("bad", [[1, math.nan, 2], [-math.inf] * 3, [1, math.inf]])
def test_broken_logits_are_an_error(bad: list[float], temperature: float) -> None:
    with pytest.raises(SluiceError, match="damaged weights"):
        Sampler(SamplingParams(temperature=temperature)).sample(np.array(bad, np.float32), [])


def test_logits_of_another_shape_are_an_error() -> None:
    for bad in (np.zeros((2, 3), np.float32), np.zeros(0, np.float32)):
        with pytest.raises(SluiceError, match="shape"):
            Sampler(SamplingParams()).sample(bad, [])


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.full(5000, -np.inf, np.float32)
    logits[[7, 4999]] = 0
    sampler = Sampler(SamplingParams(temperature=1, top_p=1, seed=3))
    assert {sampler.sample(logits, []) for _ in range(100)} == {7, 4999}


def test_a_tiny_temperature_is_greedy() -> None:
    sampler = Sampler(SamplingParams(temperature=1e-300, top_p=1, seed=3))
    assert {sampler.sample(np.array([0.0, 1.0, 0.99], np.float32), []) for _ in range(20)} == {1}


def test_a_missing_seed_is_drawn_and_told() -> None:
    one, other = Sampler(SamplingParams()), Sampler(SamplingParams())
    assert one.seed != other.seed or Sampler(SamplingParams()).seed != one.seed
    again = Sampler(SamplingParams(seed=one.seed))
    logits = np.zeros(100_000, np.float32)
    assert one.sample(logits, []) == again.sample(logits, [])


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"sample_top_k": -1}, {"top_p": 0},
        {"top_p": 1.1}, {"top_p": math.nan}, {"min_p": -0.1}, {"min_p": 2}, {"repeat_penalty": 0},
        {"repeat_penalty": 1e-9}, {"repeat_penalty": math.inf}, {"repeat_last_n": -2}, {"seed": -1},
    ],
)  # fmt: skip
def test_parameters_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(InputError, match=f"^{name} is .*; give ") as raised:
        SamplingParams(**wrong)  # pyright: ignore[reportArgumentType]
    assert "\n" not in str(raised.value)

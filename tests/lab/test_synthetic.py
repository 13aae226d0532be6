"""The generator: its traces have the published shape, and are the same for one seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sluice.errors import InputError
from sluice.lab.locality import ReuseCounter
from sluice.lab.popularity import concentration, counts
from sluice.lab.replay import Demands
from sluice.lab.routes import Joined, load
from sluice.lab.stack_distance import LruStack
from sluice.lab.synthetic import Shape, tokens, write
from sluice.trace import TraceReader

TINY = Shape(layers=3, experts=12, top_k=2, sequence_tokens=50)


def test_the_default_has_the_published_shape(tmp_path: Path) -> None:
    """Qwen3-30B-A3B's: LRU over 13.4 % hits 65.9 %, pinning 59.2 %, 95 % of traffic on 52.5 %, reuse 2.0 × chance."""
    write(tmp_path / "t", Shape(), 1500)
    with TraceReader(tmp_path / "t") as reader:
        demands = Demands.of(reader)
        routes = load(Joined([reader]))
    counter = ReuseCounter(routes.n_tokens)
    used = []
    for rows in routes.by_layer():
        counter.add(rows)
        used.append(counts(rows))
    reuse, curve = counter.finish(), concentration(np.stack(used))
    slots = round(0.134 * 48 * 128)
    assert LruStack(demands).hits[slots] / len(demands.ids) == pytest.approx(0.659, abs=0.02)
    assert curve.traffic_of(0.134) == pytest.approx(0.592, abs=0.02)
    assert curve.experts_for(0.95) == pytest.approx(0.525, abs=0.025)
    assert reuse.mean / reuse.mean_chance == pytest.approx(2.0, abs=0.1)


def test_one_seed_gives_one_trace_and_a_longer_one_begins_with_it() -> None:
    short, again, longer, other = (
        [np.concatenate(part) for part in zip(*tokens(shape, n), strict=True)]
        for shape, n in ((TINY, 120), (TINY, 120), (TINY, 40_000), (Shape(**{**TINY.__dict__, "seed": 1}), 120))
    )
    for a, b, c in zip(short, again, longer, strict=True):
        assert (a == b).all() and (a == c[:120]).all()
    assert (short[2] != other[2]).any()


def test_a_trace_holds_what_was_drawn(tmp_path: Path) -> None:
    write(tmp_path / "t", TINY, 120)
    [block] = tokens(TINY, 120)
    with TraceReader(tmp_path / "t") as reader:
        assert (reader.n_rows, reader.info.n_expert, reader.info.top_k) == (360, 12, 2)
        [batch] = reader.batches(weights=True)
    assert (batch.experts.reshape(120, 3, 2) == block.experts).all()
    assert batch.weights is not None and (batch.weights.reshape(120, 3, 2) == block.weights).all()
    assert (batch.step == np.repeat(np.arange(120), 3)).all() and batch.decode.all()
    assert batch.position[::3].tolist() == [*range(50), *range(50), *range(20)]
    assert batch.sequence[::3].tolist() == [0] * 50 + [1] * 50 + [2] * 20


def test_experts_are_distinct_and_weighed_in_router_order() -> None:
    [block] = tokens(TINY, 100)
    assert (block.experts[..., 0] != block.experts[..., 1]).all()
    assert (block.weights[..., 0] >= block.weights[..., 1]).all()
    assert block.weights.sum(axis=-1) == pytest.approx(1)


def test_without_popularity_and_topics_routes_are_even_and_independent(tmp_path: Path) -> None:
    shape = Shape(layers=2, experts=16, top_k=2, popularity=0, topicality=0)
    write(tmp_path / "t", shape, 6000)
    with TraceReader(tmp_path / "t") as reader:
        routes = load(Joined([reader]))
    counter = ReuseCounter(routes.n_tokens)
    for rows in routes.by_layer():
        counter.add(rows)
    found = counter.finish()
    assert found.mean == pytest.approx(2 / 16, abs=0.01)
    assert found.mean_chance == pytest.approx(2 / 16, abs=0.001)


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"top_k": 129}, "top-k"), ({"layers": 0}, "from 1 on"), ({"layers": 1 << 20}, "give less"),
        ({"seed": -1}, "seed"),        ({"popularity": 0.9, "topicality": 0.6}, "squares"),
        ({"stay": 1.5}, "probability"), ({"tail": 0.0}, "tail"),
    ],
)  # fmt: skip
def test_shapes_that_cant_be_are_refused(wrong: dict[str, float], named: str) -> None:
    with pytest.raises(InputError, match=named):
        Shape(**wrong)  # type: ignore[arg-type]


def test_a_trace_has_tokens_and_replaces_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one token"):
        write(tmp_path / "t", TINY, 0)
    assert not list(tmp_path.iterdir())
    write(tmp_path / "t", TINY, 1)
    with pytest.raises(InputError, match="--force"):
        write(tmp_path / "t", TINY, 1)
    write(tmp_path / "t", TINY, 2, force=True)

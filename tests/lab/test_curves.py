"""The report's hit-rate curves against caches that are replayed one by one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from small_traces import Row, info, random_rows, write_rows

from sluice.lab import curves as module
from sluice.lab.curves import BOUND, STATIC, Curves, Distances, Line, curves, tokenwise_demands
from sluice.lab.replay import Demands
from sluice.lab.routes import Joined, load
from sluice.lab.simulate import simulate
from sluice.trace import TraceReader


def curves_of(path: Path) -> tuple[Curves, Demands]:
    with TraceReader(path) as reader:
        trace = Joined([reader])
        return curves(trace, load(trace)), Demands.of(reader)


def test_lru_is_known_at_every_capacity_and_the_bound_is_no_lower(tmp_path: Path) -> None:
    rows = random_rows(np.random.default_rng(0), layers=4, n_expert=8, sequences=1, tokens=120)
    found, demands = curves_of(write_rows(tmp_path / "t", rows, info(4, 8, 2)))
    lru, bound, static = found.lines["lru"], found.lines[BOUND], found.lines[STATIC]
    assert lru.slots.tolist() == list(range(33)) and found.lru_exact and not found.tokenwise
    for n in (2, 3, 7, 16, 31, 32):
        assert lru.at(n) == simulate(demands, "lru", n).hits
    assert len(bound.slots) == len(module.SHARES) and found.usual in bound.slots
    for n, hits in zip(bound.slots.tolist(), bound.hits.tolist(), strict=True):
        assert hits == simulate(demands, "belady", n).hits
        for line in found.lines.values():
            assert hits >= (line.at(n) or 0)
    used = Counter((row.layer, e) for row in rows for e in row.experts)
    assert static.at(5) == sum(n - 1 for _, n in used.most_common(3))
    assert static.at(2) == static.at(0) == 0
    assert len(used) == 32 and static.at(31) == sum(n - 1 for _, n in used.most_common(29))
    assert static.at(32) == lru.at(32) == len(demands.ids) - len(used)
    assert found.demands == len(rows) * 2 and found.n_tokens == 120
    assert [slots for slots, _ in found.table()] == bound.slots.tolist()


def test_reuse_distances_are_of_other_experts_since_the_last_use(tmp_path: Path) -> None:
    chosen = [(0,), (1,), (2,), (0,), (0,), (2,), (1,)]  # 0 comes after two others, then none; 2 after one, 1 after two
    rows = [Row(i, 0, i, 0, experts) for i, experts in enumerate(chosen)]
    found, _ = curves_of(write_rows(tmp_path / "t", rows, info(1, 5, 1)))
    assert found.distances.cold == 3
    assert found.distances.counts.tolist() == [1, 1, 2]
    assert [found.distances.quantile(q) for q in (0.25, 0.5, 0.75, 1.0)] == [0, 1, 2, 2]
    assert Distances(np.zeros(3, np.int64), 4).quantile(0.5) is None


def test_a_long_trace_gets_fewer_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(np.random.default_rng(0), layers=4, n_expert=8, sequences=1, tokens=50)
    path = write_rows(tmp_path / "t", rows, info(4, 8, 2))
    few = {}
    for budget in (0, 3 * len(rows) * 2, 18 * len(rows) * 2, 10**9):
        monkeypatch.setattr(module, "BUDGET", budget)
        found, _ = curves_of(path)
        assert found.lines[BOUND].at(found.usual) is not None
        few[budget] = (len(found.lines[BOUND].slots), len(found.lines))
    assert list(few.values()) == [(1, 3), (3, 3), (9, 4), (9, 3 + len(module.OTHERS))]


def test_a_trace_of_prompts_alone_is_taken_token_by_token(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    decode = random_rows(rng, layers=3, n_expert=6, sequences=1, tokens=40)
    prompt = sorted(
        (row._replace(step=row.step // 20, phase="prefill") for row in decode), key=lambda row: (row.step, row.layer)
    )
    one, demands = curves_of(write_rows(tmp_path / "one", decode, info(3, 6, 2)))
    other, _ = curves_of(write_rows(tmp_path / "other", prompt, info(3, 6, 2)))
    assert other.tokenwise and other.lru_exact
    assert one.lines.keys() == other.lines.keys()
    for name, line in one.lines.items():
        assert line.hits.tolist() == other.lines[name].hits.tolist()
    assert (one.n_tokens, one.demands) == (other.n_tokens, other.demands) == (40, len(demands.ids))


def test_tokens_of_several_sequences_are_taken_one_sequence_after_the_other(tmp_path: Path) -> None:
    rows = random_rows(np.random.default_rng(3), layers=2, n_expert=6, sequences=3, tokens=12, skip=0.1)
    with TraceReader(write_rows(tmp_path / "t", rows, info(2, 6, 2))) as reader:
        demands = tokenwise_demands(load(Joined([reader])))
    expected = [
        [(row.layer, e) for e in sorted(row.experts)]
        for row in sorted(rows, key=lambda r: (r.sequence, r.step, r.layer))
    ]
    assert [[(key.layer, key.expert) for key in one.keys] for one in demands] == expected
    assert demands.tokens() == len({(row.sequence, row.position) for row in rows})


def test_a_line_is_thinned_to_its_ends() -> None:
    line = Line(np.arange(1001), np.arange(1001) * 2)
    thin = line.thinned()
    assert len(thin.slots) <= 102 and (thin.slots[0], thin.slots[-1]) == (0, 1000)
    assert (thin.hits == 2 * thin.slots).all()
    assert line.at(17) == 34 and line.at(2000) is None and thin.at(1) is None

"""Routes of a torch model as a trace: those of decoding token by token, and what the laboratory makes of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from train.toys import toy_model, toy_texts

from sluice.errors import InputError
from sluice.lab.replay import Demands
from sluice.lab.simulate import simulate
from sluice.trace import TraceReader
from sluice.train.decode_routes import decode_routes, info_of, write_trace
from sluice.train.domain_sets import domain_counts, hottest_sets, pinned_hit_rates, switching
from sluice.train.routes import record

torch.set_num_threads(1)
TEXTS = [("code", 12), ("prose", 17), ("code", 9)]


def test_one_pass_over_a_text_gives_the_routes_of_decoding_it() -> None:
    model = toy_model()
    (text,) = toy_texts([("code", 15)])
    (found,) = decode_routes(model, [text], scores=True)
    assert found.experts.shape == (15, 3, 2) and found.scores is not None and found.scores.shape == (15, 3, 8)
    cache = None
    with torch.no_grad():
        for t, token in enumerate(text.ids.tolist()):
            more = {} if cache is None else {"cache": cache}
            with record(model) as routes:
                cache = model(torch.tensor([[token]]), use_cache=True, **more).cache
            for i, one in enumerate(routes.values()):
                assert found.experts[t, i].tolist() == one.ids[0].tolist()
                assert np.allclose(found.weights[t, i], one.weights[0].numpy(), atol=1e-5)
    assert np.allclose(found.scores.sum(-1), 1, atol=1e-5)


def test_a_trace_has_a_decode_step_a_token_and_its_rows_are_the_routes(tmp_path: Path) -> None:
    model = toy_model()
    routes = list(decode_routes(model, toy_texts(TEXTS), scores=True))
    path = tmp_path / "routes.parquet"
    assert write_trace(path, info_of(model, "toy"), routes) == 38
    with TraceReader(path) as reader:
        assert (reader.info.architecture, reader.info.name, reader.info.n_expert) == ("qwen3moe", "toy", 8)
        assert reader.n_rows == 38 * 3
        step = 0
        for batch in reader.batches(weights=True, scores=True):
            assert batch.decode.all() and batch.scores is not None
            experts = batch.experts.reshape(-1, 3, 2)
            labels = [reader.domains[i] for i in batch.domain[::3]]
            assert labels == ["code"] * 12 + ["prose"] * 17 + ["code"] * 9
            assert np.array_equal(experts, np.concatenate([one.experts for one in routes])[step : step + len(experts)])
            step += len(experts)
            assert np.array_equal(
                batch.scores.reshape(-1, 3, 8), np.concatenate([one.scores for one in routes if one.scores is not None])
            )
            assert batch.position[::3].tolist() == [*range(12), *range(17), *range(9)]
            assert batch.sequence[::3].tolist() == [0] * 12 + [1] * 17 + [2] * 9


def test_a_trace_is_not_overwritten_and_not_made_of_nothing(tmp_path: Path) -> None:
    model = toy_model()
    path = tmp_path / "routes.parquet"
    with pytest.raises(InputError, match="no texts"):
        write_trace(path, info_of(model, "toy"), [])
    routes = list(decode_routes(model, toy_texts(TEXTS[:1])))
    write_trace(path, info_of(model, "toy"), routes)
    with pytest.raises(InputError, match="--force"):
        write_trace(path, info_of(model, "toy"), routes)
    write_trace(path, info_of(model, "toy"), routes, force=True)


def test_domains_sets_are_those_they_use_most_and_serve_what_is_counted() -> None:
    routes = list(decode_routes(toy_model(), toy_texts(TEXTS)))
    counts = domain_counts(routes, 8)
    assert {name: int(used.sum()) for name, used in counts.items()} == {"code": 21 * 6, "prose": 17 * 6}
    sets = hottest_sets(counts, 4)
    for domain, chosen in sets.items():
        assert (chosen.sum(1) == 4).all()
        for layer in range(3):
            inside = counts[domain][layer][chosen[layer]]
            assert inside.min() >= counts[domain][layer][~chosen[layer]].max()
    hits = pinned_hit_rates(routes, sets)
    for domain, rate in hits.items():
        assert rate == pytest.approx(counts[domain][sets[domain]].sum() / counts[domain].sum())
    assert pinned_hit_rates(routes, hottest_sets(counts, 8)) == {"code": 1, "prose": 1}


def test_loading_at_a_switch_reads_what_is_absent_and_counts_beside_the_misses(tmp_path: Path) -> None:
    model = toy_model()
    routes = list(decode_routes(model, toy_texts(TEXTS)))
    write_trace(tmp_path / "t.parquet", info_of(model, "toy"), routes)
    with TraceReader(tmp_path / "t.parquet") as reader:
        demands = Demands.of(reader)
    counts = domain_counts(routes, 8)
    found = switching(demands, routes, counts, n_slots=8, n_loaded=8)
    assert found.switches == 2 and found.misses_alone == simulate(demands, "lru", 8).misses
    assert 0 < found.loads <= 16
    assert found.reads_change == pytest.approx((found.loads + found.misses) / found.misses_alone - 1)
    # with all experts in slots a switch finds what an earlier text used, and loading only moves reads forward
    whole = switching(demands, routes, counts, n_slots=24, n_loaded=24)
    assert whole.loads + whole.misses >= whole.misses_alone == len(demands.experts)
    nothing = switching(demands, routes, counts, n_slots=8, n_loaded=0)
    assert (nothing.loads, nothing.misses) == (0, nothing.misses_alone) and nothing.reads_change == 0

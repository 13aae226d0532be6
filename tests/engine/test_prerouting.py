"""Prerouted output is what its routes make it: true routes give exact bits, heads' routes are run as they were said.

Nothing that was said of one token holds for another: not after a prompt, a rewind, a failed step, or in other company.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from harness import EVERY_SLOT, Prompt, assert_same_bits, opened, ordered, prompt, resident, run, run_together
from tiny import T, TinyModel, write_tiny

from sluice.config import EngineConfig
from sluice.engine import Engine
from sluice.engine.prerouting import Prerouting
from sluice.errors import InputError, ReadError
from sluice.ggml import load_library
from sluice.routing.prerouter_file import open_prerouter, write_prerouter
from sluice.routing.prerouter_init import init_prerouter
from sluice.trace import TraceInfo, TraceReader
from sluice.trace.schema import METADATA_KEY

SMALL: dict[str, Any] = {"n_embd": 64, "n_head": 2, "n_head_kv": 1, "head_dim": 32, "n_ff_exp": 96}
K, N_EXPERT, N_LAYERS = 3, 16, 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    path = tmp_path_factory.mktemp("prerouting") / "m.gguf"
    return write_tiny(path, expert_type=T.Q8_0, n_layers=N_LAYERS, n_expert=N_EXPERT, top_k=K, **SMALL)


@pytest.fixture(scope="module")
def untrained(model: TinyModel) -> Path:
    out = model.path.with_name("init.safetensors")
    init_prerouter(model.path, out, load_library(), hidden=24)
    return out


@pytest.fixture(scope="module")
def heads(untrained: Path) -> Path:
    """Heads whose every part has a say, and which leave the first two layers and the fourth to their routers."""
    return remade(untrained, "trained.safetensors", owners=(1, 3), first_predicted=2)


@pytest.fixture(scope="module")
def by_router(heads: Path) -> Path:
    """The same, with routing weights from the layers' routers."""
    return remade(heads, "by_router.safetensors", weights="router", change=lambda values: values)


def remade(path: Path, name: str, *, change: Any = None, **more: Any) -> Path:
    file, rng = open_prerouter(path), np.random.default_rng(3)
    info = replace(file.info, **more)
    tensors = {}
    for tensor in file.tensors.values():
        if int(tensor.name.split(".")[1]) in info.owners:
            values = file.rows(tensor.name, 0, tensor.shape[0])
            noise = rng.standard_normal(values.shape, dtype=np.float32)
            tensors[tensor.name] = values + noise if change is None else change(values)
    out = path.with_name(name)
    write_prerouter(out, info, tensors)
    return out


def prerouted(path: Path, make_reader: Any = None, **options: Any) -> Engine:
    return opened(path, make_reader, **{"routing": "prerouted", "expert_slots": 24, **options})


def trace_rows(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


BUDGETS = [{"expert_slots": K}, {"expert_slots": 7}, {"expert_slots": 20}, {"expert_slots": EVERY_SLOT}]


@pytest.mark.parametrize("options", [*BUDGETS, {"expert_slots": 20, "prefetch": False}], ids=str)
def test_true_routes_give_exact_bits(model: TinyModel, tmp_path: Path, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    prompts = [prompt(rng, n, 9) for n in (1, 5, 20)]
    trace = tmp_path / "t.parquet"
    with resident(model.path, trace=trace) as engine:
        expected = [run(engine, it) for it in prompts]
    with prerouted(model.path, ordered(5), routes=trace, **options) as engine:
        for again in range(2):  # sequences beyond the trace's are its first again
            for it, rows in zip(prompts, expected, strict=True):
                assert_same_bits(run(engine, it), rows, f"{len(it.ids)} tokens of prompt, time {again}")
        decode = engine.stats()["decode"]
        assert decode["prerouter_agreement"] == 1.0
        if options["expert_slots"] == 20 and options.get("prefetch", True):
            assert decode["prefetch_used"] > 0 and decode["prefetch_wasted"] < decode["prefetch_used"]
        assert engine.mode["routes"] == "t.parquet"


def test_true_routes_of_many_streams(model: TinyModel, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    prompts = [prompt(rng, n, 6) for n in (3, 9, 4)]
    trace = tmp_path / "t.parquet"
    with resident(model.path, trace=trace, streams=3) as engine:
        expected = run_together(engine, prompts, random.Random(1))
    with prerouted(model.path, ordered(6), routes=trace, streams=3) as engine:
        found = run_together(engine, prompts, random.Random(2))
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other, "beside others")


class Overheard:
    """What was said in each decode step: {(position of the token it is about, layer): experts}."""

    def __init__(self, engine: Engine) -> None:
        ahead = engine.prerouting
        assert isinstance(ahead, Prerouting)
        self.said: dict[tuple[int, int], list[int]] = {}
        self.scores: dict[tuple[int, int], np.ndarray] = {}
        said = ahead.said

        def listening(owner: int) -> tuple[int, np.ndarray]:
            layer, ids = said(owner)
            about = ahead._positions[0] + 1, layer
            self.said[about] = ids[0].tolist()
            at = engine.spec.moe_layers.index(layer) * engine.config.streams
            self.scores[about] = engine._stepper.workspace.arrays["ahead_scores"][at].copy()
            return layer, ids

        ahead.said = listening  # type: ignore[method-assign]


@pytest.mark.parametrize("weights", ["head", "router"])
def test_what_heads_say_is_run_with_their_weights(
    model: TinyModel, heads: Path, by_router: Path, tmp_path: Path, weights: str
) -> None:
    trace, it = tmp_path / "t.parquet", prompt(np.random.default_rng(3), 6, 8)
    file = heads if weights == "head" else by_router
    with prerouted(model.path, prerouter=file, trace=trace, trace_scores=True) as engine:
        overheard = Overheard(engine)
        run(engine, it)
        decode = engine.stats()["decode"]
    rows = [row for row in trace_rows(trace) if row["phase"] == "decode"]
    predicted = [row for row in rows if row["layer"] in (2, 4) and row["position"] > 6]
    assert len(predicted) == 2 * 7
    agreement = decode["prerouter_agreement"]
    assert agreement is None if weights == "head" else agreement < 1  # routers that decide nothing aren't run
    for row in rows:
        about = row["position"], row["layer"]
        scores = np.array(row["scores"])
        if row in predicted:
            assert row["experts"] == overheard.said[about]
            if weights == "head":
                assert np.array_equal(scores, overheard.scores[about])
        else:
            assert row["experts"] == np.argsort(-scores, kind="stable")[:K].tolist(), "the router's own"
        chosen = scores[row["experts"]]
        assert np.allclose(row["weights"], chosen / chosen.sum(), rtol=1e-5)
    native = sum(
        row["experts"] != np.argsort(-np.array(row["scores"]), kind="stable")[:K].tolist() for row in predicted
    )
    assert (native > 0) == (weights == "router")


@pytest.mark.parametrize("options", BUDGETS, ids=str)
def test_budgets_and_readers_change_no_bit(model: TinyModel, heads: Path, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(4)
    prompts = [prompt(rng, n, 7) for n in (2, 11)]
    with resident(model.path, prerouter=heads, routing="prerouted") as engine:
        expected = [run(engine, it) for it in prompts]
    for seed in range(3):
        with prerouted(model.path, ordered(seed, running_share=0.4), prerouter=heads, **options) as engine:
            for it, rows in zip(prompts, expected, strict=True):
                assert_same_bits(run(engine, it), rows, f"seed {seed}")


def test_company_changes_no_bit(model: TinyModel, heads: Path) -> None:
    rng = np.random.default_rng(5)
    prompts = [prompt(rng, n, 6) for n in (1, 8, 3, 5)]
    with prerouted(model.path, prerouter=heads) as engine:
        expected = [run(engine, it) for it in prompts]
    for seed in range(3):
        with prerouted(model.path, ordered(seed), prerouter=heads, streams=4) as engine:
            for one, other in zip(run_together(engine, prompts, random.Random(seed)), expected, strict=True):
                assert_same_bits(one, other, "beside others")


@pytest.mark.parametrize("weights", ["head", "router"])
def test_nothing_leaks(model: TinyModel, heads: Path, by_router: Path, weights: str) -> None:
    rng, file = np.random.default_rng(6), heads if weights == "head" else by_router
    first, second = prompt(rng, 7, 8), prompt(rng, 1, 8)  # a prompt of one token is no decode step
    with prerouted(model.path, prerouter=file) as engine:
        expected = run(engine, second)
    with prerouted(model.path, prerouter=file) as engine:
        run(engine, first)
        assert_same_bits(run(engine, second), expected, "after another request")
        with engine.session() as session:
            next(engine.prefill_rows(session, first.ids, lambda first, rows: None))
        assert_same_bits(run(engine, second), expected, "after one cancelled in its prompt")
        for n in range(1, 4):
            with engine.session() as session:
                session.feed(second.ids)
                for token in first.forced[:n]:
                    engine.decode([session], [token])
            assert_same_bits(run(engine, second), expected, f"after one cancelled after {n} tokens")
        with engine.session() as session:  # of the same length when it is rewound as it had before
            session.feed(second.ids)
            for token in first.forced[:3]:
                engine.decode([session], [token])
            session.rewind(1)
            rows = [engine.decode([session], [token])[0].copy() for token in second.forced]
        assert_same_bits(np.stack(rows), expected[1:], "after a rewind")


def test_a_failed_step_leaves_nothing(model: TinyModel, heads: Path) -> None:
    it = prompt(np.random.default_rng(7), 4, 6)

    def later(engine: Engine, session: Any) -> np.ndarray:
        return np.stack([engine.decode([session], [token])[0].copy() for token in it.forced[3:]])

    def begun(engine: Engine) -> Any:
        session = engine.session()
        session.feed(it.ids)
        for token in it.forced[:2]:
            engine.decode([session], [token])
        return session

    with prerouted(model.path, prerouter=heads) as engine, begun(engine) as session:
        compute = engine._stepper._compute
        engine._stepper._compute = lambda graph: (_ for _ in ()).throw(ReadError("injected"))  # type: ignore[method-assign]
        with pytest.raises(ReadError, match="injected"):
            engine.decode([session], [it.forced[2]])
        engine._stepper._compute = compute  # type: ignore[method-assign]
        again = np.stack([engine.decode([session], [it.forced[2]])[0].copy(), *later(engine, session)])
    with prerouted(model.path, prerouter=heads) as engine, begun(engine) as session:
        engine.prerouting._position[session.stream] = -1  # type: ignore[union-attr]
        fresh = np.stack([engine.decode([session], [it.forced[2]])[0].copy(), *later(engine, session)])
    assert_same_bits(again, fresh, "after a failed step")


def test_scoring_text_gives_what_decoding_gives(model: TinyModel, heads: Path) -> None:
    ids = np.random.default_rng(8).integers(0, 400, 12).tolist()
    with prerouted(model.path, prerouter=heads) as engine:
        expected = run(engine, Prompt(ids[:1], ids[1:]))
        assert_same_bits(engine.logits(ids), expected, "logits")
        rows: dict[int, np.ndarray] = {}
        with engine.session() as session:
            fed = list(engine.prefill_rows(session, ids, lambda i, some: rows.update({i: some.copy()}), skip=5))
        assert fed == list(range(1, 13))
        assert_same_bits(np.concatenate([rows[i] for i in range(5, 12)]), expected[5:], "rows")
    with resident(model.path) as engine:
        assert not np.array_equal(engine.logits(ids), expected), "the routers would have chosen otherwise"


def test_hints_change_no_bit_and_are_read(model: TinyModel, untrained: Path) -> None:
    it = prompt(np.random.default_rng(9), 5, 12)
    with resident(model.path) as engine:
        expected = run(engine, it)
    for options in BUDGETS:
        with opened(model.path, ordered(9), prerouter=untrained, **options) as engine:
            assert_same_bits(run(engine, it), expected, str(options))
            decode = engine.stats()["decode"]
            assert 0 < decode["prerouter_agreement"] < 1
            assert "prerouter" not in engine.mode and engine.mode["routing"] == "exact"


def test_prefetching_keeps_to_the_pool_and_says_when_it_is_crowded(model: TinyModel, heads: Path) -> None:
    it = prompt(np.random.default_rng(10), 5, 12)
    crowded = []
    for slots in (8, 64):
        with prerouted(model.path, prerouter=heads, expert_slots=slots) as engine:
            run(engine, it)
            assert len(engine.store.cache) <= slots
            crowded.append(engine.stats()["decode"]["prefetch_crowded"])
    assert crowded[0] > 0 and crowded[1] == 0


def test_heads_are_in_the_budget(model: TinyModel, heads: Path) -> None:
    with opened(model.path, expert_slots=8) as engine:
        before = engine.plan.needs.fixed
    with opened(model.path, expert_slots=8, prerouter=heads) as engine:
        assert engine.plan.needs.heads > 0
        assert engine.plan.needs.fixed >= before + engine.plan.needs.heads - (8 << 20)  # the process itself varies


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"routing": "prerouted"}, "needs predictions"),
        ({"routes": Path("t.parquet")}, "in the place of a prerouter"),
        ({"routing": "prerouted", "routes": Path("t"), "prerouter": Path("h")}, "in the place of a prerouter"),
    ],
)
def test_options_that_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        EngineConfig(**options)


def other_models() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "width", {"n_embd": 32}
    yield "experts", {"n_expert": 8}
    yield "router", {"seed": 5}


@pytest.mark.parametrize(("what", "shape"), list(other_models()), ids=str)
def test_another_models_heads_and_routes_are_refused(
    model: TinyModel, heads: Path, tmp_path: Path, what: str, shape: dict[str, Any]
) -> None:
    kinds: dict[str, Any] = {"n_layers": N_LAYERS, "n_expert": N_EXPERT, "top_k": K, **SMALL, **shape}
    other = write_tiny(tmp_path / "other.gguf", expert_type=T.Q8_0, **kinds).path
    with pytest.raises(InputError, match=r"other|width|experts"):
        prerouted(other, prerouter=heads)
    trace = tmp_path / "t.parquet"
    with opened(model.path, expert_slots=20, trace=trace) as engine:
        run(engine, prompt(np.random.default_rng(11), 3, 2, n_vocab=100))
    with pytest.raises(InputError, match="another model"):
        prerouted(other, routes=trace)


@pytest.mark.parametrize("slots", [K, 9, 15, 18, 24])
def test_a_prompt_takes_the_slots_of_routes_that_it_made_void(model: TinyModel, untrained: Path, slots: int) -> None:
    rng = np.random.default_rng(12)
    turns = [prompt(rng, n, 6) for n in (5, 30, 12)]

    def talked(engine: Engine) -> np.ndarray:
        with engine.session() as session:
            rows = []
            for it in turns:
                rows.append(session.feed(it.ids).copy())
                rows += [engine.decode([session], [token])[0].copy() for token in it.forced]
        return np.stack(rows)

    with resident(model.path, prerouter=untrained, routing="prerouted") as engine:
        expected = talked(engine)
    with prerouted(model.path, prerouter=untrained, expert_slots=slots) as engine:
        assert_same_bits(talked(engine), expected, "three turns")


@pytest.mark.parametrize("slots", [K, 8])
def test_a_trace_has_the_weights_of_its_own_layer(
    model: TinyModel, untrained: Path, tmp_path: Path, slots: int
) -> None:
    """Whatever runs between a layer's routes and the segment that makes its weights."""
    it, traces = prompt(np.random.default_rng(13), 6, 10), []
    for n in (EVERY_SLOT, slots):
        traces.append(tmp_path / f"{n}.parquet")
        with prerouted(model.path, ordered(3), prerouter=untrained, expert_slots=n, trace=traces[-1]) as engine:
            run(engine, it)
    assert trace_rows(traces[0]) == trace_rows(traces[1])


def claims_more_experts(info: TraceInfo, rows: list[dict[str, Any]]) -> tuple[TraceInfo, list[dict[str, Any]]]:
    return replace(info, n_expert=64), [{**row, "experts": [e + 40 for e in row["experts"]]} for row in rows]


def claims_fewer_layers(info: TraceInfo, rows: list[dict[str, Any]]) -> tuple[TraceInfo, list[dict[str, Any]]]:
    fewer = replace(info, moe_layers=info.moe_layers[:2], expert_bytes=info.expert_bytes[:2])
    return fewer, [row for row in rows if row["layer"] < 2]


def has_a_layer_twice(info: TraceInfo, rows: list[dict[str, Any]]) -> tuple[TraceInfo, list[dict[str, Any]]]:
    """And lacks another."""
    return info, [row for row in rows for _ in range(1 + (row["layer"] == 2)) if row["layer"] != 3]


def lacks_a_layer(info: TraceInfo, rows: list[dict[str, Any]]) -> tuple[TraceInfo, list[dict[str, Any]]]:
    return info, [row for row in rows if row["layer"] != 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (claims_more_experts, "another model"),
        (claims_fewer_layers, "another model"),
        (has_a_layer_twice, "twice"),
        (lacks_a_layer, "lack layers"),
    ],
)
def test_made_up_routes_are_refused(model: TinyModel, tmp_path: Path, change: Any, message: str) -> None:
    trace, made_up = tmp_path / "t.parquet", tmp_path / "made_up.parquet"
    with opened(model.path, expert_slots=20, trace=trace) as engine:
        run(engine, prompt(np.random.default_rng(14), 6, 4))
    with TraceReader(trace) as reader:
        table = pq.read_table(trace)
        info, rows = change(reader.info, table.to_pylist())
    schema = table.schema.with_metadata({METADATA_KEY: info.to_json().encode()})
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), made_up)
    with pytest.raises(InputError, match=message):
        prerouted(model.path, routes=made_up)

"""A trace holds what the engine did: every route, its weights, whose token it was; and recording changes no bit."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from fakes import OrderedReader
from harness import EVERY_SLOT, Prompt, assert_same_bits, opened, ordered, prompt, run, run_together
from tiny import T, TinyModel, write_tiny

from sluice.engine import Engine
from sluice.errors import InputError, ReadError
from sluice.memory import rss_bytes
from sluice.models.fingerprint import fingerprint
from sluice.trace import TraceReader
from sluice.trace.writer import ENCODER_BYTES
from sluice.types import Read

SMALL: dict[str, Any] = {"n_layers": 3, "n_embd": 64, "n_head": 2, "n_head_kv": 1, "head_dim": 32, "n_ff_exp": 96}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny(tmp_path_factory.mktemp("tracing") / "m.gguf", expert_type=T.Q8_0, n_expert=16, top_k=3, **SMALL)


Rows = list[dict[str, Any]]


def rows_of(path: Path) -> Rows:
    """The rows of a trace, which its reader accepts too."""
    with TraceReader(path) as reader:
        assert sum(len(batch) for batch in reader.batches(weights=True, scores=True)) == reader.n_rows
    return pq.read_table(path).to_pylist()


class FailingReader(OrderedReader):
    """Fails every read once `failing` is set."""

    failing = False

    def complete(self, read: Read) -> None:
        if self.failing:
            self.fail(read, ReadError("the disk is gone: reconnect it"))
        else:
            super().complete(read)


def traced(path: Path, out: Path, make_reader: Any = None, **options: Any) -> Engine:
    return opened(path, make_reader, **{"trace": out, "trace_scores": True, "trace_force": True, **options})


def reference(rows: Rows, k: int) -> None:
    """Every row's experts and weights follow from its scores: softmax, the k likeliest, divided by their sum."""
    for row in rows:
        scores = np.array(row["scores"], np.float64)
        assert scores.sum() == pytest.approx(1, abs=1e-5)
        best = np.argsort(-scores, kind="stable")[:k]
        assert row["experts"] == best.tolist()
        assert row["weights"] == pytest.approx((scores[best] / scores[best].sum()).tolist(), rel=1e-5)


@pytest.mark.parametrize("slots", [6, 20, EVERY_SLOT])
@pytest.mark.parametrize("prefetch", [False, True])
def test_routes_are_those_of_the_routers_scores(model: TinyModel, tmp_path: Path, slots: int, prefetch: bool) -> None:
    it = prompt(np.random.default_rng(3), 40, 12)  # 6 slots: a prompt's layer takes several waves
    with opened(model.path, expert_slots=slots, prefetch=prefetch) as engine:
        expected = run(engine, it)
    with traced(model.path, tmp_path / "t.parquet", expert_slots=slots, prefetch=prefetch) as engine:
        found, ledger = run(engine, it), engine.stats()
    assert_same_bits(found, expected, "recorded")

    rows = rows_of(tmp_path / "t.parquet")
    reference(rows, 3)
    steps = [(0, "prefill", range(40)), *((1 + i, "decode", [40 + i]) for i in range(12))]
    expected_rows = [
        (step, phase, 0, position, layer)
        for step, phase, positions in steps
        for layer in range(3)
        for position in (list(positions)[-1:] if layer == 2 else positions)  # the last layer: for what is wanted
    ]
    assert [(r["step"], r["phase"], r["sequence"], r["position"], r["layer"]) for r in rows] == expected_rows
    for phase in ("prefill", "decode"):
        mine = [row for row in rows if row["phase"] == phase]
        demands = {(row["step"], row["layer"], e) for row in mine for e in row["experts"]}
        assert len(demands) == ledger[phase]["demands"]
        assert 3 * len(mine) == ledger[phase]["token_demands"]


def test_scores_are_the_routers_own_products(model: TinyModel, tmp_path: Path) -> None:
    """The first layer's scores, computed anew from the file: with one token, attention adds only its own value."""
    config, w = model.config, model.weights
    token = 17
    with traced(model.path, tmp_path / "t.parquet", expert_slots=48, kv="f32") as engine, engine.session() as session:
        session.feed([token])
    [row] = [row for row in rows_of(tmp_path / "t.parquet") if row["layer"] == 0]

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean() + config.rms_eps) * weight

    x = w["token_embd.weight"][token].astype(np.float64)
    value = w["blk.0.attn_v.weight"] @ norm(x, w["blk.0.attn_norm.weight"])
    heads = np.concatenate([value] * (config.n_head // config.n_head_kv))
    x = x + w["blk.0.attn_output.weight"] @ heads
    logits = w["blk.0.ffn_gate_inp.weight"] @ norm(x, w["blk.0.ffn_norm.weight"])
    likely = np.exp(logits - logits.max())
    # ggml quantises what meets a Q8_0 matrix to 8 bits
    assert row["scores"] == pytest.approx((likely / likely.sum()).tolist(), abs=0.02)


def test_company_is_told_apart(model: TinyModel, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    prompts = [prompt(rng, n, 6) for n in (9, 3, 17)]
    with opened(model.path, expert_slots=20, streams=3) as engine:
        alone = [run(engine, it) for it in prompts]
    single: dict[int, list[tuple[Any, ...]]] = {}
    for i, it in enumerate(prompts):
        out = tmp_path / f"{i}.parquet"
        with traced(model.path, out, expert_slots=20, streams=3) as engine:
            run(engine, it)
        single[i] = [_content(row) for row in rows_of(out)]
    for seed in range(4):
        out = tmp_path / "t.parquet"
        with traced(model.path, out, ordered(seed), expert_slots=20, streams=3) as engine:
            together = run_together(engine, prompts, random.Random(seed))
        for i in range(3):
            assert_same_bits(together[i], alone[i], f"stream {i}")
        rows = rows_of(out)
        for i in range(3):  # what each did is what it does alone
            mine = [_content(row) for row in rows if row["sequence"] == i]
            assert Counter(mine) == Counter(single[i])
        for step in {row["step"] for row in rows}:
            assert len({row["phase"] for row in rows if row["step"] == step}) == 1


def _content(row: dict[str, Any]) -> tuple[Any, ...]:
    values = tuple(tuple(row[name]) for name in ("experts", "weights", "scores"))
    return row["position"], row["layer"], row["phase"], *values


def test_a_number_is_never_used_again(model: TinyModel, tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    with traced(model.path, out, expert_slots=20) as engine:
        for i in range(3):
            with engine.session() as session:
                assert session.stream == 0
                assert session.number == i
                assert engine.recorder is not None
                engine.recorder.domains[session.number] = f"d{i % 2}"
                session.feed([i, 1, 2])
    assert {(row["sequence"], row["domain"]) for row in rows_of(out)} == {(0, "d0"), (1, "d1"), (2, "d0")}


def test_a_rewound_session_goes_back(model: TinyModel, tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    with traced(model.path, out, expert_slots=20) as engine, engine.session() as session:
        session.feed([5, 6, 7])
        engine.decode([session], [8])
        session.rewind(2)
        engine.decode([session], [7])
    first = [row for row in rows_of(out) if row["layer"] == 0]
    assert [(row["position"], row["phase"], row["sequence"]) for row in first] == [
        (0, "prefill", 0), (1, "prefill", 0), (2, "prefill", 0), (3, "decode", 0), (2, "decode", 0),
    ]  # fmt: skip
    assert first[2]["experts"] == first[4]["experts"]


def test_logits_of_every_token_take_all_columns(model: TinyModel, tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    with traced(model.path, out, expert_slots=20) as engine:
        engine.logits(list(range(30)))
    rows = rows_of(out)
    assert [row["position"] for row in rows if row["layer"] == 2] == list(range(30))
    reference(rows, 3)


def test_fewer_experts_are_recorded_as_chosen(model: TinyModel, tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    with traced(model.path, out, expert_slots=20, top_k_experts=2) as engine:
        run(engine, Prompt([1, 2, 3, 4], [5, 6]))
    reference(rows_of(out), 2)
    with TraceReader(out) as reader:
        assert reader.info.top_k == 2


def test_a_failed_step_leaves_those_before(model: TinyModel, tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    made: list[Any] = []

    def make(files: Any, pool: Any, locate: Any) -> Any:
        made.append(FailingReader(files, pool, locate))
        return made[0]

    with traced(model.path, out, make, expert_slots=4, prefetch=False) as engine, engine.session() as session:
        session.feed([1, 2, 3])
        made[0].failing = True
        with pytest.raises(ReadError):
            for token in range(20):
                engine.decode([session], [token])
    rows = rows_of(out)
    assert rows[0]["step"] == 0 and {row["phase"] for row in rows if row["step"] == 0} == {"prefill"}
    reference(rows, 3)


def test_the_trace_says_what_it_was_recorded_on(model: TinyModel, tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    with traced(model.path, out, expert_slots=20) as engine:
        run(engine, Prompt([1, 2], [3]))
        expected = fingerprint(engine.file, engine.spec)
        assert engine.fingerprint == expected
    with TraceReader(out) as reader:
        info = reader.info
    assert (info.fingerprint, info.architecture, info.name) == (expected, "qwen3moe", "tiny-qwen3moe")
    assert (info.n_layers, info.moe_layers, info.n_expert, info.top_k) == (3, (0, 1, 2), 16, 3)
    expert = sum(model.stored[f"blk.0.ffn_{part}_exps.weight"][0][0].nbytes for part in ("gate", "up", "down"))
    assert info.expert_bytes == (expert,) * 3
    assert info.source.startswith("sluice ")


def test_nothing_is_overwritten(model: TinyModel, tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    out.write_bytes(b"mine")
    with pytest.raises(InputError, match="--force"):
        opened(model.path, expert_slots=20, trace=out)
    with pytest.raises(InputError, match="the model itself"):
        opened(model.path, expert_slots=20, trace=model.path, trace_force=True)
    with traced(model.path, out, expert_slots=20):
        pass  # nothing was recorded
    assert out.read_bytes() == b"mine" and list(tmp_path.iterdir()) == [out]


def test_a_budget_counts_what_recording_takes(model: TinyModel, tmp_path: Path) -> None:
    """The engine's own arrays are there before it measures the process, and there is room for the encoder's."""
    with opened(model.path, expert_slots=20) as engine:
        plain = engine.plan.needs
    with traced(model.path, tmp_path / "t.parquet", expert_slots=20) as engine:
        recording = engine.plan.needs
        before = rss_bytes()
        writer = engine.recorder
        assert writer is not None
        one = np.zeros(1, np.int32)
        experts, scores, weights = np.arange(3)[None], np.random.rand(1, 16), np.random.rand(1, 3)
        for i in range(2 * writer._size):
            writer.begin_step(i, "decode", one, one + i)
            writer.chose(0, experts, scores)
            writer.weighed(weights)
        assert rss_bytes() - before <= ENCODER_BYTES
    assert recording.process - plain.process >= ENCODER_BYTES
    assert recording.workspace - plain.workspace == 4096 * -(-4 * 256 * 3 // 4096)


@pytest.mark.parametrize("family", ["llama", "dense-first", "tied"])
def test_other_shapes(tmp_path: Path, family: str) -> None:
    more: dict[str, Any] = {
        "llama": {"arch": "llama"}, "dense-first": {"dense_layers": (0, 3), "n_layers": 4}, "tied": {"tied": True},
    }[family]  # fmt: skip
    path = write_tiny(tmp_path / "m.gguf", expert_type=T.Q8_0, **{**SMALL, **more}).path
    it = prompt(np.random.default_rng(1), 30, 6)
    with opened(path, expert_slots=6) as engine:
        expected = run(engine, it)
    with traced(path, tmp_path / "t.parquet", expert_slots=6) as engine:
        assert_same_bits(run(engine, it), expected, family)
        layers = engine.spec.moe_layers
    rows = rows_of(tmp_path / "t.parquet")
    reference(rows, 2)
    assert {row["layer"] for row in rows} == set(layers)
    if family == "dense-first":  # a dense layer comes after: the last layer with experts runs for all
        assert sum(row["layer"] == 2 for row in rows) == 36

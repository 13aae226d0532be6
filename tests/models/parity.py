"""Holds Sluice against llama.cpp, and against itself, on one file; knows no architecture.

The functions that compare give figures, the ones that start with `assert_` say what figures will do. Keys and values
are float32 on both sides, and llama.cpp's flash attention is off (see oracles.py).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from engine.harness import (
    EVERY_SLOT,
    Prompt,
    assert_same_bits,
    hear_the_routers,
    opened,
    ordered,
    resident,
    run,
    run_together,
    simulated,
)
from family_file import FamilyFile, FamilyModel
from oracles import (
    llamacpp_each,
    llamacpp_greedy,
    llamacpp_logits,
    llamacpp_together,
    top_logprobs,
    transformers_causal,
)

from sluice.engine.workspace import CHUNK
from sluice.experts.rerouting import Rerouting
from sluice.ggml import load_library
from sluice.routing import init_prerouter

N = 96  # positions compared; at least 64
PREFIX = 24  # of them prefilled in the decode path, the rest are decoded one by one
TOP = 20  # likeliest tokens whose log-probabilities are compared
LONG = 4100  # tokens of a long prompt
N_TOKENS = 397  # ids of the tiny vocabulary that are text
BATCH = ((40, 24), (1, 30), (70, 8), (7, 20))  # tokens of a batch's prompts, and tokens decoded after each
SHORT = ((33, 5), (1, 9), (68, 2), (7, 6), (2, 3), (CHUNK + 2, 2))

TRANSFORMERS_L2 = 1e-4
RELATIVE_L2 = 1e-3  # of float32 files. Measured: about 1e-6. A wrong norm, rope or routing weight costs 1e-2 and more.
# Of quantised files: activations are rounded to 8 bits before the products, so a last bit that another build of ggml
# computes otherwise moves one to the next step; layers make that larger, and a recurrent state carries it on to every
# later position. Measured: 0 as a rule, up to 0.035 where that happened early.
MEDIAN = 0.05
TIE = 0.5  # log-probability that no rounding makes up for


@dataclass(frozen=True)
class Parity:
    """How far logits are from llama.cpp's.

    `median` and `noise` (99th percentile) are of the distances between log-probabilities of llama.cpp's TOP likeliest
    tokens. `flips` counts positions whose likeliest token is another one, `untied` those of them where that is no tie:
    where llama.cpp's own first and second lie further apart than twice the noise, by which each could have moved, or
    than TIE.
    """

    what: str
    positions: int
    relative_l2: float
    median: float
    noise: float
    flips: int
    untied: int


def token_ids(n: int, seed: int = 11) -> list[int]:
    """`n` random text tokens."""
    return np.random.default_rng(seed).integers(0, N_TOKENS, n).tolist()


def compare(what: str, found: np.ndarray, expected: np.ndarray) -> Parity:
    """Figures of logits [positions, n_vocab] beside llama.cpp's."""
    assert found.shape == expected.shape, f"{what}: {found.shape} instead of {expected.shape}"
    ids, theirs = top_logprobs(expected, TOP)
    wide = found.astype(np.float64)
    ours = np.take_along_axis(wide - np.logaddexp.reduce(wide, axis=1, keepdims=True), ids, axis=1)
    apart = np.abs(ours - theirs)
    noise = float(np.quantile(apart, 0.99))
    differ = found.argmax(axis=1) != ids[:, 0]
    figures = Parity(
        what=what,
        positions=len(found),
        relative_l2=float(np.linalg.norm(wide - expected) / np.linalg.norm(expected)),
        median=float(np.median(apart)),
        noise=noise,
        flips=int(differ.sum()),
        untied=int((differ & (theirs[:, 0] - theirs[:, 1] > min(2 * noise, TIE))).sum()),
    )
    if path := os.environ.get("SLUICE_FIGURES"):  # benchmarks/models_table.py makes docs/models.md of these
        with Path(path).open("a") as file:
            file.write(json.dumps({"test": os.environ["PYTEST_CURRENT_TEST"], **asdict(figures)}) + "\n")
    return figures


def assert_parity(figures: Sequence[Parity], *, float32: bool) -> None:
    """The bars: >= 64 positions, the same likeliest tokens except at ties, and the distance that the weights allow."""
    for it in figures:
        assert it.positions >= 64, it
        assert it.untied == 0, it
        assert it.relative_l2 <= RELATIVE_L2 if float32 else it.median <= MEDIAN, it


# --- against llama.cpp


def logits_parity(model: FamilyModel, *, float32: bool) -> list[Parity]:
    """Prefill, and one token at a time after a prompt, with hardly more slots than one token needs."""
    ids = token_ids(N)
    # Quantised, llama.cpp takes one token at a time: its own answer moves with the number it takes at once.
    expected = llamacpp_logits(model.path, ids, chunk=512 if float32 else 1)
    with opened(model.path, kv="f32", expert_slots=model.top_k + 1) as engine:
        prefilled = engine.logits(ids)
        decoded = run(engine, Prompt(ids[:PREFIX], ids[PREFIX:]))
    return [compare("prefill", prefilled, expected), compare("decode", decoded, expected[PREFIX - 1 :])]


def batch_parity(model: FamilyModel, *, float32: bool) -> Parity:
    """Four prompts of mixed lengths fed together and decoded together, as llama.cpp does it in one context.

    Asserts that each has the very bits that it has alone.
    """
    prompts = prompts_of(BATCH)
    expected = llamacpp_together(model.path, prompts, chunk=512 if float32 else 1)
    with opened(model.path, kv="f32", expert_slots=model.top_k + 1) as engine:
        alone = [run(engine, it) for it in prompts]
    with opened(model.path, kv="f32", expert_slots=2 * model.top_k, streams=len(prompts)) as engine:
        sessions = [engine.session() for _ in prompts]
        fed = engine.prefill_many([(session, it.ids) for session, it in zip(sessions, prompts, strict=True)])
        rows = {i: [logits.copy()] for i, logits in fed}
        for at in range(max(len(it.forced) for it in prompts)):
            going = [i for i, it in enumerate(prompts) if at < len(it.forced)]
            logits = engine.decode([sessions[i] for i in going], [prompts[i].forced[at] for i in going])
            for i, row in zip(going, logits, strict=True):
                rows[i].append(row.copy())
    found = [np.stack(rows[i]) for i in range(len(prompts))]
    for i, each in enumerate(found):
        assert_same_bits(each, alone[i], f"prompt {i} of {len(prompts)} together")
    ends = [rows[len(it.ids) - 1 :] for rows, it in zip(expected, prompts, strict=True)]
    return compare("batch of 4", np.concatenate(found), np.concatenate(ends))


def long_parity(model: FamilyModel, *, float32: bool = True) -> Parity:
    """The positions from LONG on, decoded one by one after a prompt of that length."""
    ids = token_ids(LONG + 64)
    expected = llamacpp_logits(model.path, ids, chunk=512)
    with opened(model.path, kv="f32", ctx=LONG + 64, expert_slots=2 * model.top_k) as engine:
        found = run(engine, Prompt(ids[:LONG], ids[LONG:]))
    return compare(f"position {LONG}", found, expected[LONG - 1 :])


def greedy_pair(model: FamilyModel, n: int = 64) -> tuple[list[int], list[int]]:
    """The `n` likeliest tokens after a prompt, each fed back: Sluice's and llama.cpp's. Float32 files only."""
    ids = token_ids(16)
    with opened(model.path, kv="f32", expert_slots=model.top_k + 1) as engine:
        ours = [token.id for token in engine.generate(ids, n, temperature=0.0, ignore_eos=True)]
    return ours, llamacpp_greedy(model.path, ids, n)


# --- against transformers


def assert_transformers(
    model: FamilyModel, there: str, config: Mapping[str, Any], state: Mapping[str, np.ndarray], *,
    llamacpp: bool = False,
) -> None:  # fmt: skip
    """Logits are those of transformers' class `there`, to 1e-4; with `llamacpp`, llama.cpp's are too."""
    ids = token_ids(N)
    expected = transformers_causal(there, config, state, ids)
    if llamacpp:
        assert compare("llama.cpp", llamacpp_logits(model.path, ids), expected).relative_l2 <= TRANSFORMERS_L2
    with opened(model.path, kv="f32", expert_slots=model.top_k + 1) as engine:
        assert compare("Sluice", engine.logits(ids), expected).relative_l2 <= TRANSFORMERS_L2


# --- against itself


def prompts_of(lengths: Sequence[tuple[int, int]]) -> list[Prompt]:
    """Random prompts, each with the tokens to decode after it."""
    return [Prompt(token_ids(n, seed=i), token_ids(m, seed=100 + i)) for i, (n, m) in enumerate(lengths)]


def assert_streamed_is_resident(model: FamilyModel, *, kv: str = "f16", seed: int = 0) -> None:
    """Any budget, policy and order of reads, alone and in changing company, gives a resident engine's bits."""
    rng = random.Random(seed)
    prompts = prompts_of(SHORT)
    with resident(model.path, kv=kv, ctx=600) as engine:
        expected = [run(engine, it) for it in prompts]
    assert all(np.isfinite(rows).all() for rows in expected)
    for slots, policy, streams in ((0, "lru", 1), (1, "lfu", 6), (model.top_k, "cyclic", 6)):
        options = {"expert_slots": model.top_k + slots, "policy": policy, "streams": streams, "kv": kv, "ctx": 600}
        with opened(model.path, ordered(rng.randrange(1 << 32)), **options) as engine:
            found = run_together(engine, prompts, rng) if streams > 1 else [run(engine, it) for it in prompts]
            assert engine.store.cache.counters.evictions > 0
        for i, rows in enumerate(found):
            assert_same_bits(rows, expected[i], f"{options}, prompt {i}")


def assert_sessions_start_afresh(model: FamilyModel, *, kv: str = "f16") -> None:
    """A request after another in one engine, on the same stream, is that request in a process of its own.

    So it is in a session that is rewound, wholly or to some tokens, which counts as feeding those first.
    """
    first, second, *_ = prompts_of(SHORT)
    with opened(model.path, kv=kv, expert_slots=model.top_k + 1) as engine:
        found = [run(engine, it) for it in (first, second, first)]
        with engine.session() as session:
            session.feed(first.ids[:20])
            pieces = session.feed(second.ids).copy()
            session.rewind(0)
            again = session.feed(second.ids).copy()
            session.rewind(0)
            session.feed(first.ids)
            session.rewind(20)
            rewound = session.feed(second.ids).copy()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        expected = pool.submit(run_in_new_engine, model.path, second, kv, model.top_k + 1).result()
    assert_same_bits(found[1], expected, "the second request")
    assert_same_bits(found[2], found[0], "the first request, once more")
    assert_same_bits(again[None], expected[:1], "after rewinding to nothing")
    assert_same_bits(rewound[None], pieces[None], "after rewinding to 20 tokens")


def assert_prerouted(model: FamilyModel) -> None:
    """The true routes, as if predicted, give exact bits; what untrained heads predict doesn't depend on company."""
    folder, prompts = model.path.parent, prompts_of(SHORT)[:2]
    trace, heads = folder / "routes.parquet", folder / "heads.safetensors"
    with opened(model.path, trace=trace, expert_slots=EVERY_SLOT) as engine:
        expected = [run(engine, it) for it in prompts]
    for slots in (model.top_k + 2, EVERY_SLOT):
        with opened(model.path, ordered(3), routing="prerouted", routes=trace, expert_slots=slots) as engine:
            for it, rows in zip(prompts, expected, strict=True):
                assert_same_bits(run(engine, it), rows, f"true routes, {slots} slots")
    init_prerouter(model.path, heads, load_library(), hidden=16)
    options: dict[str, Any] = {"routing": "prerouted", "prerouter": heads, "expert_slots": model.top_k + 2}
    predicted, crowded = folder / "predicted.parquet", folder / "crowded.parquet"
    roomy: dict[str, Any] = {**options, "expert_slots": EVERY_SLOT}
    with opened(model.path, trace=predicted, **roomy) as engine:
        alone = [run(engine, it) for it in prompts]
    with opened(model.path, ordered(5), trace=crowded, **options) as engine:
        for it, rows in zip(prompts, alone, strict=True):
            assert_same_bits(run(engine, it), rows, "predicted routes, and few slots")
    assert pq.read_table(predicted) == pq.read_table(crowded), "what the traces say of weights"
    assert not all(np.array_equal(a, b) for a, b in zip(alone, expected, strict=True)), "heads had no say"
    with opened(model.path, ordered(4), streams=2, **options) as engine:
        for rows, other in zip(run_together(engine, prompts, random.Random(1)), alone, strict=True):
            assert_same_bits(rows, other, "predicted routes, in company")


def assert_rerouted(model: FamilyModel) -> None:
    """Without a margin every bit is exact; with one the ledger is the simulator's, by the family's own scores."""
    prompts, slots, trace = prompts_of(SHORT)[:2], 3 * model.top_k, model.path.with_name("rerouted.parquet")
    with resident(model.path) as engine:
        expected = [run(engine, it) for it in prompts]
    with opened(model.path, ordered(5), expert_slots=slots, reroute=0.0, reroute_keep=0) as engine:
        for it, rows in zip(prompts, expected, strict=True):
            assert_same_bits(run(engine, it), rows, "rerouted without a margin")
    rule = Rerouting(1e3, 0)
    options: dict[str, Any] = {"expert_slots": slots, "policy": "lru", "streams": 2, "trace": trace}
    with opened(
        model.path, ordered(6), trace_scores=True, reroute=rule.margin, reroute_keep=rule.keep, **options
    ) as engine:  # fmt: skip
        hear_the_routers(engine)
        for rows in run_together(engine, prompts, random.Random(2)):
            assert np.isfinite(rows).all()
        decode = engine.stats()["decode"]
    found = simulated(trace, rule, slots=slots)
    assert decode["substituted"] == found.substituted > 0
    assert (decode["demands"], decode["misses"]) == (found.demands, found.misses)
    assert decode["reroute_kl"] == pytest.approx(found.reroute_kl, rel=1e-9) and decode["reroute_kl"] > 0


def run_in_new_engine(path: Path, it: Prompt, kv: str, slots: int) -> np.ndarray:
    """`run`, for another process."""
    with opened(path, kv=kv, expert_slots=slots) as engine:
        return run(engine, it)


def assert_skipped_tensors_change_nothing(model: FamilyModel, without: FamilyModel) -> None:
    """A file with a block that is skipped gives the bits of the one without it."""
    ids = token_ids(N)
    rows = []
    for it in (model, without):
        with opened(it.path, expert_slots=it.top_k + 1) as engine:
            rows.append(engine.logits(ids))
    assert len(model.stored) > len(without.stored)
    assert_same_bits(rows[0], rows[1], "with a skipped block")


# --- of the files themselves


def weight_of_tensors(file: FamilyFile, folder: Path) -> dict[str, float]:
    """Of each tensor, the relative L2 by which llama.cpp's logits change when it is zeros: what parity could notice."""
    whole = file.write(folder / "whole.gguf").path
    zeroed = [file.write(folder / f"without{i}.gguf", zeroed=name).path for i, name in enumerate(file.stored)]
    expected, *others = llamacpp_each([whole, *zeroed], token_ids(64))
    assert np.isfinite(expected).all()
    # of a random file: logits that differ from token to token, and are no coin toss
    assert 1.0 < expected.std(axis=1).mean() < 6.0 and len(set(expected.argmax(axis=1).tolist())) > 32
    changes = [float(np.linalg.norm(other - expected) / np.linalg.norm(expected)) for other in others]
    return dict(zip(file.stored, changes, strict=True))

"""Streamed logits are the resident ones, bit for bit, whatever the budget, policy, order of reads, file or company.

A case is one prompt in one engine, with the tokens forced after it, compared with the same prompt in an engine that
keeps every expert. SLUICE_EXACT_CASES sets how many random cases there are.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import EVERY_SLOT, Prompt, assert_same_bits, opened, ordered, prompt, resident, run, run_together
from tiny import T, write_tiny

from sluice.engine import Engine
from sluice.engine import engine as engine_module
from sluice.engine import workspace as workspace_module
from sluice.engine.workspace import CHUNK
from sluice.ggml import load_library
from sluice.models.kv_cache import KV_PADDING, KV_TYPES
from sluice.pack import pack

CASES = int(os.environ.get("SLUICE_EXACT_CASES", "2100"))
CASES_PER_ENGINE = 25
POLICIES = ("lru", "lfu", "cyclic")
KV = ("f16", "f32", "q8_0", "q4_0", "f16,q8_0", "q8_0,f32")
assert {name for kv in KV for name in kv.split(",")} == set(KV_TYPES)

SMALL: dict[str, Any] = {"n_embd": 64, "n_head": 2, "n_head_kv": 1, "head_dim": 32, "expert_type": T.Q8_0}
FILES: dict[str, dict[str, Any]] = {
    # an expert's matrices are 34 blocks of 512 bytes: they are read in place
    "in place": {**SMALL, "n_ff_exp": 256},
    # 12.75 blocks, which start anywhere in a block: they go through the bounce buffer
    "bounced": {**SMALL, "n_ff_exp": 96, "arch": "llama"},
    "k-quants": {"n_head": 2, "expert_type": [T.Q4_K, T.Q6_K, T.Q3_K], "down_type": [T.Q6_K, T.Q8_0, T.Q5_K]},
    "mixed": {
        **SMALL, "n_layers": 6, "n_ff_exp": 64, "n_expert": 5,
        "expert_type": [T.F16, T.F32, T.Q5_0, T.IQ4_NL, T.Q4_1, T.MXFP4],
        "down_type": [T.Q5_1, T.IQ4_NL, T.F32, T.Q4_0, T.BF16], "dense_type": [T.F16, T.Q8_0, T.Q4_0],
    },
    "dense layers": {**SMALL, "n_layers": 6, "n_ff_exp": 64, "dense_layers": (0, 2, 3, 5)},
    "fused": {**SMALL, "n_ff_exp": 96, "fused": True, "dense_layers": (1,), "arch": "llama"},
    "split": {**SMALL, "n_ff_exp": 64, "split": 3, "empty_first_shard": True, "shuffled": True, "n_layers": 4},
    "tied": {
        **SMALL, "arch": "llama", "n_ff_exp": 64, "tied": True, "n_head": 3, "n_head_kv": 3, "rope_freqs": True,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_context_length": 64},
    },
    "top one": {**SMALL, "n_ff_exp": 64, "n_layers": 2, "n_expert": 3, "top_k": 1, "n_head": 5},
    "many experts": {**SMALL, "n_ff_exp": 32, "n_layers": 2, "n_expert": 48, "top_k": 8},
    "every expert": {**SMALL, "n_ff_exp": 32, "n_layers": 2, "n_expert": 4, "top_k": 4},
}  # fmt: skip
PACKED = {"packed bounced": "bounced", "packed k-quants": "k-quants", "packed mixed": "mixed", "packed fused": "fused",
          "packed split": "split"}  # fmt: skip
QUOTA = -(-CASES // (len(FILES) + len(PACKED)))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models by name; a packed one beside the stock one it was made of."""
    folder = tmp_path_factory.mktemp("exact")
    paths = {name: write_tiny(folder / f"{name}.gguf", **options).path for name, options in FILES.items()}
    for name, source in PACKED.items():
        paths[name] = folder / f"{name}.gguf"
        pack(paths[source], paths[name], load_library())
    return paths


class Reference:
    """Prompts of one model and the resident engine's logits for them, by KV type."""

    def __init__(self, path: Path, prompts: list[Prompt]) -> None:
        self.path = path
        self.prompts = prompts
        self._rows: dict[str, list[np.ndarray]] = {}

    def rows(self, kv: str) -> list[np.ndarray]:
        """Logits [1 + n_forced, n_vocab] of every prompt."""
        if kv not in self._rows:
            with resident(self.path, kv=kv) as engine:
                self._rows[kv] = [run(engine, it) for it in self.prompts]
            assert all(np.isfinite(rows).all() for rows in self._rows[kv])
        return self._rows[kv]


def random_options(rng: random.Random, top_k: int, n_all: int) -> dict[str, Any]:
    """An engine's options. Small budgets are likelier: they make more of the machinery work."""
    slots = rng.choice([top_k, top_k + 1, rng.randint(top_k, max(top_k, n_all // 3)), rng.randint(top_k, n_all)])
    options: dict[str, Any] = {
        "expert_slots": slots,
        "policy": rng.choice(POLICIES),
        "kv": rng.choice(KV),
        "prefetch": rng.random() < 0.7,
        "overlap": rng.random() < 0.8,
        "streams": rng.choice([1, 1, 2, 4]),
    }
    if rng.random() < 0.3:
        options |= {"io_threads": rng.randint(1, 4), "reader": rng.choice(["auto", "threads"])}
    else:
        shares = rng.choice([0.0, 0.5]), rng.choice([0.0, 0.3, 1.0])
        options["make_reader"] = ordered(rng.randrange(1 << 32), running_share=shares[0], poll_share=shares[1])
    return options


def random_cases(engine: Engine, n_streams: int, prompts: list[Prompt], rng: random.Random, n: int) -> Iterator[
    tuple[int, np.ndarray]
]:  # fmt: skip
    """`n` times (number of a prompt, its logits)."""
    while n > 0:
        chosen = rng.choices(range(len(prompts)), k=min(n, rng.randint(1, n_streams)))
        yield from zip(chosen, run_together(engine, [prompts[i] for i in chosen], rng), strict=True)
        n -= len(chosen)


@pytest.mark.parametrize("name", [*FILES, *PACKED])
def test_any_engine_gives_the_resident_bits(files: dict[str, Path], name: str) -> None:
    rng, numbers = random.Random(name), np.random.default_rng(len(name))
    lengths = [1, 1, 2, 3, 63, 64, 65, 100, *(int(n) for n in numbers.integers(4, 33, 12))]
    prompts = [prompt(numbers, n, rng.randint(0, 6)) for n in lengths]
    reference = Reference(files[PACKED.get(name, name)], prompts)
    done = evictions = 0
    while done < QUOTA:
        options = random_options(rng, *shape_of(name))
        what = f"{name}, engine after {done} cases, {options}"
        expected = reference.rows(options["kv"])
        with opened(files[name], **options) as engine:
            for i, rows in random_cases(engine, options["streams"], prompts, rng, min(CASES_PER_ENGINE, QUOTA - done)):
                done += 1
                assert_same_bits(rows, expected[i], f"{what}: prompt {i}, case {done}")
            evictions += engine.store.cache.counters.evictions
            engine.store.cache.check()
    assert done == QUOTA and evictions > done


def shape_of(name: str) -> tuple[int, int]:
    """top_k, and the number of experts over all layers."""
    options = FILES[PACKED.get(name, name)]
    n_layers = options.get("n_layers", 3) - len(options.get("dense_layers", ()))
    return options.get("top_k", 2), n_layers * options.get("n_expert", 8)


def test_there_are_enough_cases() -> None:
    assert QUOTA * (len(FILES) + len(PACKED)) >= CASES >= 2000


# --- chunks of a prompt


def in_pieces(session: Any, ids: list[int], *, cuts: tuple[int, ...]) -> np.ndarray:
    """Feed `ids` in pieces that end at `cuts`."""
    for start, end in zip((0, *cuts[:-1]), cuts, strict=True):
        session.feed(ids[start:end])
    return session.feed(ids[cuts[-1] :])


@pytest.mark.parametrize("n", [500, CHUNK - 1, CHUNK, CHUNK + 1, 600, 2 * CHUNK + 6])
@pytest.mark.parametrize("name", ["in place", "packed bounced"])
def test_prompts_across_chunk_borders(files: dict[str, Path], name: str, n: int) -> None:
    it = prompt(np.random.default_rng(n), n, 14)
    cuts = tuple(range(CHUNK, n, CHUNK))
    for kv in ("f16", "f32" if n % 2 else "q8_0"):
        with resident(files[PACKED.get(name, name)], ctx=1100, kv=kv) as engine:
            expected = run(engine, it)
            assert_same_bits(engine.logits(it.ids)[-1:], expected[:1], f"all logits, {kv}")
        for slots, policy in ((2, "lru"), (5, "lfu"), (13, "cyclic")):
            with opened(files[name], ordered(n), ctx=1100, kv=kv, expert_slots=slots, policy=policy) as engine:
                assert_same_bits(run(engine, it), expected, f"{kv}, {slots} slots, {policy}")
                if cuts:
                    rows = run(engine, it, partial(in_pieces, cuts=cuts))
                    assert_same_bits(rows, expected, f"in pieces, {kv}, {slots} slots, {policy}")


def set_chunk(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    for module in (engine_module, workspace_module):  # how wide a step may be, and where prompts are cut
        monkeypatch.setattr(module, "CHUNK", n)


@pytest.mark.parametrize("chunk", [1, 7, 32, 80])
def test_chunks_of_other_sizes(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    set_chunk(monkeypatch, chunk)
    rng, numbers = random.Random(chunk), np.random.default_rng(chunk)
    prompts = [prompt(numbers, n, 4) for n in (1, chunk, chunk + 1, 2 * chunk, 3 * chunk + 2, 100)]
    with resident(files["mixed"]) as engine:
        expected = [run(engine, it) for it in prompts]
    for slots, streams in ((2, 1), (6, 3), (EVERY_SLOT, 4)):
        with opened(files["mixed"], ordered(chunk), expert_slots=slots, streams=streams) as engine:
            for i, it in enumerate(prompts):
                cut = len(it.ids) // chunk // 2 * chunk
                feed = partial(in_pieces, cuts=(cut,)) if 0 < cut < len(it.ids) else None
                assert_same_bits(run(engine, it, feed), expected[i], f"{slots} slots, prompt {i} cut at {cut}")
            for i, rows in random_cases(engine, streams, prompts, rng, 12):
                assert_same_bits(rows, expected[i], f"{slots} slots, prompt {i} of {streams} streams")


def test_a_chunk_of_one_token_in_the_middle_of_a_prompt(files: dict[str, Path]) -> None:
    it = prompt(np.random.default_rng(9), CHUNK + 2, 2)
    feed = partial(in_pieces, cuts=(CHUNK - 1,))  # the rest goes as one token, whose logits nobody wants, and two more
    with resident(files["in place"], ctx=600) as engine:
        expected = run(engine, it, feed)
    for slots in (2, 5, 24):
        with opened(files["in place"], ordered(slots), expert_slots=slots, ctx=600) as engine:
            assert_same_bits(run(engine, it, feed), expected, f"{slots} slots")


# --- decoding


@pytest.mark.parametrize(("kv", "threads"), [("f16", 1), ("f32", 1), ("q4_0", 1), ("f16", 2)])
def test_decoding_across_padding_borders(files: dict[str, Path], kv: str, threads: int) -> None:
    options: dict[str, Any] = {"kv": kv, "threads": threads, "ctx": 600}
    prompts = [prompt(np.random.default_rng(n), n, 4) for n in (KV_PADDING - 2, 2 * KV_PADDING - 2, 20)]
    with resident(files["in place"], **options) as engine:
        expected = [run(engine, it) for it in prompts]
    for seed, slots in enumerate((2, 3, 9)[: 4 - threads]):
        with opened(files["in place"], ordered(seed), expert_slots=slots, streams=3, **options) as engine:
            for i, rows in enumerate(run_together(engine, prompts, random.Random(seed))):
                assert_same_bits(rows, expected[i], f"{slots} slots, stream {i}")


@pytest.mark.parametrize("name", ["mixed", "packed k-quants"])
def test_two_threads(files: dict[str, Path], name: str) -> None:
    # Few and short: where two threads don't get two cores, each of a graph's barriers waits for a turn.
    rng, numbers = random.Random(name), np.random.default_rng(6)
    prompts = [prompt(numbers, n, 1) for n in (1, 5, 66)]
    with resident(files[PACKED.get(name, name)], threads=2) as engine:
        expected = [run(engine, it) for it in prompts]
    for seed, slots in enumerate((2, 7)):
        options: dict[str, Any] = {"expert_slots": slots, "streams": 2, "threads": 2}
        with opened(files[name], ordered(seed), **options) as engine:
            for i, rows in random_cases(engine, 2, prompts, rng, 5):
                assert_same_bits(rows, expected[i], f"{slots} slots, prompt {i}")


def test_company_of_many_streams(files: dict[str, Path]) -> None:
    # 24 streams: more logits rows than a small workspace has, and steps that demand more experts than there are slots.
    numbers = np.random.default_rng(7)
    prompts = [prompt(numbers, int(n), 5) for n in numbers.integers(1, 40, 24)]
    with resident(files["many experts"]) as engine:
        expected = [run(engine, it) for it in prompts]
    for seed, slots in enumerate((8, 9, 40, 96)):
        with opened(files["many experts"], ordered(seed), expert_slots=slots, streams=24) as engine:
            for i, rows in enumerate(run_together(engine, prompts, random.Random(seed))):
                assert_same_bits(rows, expected[i], f"{slots} slots, stream {i}")


def test_a_rewound_session_is_as_good_as_a_new_one(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    set_chunk(monkeypatch, 16)
    numbers = np.random.default_rng(3)
    first, second = (prompt(numbers, 40, 3) for _ in range(2))
    joined = Prompt(first.ids[:32] + second.ids, second.forced)
    with resident(files["fused"]) as engine:
        expected = run(engine, joined)
    with opened(files["fused"], ordered(0), expert_slots=3) as engine, engine.session() as session:
        session.feed(first.ids)
        for token in first.forced:
            engine.decode([session], [token])
        session.rewind(32)
        rows = [session.feed(second.ids).copy()]
        rows += [engine.decode([session], [token])[0].copy() for token in second.forced]
        assert_same_bits(np.stack(rows), expected, "rewound")
        assert session.tokens == joined.ids + joined.forced


def test_threads_agree_within_the_stated_tolerance(files: dict[str, Path]) -> None:
    # Not bit for bit (SPEC 2): f16 flash attention splits long sequences over threads. Same tokens all the same.
    it = prompt(np.random.default_rng(5), 100, 4)
    rows = []
    for threads in (1, 2):
        with opened(files["k-quants"], expert_slots=6, threads=threads) as engine:
            rows.append(run(engine, it))
    np.testing.assert_allclose(rows[1], rows[0], atol=1e-3 * np.abs(rows[0]).max())
    np.testing.assert_array_equal(rows[1].argmax(axis=1), rows[0].argmax(axis=1))

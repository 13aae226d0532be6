"""Opens engines on tiny models with readers whose order a test decides, and runs prompts; knows no expected values."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fakes import POISON, OrderedReader

from sluice.config import EngineConfig
from sluice.engine import Engine
from sluice.experts.rerouting import Rerouting
from sluice.lab.replay import Demands
from sluice.lab.rerouting import ReroutedResult, simulate_rerouting
from sluice.store import ReaderFactory
from sluice.trace import TraceReader
from sluice.types import Read

EVERY_SLOT = 1 << 20  # more slots than any test model has experts: everything becomes resident


class PoisoningReader(OrderedReader):
    """Fills a slot with NaN as soon as its read is submitted, so that a use before its completion shows."""

    def submit(self, read: Read) -> None:
        super().submit(read)
        for segment in self._locate(read):
            self._pool[segment.dest : segment.dest + segment.n_bytes] = bytes([POISON]) * segment.n_bytes


class Prompt(NamedTuple):
    """Tokens to feed, then tokens to decode one at a time whatever the logits say."""

    ids: list[int]
    forced: list[int]


def ordered(seed: int, *, running_share: float = 0.0, poll_share: float = 0.5) -> ReaderFactory:
    """A factory of PoisoningReaders, for `make_reader`."""
    return lambda files, pool, locate: PoisoningReader(
        files, pool, locate, random.Random(seed), running_share=running_share, poll_share=poll_share
    )


def opened(path: Path, make_reader: ReaderFactory | None = None, **options: Any) -> Engine:
    """An engine with a poisoned pool and, unless given, one thread and room for short prompts."""
    config = EngineConfig(**{"threads": 1, "ctx": 256, "poison": True, **options})
    return Engine(path, config, make_reader=make_reader)


def resident(path: Path, **options: Any) -> Engine:
    """An engine that keeps every expert it has read, and reads each when it is demanded."""
    return opened(path, expert_slots=EVERY_SLOT, prefetch=False, overlap=False, **options)


def prompt(rng: np.random.Generator, n: int, n_forced: int, n_vocab: int = 400) -> Prompt:
    return Prompt(rng.integers(0, n_vocab, n).tolist(), rng.integers(0, n_vocab, n_forced).tolist())


def run(engine: Engine, it: Prompt, feed: Callable[[Any, list[int]], np.ndarray] | None = None) -> np.ndarray:
    """Logits [1 + n_forced, n_vocab]: after the prompt, and after each forced token."""
    with engine.session() as session:
        rows = [(feed(session, it.ids) if feed else session.feed(it.ids)).copy()]
        rows += [engine.decode([session], [token])[0].copy() for token in it.forced]
    return np.stack(rows)


def run_together(engine: Engine, prompts: Sequence[Prompt], rng: random.Random) -> list[np.ndarray]:
    """`run` for several prompts at once: fed one by one or together, decoded in steps of changing company."""
    sessions = [engine.session() for _ in prompts]
    try:
        if rng.random() < 0.5:
            rows = [[session.feed(it.ids).copy()] for session, it in zip(sessions, prompts, strict=True)]
        else:
            rows = [[] for _ in prompts]
            fed = engine.prefill_many([(session, it.ids) for session, it in zip(sessions, prompts, strict=True)])
            for i, logits in fed:
                rows[i].append(logits.copy())
        while waiting := [i for i, it in enumerate(prompts) if len(rows[i]) <= len(it.forced)]:
            chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
            logits = engine.decode([sessions[i] for i in chosen], [prompts[i].forced[len(rows[i]) - 1] for i in chosen])
            for i, row in zip(chosen, logits, strict=True):
                rows[i].append(row.copy())
        return [np.stack(each) for each in rows]
    finally:
        for session in sessions:
            session.close()


def hear_the_routers(engine: Engine) -> None:
    """Have a rerouted engine's trace name what routers chose, not what was run instead."""
    recorder, arrays = engine.recorder, engine._stepper.workspace.arrays
    assert recorder is not None
    chose = recorder.chose

    def native(layer: int, experts: Any, scores: Any = None, columns: Any = None) -> None:
        chose(layer, arrays["selected"][: len(experts)], scores, columns)

    recorder.chose = native  # type: ignore[method-assign]


def simulated(trace: Path, rule: Rerouting, **options: Any) -> ReroutedResult:
    """What the simulator makes of decoding in a trace of the routers' choice; `policy` and `slots` in `options`."""
    with TraceReader(trace) as reader:
        demands = Demands.of(reader)
        reader.info = replace(reader.info, source="a test that wrote down what routers chose")
        policies, slots = [options.pop("policy", "lru")], [options.pop("slots")]
        return simulate_rerouting(
            reader, demands, policies, slots, [rule], pinned=(), **{"phase": "decode", **options}
        )[0]  # fmt: skip


def assert_same_bits(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Equal shapes and bits, NaN nowhere."""
    if not np.array_equal(found, expected):
        assert found.shape == expected.shape, f"{what}: {found.shape} instead of {expected.shape}"
        rows = np.flatnonzero((found != expected).any(axis=1)).tolist()
        apart = np.abs(found - expected).max()
        raise AssertionError(f"{what}: rows {rows} of {len(expected)} differ, by up to {apart}")

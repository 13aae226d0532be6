"""Plans in the engine: same bits, pins resident from the start, nothing counted that no router chose."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import OrderedReader
from harness import assert_same_bits, opened, ordered, prompt, resident, run, run_together
from tiny import write_tiny

from sluice.config import EngineConfig
from sluice.engine import Engine, placing
from sluice.errors import EngineClosed, InputError, ReadError
from sluice.experts.policies import POLICIES
from sluice.lab.replay import Demands
from sluice.plan.placement import replay_placed
from sluice.plan_file import Placement, read_plan, write_plan
from sluice.trace import TraceReader
from sluice.types import ExpertKey, Read

N_LAYERS, N_EXPERT, TOP_K = 3, 8, 2
EVERY = [ExpertKey(layer, expert) for layer in range(N_LAYERS) for expert in range(N_EXPERT)]
ON_DEMAND: dict[str, Any] = {"prefetch": False, "overlap": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("placing") / "tiny.gguf").path


@pytest.fixture(scope="module")
def described(model: Path) -> dict[str, Any]:
    engine = Engine(model, EngineConfig(threads=1, ctx=64), plan_only=True)
    return placing.model_of(engine.file, engine.spec, engine.fingerprint)


@pytest.fixture
def planned(described: dict[str, Any], tmp_path: Path) -> Any:
    """Writes a plan for the model: its path."""

    def write(
        pins: Sequence[ExpertKey] = (), load: Sequence[ExpertKey] = (), *, slots: int = 24, policy: str = "lru",
        **more: Any,
    ) -> Path:  # fmt: skip
        plan = Placement(
            **described, slots=slots, policy=policy, pins=tuple(pins), load=tuple(load), expected=None, source="a test"
        )
        write_plan(tmp_path / "plan.json", replace(plan, **more), force=True)
        return tmp_path / "plan.json"

    return write


@pytest.mark.parametrize("seed", range(24))
def test_any_plan_gives_the_resident_bits(model: Path, planned: Any, seed: int) -> None:
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    prompts = [prompt(numbers, n, 5) for n in (1, 2, 9, 40)]
    with resident(model) as engine:
        expected = [run(engine, it) for it in prompts]
    streams = rng.choice([1, 2])
    room = streams * TOP_K
    slots = rng.randint(room, 24)
    shuffled = rng.sample(EVERY, len(EVERY))
    n_pins = rng.choice([0, rng.randint(0, slots - room), slots - room])
    n_load = rng.randint(0, 24 - n_pins)
    policy = rng.choice(list(POLICIES))
    path = planned(shuffled[:n_pins], shuffled[n_pins : n_pins + n_load], policy=policy)
    shares = rng.choice([0.0, 0.5]), rng.choice([0.0, 0.3, 1.0])
    options: dict[str, Any] = {"expert_slots": slots, "streams": streams, "plan": path}
    options |= {"prefetch": rng.random() < 0.7, "overlap": rng.random() < 0.7}
    with opened(model, ordered(seed, running_share=shares[0], poll_share=shares[1]), **options) as engine:
        assert engine.placed is not None and engine.config.policy == policy
        assert (engine.placed.pins, engine.placed.loaded) == (n_pins, min(n_pins + n_load, slots))
        for start in range(0, len(prompts), streams):
            together = prompts[start : start + streams]
            for i, rows in enumerate(run_together(engine, together, rng)):
                assert_same_bits(rows, expected[start + i], f"prompt {start + i}, {options}, {n_pins} pins")
            engine.store.cache.check()


def test_everything_planned_is_there_before_the_first_step_and_counted_apart(model: Path, planned: Any) -> None:
    path = planned(EVERY[:4], EVERY[10:16])
    with opened(model, expert_slots=10, plan=path, **ON_DEMAND) as engine:
        cache, placed = engine.store.cache, engine.placed
        assert placed is not None
        assert set(cache.keys_resident()) == {*EVERY[:4], *EVERY[10:16]}
        assert not any(cache.counters.as_dict().values())
        stats = engine.store.reader.stats()
        assert stats.reads == placed.loaded == 10
        assert placed.bytes_read == stats.bytes_read == sum(engine.store.expert_bytes(k.layer) for k in EVERY[:10])
        assert all(phase["steps"] == phase["bytes_read"] == 0 for phase in engine.stats().values())
        # the hottest pin goes last, of what is loaded beside them the last
        assert cache.eviction_order() == [*EVERY[10:16], *reversed(EVERY[:4])]


def test_with_everything_loaded_nothing_is_read_again(model: Path, planned: Any) -> None:
    it = prompt(np.random.default_rng(1), 20, 10)
    with opened(model, expert_slots=24, plan=planned(EVERY[:5], EVERY[5:])) as engine:
        run(engine, it)
        for phase in engine.stats().values():
            assert phase["demands"] == phase["hits"] > 0
            assert phase["bytes_read"] == phase["reads"] == phase["evictions"] == phase["prefetch_issued"] == 0


def test_what_nobody_demanded_is_no_wasted_prefetch(model: Path, planned: Any) -> None:
    with opened(model, expert_slots=8, plan=planned([], EVERY[:8]), **ON_DEMAND) as engine:
        run(engine, prompt(np.random.default_rng(2), 1, 20))
        counters = engine.store.cache.counters
    assert counters.evictions > 8 and counters.hits + counters.misses == counters.demands
    assert counters.prefetch_wasted == counters.prefetch_issued == counters.prefetch_used == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_pins_stay_while_anything_else_can_go(model: Path, planned: Any, policy: str) -> None:
    pins = EVERY[::3]
    with opened(model, expert_slots=len(pins) + TOP_K, plan=planned(pins, policy=policy), **ON_DEMAND) as engine:
        cache = engine.store.cache
        with engine.session() as session:
            session.feed([1])
            for token in range(40):
                engine.decode([session], [token])
                assert all(cache.resident(key) for key in pins)
        decode = engine.stats()["decode"]
    assert decode["evictions"] > 0 and decode["hits"] > 0


def test_pins_do_not_stop_a_prompt_that_needs_every_slot(model: Path, planned: Any) -> None:
    it = prompt(np.random.default_rng(3), 60, 2)  # demands all 8 experts of a layer
    with resident(model) as engine:
        expected = run(engine, it)
    with opened(model, expert_slots=6, plan=planned(EVERY[:4])) as engine:
        assert_same_bits(run(engine, it), expected, "few slots, most of them pinned")


def test_more_pins_than_there_is_room_for_are_refused(model: Path, planned: Any) -> None:
    path = planned(EVERY[:7])
    with opened(model, expert_slots=9, plan=path):
        pass
    with pytest.raises(InputError, match="this budget's 8 slots have room for 6: raise --ram, or plan again"):
        opened(model, expert_slots=8, plan=path)
    with pytest.raises(InputError, match="have room for 5"):
        opened(model, expert_slots=9, streams=2, plan=path)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"fingerprint": "0" * 64}, "other content"),
        ({"architecture": "olmoe"}, "architecture 'olmoe', this model has 'qwen3moe'"),
        ({"n_expert": 9}, "experts a layer 9, this model has 8"),
        ({"policy": "mru"}, "cache policy 'mru', which is unknown"),
    ],
)
def test_plans_that_do_not_suit_are_refused(model: Path, planned: Any, changes: dict[str, Any], said: str) -> None:
    path = planned(EVERY[:2], **changes)
    before = threading.active_count()
    with pytest.raises(InputError, match=said):
        opened(model, expert_slots=9, plan=path)
    assert threading.active_count() == before


def test_a_plan_of_a_stock_file_serves_its_packed_copy(model: Path, planned: Any, tmp_path: Path) -> None:
    from sluice.ggml import load_library
    from sluice.pack import pack

    packed = tmp_path / "packed.gguf"
    pack(model, packed, load_library())
    it = prompt(np.random.default_rng(4), 5, 5)
    path = planned(EVERY[:4], EVERY[4:9])
    with resident(model) as engine:
        expected = run(engine, it)
    with opened(packed, expert_slots=9, plan=path) as engine:
        assert engine.placed is not None and engine.placed.loaded == 9
        assert_same_bits(run(engine, it), expected, "packed, with the stock file's plan")


def test_what_is_resident_at_the_end_is_restored_in_its_order(model: Path, tmp_path: Path) -> None:
    it = prompt(np.random.default_rng(5), 12, 12)
    saved = tmp_path / "residents.json"
    with opened(model, expert_slots=11, **ON_DEMAND) as engine:
        run(engine, it)
        order = engine.store.cache.eviction_order()
        assert engine.save_residents(saved) == len(order) == 11
    plan = read_plan(saved)
    assert (plan.pins, plan.load, plan.policy, plan.slots) == ((), tuple(order), "lru", 11)
    with opened(model, expert_slots=11, plan=saved, **ON_DEMAND) as engine:
        assert engine.store.cache.eviction_order() == order
    with opened(model, expert_slots=6, plan=saved, **ON_DEMAND) as engine:  # a smaller budget keeps what was used last
        assert engine.store.cache.eviction_order() == order[-6:]


def test_what_is_saved_keeps_the_plans_pins_and_policy(model: Path, planned: Any, tmp_path: Path) -> None:
    path, saved = planned(EVERY[:4], policy="lfu"), tmp_path / "residents.json"
    with opened(model, expert_slots=9, plan=path, **ON_DEMAND) as engine:
        run(engine, prompt(np.random.default_rng(6), 1, 6))
        engine.save_residents(saved)
        held = set(engine.store.cache.keys_resident())
    plan = read_plan(saved)
    assert (plan.pins, plan.policy) == (tuple(EVERY[:4]), "lfu")
    assert {*plan.pins, *plan.load} == held | set(plan.pins)
    with pytest.raises(EngineClosed):
        engine.save_residents(saved, force=True)


def test_saving_overwrites_nothing_unasked(model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "residents.json"
    with opened(model, expert_slots=9) as engine:
        assert engine.save_residents(saved) == 0
        with pytest.raises(InputError, match="--force"):
            engine.save_residents(saved)
        engine.save_residents(saved, force=True)


def test_the_model_is_not_overwritten(model: Path) -> None:
    before = model.read_bytes()
    with opened(model, expert_slots=9) as engine, pytest.raises(InputError, match="name another file"):
        engine.save_residents(model, force=True)
    assert model.read_bytes() == before


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [6, 11, 17])
def test_the_simulation_of_a_plan_is_the_run_of_it(
    model: Path, planned: Any, tmp_path: Path, policy: str, slots: int
) -> None:
    pins = EVERY[::4][: slots - TOP_K]
    load = [key for key in EVERY[1::3] if key not in pins]
    path, trace = planned(pins, load, policy=policy), tmp_path / "trace.parquet"
    rng = np.random.default_rng(slots)
    with opened(model, expert_slots=slots, plan=path, trace=trace, **ON_DEMAND) as engine:
        for n in (1, 30, 5):
            run(engine, prompt(rng, n, 8))
        placement, counters = engine.placement, engine.store.cache.counters
    assert placement is not None
    with TraceReader(trace) as reader:
        demands = Demands.of(reader)
    misses = replay_placed(demands, placement.pins, placement.load, slots, policy)
    assert (len(demands.ids), int(misses.sum())) == (counters.demands, counters.misses)
    assert 0 < counters.misses < counters.demands


class FailingReader(OrderedReader):
    """Its third read ends in an error."""

    failed = 0

    def complete(self, read: Read) -> None:
        self.failed += 1
        if self.failed == 3:
            self.fail(read, OSError(5, "Input/output error"))
        else:
            super().complete(read)


def test_a_read_that_fails_while_loading_ends_the_opening(model: Path, planned: Any) -> None:
    with pytest.raises(ReadError, match="Input/output error"):
        opened(model, FailingReader, expert_slots=9, plan=planned(EVERY[:4], EVERY[4:9]))


@pytest.mark.parametrize("reader", ["threads", "auto"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_ctrl_c_while_loading_ends_the_opening(model: Path, planned: Any, reader: str, share: float) -> None:
    path, before, seen = planned(EVERY[:10], EVERY[10:]), threading.active_count(), []
    with opened(model, expert_slots=24) as engine:
        n_dense = engine.plan.needs.dense

    def strike(done: int, total: int) -> None:
        seen.append((done, total))
        if done > n_dense + share * (total - n_dense):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        config = EngineConfig(threads=1, ctx=64, expert_slots=24, plan=path, reader=reader)
        Engine(model, config, progress=strike)
    assert threading.active_count() == before
    assert len({total for _, total in seen}) == 1 and seen[-1][0] <= seen[-1][1]
    with opened(model, expert_slots=24, plan=path) as engine:
        assert engine.placed is not None and engine.placed.loaded == 24


def test_the_pool_can_be_used_after_a_load_that_was_broken_off(model: Path) -> None:
    it = prompt(np.random.default_rng(7), 6, 6)
    with resident(model) as engine:
        expected = run(engine, it)

    def strike(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with opened(model, ordered(1, running_share=0.5), expert_slots=12) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.store.preload(EVERY[:12], strike)
        engine.store.cache.check()
        assert engine.store.cache.reads_in_flight() == []
        assert_same_bits(run(engine, it), expected, "after a load that was broken off")

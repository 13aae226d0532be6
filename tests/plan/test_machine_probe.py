"""A probe of a real engine on a tiny model: figures that can be, whatever they are here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny import write_tiny

from sluice.config import EngineConfig
from sluice.engine import Engine
from sluice.plan import measure as measuring
from sluice.plan.bandwidth import predict_counters
from sluice.plan.probe import Probe, probe_slots, ram_rate
from sluice.plan.profile import MachineProfile, load, save


def profile_of(path: Path, **options: object) -> MachineProfile:
    planned = Engine(path, EngineConfig(threads=1, ctx=200, **options), plan_only=True)  # type: ignore[arg-type]
    config = measuring.probe_config(planned, 1 << 30)
    return measuring.measure(config, lambda config: Engine(path, config), machine="here")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("probe") / "tiny.gguf").path


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain reading and memory are measured shortly."""
    monkeypatch.setattr("sluice.plan.probe.RAW_S", 0.05)
    monkeypatch.setattr("sluice.plan.probe.RAM_S", 0.05)


def test_a_profile_has_figures_that_can_be(tiny: Path, tmp_path: Path) -> None:
    profile = profile_of(tiny)
    save(profile, tmp_path / "p.json")
    assert load(tmp_path / "p.json") == profile  # which refuses what can't be
    assert (profile.moe_layers, profile.n_expert, profile.top_k, profile.threads) == (3, 8, 2, 1)
    assert profile.recall is not None and 0 < profile.recall <= 1
    assert profile.prefetch is not None
    for cost in (profile.demand, profile.prefetch):
        assert cost.segments_s > 0 and cost.experts_s > 0 and cost.host_s > 0
    assert profile.prompts[0].tokens == 32
    assert all(6 < prompt.experts <= 24 and prompt.compute_s > 0 for prompt in profile.prompts)
    assert profile.host_read_s > 0
    with Engine(tiny, EngineConfig(threads=1, expert_slots=9)) as engine:
        layout = engine.store.layout
        assert profile.expert_bytes == sum(run.n_bytes for run in layout.runs[0])
        predicted = predict_counters(
            profile, {"steps": 2, "demands": 12, "misses": 3, "prefetch_used": 2}, slots=9, prefetch=True
        )
        assert predicted is not None and predicted.tok_per_s > 0
        assert predicted.bytes_per_step >= 2.5 * profile.expert_bytes * 0.999


def test_resident_steps_read_nothing_and_loads_are_as_cold_as_asked(tiny: Path) -> None:
    with Engine(tiny, EngineConfig(threads=1, expert_slots=12, ctx=64)) as engine:
        probe = Probe(engine)
        with engine.session() as session:
            session.feed([1, 2, 3])
            found = probe.resident_steps(session, 4, 3)
            assert len(found) == 3 and all(one.waited_for == 0 and one.demands == 6 for one in found)
            assert len(session.tokens) == 3
        probe._fill()
        assert engine.store.cache.n_free == 0
        for cold in (0, 1, 2):
            _, was = probe._load(cold)
            assert was == cold
        engine.store.cache.check()


def test_after_a_probe_the_engine_runs_as_before(tiny: Path) -> None:
    def tokens(engine: Engine) -> list[int]:
        return [token.id for token in engine.generate([5, 6, 7], 6, temperature=0, ignore_eos=True)]

    config = EngineConfig(threads=1, expert_slots=12, ctx=200)
    with Engine(tiny, config) as engine:
        expected = tokens(engine)
    with Engine(tiny, config) as engine:
        probe = Probe(engine)
        probe.prompts()
        loads = probe.loads()
        probe.natural()
        probe.step_cost()
        probe.contention(loads)
        engine.store.cache.check()
        assert not engine.store.cache.reads_in_flight()
        assert tokens(engine) == expected


def test_a_pool_below_one_tokens_demand_is_measured_too(tiny: Path) -> None:
    with Engine(tiny, EngineConfig(threads=1, expert_slots=3, ctx=64)) as engine:
        probe = Probe(engine)
        loads = probe.loads()
        assert loads.b_s > 0
        assert probe.step_cost().experts_s > 0
        beside, host_read_s = probe.contention(loads)
        assert beside == (1.0, 1.0) and host_read_s > 0


def test_the_end_can_be_asked_for(tiny: Path) -> None:
    class Stopped(Exception):
        pass

    def check() -> None:
        raise Stopped

    config = replace(measuring.probe_config(Engine(tiny, EngineConfig(threads=1), plan_only=True), 1 << 30), threads=1)
    with pytest.raises(Stopped):
        measuring.measure(config, lambda config: Engine(tiny, config), machine="here", check=check)


def test_slots_to_probe_with() -> None:
    assert probe_slots(384, 6144, 10_000) == 768
    assert probe_slots(384, 6144, 500) == 500
    assert probe_slots(12, 20, 100) == 19  # some must be absent
    assert probe_slots(24, 24, 100) == 24  # a token uses all of them


def test_memory_is_read_from_as_many_threads_as_asked() -> None:
    assert ram_rate(2, n_bytes=1 << 20) > 0

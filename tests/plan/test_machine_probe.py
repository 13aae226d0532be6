"""A probe of a real engine on a tiny model: figures that can be, whatever they are here."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tiny import write_tiny

from sluice.config import EngineConfig
from sluice.engine import Engine
from sluice.plan import measure as measuring
from sluice.plan.bandwidth import predict_counters
from sluice.plan.probe import Fresh, Probe, _Burst, _fresh, probe_slots, ram_rate
from sluice.plan.profile import MachineProfile, load, save


def config_to_probe(path: Path, **options: object) -> EngineConfig:
    """With a GiB beside what this process has taken already: tests before may have left it with more than that."""
    planned = Engine(path, EngineConfig(threads=1, **options), plan_only=True)  # type: ignore[arg-type]
    return measuring.probe_config(planned, planned.plan.needs.process + (1 << 30))


def profile_of(path: Path, **options: object) -> MachineProfile:
    config = config_to_probe(path, ctx=200, **options)
    return measuring.measure(config, lambda config: Engine(path, config), machine="here")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("probe") / "tiny.gguf").path


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain reading and memory are measured shortly, and at once."""
    monkeypatch.setattr("sluice.plan.measure.SETTLE_S", 0)
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
            profile,
            {"steps": 2, "demands": 12, "misses": 3, "prefetch_used": 2, "reads": 6, "evictions": 2},
            slots=9, prefetch=True,
        )  # fmt: skip
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
        probe.fill()
        assert engine.store.cache.n_free == 0
        for cold in (0, 1, 2):
            _, was = probe._load(cold)
            assert was == cold
        engine.store.cache.check()


@pytest.mark.parametrize("how", ["auto", "threads"])
def test_what_fresh_memory_costs_is_measured_while_the_pool_fills(tiny: Path, how: str) -> None:
    with Engine(tiny, EngineConfig(threads=1, expert_slots=12, ctx=64, reader=how)) as engine:
        probe = Probe(engine)
        found = probe.fresh()
        assert engine.store.cache.n_free == 0
        assert all(math.isfinite(cost) and cost >= 0 for cost in found)
        assert probe.fresh() == (0, 0)  # nothing is fresh any more
        engine.store.cache.check()
    with Engine(tiny, EngineConfig(threads=1, expert_slots=24, ctx=64)) as engine:
        assert Probe(engine).fresh() == (0, 0)  # nothing to compare with: all experts are there
        assert engine.store.cache.n_free == 0


@pytest.mark.parametrize(
    ("new", "used", "found"),
    [
        # asked for in 9 instead of 1; the second load of 5 runs while none is asked for any more, as the used ones' did
        (_Burst(2, 18, 23), _Burst(2, 2, 11), (8, 0)),
        (_Burst(2, 2, 21), _Burst(2, 2, 11), (0, 5)),  # all in the load: 10 instead of 5
        (_Burst(2, 4, 22), _Burst(2, 2, 11), (1, 5)),  # in both
        (_Burst(1, 3, 11), _Burst(2, 2, 11), (2, 3)),
        (_Burst(2, 1, 9), _Burst(2, 2, 11), (0, 0)),  # never less than nothing
    ],
)
def test_costs_of_fresh_memory_are_told_apart(new: _Burst, used: _Burst, found: tuple[float, float]) -> None:
    assert _fresh([new], [used]) == Fresh(*found)


def test_costs_of_fresh_memory_are_means() -> None:
    cheap, dear, used = _Burst(1, 1, 6), _Burst(1, 21, 26), _Burst(1, 1, 6)
    assert _fresh([cheap] * 9 + [dear], [used]) == pytest.approx((2, 0))


def test_after_a_probe_the_engine_runs_as_before(tiny: Path) -> None:
    def tokens(engine: Engine) -> list[int]:
        return [token.id for token in engine.generate([5, 6, 7], 6, temperature=0, ignore_eos=True)]

    config = EngineConfig(threads=1, expert_slots=12, ctx=200)
    with Engine(tiny, config) as engine:
        expected = tokens(engine)
    with Engine(tiny, config) as engine:
        probe = Probe(engine)
        probe.fresh()
        probe.prompts()
        loads = probe.loads()
        probe.natural()
        probe.step_cost()
        probe.contention(loads)
        while engine.store.cache.reads_in_flight():  # what its last steps read ahead
            engine.store.arrived(block=True)
        engine.store.cache.check()
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

    with pytest.raises(Stopped):
        measuring.measure(config_to_probe(tiny), lambda config: Engine(tiny, config), machine="here", check=check)


def test_a_host_that_takes_memory_back_is_known_by_its_balloon(tmp_path: Path) -> None:
    assert not measuring.host_takes_back(tmp_path / "none")
    (tmp_path / "virtio0").mkdir()
    for bits, takes in (("0110000", False), ("01100", False), ("", False), ("0110010", True)):
        (tmp_path / "virtio0" / "features").write_text(bits + "\n")
        assert measuring.host_takes_back(tmp_path) is takes


def test_it_waits_for_that_host(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    waited = []

    def check() -> None:
        waited.append(1)
        if len(waited) == 3:
            raise InterruptedError

    monkeypatch.setattr(measuring, "SETTLE_S", 1e9)
    monkeypatch.setattr(measuring, "SETTLE_STEP_S", 0)
    monkeypatch.setattr(measuring, "host_takes_back", lambda balloons: True)
    with pytest.raises(InterruptedError):
        measuring.measure(EngineConfig(), lambda config: Engine(tiny, config), machine="here", check=check)
    assert len(waited) == 3


def test_slots_to_probe_with() -> None:
    assert probe_slots(384, 6144, 10_000) == 768
    assert probe_slots(384, 6144, 500) == 500
    assert probe_slots(12, 20, 100) == 19  # some must be absent
    assert probe_slots(24, 24, 100) == 24  # a token uses all of them


def test_memory_is_read_from_as_many_threads_as_asked() -> None:
    assert ram_rate(2, n_bytes=1 << 20) > 0

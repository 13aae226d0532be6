"""What a trace's replay lacks is what the engine read on demand, and traces that don't fit are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny import write_tiny

from sluice.engine import Engine
from sluice.errors import InputError
from sluice.plan.workload import Absences, TraceWorkload, ahead, first_uses, on_demand

SLOTS = 12


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, int]], str]:
    """A trace of a tiny model, the ledger of the run, and the model's fingerprint."""
    folder = tmp_path_factory.mktemp("workload")
    model, trace = write_tiny(folder / "tiny.gguf").path, folder / "routes.trace"
    with Engine.open(model, threads=1, expert_slots=SLOTS, ctx=64, prefetch=False, trace=trace) as engine:
        for _ in engine.generate(list(range(20)), 12, temperature=1.0, seed=1, ignore_eos=True):
            pass
        return trace, engine.stats(), engine.fingerprint


def workload(trace: Path, fingerprint: str = "", n_expert: int = 8, policy: str = "lru") -> TraceWorkload:
    return TraceWorkload(trace, policy=policy, fingerprint=fingerprint, moe_layers=(0, 1, 2), n_expert=n_expert)


def test_a_replay_lacks_what_the_engine_read(recorded: tuple[Path, dict[str, dict[str, int]], str]) -> None:
    trace, ledger, fingerprint = recorded
    found = workload(trace, fingerprint).absences(SLOTS)
    assert found.prompt_tokens == (20,)
    for phase, absences in (("decode", found.decode), ("prefill", found.prefill)):
        assert absences.needed.sum() == ledger[phase]["demands"]
        assert absences.absent.sum() == ledger[phase]["misses"] > 0
        assert absences.absent_share == 0.5
    assert found.decode.needed.shape == (ledger["decode"]["steps"], 3)


@pytest.mark.parametrize("slots", [6, 12, 18, 30])
def test_an_empty_pool_fills_with_its_first_reads(
    recorded: tuple[Path, dict[str, dict[str, int]], str], slots: int
) -> None:
    trace, ledger, _ = recorded
    found = workload(trace).absences(slots)
    decode, prefill = found.decode, found.prefill
    reads = prefill.absent.sum() + decode.absent.sum()
    assert prefill.fresh.sum() + decode.fresh.sum() == min(slots, reads)
    assert prefill.fresh.sum() == min(slots, prefill.absent.sum())
    assert ((decode.fresh >= 0) & (decode.fresh <= decode.absent)).all()
    if slots == SLOTS:
        for phase, absences in (("prefill", prefill), ("decode", decode)):
            assert absences.fresh.sum() == ledger[phase]["misses"] - ledger[phase]["evictions"]


def test_the_first_layers_of_a_step_take_what_is_left() -> None:
    reads, free = np.array([[2.0, 0, 3], [2, 2, 1], [1, 1, 0]]), np.array([7.0, 3, 0])
    assert first_uses(reads, free).tolist() == [[2, 0, 3], [2, 1, 0], [0, 0, 0]]


def steps(absent: float, slots: float, n: int = 20) -> Absences:
    """Steps of one token: each of 3 layers of 8 experts needs 2 of them; from an empty pool of `slots` slots."""
    shape = (n, 3)
    return Absences(np.full(shape, 2.0), np.full(shape, absent), 0.0, np.maximum(0, slots - np.arange(n) * 3 * absent))


def test_on_demand_nothing_is_needless() -> None:
    reads = on_demand(steps(0.5, 18))
    assert not reads.needless.any()
    assert (reads.fresh[:12] == 1).all() and not reads.fresh[12:].any()
    assert not on_demand(steps(0, 18)).fresh.any()


def test_needless_reads_take_fresh_slots_sooner() -> None:
    lacking = steps(0.5, 18)
    right, wrong = ahead(lacking, 1.0, 2, 8), ahead(lacking, 0.5, 2, 8)
    assert not right.needless.any() and (right.fresh == on_demand(lacking).fresh).all()
    # one wrong guess in each layer but the first, of which 18 of 24 are absent before anything else was read
    assert wrong.needless[0].tolist() == [0, 0.75, 0.75]
    assert (np.diff(wrong.needless[:, 1]) <= 0).all()  # the fuller the pool
    assert not wrong.needless[-1].any()  # here it holds all that nobody needs, once it is full
    taken = wrong.fresh * (wrong.needless + lacking.absent)
    assert taken.sum() == pytest.approx(18)
    assert np.flatnonzero(taken.sum(axis=1))[-1] < 11
    large = steps(0.5, 1000)  # of what is left at the end they take some that demands never would
    assert (ahead(large, 0.5, 2, 8).fresh == 1).all()


def test_a_wrong_guess_for_one_token_may_be_right_for_another() -> None:
    met = np.full((1, 3), 8.0)  # all there are
    assert not ahead(Absences(met, met, 0.5), 0.5, 2, 8).needless.any()


def test_more_slots_lack_no_more(recorded: tuple[Path, dict[str, dict[str, int]], str]) -> None:
    of_trace = workload(recorded[0])
    lacking = [of_trace.absences(slots).decode.absent.sum() for slots in (6, 9, 12, 18, 24)]
    assert lacking == sorted(lacking, reverse=True) and lacking[0] > lacking[-1]


def test_its_label_says_what_it_is(recorded: tuple[Path, dict[str, dict[str, int]], str]) -> None:
    assert str(recorded[0]) in workload(recorded[0], policy="lfu").label
    assert "lfu" in workload(recorded[0], policy="lfu").label


@pytest.mark.parametrize("other", [{"n_expert": 16}, {"fingerprint": "0" * 64}])
def test_a_trace_of_another_model_is_refused(
    recorded: tuple[Path, dict[str, dict[str, int]], str], other: dict[str, str]
) -> None:
    with pytest.raises(InputError, match="another model"):
        workload(recorded[0], **other)  # type: ignore[arg-type]


def test_streams_in_company_are_no_single_stream(tmp_path: Path) -> None:
    model, trace = write_tiny(tmp_path / "tiny.gguf").path, tmp_path / "routes.trace"
    options = {"threads": 1, "expert_slots": SLOTS, "ctx": 64, "streams": 2, "trace": trace}
    with Engine.open(model, **options) as engine, engine.session() as one, engine.session() as two:
        one.feed([1, 2])
        two.feed([3, 4])
        engine.decode([one, two], [5, 6])
    with pytest.raises(InputError, match="several sequences"):
        workload(trace)

"""What a trace's replay lacks is what the engine read on demand, and traces that don't fit are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import write_tiny

from sluice.engine import Engine
from sluice.errors import InputError
from sluice.plan.workload import TraceWorkload

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

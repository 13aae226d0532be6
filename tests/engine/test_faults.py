"""Faults in the read path, interrupts, closing, and what is left behind: a step raises, or its logits are right."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import PoisoningReader, Prompt, assert_same_bits, opened, ordered, prompt, resident, run
from tiny import T, write_tiny

from sluice.engine import Engine
from sluice.engine import engine as engine_module
from sluice.errors import ContextError, EngineClosed, InputError, ModelFileError, ReadError
from sluice.experts.cache import CacheCounters
from sluice.io import uring
from sluice.io.files import ModelFiles
from sluice.io.ring_reader import RingReader
from sluice.types import Completion, Read

SMALL: dict[str, Any] = {
    "n_embd": 64, "n_head": 2, "n_head_kv": 1, "head_dim": 32, "n_ff_exp": 96, "expert_type": T.Q8_0
}  # fmt: skip
PROMPTS = [prompt(np.random.default_rng(n), n, 5) for n in (1, 3, 12, 40)]


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose experts are read by threads, since they are no whole blocks; or one that is read by io_uring."""
    kind = getattr(request, "param", "threads")
    options = SMALL if kind == "threads" else {**SMALL, "n_ff_exp": 256}
    path = write_tiny(tmp_path_factory.mktemp("faults") / "m.gguf", **options).path
    with opened(path, expert_slots=2) as engine:
        if engine.store.reader.name != kind:
            assert kind == "io_uring" and not (uring.available() and engine.files.direct)
            pytest.skip("this system has no io_uring, or its folder for temporary files no O_DIRECT")
    return path


either_reader = pytest.mark.parametrize("model", ["threads", "io_uring"], indirect=True)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[np.ndarray]:
    with resident(model) as engine:
        return [run(engine, it) for it in PROMPTS]


def assert_works(engine: Engine, expected: list[np.ndarray], what: str) -> None:
    for it, rows in zip(PROMPTS, expected, strict=True):
        assert_same_bits(run(engine, it), rows, what)
    engine.store.cache.check()
    assert not engine.store.cache.reads_in_flight() or engine.config.prefetch


# --- reads that fail


class FailingReader(PoisoningReader):
    """Ends a read with an error, its slot destroyed, with probability `share`."""

    share = 0.0

    def complete(self, read: Read) -> None:
        if self._rng.random() < self.share:
            self.fail(read, self._rng.choice([OSError(5, "Input/output error"), ReadError("m.gguf: failed")]))
        else:
            super().complete(read)


@pytest.mark.parametrize("options", [
    {"expert_slots": 2}, {"expert_slots": 5}, {"expert_slots": 5, "prefetch": False, "overlap": False},
    {"expert_slots": 12, "policy": "cyclic"}, {"expert_slots": 20, "policy": "lfu"},
], ids=str)  # fmt: skip
def test_failing_reads_raise_or_change_nothing(
    model: Path, expected: list[np.ndarray], options: dict[str, Any]
) -> None:
    def make(files: ModelFiles, pool: memoryview, locate: Any) -> FailingReader:
        return FailingReader(files, pool, locate, random.Random(1), running_share=0.3, poll_share=0.5)

    rng = random.Random(2)
    outcomes = {"raised": 0, "right": 0}
    with opened(model, make, **options) as engine:
        reader = engine.store.reader
        assert isinstance(reader, FailingReader)
        for _ in range(120):
            i = rng.randrange(len(PROMPTS))
            reader.share = rng.choice([0.0, 0.01, 0.1, 0.5])
            try:
                rows = run(engine, PROMPTS[i])
            except ReadError as error:
                outcomes["raised"] += 1
                assert "\n" not in str(error)
                assert not engine.store.cache.reads_in_flight()
            else:
                outcomes["right"] += 1
                assert_same_bits(rows, expected[i], f"prompt {i}, {outcomes}")
            engine.store.cache.check()
        reader.share = 0.0
        assert_works(engine, expected, "after the faults")
    assert min(outcomes.values()) > 15


def test_a_failed_session_goes_on_where_it_was(model: Path, expected: list[np.ndarray]) -> None:
    reader: FailingReader | None = None

    def make(files: ModelFiles, pool: memoryview, locate: Any) -> FailingReader:
        nonlocal reader
        reader = FailingReader(files, pool, locate, random.Random(3), poll_share=0.2)
        return reader

    it = PROMPTS[2]
    with opened(model, make, expert_slots=3) as engine, engine.session() as session:
        assert reader is not None
        rows: list[np.ndarray] = []
        failures = 0
        while len(rows) <= len(it.forced):
            reader.share = 0.0 if failures > 50 else 0.2
            try:
                if rows:
                    rows.append(engine.decode([session], [it.forced[len(rows) - 1]])[0].copy())
                else:
                    rows.append(session.feed(it.ids).copy())
            except ReadError:
                failures += 1
        assert failures > 3 and session.tokens == it.ids + it.forced
        assert_same_bits(np.stack(rows), expected[2], "with failures between")


class FlakyFiles(ModelFiles):
    """Raises OSError from a share of all reads, in whichever thread makes them."""

    share = 0.0
    rng = random.Random(4)

    def read_into(self, file: int, offset: int, view: memoryview) -> int:
        if self.rng.random() < self.share:
            raise OSError(5, "Input/output error")
        return super().read_into(file, offset, view)


def test_errors_in_reading_threads_raise_or_change_nothing(
    model: Path, expected: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "ModelFiles", FlakyFiles)
    rng = random.Random(5)
    raised = right = 0
    with opened(model, expert_slots=5, io_threads=3) as engine:
        for _ in range(60):
            i = rng.randrange(len(PROMPTS))
            monkeypatch.setattr(FlakyFiles, "share", rng.choice([0.0, 0.001, 0.02]))
            try:
                rows = run(engine, PROMPTS[i])
            except ReadError as error:
                raised += 1
                assert "Input/output error" in str(error)
            else:
                right += 1
                assert_same_bits(rows, expected[i], f"prompt {i}")
        monkeypatch.setattr(FlakyFiles, "share", 0.0)
        assert_works(engine, expected, "after the faults")
    assert raised > 5 and right > 5


class FlakyRing(uring.Ring):
    """Turns a share of all results into errors."""

    share = 0.0
    rng = random.Random(4)

    def results(self) -> Iterator[tuple[int, int]]:
        for tag, result in super().results():
            yield tag, -5 if tag != uring.NOP and self.rng.random() < self.share else result


@pytest.mark.parametrize("model", ["io_uring"], indirect=True)
def test_errors_in_the_ring_raise_or_change_nothing(
    model: Path, expected: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(files: ModelFiles, pool: memoryview, locate: Any) -> RingReader:
        return RingReader(files, pool, locate, depth=6, make_ring=FlakyRing)

    rng = random.Random(5)
    raised = right = 0
    with opened(model, make, expert_slots=5) as engine:
        for _ in range(60):
            i = rng.randrange(len(PROMPTS))
            monkeypatch.setattr(FlakyRing, "share", rng.choice([0.0, 0.001, 0.02]))
            try:
                rows = run(engine, PROMPTS[i])
            except ReadError as error:
                raised += 1
                assert "Input/output error" in str(error) and str(model) in str(error) and "\n" not in str(error)
            else:
                right += 1
                assert_same_bits(rows, expected[i], f"prompt {i}")
        monkeypatch.setattr(FlakyRing, "share", 0.0)
        assert_works(engine, expected, "after the faults")
    assert raised > 5 and right > 5


@pytest.mark.parametrize("model", ["io_uring"], indirect=True)
def test_without_io_uring_threads_read(
    model: Path, expected: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(model, expert_slots=3, reader="io_uring") as engine:
        assert engine.store.reader.name == "io_uring"
        assert_works(engine, expected, "by name")
    monkeypatch.setattr(uring, "_SETUP", 1 << 20)  # no such system call
    with opened(model, expert_slots=3) as engine:
        assert engine.store.reader.name == "threads"
        assert_works(engine, expected, "without io_uring")
    before = open_files(), threading.active_count()
    with pytest.raises(InputError, match=r"gives no io_uring .*not implemented.* auto"):
        opened(model, expert_slots=3, reader="io_uring")
    assert (open_files(), threading.active_count()) == before


def test_io_uring_by_name_where_it_does_not_suit(model: Path) -> None:
    for read_rate in (None, 1 << 30):
        with pytest.raises(InputError, match=r"whole blocks.* auto"):
            opened(model, expert_slots=3, reader="io_uring", read_rate=read_rate)


def test_a_failure_while_loading_leaves_nothing_open(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "ModelFiles", FlakyFiles)
    monkeypatch.setattr(FlakyFiles, "share", 1.0)
    before = open_files(), threading.active_count()
    with pytest.raises((ReadError, OSError)):
        opened(model, expert_slots=4)
    assert (open_files(), threading.active_count()) == before


# --- files that change


@either_reader
def test_a_file_truncated_while_running(model: Path, tmp_path: Path) -> None:
    path = shutil.copy(model, tmp_path / "m.gguf")
    with opened(Path(path), expert_slots=2) as engine:
        run(engine, PROMPTS[1])
        os.truncate(path, 4096)
        for _ in range(3):
            with pytest.raises(ReadError, match=r"m\.gguf.* (truncated|changed)"):
                run(engine, PROMPTS[2])


@either_reader
def test_a_file_overwritten_while_running(model: Path, tmp_path: Path, expected: list[np.ndarray]) -> None:
    path = Path(shutil.copy(model, tmp_path / "m.gguf"))
    size = path.stat().st_size
    with opened(path, expert_slots=2) as engine:
        assert_same_bits(run(engine, PROMPTS[1]), expected[1], "before")
        with path.open("r+b") as file:
            file.seek(size // 2)
            file.write(os.urandom(size - size // 2))
        with pytest.raises(ReadError, match=r"m\.gguf.* changed"):
            run(engine, PROMPTS[2])


@either_reader
@pytest.mark.skipif(sys.platform == "win32", reason="Windows keeps open files from being removed")
def test_a_file_removed_while_running_is_still_read(model: Path, tmp_path: Path, expected: list[np.ndarray]) -> None:
    path = Path(shutil.copy(model, tmp_path / "m.gguf"))
    with opened(path, expert_slots=2) as engine:
        path.unlink()
        assert_works(engine, expected, "removed")
    with pytest.raises(ModelFileError):
        opened(path, expert_slots=2)


# --- interrupts


class InterruptedReader(PoisoningReader):
    """Raises KeyboardInterrupt on the n-th call, before or after what it does."""

    countdown = -1
    after = False

    def _strike(self) -> None:
        self.countdown -= 1
        if self.countdown == 0:
            raise KeyboardInterrupt

    def submit(self, read: Read) -> None:
        if not self.after:
            self._strike()
        super().submit(read)
        if self.after:
            self._strike()

    def promote(self, read: Read, deadline: int) -> None:
        self._strike()
        super().promote(read, deadline)

    def completions(self, block: bool = False, timeout: float | None = None) -> list[Completion]:
        if not self.after:
            self._strike()
        ended = super().completions(block, timeout)
        if self.after and self.countdown == 1:
            self._ended = ended + self._ended  # a queue loses nothing when a signal strikes in `get`
            self._strike()
        if self.after:
            self._strike()
        return ended


@pytest.mark.parametrize("options", [{"expert_slots": 2}, {"expert_slots": 7}], ids=str)
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_in_a_step_leaves_the_engine_usable(
    model: Path, expected: list[np.ndarray], options: dict[str, Any], after: bool
) -> None:
    def make(files: ModelFiles, pool: memoryview, locate: Any) -> InterruptedReader:
        return InterruptedReader(files, pool, locate, random.Random(6), running_share=0.3, poll_share=0.5)

    struck = 0
    with opened(model, make, **options) as engine:
        reader = engine.store.reader
        assert isinstance(reader, InterruptedReader)
        reader.after = after
        for n in range(1, 90, 2):
            reader.countdown = n
            with engine.session() as session:
                try:
                    session.feed(PROMPTS[2].ids)
                    for token in PROMPTS[2].forced:
                        engine.decode([session], [token])
                except KeyboardInterrupt:
                    struck += 1
                    assert not engine.store.cache.reads_in_flight()
                    assert session.tokens in [PROMPTS[2].ids[:0], *(
                        PROMPTS[2].ids + PROMPTS[2].forced[:i] for i in range(len(PROMPTS[2].forced) + 1)
                    )]  # fmt: skip
            reader.countdown = -1
            i = n % len(PROMPTS)
            assert_same_bits(run(engine, PROMPTS[i]), expected[i], f"prompt {i} after an interrupt at call {n}")
            engine.store.cache.check()
    assert struck > 30


@either_reader
def test_an_interrupt_while_computing(model: Path, expected: list[np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(model, expert_slots=3) as engine:
        backend = engine._stepper.backend
        compute, left = backend.compute, 0

        def interrupted(graph: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            compute(graph)

        monkeypatch.setattr(backend, "compute", interrupted)
        for n in range(1, 30):
            left = n
            with pytest.raises(KeyboardInterrupt):
                run(engine, PROMPTS[3])
            i = n % len(PROMPTS)
            left = 0
            assert_same_bits(run(engine, PROMPTS[i]), expected[i], f"after an interrupt in graph {n}")


# --- one request after another, in one process or several

REQUEST = """
import sys, hashlib
sys.path[:0] = sys.argv[1:3]
from pathlib import Path
from harness import Prompt, opened, run
with opened(Path(sys.argv[3]), expert_slots=4) as engine:
    for ids, forced in eval(sys.argv[4]):
        print(hashlib.sha256(run(engine, Prompt(ids, forced)).tobytes()).hexdigest())
"""


def requests(model: Path, prompts: list[Prompt]) -> list[str]:
    here = Path(__file__).parent
    arguments = [str(here.parent), str(here), str(model), repr([tuple(it) for it in prompts])]
    done = subprocess.run([sys.executable, "-c", REQUEST, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_two_requests_in_one_process_equal_two_processes(model: Path, expected: list[np.ndarray]) -> None:
    both = requests(model, PROMPTS[1:3])
    apart = requests(model, PROMPTS[1:2]) + requests(model, PROMPTS[2:3])
    assert both == apart == [hashlib.sha256(rows.tobytes()).hexdigest() for rows in expected[1:3]]


# --- closing, and what stays


def open_files() -> int:
    place = Path("/proc/self/fd")
    return len(list(place.iterdir())) if place.exists() else 0


@either_reader
def test_nothing_is_left_after_many_engines(model: Path) -> None:
    gc.collect()
    files, threads = open_files(), set(threading.enumerate())
    for i in range(20):
        engine = opened(model, expert_slots=2 + i, io_threads=1 + i % 4)
        run(engine, PROMPTS[i % 3])
        assert set(threading.enumerate()) - threads
        engine.close()
        engine.close()
        assert open_files() == files and set(threading.enumerate()) == threads


@either_reader
def test_a_forgotten_engine_is_closed(model: Path) -> None:
    gc.collect()
    files, threads = open_files(), set(threading.enumerate())
    engine = opened(model, expert_slots=4)
    run(engine, PROMPTS[0])
    assert set(threading.enumerate()) - threads
    del engine
    gc.collect()
    assert open_files() == files and set(threading.enumerate()) == threads


OPEN_AND_END = """
import sys
from sluice.engine import Engine
engine = Engine.open(sys.argv[1], expert_slots=4, threads=1, ctx=64)
tokens = engine.generate([1, 2], 9, ignore_eos=True)
print(next(tokens).id >= 0)
"""
FORK = """
import os, sys
from sluice.engine import Engine
from sluice.errors import EngineClosed
engine = Engine.open(sys.argv[1], expert_slots=4, threads=1, ctx=64)
child = os.fork()
if child == 0:
    try:
        engine.logits([1])
    except EngineClosed:
        engine.close()
        sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(len(engine.logits([1, 2])))
"""


def outcome(script: str, model: Path) -> tuple[int, str]:
    command = [sys.executable, "-c", script, str(model)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=False)
    return done.returncode, done.stdout


@either_reader
def test_a_process_ends_with_an_engine_open(model: Path) -> None:
    assert outcome(OPEN_AND_END, model) == (0, "True\n")


@either_reader
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_can_not_use_its_parents_engine(model: Path) -> None:
    assert outcome(FORK, model) == (0, "2\n")


def test_another_engines_session_is_refused(model: Path, expected: list[np.ndarray]) -> None:
    with opened(model, expert_slots=2) as one, opened(model, expert_slots=2) as other, other.session() as session:
        for use in (lambda: one.decode([session], [1]), lambda: one.prefill(session, [1])):
            with pytest.raises(InputError, match="another's"):
                use()
        assert not session.tokens
        assert_works(one, expected, "after another engine's session")


def test_a_closed_engine_says_so(model: Path) -> None:
    engine = opened(model, expert_slots=2)
    session = engine.session()
    session.feed([1, 2])
    engine.close()
    for use in (
        lambda: session.feed([3]),
        lambda: engine.decode([session], [3]),
        lambda: engine.logits([1]),
        lambda: engine.session(),
        lambda: next(iter(engine.generate([1]))),
    ):
        with pytest.raises(EngineClosed, match="open it again"):
            use()
    session.close()
    session.close()


def test_a_closed_session_gives_its_stream_back_once(model: Path) -> None:
    with opened(model, expert_slots=2, streams=2) as engine:
        first, second = engine.session(), engine.session()
        with pytest.raises(InputError, match="2 streams are in use"):
            engine.session()
        first.close()
        first.close()
        third = engine.session()
        with pytest.raises(InputError):
            engine.session()
        third.close()
        second.close()


def test_a_closed_session_is_not_used(model: Path, expected: list[np.ndarray]) -> None:
    # Its stream may be someone else's by now: whatever happens, the other's keys and values stay.
    with opened(model, expert_slots=2) as engine:
        closed = engine.session()
        closed.feed([1, 2, 3])
        closed.close()
        for use in (lambda: closed.feed([4]), lambda: engine.decode([closed], [4])):
            with pytest.raises(InputError, match="closed"):
                use()
        assert_works(engine, expected, "after a use of a closed session")


def test_what_can_not_be_fed_is_refused_and_changes_nothing(model: Path, expected: list[np.ndarray]) -> None:
    with opened(model, expert_slots=2, ctx=64) as engine:
        with engine.session() as session:
            session.feed(list(range(60)))
            refused: tuple[tuple[Any, type[Exception]], ...] = (
                ([], ContextError), ([1] * 5, ContextError),
                ([400], InputError), ([-1], InputError), ([1.5], InputError),
            )  # fmt: skip
            for ids, error in refused:
                with pytest.raises(error):
                    session.feed(ids)
            with pytest.raises(InputError):
                session.rewind(-1)
            numpys: Any = np.array([1, 2, 3, 4], np.int32)
            session.feed(numpys[:3])
            engine.decode([session], numpys[3:])
            with pytest.raises(ContextError, match="raise --ctx"):
                engine.decode([session], [5])
            assert session.tokens == [*range(60), 1, 2, 3, 4]
        with pytest.raises(ContextError):
            engine.logits([1] * 65)
        assert_works(engine, expected, "after refusals")


def test_two_tokens_for_one_session_in_one_step_are_refused(model: Path) -> None:
    with opened(model, expert_slots=2, streams=2) as engine, engine.session() as session:
        session.feed([1])
        with pytest.raises(InputError, match="twice"):
            engine.decode([session, session], [2, 3])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@either_reader
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to see the process's memory")
def test_memory_is_flat_over_many_sessions(model: Path) -> None:
    rng = np.random.default_rng(8)

    def sessions(engine: Engine, n: int) -> int:
        for _ in range(n):
            run(engine, prompt(rng, int(rng.integers(1, 200)), 3))
        gc.collect()
        return resident_bytes()

    with opened(model, expert_slots=6) as engine:
        before = sessions(engine, 360)  # until what is kept of steps is full, and the heap has settled
        growth = sessions(engine, 120) - before
    assert growth < 2 << 20, f"{growth} bytes more after 120 more sessions"


@pytest.fixture(autouse=True)
def no_thread_outlives_its_test() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def test_counters_add_up_in_every_order(model: Path) -> None:
    for seed in range(6):
        with opened(model, ordered(seed), expert_slots=2 + 3 * seed) as engine:
            for it in PROMPTS:
                run(engine, it)
            total, c = CacheCounters(), engine.store.cache.counters
            for phase in engine.ledger.values():
                for name in CacheCounters.__slots__:
                    setattr(total, name, getattr(total, name) + getattr(phase.cache, name))
            assert total == c and c.demands == c.hits + c.late_hits + c.misses

"""Ctrl-C, SIGTERM and a closed stdout: a clean end, with the right exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic, sleep

import pytest
from commands import FAST, process

from sluice.cli.opening import open_engine
from sluice.cli.signals import Stop, Terminated, deferred, raising
from sluice.config import EngineConfig

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends signals to one process")
ENDLESS = ("-p", "the river", "-n", 30000, "--ignore-eos", "--ctx", 32000, "--seed", 1, *FAST)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_answer(tiny_path: Path, number: int, code: int) -> None:
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("this process ignores the signal, as under nohup, and so do those it starts")
    with process("run", tiny_path, *ENDLESS) as child:
        assert child.stdout is not None
        first = child.stdout.read(1)
        child.send_signal(number)
        out, err = child.communicate(timeout=300)
    assert child.returncode == code
    assert (first + out).endswith("\n")
    assert err.count("\n") == 1 and "bottleneck" in err


def test_a_signal_with_json_prints_what_there_is(tiny_path: Path) -> None:
    with process("run", tiny_path, *ENDLESS, "--json", bufsize=0) as child:
        _wait_until_decoding(child)
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=300)
    assert child.returncode == 130
    result = json.loads(out.splitlines()[-1])
    assert result["finish_reason"] is None
    assert 0 < result["generated_tokens"] < 30000


def _wait_until_decoding(child: subprocess.Popen[str]) -> None:
    """Until the process has used enough processor time to be past its start: it prints nothing that would tell."""
    ticks, deadline = os.sysconf("SC_CLK_TCK"), monotonic() + 50
    while monotonic() < deadline:
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        if (int(fields[11]) + int(fields[12])) / ticks > 1.6:
            return
        sleep(0.05)


@pytest.mark.parametrize("words", [("run", "-p", "x"), ("bench", "--gen", "30000"), ("chat",)])
def test_sigterm_leaves_no_thread_or_traceback(tiny_path: Path, words: tuple[str, ...]) -> None:
    command, *rest = words
    with process(command, tiny_path, *rest, "--ctx", 32000, *FAST, stdin=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stderr is not None
        if command == "chat":
            child.stdin.write("hello\n")
            child.stdin.flush()
        _wait_until_decoding(child) if command == "bench" else child.stdout.read(1)  # type: ignore[union-attr]
        child.send_signal(signal.SIGTERM)
        _, err = child.communicate(timeout=300)
    assert child.returncode == 143
    assert "Traceback" not in err and "Exception" not in err


def test_a_closed_stdout_is_a_quiet_end(tiny_path: Path) -> None:
    with process("run", tiny_path, *ENDLESS) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.read(1)
        child.stdout.close()
        child.stdout = None
        _, err = child.communicate(timeout=300)
    assert (child.returncode, err) == (1, "")


def test_a_stdout_closed_before_the_start_is_too(tiny_path: Path) -> None:
    with process("inspect", tiny_path) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        child.stdout = None
        _, err = child.communicate(timeout=300)
    assert (child.returncode, err) == (1, "")


@pytest.mark.parametrize("words", [("inspect",), ("run", *FAST, "-n", "3", "-p", "x")], ids=" ".join)
def test_without_a_stdout_nothing_is_written_and_said_in_one_line(tiny_path: Path, words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "sluice", words[0], str(tiny_path), *words[1:]]
    closing = ["sh", "-c", 'exec "$@" <&- >&-', "sh", *command]
    done = subprocess.run(closing, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "Bad file descriptor" in done.stderr


def test_what_is_packed_without_standard_streams_is_whole(tiny_path: Path, tmp_path: Path) -> None:
    packed = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    for out, streams in zip(packed, ("", "<&- >&- 2>&-"), strict=True):
        command = [sys.executable, "-m", "sluice", "pack", str(tiny_path), str(out)]
        closing = ["sh", "-c", f'exec "$@" {streams}', "sh", *command]
        done = subprocess.run(closing, stdout=subprocess.DEVNULL, timeout=300, check=False)
        assert done.returncode == (1 if streams else 0)
    assert packed[0].read_bytes() == packed[1].read_bytes()


def test_a_full_disk_under_stdout_is_said(tiny_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    with full.open("w") as stdout, process("inspect", tiny_path, stdout=stdout) as child:
        _, err = child.communicate(timeout=300)
    assert child.returncode == 1
    assert err.count("\n") == 1 and "No space left" in err


def test_opening_stops_between_tensors(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sluice.engine.weights import DenseWeights

    load = DenseWeights.load

    def load_and_signal(self: DenseWeights, files: object, progress: object) -> None:
        signal.raise_signal(signal.SIGINT)
        load(self, files, progress)  # type: ignore[arg-type]
        raise AssertionError("loading went on to its end")

    monkeypatch.setattr(DenseWeights, "load", load_and_signal)
    before = threading.active_count()
    with deferred() as stop, pytest.raises(KeyboardInterrupt):
        open_engine(tiny_path, EngineConfig(expert_slots=6, threads=1), stop)
    assert threading.active_count() == before


def test_the_first_signal_waits_and_the_second_does_not() -> None:
    with deferred() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.exit_code == 130
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            stop.check()


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with raising(), pytest.raises(Terminated):
        signal.raise_signal(signal.SIGTERM)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    Stop().check()  # nothing came: nothing is raised

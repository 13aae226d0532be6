"""`sluice batch`: every line answered exactly once, however the run ends; what is refused; what is told."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import write_tiny

from sluice.cli import batch as command
from sluice.cli import main
from sluice.config import EngineConfig
from sluice.engine import Engine
from sluice.engine.budget import MemoryNeeds, plan_memory
from sluice.errors import InputError, ReadError

pytest.importorskip("fastapi", reason="needs the extra [serve]")

from sluice.server import batch_files
from sluice.server.batch_files import Answers, Requests
from sluice.server.jobs import Event, Finished, Job, TokenEvent
from sluice.server.limits import Limits
from sluice.server.model import ServedModel
from sluice.server.offline import AHEAD, Offline

FAST = ("--threads", "1", "--expert-slots", "24", "--ctx", "256", "--max-streams", "4")
Json = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("batch") / "tiny.gguf").path


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return call


Cli = Callable[..., tuple[int, str, str]]


def line(i: int, tokens: int = 5, **more: Any) -> Json:
    """A request to continue a text greedily."""
    body = {"prompt": f"the river number {i} runs", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body | more}


def write(path: Path, lines: Sequence[Json | str]) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return path


def answers(path: Path) -> list[Json]:
    return [json.loads(each) for each in path.read_text().splitlines()]


def texts(path: Path) -> dict[str, str]:
    """The text of each answer; every custom_id is there once."""
    found = answers(path)
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in found}


def test_requests_are_answered_as_the_api_does(cli: Cli, model: Path, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "the river"}], "max_tokens": 4, "temperature": 0, "seed": 3}
    given = write(
        tmp_path / "in.jsonl",
        [
            line(0), line(1, n=2, logprobs=1),
            {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": chat},
            "no JSON", "[1]", '{"body": {}}', "", {"custom_id": "u", "url": "/v1/embeddings", "body": {}},
            line(2, stream=True), line(3, temperature="hot"), line(4, model="gpt-4"), line(5, tokens=0),
            '{"custom_id": "half", "url": "/v1/completions", "body": {"prompt": "\\ud800"}}',
            {"custom_id": "", "url": "/v1/completions", "body": {}}, line(6, prompt="the " * 400),
            '{"custom_id": "half \\ud800", "url": "/v1/completions", "body": {"prompt": "x"}}',
        ],
    )  # fmt: skip
    out = tmp_path / "out.jsonl"
    code, printed, said = cli("batch", model, given, out, *FAST, "--json")
    result = json.loads(printed.splitlines()[-1])
    assert code == 0 and printed.count("\n") == 1
    assert (result["lines"], result["answered"], result["failed"], result["left"]) == (15, 4, 11, 0)
    assert result["generated_tokens"] == 5 + 2 * 5 + 4
    assert result["ledger"]["decode"]["steps"] > 0 and result["mode"]["ctx"] == 256 and result["streams"] == 4
    assert "first failure: line" in said and "11 failed" in said
    found = {each["sluice"]["line"]: each for each in answers(out)}
    assert sorted(found) == [1, 2, 3, 4, 5, 6, *range(8, 17)]
    with Engine.open(model, threads=1, expert_slots=24, ctx=256) as engine:
        text = "".join(t.text for t in engine.generate(
            "the river number 0 runs", 5, raw=True, temperature=0, ignore_eos=True))  # fmt: skip
    whole = found[1]["response"]
    assert whole["status_code"] == 200 and found[1]["error"] is None and found[1]["custom_id"] == "r0"
    assert whole["body"]["object"] == "text_completion" and whole["body"]["choices"][0]["text"] == text
    assert whole["body"]["usage"]["completion_tokens"] == 5
    two = found[2]["response"]["body"]["choices"]
    assert [each["index"] for each in two] == [0, 1] and len(two[0]["logprobs"]["tokens"]) == 5
    assert found[3]["response"]["body"]["object"] == "chat.completion"
    for number, said in (
        (4, "no JSON"),
        (5, "no JSON object"),
        (6, "no custom_id"),
        (8, "its url is"),
        (14, "custom_id"),
        (16, "no custom_id"),
    ):
        assert found[number]["response"] is None and said in found[number]["error"]["message"]
    statuses = {number: found[number]["response"]["status_code"] for number in (9, 10, 11, 12, 13, 15)}
    assert statuses == {9: 400, 10: 400, 11: 404, 12: 200, 13: 400, 15: 400}
    assert found[10]["response"]["body"]["error"]["param"] == "temperature" and found[10]["error"] is None


def test_kill_and_go_on(model: Path, tmp_path: Path) -> None:
    lines = [line(i, tokens=60) for i in range(40)]
    given, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "sluice", "batch", str(model), str(given), str(out), *FAST]
    kept, before = 0, b""
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
            while child.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < kept + 5):
                time.sleep(0.01)
            child.kill()
        assert child.returncode == -signal.SIGKILL if sys.platform != "win32" else child.returncode
        raw = out.read_bytes()
        assert kept < raw.count(b"\n") < 40
        out.write_bytes(raw + b'{"id": "batch_req_0", "custom_id": "r1')  # as if it had been writing
        kept = raw.count(b"\n")
        before = raw[: raw.rindex(b"\n") + 1]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert (result["skipped"], result["answered"], result["left"]) == (kept, 40 - kept, 0)
    assert f"has {kept} of 40 answers already" in done.stderr
    assert out.read_bytes().startswith(before)
    assert set(texts(out)) == {f"r{i}" for i in range(40)}
    other = tmp_path / "other.jsonl"
    subprocess.run([*command[: -len(FAST) - 1], str(other), *FAST], capture_output=True, check=True)
    assert texts(other) == texts(out)
    again = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(again.stdout)["answered"] == 0 and "has all 40 answers" in again.stderr


def test_ctrl_c_ends_it_and_says_how_to_go_on(
    cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, out = write(tmp_path / "in.jsonl", [line(i) for i in range(30)]), tmp_path / "out.jsonl"
    append, calls = Answers.append, []

    def interrupted(self: Answers, *words: Any) -> None:
        append(self, *words)
        calls.append(words)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Answers, "append", interrupted)
        code, printed, said = cli("batch", model, given, out, *FAST, "--json")
    result = json.loads(printed)
    assert (
        code == 130 and 3 <= result["answered"] == len(answers(out)) < 30 and result["left"] == 30 - len(answers(out))
    )
    assert f"{result['left']} are left: the same command goes on" in said and "Traceback" not in said
    assert cli("batch", model, given, out, *FAST)[0] == 0
    assert len(texts(out)) == 30


def test_what_the_machine_is_at_fault_for_is_no_answer(
    cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, out = write(tmp_path / "in.jsonl", [line(i) for i in range(12)]), tmp_path / "out.jsonl"
    decode, calls = Engine.decode, []

    def failing(self: Engine, *words: Any) -> Any:
        calls.append(words)
        if len(calls) == 6:
            raise ReadError("tiny.gguf: can't be read at 0: check the disk")
        return decode(self, *words)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "decode", failing)
        code, _, said = cli("batch", model, given, out, *FAST)
    assert code == 1 and said.endswith("sluice: tiny.gguf: can't be read at 0: check the disk\n")
    assert "answered before a fault; the same command goes on" in said
    assert len(answers(out)) < 12
    assert cli("batch", model, given, out, *FAST)[0] == 0
    assert len(texts(out)) == 12


def refused(done: tuple[int, str, str], said: str) -> None:
    assert done[0] == 2 and done[1] == "" and done[2].count("\n") == 1, done
    assert said in done[2]


def test_another_input_is_noticed_by_name(cli: Cli, model: Path, tmp_path: Path) -> None:
    lines = [line(i, tokens=1) for i in range(4)]
    given, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert cli("batch", model, given, out, *FAST)[0] == 0
    before = out.read_bytes()
    write(given, [*lines[:2], line(2, tokens=2), *lines[3:]])
    refused(cli("batch", model, given, out, *FAST), "in.jsonl: line 3 (custom_id 'r2') is not what")
    write(given, lines[:3])
    refused(cli("batch", model, given, out, *FAST), "out.jsonl: answers 1 lines that")
    assert out.read_bytes() == before
    write(given, [*lines, line(9, tokens=1)])
    assert cli("batch", model, given, out, *FAST)[0] == 0
    assert list(texts(out))[4:] == ["r9"] and out.read_bytes().startswith(before)
    write(given, [line(7, tokens=1)])
    assert cli("batch", model, given, out, *FAST, "--force")[0] == 0
    assert list(texts(out)) == ["r7"]


def test_what_is_refused(cli: Cli, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    twice = write(tmp_path / "twice.jsonl", [line(1), line(2), line(3), line(2, tokens=9)])
    refused(cli("batch", model, twice, out, *FAST), "custom_id 'r2' is on line 2 and on line 4")
    good = write(tmp_path / "good.jsonl", [line(1)])
    refused(cli("batch", model, tmp_path / "absent.jsonl", out, *FAST), "absent.jsonl: no such file")
    refused(cli("batch", model, write(tmp_path / "blank.jsonl", [""]), out, *FAST), "holds no requests")
    refused(cli("batch", model, good, good, *FAST), "is the file of requests")
    refused(cli("batch", good, *FAST), "1 names are given")
    refused(cli("batch", model, good, tmp_path, *FAST), "can't be written")
    for foreign in ("a diary", "a diary\n", '{"id": "batch_req_1"}\n', '{"custom_id": 1, "sluice": {}}\n'):
        out.write_text(foreign)
        refused(cli("batch", model, good, out, *FAST), "line 1 is no answer of sluice batch")
        assert out.read_text() == foreign


def test_force_loses_nothing_before_there_is_something_better(cli: Cli, model: Path, tmp_path: Path) -> None:
    given, out = write(tmp_path / "in.jsonl", [line(0)]), tmp_path / "out.jsonl"
    assert cli("batch", model, given, out, *FAST)[0] == 0
    before = out.read_bytes()
    refused(cli("batch", model, write(given, [line(0), line(0)]), out, *FAST, "--force"), "on line 1 and on line 2")
    refused(cli("batch", tmp_path / "none.gguf", write(given, [line(1)]), out, *FAST, "--force"), "no such file")
    assert out.read_bytes() == before
    weights = model.read_bytes()
    refused(cli("batch", model, given, model, *FAST, "--force"), "is the model")
    assert model.read_bytes() == weights
    assert cli("batch", model, given, out, *FAST, "--force")[0] == 0
    assert [each["custom_id"] for each in answers(out)] == ["r1"]


def test_two_processes_do_not_share_a_file(tmp_path: Path) -> None:
    pytest.importorskip("fcntl", reason="needs locks on files")
    with Answers(tmp_path / "out.jsonl"), pytest.raises(InputError, match="another sluice batch"):
        Answers(tmp_path / "out.jsonl")


def test_lines_that_are_too_long_are_passed_over(tmp_path: Path) -> None:
    given = write(tmp_path / "in.jsonl", [line(1), "x" * 5000, line(2), "y" * 5000])
    requests = Requests(given, 1000)
    with Answers(tmp_path / "out.jsonl") as out:
        assert requests.check(out.answered) == 4
    found = list(requests.lines())
    assert [(each.number, each.custom_id, each.raw is None) for each in found] == [
        (1, "r1", False), (2, None, True), (3, "r2", False), (4, None, True),
    ]  # fmt: skip
    assert found[1].digest != found[3].digest
    given.write_text(given.read_text() + "\n" + json.dumps(line(3)))
    with pytest.raises(InputError, match="was changed while it was read"):
        requests.check_unchanged()


def test_a_double_answer_is_noticed(tmp_path: Path) -> None:
    requests = Requests(write(tmp_path / "in.jsonl", [line(1)]), 1000)
    out = tmp_path / "out.jsonl"
    with Answers(out) as one:
        each = next(iter(requests.lines()))
        for now in (0.0, batch_files.SYNC_S + 1):
            one.append({"id": "batch_req_1", "custom_id": each.custom_id, "response": None, "error": {}}, each, now)
    with pytest.raises(InputError, match="answers one line twice"):
        Answers(out)


class Immediate:
    """A service that answers every job with one token, from a thread of its own; counts jobs that have not ended."""

    def __init__(self) -> None:
        self.most = self.open = 0
        self._lock = threading.Lock()

    def submit_all(self, jobs: Sequence[Job], on_event: Callable[[int, Event], None]) -> list[int]:
        with self._lock:
            self.open += len(jobs)
            self.most = max(self.most, self.open)

        def answer() -> None:
            for i in range(len(jobs)):
                on_event(i, TokenEvent(5, "x"))
                with self._lock:
                    self.open -= 1
                on_event(i, Finished("stop", 1, 3, 0, 1, 0.0, 0.0, (), 0.0))

        threading.Thread(target=answer).start()
        return list(range(len(jobs)))

    def cancel(self, ticket: int) -> None:
        raise AssertionError("nothing is cancelled in a run that ends well")


def test_only_so_many_are_under_way(model: Path, tmp_path: Path) -> None:
    given = write(tmp_path / "in.jsonl", [line(i, n=1 + i % 2) for i in range(200)])
    service, seen = Immediate(), []
    given_service: Any = service  # of a Service it has what is needed
    with Engine.open(model, threads=1, expert_slots=6, ctx=64) as engine, Answers(tmp_path / "out.jsonl") as out:
        requests = Requests(given, 1 << 20)
        run = Offline(
            given_service,
            ServedModel(engine, "tiny", 1),
            Limits(),
            width=3,
            progress=lambda done, of: seen.append((done, of)),
        )
        run.run(requests, out, requests.check(out.answered))
    assert len(texts(tmp_path / "out.jsonl")) == run.summary.answered == 200
    assert service.most <= AHEAD * 3 + 1
    assert seen[-1] == (200, 200) and run.summary.generated_tokens == 300


@pytest.mark.parametrize(
    ("ram", "streams"),
    [
        (400, 64),  # MB: all 100 experts of one MB fit, and so do contexts of 4 MB for as many as are opened at most
        (200, 14),  # all experts fit, and contexts beside them
        (155, 8),  # all would fit alone: some give way, for eight
        (100, 7),  # contexts take half of what experts would have
        (56, 2),  # hardly any room
    ],
)
def test_as_wide_as_memory_allows(monkeypatch: pytest.MonkeyPatch, ram: int, streams: int) -> None:
    class Planned:
        def __init__(self, path: Path, config: EngineConfig, plan_only: bool) -> None:
            self.spec = type("Spec", (), {"moe_layers": range(10), "n_expert": 10})
            needs = MemoryNeeds(
                process=1 << 20, dense=1 << 20, kv=4 * config.streams << 20, workspace=0, scratch=0, work=0
            )
            self.plan = plan_memory(
                needs, 1 << 20, ram=config.ram, free=0, expert_slots=None, least_slots=2, floor_slots=20, all_slots=100
            )

    monkeypatch.setattr("sluice.engine.Engine", Planned)
    config = EngineConfig(ram=ram << 20)
    found = command.widest(Path(), config)
    assert found == streams
    assert Planned(Path(), replace(config, streams=found), True).plan.slots >= 2

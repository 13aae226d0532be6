"""The benchmarks' own plumbing at toy size: a file is written, an arm walks it, another replays what it walked."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from oracles import llamacpp_logits
from tiny import write_tiny

FOLDER = Path(__file__).parents[1] / "benchmarks"
SYNTHETIC = ["qwen3-30b", "qwen3.6-35b", "ling-3.0-tiny", "gpt-oss-20b", "qwen3-235b"]
SHAPE = ["--layers=2", "--experts=8", "--top-k=2", "--ff=256", "--dim=256", "--heads=2", "--kv-heads=1", "--vocab=512"]


def run(script: str, *words: object) -> list[dict[str, Any]]:
    """The JSON lines that a script prints."""
    command = [sys.executable, str(FOLDER / script), *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("benchmarks") / "toy.gguf"
    [figures] = run("synth.py", path, *SHAPE)
    assert figures["bytes"] == path.stat().st_size
    shares = ("adjacent", "share_of_experts_for_95", "pinned_hit_at_13.4", "lru_hit_at_13.4")
    assert all(0 <= figures[name] <= 1 for name in shares)
    assert figures["adjacent_over_chance"] > 1  # tokens share their cluster's experts
    return path


def test_a_synthetic_file_has_the_shape_asked_for(synthetic: Path) -> None:
    reader = gguf.GGUFReader(synthetic)
    assert reader.fields["general.architecture"].contents() == "qwen3moe"
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    assert shapes["blk.1.ffn_down_exps.weight"] == [256, 256, 8]
    assert "blk.2.attn_q.weight" not in shapes


@pytest.mark.parametrize("model", SYNTHETIC)
def test_llamacpp_computes_what_every_synthetic_model_was_designed_for(model: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    run("synth.py", path, "--model", model, *SHAPE, "--layers=4", "--experts=16")  # the last of a shape counts
    ids = [5 + 16 * i for i in range(8)]  # all of one cluster
    logits = llamacpp_logits(path, ids)

    assert np.isfinite(logits).all()
    likely = np.exp(logits - logits.max(axis=1, keepdims=True))
    in_cluster = likely[:, 5::16].sum(axis=1) / likely.sum(axis=1)
    assert (in_cluster > 0.8).all()  # 0.95 by design, in wider models
    # What the layers add hardly changes what the embedding alone would yield, and so would route.
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    embedding, head = (
        gguf.quants.dequantize(stored[name].data, stored[name].tensor_type)
        for name in ("token_embd.weight", "output.weight")
    )
    x = embedding[ids]
    alone = x / np.sqrt((x**2).mean(axis=1, keepdims=True)) @ head.T
    assert 0 < np.linalg.norm(logits - alone) < 0.1 * np.linalg.norm(alone)


@pytest.mark.parametrize("model, billions", [("qwen3.6-35b", 34.66), ("ling-3.0-tiny", 7.89), ("gpt-oss-20b", 20.91)])
def test_a_shape_has_as_many_weights_as_is_published(
    model: str, billions: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    made = importlib.import_module("synth_models").MODELS[model]
    shape = made.shape
    n = 2 * shape.vocab * shape.dim + shape.dim
    n += sum(math.prod(tensor.shape) for i in range(shape.layers) for tensor in made.layer(shape, i))
    assert n / 1e9 == pytest.approx(billions, abs=0.006)


@pytest.mark.parametrize(
    "words, named",
    [
        (["--model=qwen3.6-35b", "--layers=3"], "4 layers"),
        (["--model=ling-3.0-tiny", "--experts=12"], "multiple of 8"),
        (["--ff=100"], "no multiple of Q6_K"),
        (["--top-k=9", "--experts=8"], "top-k"),
    ],
)
def test_a_shape_that_no_file_can_have_is_refused(words: list[str], named: str, tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "synth.py"), str(tmp_path / "no.gguf"), *SHAPE, "--layers=4", *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert named in result.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_an_existing_file_is_not_overwritten(synthetic: Path) -> None:
    before = synthetic.stat()
    result = subprocess.run(
        [sys.executable, str(FOLDER / "synth.py"), str(synthetic), *SHAPE], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert "--force" in result.stderr.splitlines()[-1]
    assert synthetic.stat() == before


def test_a_resident_arm_replays_a_streamed_arms_tokens(synthetic: Path, tmp_path: Path) -> None:
    walk = tmp_path / "walk.json"
    shape = ("--prompt", 8, "--warm-up", 3, "--gen", 4, "--repeat", 2, "--streams", 2)
    raw = ("--raw", "--raw-seconds", 0.01, "--tolerance", 2)  # two rates never differ by more than twice their mean
    streamed = run("arm.py", synthetic, "--expert-slots", 6, *shape, *raw, "--dump", walk)
    resident = run("arm.py", synthetic, "--resident", "--replay", walk)

    assert [one["span"] for one in streamed] == [one["span"] for one in resident] == [[3, 7], [7, 11]]
    [dumped] = json.loads(walk.read_text())
    assert [len(tokens) for tokens in dumped["tokens"]] == [11, 11]
    for one in (*streamed, *resident):
        decode = one["ledger"]["decode"]
        assert (decode["steps"], decode["tokens"], one["kept"]) == (4, 8, True)
        assert len(one["intervals_s"]) == 4
        assert one["decode_s"] == sum(one["intervals_s"]) >= decode["compute_s"] > 0
        assert one["decode_tok_per_s"] > 0 and one["itl_ms"]["p50"] > 0 and one["arm"]["expert_bytes"] > 0
    assert all(one["ledger"]["decode"]["bytes_read"] > 0 for one in streamed)  # 6 slots can't hold 16 experts
    assert all(one["raw"]["bytes_per_s"] > 0 and one["raw"]["depth"] >= 1 for one in streamed)
    assert all(one["arm"]["slots"] == 16 for one in resident)


def test_simulated_and_live_rerouting_begin_alike(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf").path
    words = ("--model", model, "--characters", 60, "--ctx", 32, "--slots", 12, "--threads", 1, "--margins", "0,1")
    [result] = run("rerouting.py", *words)
    verdicts = {one["row"]: one["verdict"] for one in result["rows"]}
    assert verdicts["margin 0: live ÷ simulated misses"] == "pass"
    assert verdicts["margin 1: experts replaced, live"] == "pass"
    assert "fail" not in verdicts.values() and "not measured" not in verdicts.values()
    exact, wide = result["raw"]["table"]
    assert exact["live"]["misses"] > wide["live"]["misses"] and exact["live"]["ppl"] != wide["live"]["ppl"]


def test_every_mode_of_nano_is_measured_by_domain(tmp_path: Path) -> None:
    for i, domain in enumerate(("code", "prose")):
        (tmp_path / f"{i:03}-{domain}.txt").write_text("And the king said unto them, Go ye, and serve. " * 3)
    last = run("modes.py", "--texts", tmp_path, "--passages", 1)[-1]
    assert all(one["kl"] > 0 and set(one["per_domain"]) == {"code", "prose"} for one in last["modes"].values())
    kl = {mode: one["kl"] for mode, one in last["modes"].items()}
    assert kl["kv q8_0"] < kl["kv q4_0"] < kl["one expert of two"]


def test_a_streamed_prompt_is_timed_alone(synthetic: Path) -> None:
    [first, second] = run(
        "arm.py", synthetic, "--expert-slots", 6, "--measure", "prefill", "--prompt", 20, "--walks", 2
    )
    for one in (first, second):
        assert one["ledger"]["prefill"]["tokens"] == 20
        assert one["ledger"]["decode"]["steps"] == 0
        assert one["prefill_tok_per_s"] > 0
        assert one["decode_s"] is None


def test_a_server_answers_many_as_it_answers_one(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "served.gguf").path
    words = ("--parts=exactness", "--exact=4", "--exact-gen=4", "--exact-longest=16", "--threads=1")
    [result] = run("serving.py", f"--model={model}", *words)
    verdicts = {row["row"]: row["verdict"] for row in result["rows"]}
    assert "pass" in verdicts.values() and "fail" not in verdicts.values(), result["rows"]

"""Training whole models from recipes: from scratch, from a model, interrupted, by several processes, refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import two_processes
from safetensors.torch import load_file
from toys import MODEL, toy_data, toy_model, write_documents

from sluice.errors import InputError
from sluice.train.data import Tokens, prepare
from sluice.train.experts import NAME, use_fast_experts
from sluice.train.language import LanguageModel
from sluice.train.loop import DivergedError, Stopped
from sluice.train.opening import open_model
from sluice.train.pretrain import fresh, held_out, pretrain
from sluice.train.recipe import Recipe, parse_recipe

torch.set_num_threads(1)

TRAIN = {"steps": 24, "batch": 4, "length": 32, "lr": 1e-2, "warmup": 2, "log_every": 5, "save_every": 10,
         "valid_every": 12}  # fmt: skip


def recipe(*, model: Mapping[str, Any] | None = None, **sections: Any) -> Recipe:
    train = {**TRAIN, **sections.pop("train", {})}
    return parse_recipe(
        {"train": train, "data": {"valid_rows": 4}, "model": MODEL if model is None else model, **sections}
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_data(tmp_path_factory.mktemp("text"), valid_share=0.2, seed=0)


@pytest.fixture(scope="module")
def base(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the recipe from scratch."""
    out = tmp_path_factory.mktemp("runs") / "base"
    pretrain(data, out, recipe())
    return out


def model_weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def logged(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("tok_per_s", "elapsed_s")} for line in lines]


def test_a_model_learns_from_scratch(data: Path, base: Path) -> None:
    lines = logged(base)
    train = [line for line in lines if "loss" in line]
    assert train[-1]["cross_entropy"] < 0.8 * train[0]["cross_entropy"]
    assert {"balance", "router_z", "load_entropy", "dead_share", "reuse", "lru_miss", "grad_norm", "lr"} <= set(
        train[0]
    )
    valid = json.loads((base / "result.json").read_text())["valid"]
    assert {"loss", "perplexity", "loss.code", "loss.prose", "own.code", "own.prose", "reuse", "lru_miss"} <= set(valid)
    assert valid["loss"] == pytest.approx((valid["loss.code"] + valid["loss.prose"]) / 2)
    model = open_model(base / "model")
    assert sum(p.numel() for p in model.parameters()) == json.loads((base / "result.json").read_text())["parameters"]
    assert (base / "model" / "tokenizer.json").read_bytes() == (data / "tokenizer.json").read_bytes()
    config = json.loads((base / "model" / "config.json").read_text())
    assert config["eos_token_id"] == Tokens(data).end and config["model_type"] == "qwen3_moe"


def test_the_saved_model_has_the_reported_loss(data: Path, base: Path) -> None:
    tokens = Tokens(data)
    model = open_model(base / "model")
    losses: dict[int, list[float]] = {}
    for ids, domain in held_out(tokens, 32, 4):
        with torch.no_grad():
            out = model(input_ids=ids[:, :-1]).logits.log_softmax(-1)
        for row, wanted, d in zip(out, ids[:, 1:], domain.tolist(), strict=True):
            losses.setdefault(d, []).append(-float(row.gather(1, wanted[:, None]).mean()))
    mean = sum(sum(one) / len(one) for one in losses.values()) / len(losses)
    assert json.loads((base / "result.json").read_text())["valid"]["loss"] == pytest.approx(mean, rel=1e-4)


def test_interrupted_and_gone_on_is_bit_for_bit_the_same(data: Path, base: Path, tmp_path: Path) -> None:
    for at in (7, 15):
        done = [0]

        def progress(now: float, total: float, done: list[int] = done) -> None:
            done[0] = int(now)

        with pytest.raises(Stopped):
            pretrain(
                data, tmp_path / "run", recipe(), progress=progress, stop=lambda at=at, done=done: done[0] + 1 >= at
            )
    pretrain(data, tmp_path / "run", recipe())
    a, b = model_weights(base), model_weights(tmp_path / "run")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert logged(tmp_path / "run") == logged(base)


def test_the_bias_that_balances_is_kept_and_fades(data: Path, tmp_path: Path) -> None:
    asked = recipe(balance={"loss": 0.0, "bias": 0.01, "fade": 0.4})
    pretrain(data, tmp_path / "whole", asked)
    done = [0]

    def progress(now: float, total: float) -> None:
        done[0] = int(now)

    with pytest.raises(Stopped):
        pretrain(data, tmp_path / "parts", asked, progress=progress, stop=lambda: done[0] + 1 >= 9)
    pretrain(data, tmp_path / "parts", asked)
    a, b = model_weights(tmp_path / "whole"), model_weights(tmp_path / "parts")
    assert all(torch.equal(a[name], b[name]) for name in a)
    tokens = Tokens(data)
    objective = LanguageModel(fresh(MODEL, tokens, 0), asked.balance, [], tokens.domains, lambda m, p: None)
    assert objective.bias is not None
    objective.bias.bias[0, 5] = 1e3
    (ids, domain), *_ = held_out(tokens, 32, 4)
    for done_share, taken in ((0.2, True), (0.97, False)):
        objective.done = done_share
        chosen = objective.run(ids, domain, prior=True).routes[0][1]
        assert bool((chosen == 5).any(-1).all()) == taken
    assert not (objective.run(ids, domain).routes[0][1] == 5).any(-1).all()  # what is measured has no bias


def test_training_starts_from_a_model(data: Path, base: Path, tmp_path: Path) -> None:
    result = pretrain(data, tmp_path / "run", recipe(model={}, train={"steps": 2, "lr": 1e-4}), start=base / "model")
    before = json.loads((base / "result.json").read_text())["valid"]["loss"]
    assert result["valid"]["loss"] == pytest.approx(before, rel=0.05)
    made = json.loads((tmp_path / "run" / "recipe.json").read_text())["recipe"]
    assert len(made["start"]) == 64 and made["data_fingerprint"] == Tokens(data).fingerprint


def test_another_recipe_and_other_data_are_refused_by_name(data: Path, base: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"another recipe: train\.seed is 0 there and 1 here"):
        pretrain(data, base, recipe(train={"seed": 1}))
    files = write_documents(tmp_path, documents=50)
    prepare(tmp_path / "other", {name: [path] for name, path in files.items()}, tokenizer=data, valid_share=0.2, seed=0)
    with pytest.raises(InputError, match=r"another recipe: data_fingerprint is"):
        pretrain(tmp_path / "other", base, recipe())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({}, r"model\.family is missing: choose from qwen3_moe"),
        ({"family": "gpt2"}, r"model\.family is 'gpt2', which is unknown: choose from"),
        ({**MODEL, "experts": 8}, r"model\.experts is unknown: Qwen3MoeConfig has no such number"),
        ({**MODEL, "vocab_size": 8}, r"model\.vocab_size is the data's to say"),
        ({**MODEL, "hidden_size": "wide"}, r"\[model\] can't be built"),
        ({**MODEL, "mlp_only_layers": [0, 1]}, r"has no layer with experts"),
        ({**MODEL, "num_experts_per_tok": 9}, r"gives a token 9 of 8 experts"),
        ({**MODEL, "num_experts_per_tok": 0}, r"gives a token 0 of 8 experts"),
        ({**MODEL, "num_experts": 1 << 30}, r"parameters, whose training takes .* free: give it fewer"),
        ({**MODEL, "num_hidden_layers": 10**9}, r"num_hidden_layers is 1000000000: give at most"),
        ({**MODEL, "num_attention_heads": 3, "num_key_value_heads": 2}, r"\[model\] can't be built"),
        ({**MODEL, "norm_topk_prob": False}, r"GGUF's qwen3moe always divides routing weights by their sum"),
    ],
)
def test_a_model_that_cannot_be_is_refused(data: Path, model: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fresh(model, Tokens(data), 0)


def test_weights_are_normalised_as_gguf_does_unless_asked(data: Path) -> None:
    asked = {key: value for key, value in MODEL.items() if key != "norm_topk_prob"}
    assert fresh(asked, Tokens(data), 0).config.norm_topk_prob  # type: ignore[union-attr]


def test_a_model_of_another_tokenizer_is_refused(data: Path, base: Path, tmp_path: Path) -> None:
    files = write_documents(tmp_path)
    prepare(tmp_path / "other", {name: [path] for name, path in files.items()}, vocab=290, valid_share=0.2, seed=0)
    with pytest.raises(InputError, match="another tokenizer"):
        pretrain(tmp_path / "other", tmp_path / "run", recipe(model={}), start=base / "model")
    with pytest.raises(InputError, match=r"has a \[model\]"):
        pretrain(data, tmp_path / "run", recipe(), start=base / "model")


def test_weights_that_became_no_numbers_are_named(data: Path, tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"training diverged in step \d+: the .* (is nan|is not finite)"):
        pretrain(data, tmp_path / "run", recipe(train={"lr": 1e30, "clip": 1e30, "warmup": 0}))


# --- experts


def test_sorted_experts_are_transformers_own() -> None:
    plain, fast = toy_model(), toy_model()
    use_fast_experts(fast)
    assert fast.config._experts_implementation == NAME and plain.config._experts_implementation != NAME
    plain.set_experts_implementation("eager")
    ids = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(1))
    for model in (plain, fast):
        model(input_ids=ids, labels=ids).loss.backward()
    torch.testing.assert_close(fast(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    for (name, a), (_, b) in zip(plain.named_parameters(), fast.named_parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_an_expert_that_nothing_goes_to_gets_no_gradient() -> None:
    model = toy_model()
    use_fast_experts(model)
    model(input_ids=torch.tensor([[5]]), labels=torch.tensor([[5]])).logits.sum().backward()
    grad = model.get_parameter("model.layers.0.mlp.experts.gate_up_proj").grad
    assert grad is not None and int((grad.abs().sum((1, 2)) > 0).sum()) == 2


# --- the command


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "sluice", "train", *map(str, words)]


def recipe_file(folder: Path, **train: Any) -> Path:
    def section(name: str, values: Mapping[str, Any]) -> str:
        return f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())

    text = section("train", {**TRAIN, **train}) + section("model", MODEL) + section("data", {"valid_rows": 4})
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_sigterm_saves_and_the_same_command_goes_on(data: Path, tmp_path: Path) -> None:
    asked = recipe_file(tmp_path, steps=4000, log_every=1, save_every=4000, valid_every=0)
    words = command("pretrain", data, tmp_path / "run", "--recipe", asked)
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.is_file() and metrics.stat().st_size):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert "saved in" in said and "the same command goes on" in said
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert int(saved.name.removeprefix("step-")) == json.loads(metrics.read_text().splitlines()[-1])["step"]


def test_divergence_is_one_line_and_exit_code_2(data: Path, tmp_path: Path) -> None:
    asked = recipe_file(tmp_path, lr=1e30, clip=1e30, warmup=0)
    ended = subprocess.run(
        command("pretrain", data, tmp_path / "run", "--recipe", asked), capture_output=True, text=True, timeout=300,
        env=ENVIRONMENT,
    )  # fmt: skip
    last = ended.stderr.strip().splitlines()[-1]
    assert ended.returncode == 2 and last.startswith("sluice: ") and "diverged in step" in last
    assert "there is no checkpoint yet" in last


@pytest.mark.parametrize("split", [False, True])
def test_two_processes_are_one(data: Path, tmp_path: Path, split: bool) -> None:
    """Gradients are those of all rows, whoever has them: within float32, as sums are in another order.

    Where weights are split, the run is also one that went on from a checkpoint of a single process.
    """
    asked = recipe_file(tmp_path, steps=8, save_every=4, log_every=2)
    pretrain(data, tmp_path / "one", recipe(train={"steps": 8, "save_every": 4, "log_every": 2}))
    if split:
        shutil.copytree(tmp_path / "one", tmp_path / "two")
        for name in ("result.json", "model", "checkpoints/step-000008"):
            path = tmp_path / "two" / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    two_processes("pretrain", data, tmp_path / "two", "--recipe", asked, split=split)
    a, b = model_weights(tmp_path / "one"), model_weights(tmp_path / "two")
    for name in a:
        torch.testing.assert_close(b[name], a[name], rtol=1e-3, atol=1e-4, msg=name)
    one, two = logged(tmp_path / "one"), logged(tmp_path / "two")
    assert [line["step"] for line in one] == [line["step"] for line in two]
    assert two[-2]["loss"] == pytest.approx(one[-2]["loss"], rel=1e-4)
    result = json.loads((tmp_path / "two" / "result.json").read_text())
    assert (result["processes"], result["split"]) == (2, split)

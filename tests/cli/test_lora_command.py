"""`--lora` and `sluice lora survival`: their JSON, what they say, what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import FAST, Cli
from routing.adapters import linear_names, random_factors, write_adapter
from tiny import CORPUS, TinyModel, write_tiny

IDS = ("--prompt-ids", "1,2,3,4", "-n", "6", "--temperature", "0", "--ctx", "64")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny(tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.fixture(scope="session")
def adapter(model: TinyModel) -> Path:
    factors = random_factors(model, linear_names(model), 4, std=0.02)
    return write_adapter(model.path.with_name("a.gguf"), "qwen3moe", factors)


@pytest.fixture(scope="session")
def text(model: TinyModel) -> Path:
    path = model.path.with_name("text.txt")
    path.write_text(CORPUS)
    return path


def test_run_names_the_adapters(cli: Cli, model: TinyModel, adapter: Path) -> None:
    plain = cli("run", model.path, *IDS, "--json", *FAST)
    done = cli("run", model.path, *IDS, "--lora", f"{adapter}:4", "--lora", adapter, "--json", *FAST)
    assert done.code == 0 and done.json["tokens"] != plain.json["tokens"]
    assert "lora" not in plain.json["mode"]
    assert [(it["file"], it["scale"]) for it in done.json["mode"]["lora"]] == [(str(adapter), 4.0), (str(adapter), 1.0)]
    told = cli("run", model.path, *IDS, "--lora", f"{adapter}:4", *FAST)
    assert "adapter a.gguf × 4" in told.err
    none = cli("run", model.path, *IDS, "--lora", f"{adapter}:0", "--json", *FAST)
    assert none.json["tokens"] == plain.json["tokens"]


def test_eval_kl_compares_with_the_model_alone(cli: Cli, model: TinyModel, adapter: Path, text: Path) -> None:
    words = (model.path, "--text", text, "--ctx", 64, "--lora", f"{adapter}:2", "--json", *FAST)
    result = cli("eval", "kl", *words).json
    assert result["kl"]["mean"] > 1e-3 and "lora" not in result["reference"]["mode"]


def test_survival_of_weights(cli: Cli, model: TinyModel, adapter: Path) -> None:
    done = cli("lora", "survival", model.path, adapter, "--json", *FAST)
    result = done.json
    assert done.code == 0 and result["output"] is None
    assert result["paper"] == {"attention_projection": 0.34, "dense_projection": 0.02, "output_distribution": 0.18}
    assert set(result["matrices"]) == set(linear_names(model))
    router = result["matrices"]["blk.0.ffn_gate_inp.weight"]
    assert router["type"] == "F32" and router["share"] == pytest.approx(1, abs=1e-5)
    assert result["matrices"]["blk.0.ffn_up_exps.weight"]["type"] == "Q4_K"
    assert result["types"]["Q4_K"]["share"] < result["types"]["Q8_0"]["share"] <= 1.01
    table = cli("lora", "survival", model.path, adapter, *FAST)
    assert "blk.2.attn_output.weight" in table.out and "all in Q4_K" in table.out and "34% on an attention" in table.err


def test_survival_in_the_output(cli: Cli, model: TinyModel, adapter: Path, text: Path) -> None:
    words = ("lora", "survival", model.path, f"{adapter}:3", "--text", text, "--ctx", 64)
    output = cli(*words, "--json", *FAST).json["output"]
    assert output["tokens"] > 100
    assert 0.5 < output["share"] < 1.2  # a large update, most of which survives
    assert output["kl"]["unmerged"] > output["kl"]["unmerged_to_merged"] > 0
    assert output["mode"]["lora"][0]["scale"] == 3.0 and "lora" not in output["reference_mode"]
    assert "distribution" in cli(*words, *FAST).out


def test_survival_in_the_output_of_a_model_that_rounds_nothing(cli: Cli, text: Path, tmp_path: Path) -> None:
    from tiny import T

    model = write_tiny(tmp_path / "m.gguf", expert_type=T.F32, dense_type=T.F32, split=2)
    adapter = write_adapter(tmp_path / "a.gguf", "qwen3moe", random_factors(model, linear_names(model), 4, std=0.02))
    words = ("lora", "survival", model.path, adapter, "--text", text, "--ctx", 64, "--kv", "f32", "--json", *FAST)
    output = cli(*words).json["output"]
    assert output["share"] == pytest.approx(1, abs=1e-3)
    assert output["kl"]["unmerged_to_merged"] < 1e-6 < output["kl"]["merged"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("run", "{model}", *IDS, "--lora", "{model}"), "no adapter"),
        (("run", "{model}", *IDS, "--lora", "absent.gguf"), "no such adapter"),
        (("run", "{model}", *IDS, "--lora", "{adapter}:nan"), "is no file and scale"),
        (("lora", "survival", "{model}", "{model}"), "no adapter"),
        (("lora", "survival", "{model}", "{adapter}", "--lora", "{adapter}"), "leave out --lora"),
        (("lora", "survival", "{model}", "{adapter}", "--text", "absent.txt"), "no such file"),
    ],
)
def test_refusals(cli: Cli, model: TinyModel, adapter: Path, words: tuple[str, ...], complaint: str) -> None:
    done = cli(*(word.format(model=model.path, adapter=adapter) for word in words), *FAST)
    assert done.code == 2 and done.out == "" and done.err.count("\n") == 1 and complaint in done.err

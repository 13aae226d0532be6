"""The three stages end to end, by their commands: text from the engine, heads and adapter that the engine serves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch import two_processes
from safetensors.torch import load_file
from tiny_moe import tiny_model
from toys import toy_data
from typer.testing import CliRunner

from sluice.cli.commands import group
from sluice.cli.ending import main
from sluice.cli.train_stages import onpolicy, prerouter, recover, text
from sluice.engine import Engine
from sluice.errors import InputError
from sluice.ggml import load_library
from sluice.routing import init_prerouter, open_prerouter
from sluice.train.data import Tokens
from sluice.train.gguf_in import GgufWeights
from sluice.train.gguf_out import export_gguf
from sluice.train.heads import Heads
from sluice.train.lora import open_lora
from sluice.train.opening import open_model
from sluice.train.pretrain import saver
from sluice.train.processes import Place
from sluice.train.student import Student
from sluice.train.teacher_text import Asked, write_teacher_texts
from sluice.train.texts import Texts

torch.set_num_threads(1)
COMMANDS = {"text": text, "prerouter": prerouter, "recover": recover, "onpolicy": onpolicy}
APP = group("train", "", COMMANDS)
SHORT = ["--steps", "4", "--batch", "4", "--length", "24", "--warmup", "0", "--held-out", "2", "--save-every", "2"]


@dataclass(frozen=True)
class Made:
    """A tiny model as transformers has it, as GGUF in full and quantised, data and texts of its teacher."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def whole(self) -> Path:
        return self.folder / "whole.gguf"

    @property
    def quantised(self) -> Path:
        return self.folder / "q4_0.gguf"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def texts(self) -> Path:
        return self.folder / "texts"


def call(*words: object) -> Any:
    """The object that a command prints. Raises what it raises."""
    result = CliRunner().invoke(APP, [str(word) for word in (*words, "--json")], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    found = Made(tmp_path_factory.mktemp("staged"))
    assert toy_data(found.folder) == found.data
    end = Tokens(found.data).end
    model = tiny_model(vocab_size=300, moe_intermediate_size=32, eos_token_id=end, bos_token_id=end)
    saver(found.data)(model, found.model)
    for out, type in ((found.whole, "f32"), (found.quantised, "q4_0")):
        export_gguf(found.model, out, load_library(), type=type)
    call("text", found.whole, found.data, found.texts, "--prompts", 12, "--held-out", 4, "--prompt-tokens", 6,
         "--tokens", 12, "--ram", "1G", "--threads", 1)  # fmt: skip
    return found


@pytest.fixture(scope="module")
def runs(made: Made) -> dict[str, dict[str, Any]]:
    """What the three stages came to, one after the other."""
    at = made.folder
    given = ["--weights", made.quantised]
    first = call("prerouter", made.model, made.data, at / "one", *given, "--hidden", 8, *SHORT)
    second = call("recover", made.model, made.texts, at / "two", *given, "--heads", first["heads"], "--rank", 2,
                  "--targets", "attention,experts", "--lr", "0.03", *SHORT)  # fmt: skip
    third = call("onpolicy", made.model, made.texts, at / "three", *given, "--heads", second["heads"],
                 "--adapter", second["adapter"], "--generate", 5, *SHORT)  # fmt: skip
    return {"prerouter": first, "recover": second, "onpolicy": third}


def test_the_teacher_wrote_on_where_the_prompts_end(made: Made) -> None:
    texts, data = Texts(made.texts), Tokens(made.data)
    assert (texts.n_texts("train"), texts.n_texts("valid")) == (12, 4)
    assert texts.meta.tokenizer == data.meta.tokenizer and tuple(texts.meta.domains) == data.domains
    for split in ("train", "valid"):
        for i in range(texts.n_texts(split)):
            ids, n_prompt, domain = texts.text(split, i)
            assert n_prompt == 6 and domain == i % 2 and 7 <= len(ids) <= 6 + 2 * 12
            whole = data.ids(data.domains[domain], split)
            windows = np.lib.stride_tricks.sliding_window_view(whole, 6)
            assert (windows == ids[:6]).all(1).any()


def test_texts_are_gone_on_with_and_others_are_refused(made: Made, tmp_path: Path) -> None:
    again = call("text", made.whole, made.data, made.texts, "--prompts", 12, "--held-out", 4, "--prompt-tokens", 6,
                 "--tokens", 12)  # fmt: skip
    assert again["fingerprint"] == Texts(made.texts).fingerprint
    with pytest.raises(InputError, match="holds texts asked for otherwise"):
        call("text", made.whole, made.data, made.texts, "--prompts", 13)
    with pytest.raises(InputError, match="holds texts by another model"):
        call("text", made.quantised, made.data, made.texts, "--prompts", 12, "--held-out", 4, "--prompt-tokens", 6,
             "--tokens", 12)  # fmt: skip
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="holds other files"):
        call("text", made.whole, made.data, tmp_path)
    data, library = Tokens(made.data), load_library()
    with pytest.raises(InputError, match="no document of more than 5000 tokens"):
        write_teacher_texts(made.whole, data, tmp_path / "long", Asked(4, 4, 5000, 4), library=library)
    with pytest.raises(InputError, match="prompts 0 is too small"):
        Asked(0, 4, 4, 4)


def test_each_stage_writes_what_the_next_one_and_the_engine_take(made: Made, runs: dict[str, dict[str, Any]]) -> None:
    done: list[str] = []
    for stage, result in runs.items():
        done.append(stage)
        heads = Heads.open(result["heads"])
        assert heads.stages == tuple(done) and result["steps"] == 4
        training = open_prerouter(result["heads"]).info.training
        assert set(training) == {"stages", "seed", *done} and training[stage]["stage"] == stage
        assert (result["adapter"] is None) == (stage == "prerouter")
        with Engine.open(
            made.quantised, routing="prerouted", prerouter=Path(result["heads"]), expert_slots=64, threads=1, ctx=64,
            lora=() if result["adapter_gguf"] is None else ((Path(result["adapter_gguf"]), 1.0),),
        ) as engine:  # fmt: skip
            assert len(list(engine.generate([1, 2, 3], max_tokens=4))) <= 4


def test_a_run_that_is_done_is_not_done_again(made: Made, runs: dict[str, dict[str, Any]]) -> None:
    given = ["--weights", made.quantised, "--hidden", 8, *SHORT]
    again = call("prerouter", made.model, made.data, made.folder / "one", *given)
    assert again == runs["prerouter"]
    with pytest.raises(InputError, match=r"is a run of another recipe: train\.lr"):
        call("prerouter", made.model, made.data, made.folder / "one", *given, "--lr", "0.5")


def test_stages_of_a_frozen_model_in_parts_come_to_the_same(
    made: Made, runs: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within float32, as sums are in another order."""
    given = ["--weights", made.quantised, *SHORT]
    two_processes("prerouter", made.model, made.data, tmp_path / "one", *given, "--hidden", 8, split=True)
    two_processes("recover", made.model, made.texts, tmp_path / "two", *given, "--heads", runs["prerouter"]["heads"],
                  "--rank", 2, "--targets", "attention,experts", "--lr", "0.03", split=True)  # fmt: skip
    for run, stage in (("one", "prerouter"), ("two", "recover")):
        assert json.loads((tmp_path / run / "result.json").read_text())["split"]
        for name, whole in load_file(runs[stage]["heads"]).items():
            part = load_file(tmp_path / run / "heads.safetensors")[name]
            torch.testing.assert_close(part, whole, rtol=1e-3, atol=1e-4, msg=name)
    whole, part = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in
                   (made.folder / "two", tmp_path / "two"))  # fmt: skip
    for name in whole:
        torch.testing.assert_close(part[name], whole[name], rtol=1e-3, atol=1e-4, msg=name)
    monkeypatch.setattr("sluice.train.processes.place", lambda: Place(0, 2, torch.device("cpu"), split=True))
    second = runs["recover"]
    with pytest.raises(InputError, match="onpolicy can't split weights"):
        call("onpolicy", made.model, made.texts, tmp_path / "three", *given, "--heads", second["heads"], "--adapter",
             second["adapter"])  # fmt: skip


def test_the_engines_logits_are_the_torch_students(made: Made, runs: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """On the quantised file, whose products in the engine round what they multiply by to 8 bits: the natively routed
    model tells how much that is. And, to the last bits of float32, on a file that stores the same numbers unrounded."""
    result = runs["onpolicy"]
    ids = [int(i) for i in Texts(made.texts).text("valid", 0).ids[:16]]
    base = open_model(made.model)
    config = json.loads((made.model / "config.json").read_bytes())
    GgufWeights(made.quantised, config, load_library()).load_into(base)
    with torch.no_grad():
        native = base(input_ids=torch.tensor([ids])).logits[0].numpy()
    saver(made.data)(base, tmp_path / "same")
    export_gguf(tmp_path / "same", tmp_path / "same.gguf", load_library(), type="f32")
    open_lora(base, Path(result["adapter"]))
    with torch.no_grad():
        out = Student(base, Heads.open(result["heads"]))(torch.tensor([ids]))
    ours = out.logits[0].numpy()
    assert int(out.predicted.sum()) == 14

    def served(path: Path, **more: Any) -> np.ndarray:
        with Engine.open(path, expert_slots=64, threads=1, ctx=64, kv="f32", **more) as engine:
            return engine.logits(ids)

    student: dict[str, Any] = {"routing": "prerouted", "prerouter": Path(result["heads"]),
                               "lora": [(Path(result["adapter_gguf"]), 1.0)]}  # fmt: skip
    assert _relative(served(tmp_path / "same.gguf", **student), ours) < 1e-5
    assert _relative(ours, native) > 0.05  # the adapter and the routes do make a difference
    rounding = _relative(served(made.quantised), native)
    assert _relative(served(made.quantised, **student), ours) < 3 * rounding


def _relative(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def test_stages_out_of_order_are_refused_by_name(made: Made, runs: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    init_prerouter(made.quantised, tmp_path / "init", load_library(), hidden=8)
    given = ["--weights", made.quantised, *SHORT]
    with pytest.raises(InputError, match=r"init: .* not been through prerouter, and recover comes after it"):
        call("recover", made.model, made.texts, tmp_path / "run", "--heads", tmp_path / "init", *given)
    one, two = runs["prerouter"]["heads"], runs["recover"]
    with pytest.raises(InputError, match="not been through recover, and onpolicy comes after it"):
        call("onpolicy", made.model, made.texts, tmp_path / "run", "--heads", one, "--adapter", two["adapter"], *given)
    with pytest.raises(InputError, match="been through recover, which prerouter would undo"):
        call("prerouter", made.model, made.data, tmp_path / "run", "--heads", two["heads"], *given)
    assert not (tmp_path / "run").exists()
    forced = call("recover", made.model, made.texts, tmp_path / "run", "--heads", tmp_path / "init", "--force", *given)
    assert Heads.open(forced["heads"]).stages == ("recover",)


def test_parts_of_other_models_are_refused_by_name(made: Made, runs: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    other = tiny_model(vocab_size=300, moe_intermediate_size=32, seed=5)
    saver(made.data)(other, tmp_path / "other")
    export_gguf(tmp_path / "other", tmp_path / "other.gguf", load_library(), type="q4_0")
    one, two, three = runs.values()
    run = tmp_path / "run"
    with pytest.raises(InputError, match=r"other\.gguf: holds another model of the same shape: layer 0's router"):
        call("prerouter", made.model, made.data, run, "--weights", tmp_path / "other.gguf", *SHORT)
    with pytest.raises(InputError, match="heads for another model"):
        call("recover", tmp_path / "other", made.texts, run, "--weights", tmp_path / "other.gguf",
             "--heads", one["heads"], *SHORT)  # fmt: skip
    with pytest.raises(InputError, match="is not the adapter that the heads in"):
        call("onpolicy", made.model, made.texts, run, "--weights", made.quantised, "--heads", two["heads"],
             "--adapter", three["adapter"], *SHORT)  # fmt: skip
    assert not run.exists()


@pytest.mark.parametrize("held_out", ["0", "-3"])
def test_nothing_held_out_is_refused(held_out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "prerouter", str(tmp_path / "model"), str(tmp_path / "data"), str(tmp_path / "run")]
    assert main([*words, "--held-out", held_out]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"sluice: --held-out {held_out} is too small: give a whole number of at least 1"
    ]

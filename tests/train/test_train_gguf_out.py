"""Exported files: equal logits in transformers, Sluice and llama.cpp; whole or not at all; bad directories refused."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from engine.harness import opened
from hf_models import FAMILY_NAMES, N_TOKENS, logits_of, random_model, save_model
from oracles import llamacpp_logits, llamacpp_tokenize
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sluice.cli.train_export import export
from sluice.errors import InputError
from sluice.ggml import load_library
from sluice.train.gguf_out import export_gguf
from sluice.train.gguf_types import FILE_TYPES

torch.set_num_threads(1)
N = 64
# Float32 products summed in another order, over at most 4 layers: about 1e-6, 7e-6 through linear attention's state.
RELATIVE_L2 = 2e-5
# Quantised, Sluice and llama.cpp take one token at a time by the same kernels of two builds of ggml. See models/parity.
QUANTISED_L2 = 0.01


def ids_of(seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, N_TOKENS, N).tolist()


def apart(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def sluice_logits(path: Path, ids: list[int]) -> np.ndarray:
    with opened(path, kv="f32", expert_slots=16) as engine:
        return engine.logits(ids)


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A qwen3_moe directory, for tests that leave it as it is."""
    return save_model(random_model("qwen3_moe"), tmp_path_factory.mktemp("hf") / "Tiny MoE")


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_logits_are_transformers_and_llamacpps(family: str, tmp_path: Path) -> None:
    model, ids = random_model(family), ids_of()
    save_model(model, tmp_path / "model")
    export_gguf(tmp_path / "model", tmp_path / "m.gguf", load_library())
    expected = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager"), ids)
    assert apart(expected, logits_of(model, ids)) == 0
    assert apart(sluice_logits(tmp_path / "m.gguf", ids), expected) < RELATIVE_L2
    assert apart(llamacpp_logits(tmp_path / "m.gguf", ids), expected) < RELATIVE_L2


@pytest.mark.parametrize("changed", [
    {"tie_word_embeddings": True},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}},
    {"rope_parameters": YARN},
], ids=["tied", "linear", "yarn"])  # fmt: skip
def test_variants_have_transformers_logits_too(changed: dict[str, Any], tmp_path: Path) -> None:
    model, ids = random_model("qwen3_moe", **changed), ids_of(1)
    save_model(model, tmp_path / "model")
    done = export_gguf(tmp_path / "model", tmp_path / "m.gguf", load_library())
    assert ("output.weight" in done.types) == ("tie_word_embeddings" not in changed)
    expected = logits_of(model, ids)
    assert apart(sluice_logits(tmp_path / "m.gguf", ids), expected) < RELATIVE_L2
    assert apart(llamacpp_logits(tmp_path / "m.gguf", ids), expected) < RELATIVE_L2


@pytest.mark.parametrize("type", [name for name in FILE_TYPES if name != "f32"])
def test_quantised_files_have_equal_logits_in_both_engines(type: str, tmp_path: Path) -> None:
    changed = {"hidden_size": 256, "moe_intermediate_size": 64, "num_experts": 6, "head_dim": 64}
    save_model(random_model("qwen3_moe", **changed), tmp_path / "model")
    done = export_gguf(tmp_path / "model", tmp_path / "m.gguf", load_library(), type=type)
    theirs = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert {name: it.name for name, it in done.types.items()} == theirs
    assert set(done.fell_back) == (
        {f"blk.{i}.ffn_down_exps.weight" for i in range(2)} if type.endswith(("_k", "xs")) else set()
    )
    ids = ids_of(2)
    expected = llamacpp_logits(tmp_path / "m.gguf", ids, chunk=1)
    assert apart(sluice_logits(tmp_path / "m.gguf", ids), expected) < QUANTISED_L2


@pytest.mark.parametrize("type", ["f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_bytes_are_those_of_the_gguf_package(type: str, folder: Path, tmp_path: Path) -> None:
    export_gguf(folder, tmp_path / "f32.gguf", load_library())
    export_gguf(folder, tmp_path / "m.gguf", load_library(), type=type)
    plain = {t.name: np.asarray(t.data) for t in gguf.GGUFReader(tmp_path / "f32.gguf").tensors}
    compared = 0
    for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors:
        if tensor.tensor_type.name.lower() == type:
            expected = gguf.quants.quantize(plain[tensor.name], tensor.tensor_type)
            np.testing.assert_array_equal(np.asarray(tensor.data).view(expected.dtype), expected)
            compared += 1
    assert compared > 10


def test_metadata_is_the_converters(folder: Path, tmp_path: Path) -> None:
    done = export_gguf(folder, tmp_path / "m.gguf", load_library(), type="q4_k")
    fields = {key: field.contents() for key, field in gguf.GGUFReader(tmp_path / "m.gguf").fields.items()}
    expected = {
        "general.architecture": "qwen3moe", "general.type": "model", "general.name": "Tiny MoE",
        "general.file_type": 15, "general.quantization_version": 2, "general.size_label": "8x104K",
        "qwen3moe.block_count": 2, "qwen3moe.context_length": 256, "qwen3moe.embedding_length": 64,
        "qwen3moe.feed_forward_length": 160, "qwen3moe.expert_feed_forward_length": 32,
        "qwen3moe.attention.head_count": 4, "qwen3moe.attention.head_count_kv": 2,
        "qwen3moe.attention.key_length": 32, "qwen3moe.attention.value_length": 32,
        "qwen3moe.expert_count": 8, "qwen3moe.expert_used_count": 2,
    }  # fmt: skip
    assert {key: fields[key] for key in expected} == expected
    assert fields["qwen3moe.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert fields["qwen3moe.rope.freq_base"] == 10000
    said = done.as_dict()
    assert json.loads(json.dumps(said)) == said
    assert said["bytes"] == (tmp_path / "m.gguf").stat().st_size
    assert said["parameters"] == sum(value.numel() for value in random_model("qwen3_moe").parameters())
    assert said["fell_back"]["blk.0.attn_q.weight"] == {"wanted": "Q4_K", "became": "Q5_0"}
    assert said["tensors"]["blk.0.ffn_gate_inp.weight"] == said["tensors"]["output_norm.weight"] == "F32"
    renamed = export_gguf(folder, tmp_path / "n.gguf", load_library(), name="another")
    assert renamed.name == gguf.GGUFReader(tmp_path / "n.gguf").fields["general.name"].contents() == "another"


def test_text_becomes_the_same_ids_everywhere(folder: Path, tmp_path: Path) -> None:
    export_gguf(folder, tmp_path / "m.gguf", load_library())
    texts = ["def f(x):\n    return x", "The quick brown fox, 1234!", "naïve 日本語 \t\n\n 🦙"]
    theirs = AutoTokenizer.from_pretrained(folder)
    expected = [theirs(text)["input_ids"] for text in texts]
    with opened(tmp_path / "m.gguf", expert_slots=16) as engine:
        assert [engine.tokenizer.encode(text) for text in texts] == expected
    assert llamacpp_tokenize(tmp_path / "m.gguf", texts, add_special=True) == expected


def test_memory_holds_a_matrix_and_not_the_model(tmp_path: Path) -> None:
    changed = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 12}
    save_model(random_model("qwen3_moe", **changed), tmp_path / "model")
    export_gguf(tmp_path / "model", tmp_path / "m.gguf", load_library())  # everything is imported
    tracemalloc.start()
    try:
        done = export_gguf(tmp_path / "model", tmp_path / "m.gguf", load_library(), force=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < done.n_bytes / 5


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(folder, tmp_path / "m.gguf", type="q4_k", json=True) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["path"] == str(tmp_path / "m.gguf") and said["types"]["Q5_0"] > 4
    assert export(folder, tmp_path / "m.gguf", type="q4_k", name="other", force=True) == 0
    out, err = capsys.readouterr()
    assert "other (qwen3moe)" in out
    assert "Q5_0 in place of Q4_K, whose blocks don't divide the rows: 8 tensors, token_embd.weight for one" in err


def test_every_way_to_keep_weights_gives_the_same_file(folder: Path, tmp_path: Path) -> None:
    export_gguf(folder, tmp_path / "a.gguf", load_library(), name="x")
    model = random_model("qwen3_moe")
    sharded, fused, half = (tmp_path / name for name in ("sharded", "fused", "half"))
    save_model(model, sharded, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    save_model(model, fused)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, fused / "model.safetensors")
    for source in (sharded, fused):
        export_gguf(source, tmp_path / "b.gguf", load_library(), name="x", force=True)
        assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()
    save_model(model.bfloat16(), half)  # and back, as it holds nothing that float32 doesn't
    export_gguf(half, tmp_path / "c.gguf", load_library(), name="x")
    save_model(model.float(), half)
    export_gguf(half, tmp_path / "d.gguf", load_library(), name="x")
    assert (tmp_path / "c.gguf").read_bytes() == (tmp_path / "d.gguf").read_bytes()


def test_other_modalities_and_their_layers_are_left_out(tmp_path: Path) -> None:
    folder = save_model(random_model("qwen3_5_moe"), tmp_path / "model")
    export_gguf(folder, tmp_path / "a.gguf", load_library(), name="x")
    state = load_file(folder / "model.safetensors")
    more = {"model.visual.merger.norm.weight": torch.ones(4), "mtp.norm.weight": torch.ones(64)}
    renamed = {name.replace("model.layers", "model.language_model.layers"): value for name, value in state.items()}
    save_file(renamed | more, folder / "model.safetensors")
    said = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "qwen3_5_moe", "text_config": said, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(outer))
    done = export_gguf(folder, tmp_path / "b.gguf", load_library(), name="x")
    assert done.skipped == tuple(sorted(more))
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


# --- what is refused


Spoil = Callable[[Path, dict[str, torch.Tensor]], None]
GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"


def changed_config(**changed: Any) -> Spoil:
    def spoil(folder: Path, state: dict[str, torch.Tensor]) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder, state: (folder / "config.json").unlink(), "config.json: no such file"),
        (lambda folder, state: (folder / "config.json").write_text("[1]"), "config.json: no JSON object"),
        (changed_config(model_type="gpt2"), "model_type is 'gpt2': choices are qwen3_moe, qwen2_moe, olmoe, mixtral"),
        (changed_config(num_local_experts=9), "mlp.gate.weight is [8, 64], config.json says [9, 64]"),
        (lambda folder, state: state.update({GATE.replace("3", "8"): torch.ones(32, 64)}), "unknown tensor 'model.lay"),
        (changed_config(vocab_size=319), "model.embed_tokens.weight is [320, 64], config.json says [319, 64]"),
        (lambda folder, state: state.pop(GATE), f"tensor {GATE} is missing: the model is incomplete"),
        (lambda folder, state: state.update({"odd\nname": torch.ones(1)}), "unknown tensor 'odd\\nname': no part of"),
        (lambda folder, state: state.update({GATE: torch.ones(8, 8)}), f"{GATE} is [8, 8], config.json says [32, 64]"),
        (lambda folder, state: state.update({GATE: state[GATE].double()}), "Sluice reads F32, F16, BF16"),
        (lambda folder, state: state[GATE].fill_(float("nan")), "holds numbers that are not finite"),
        (lambda folder, state: (folder / "tokenizer.json").unlink(), "tokenizer.json: no such file: a model to export"),
    ],
)  # fmt: skip
def test_a_bad_directory_is_refused_by_name(spoil: Spoil, says: str, folder: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    for file in folder.iterdir():
        (bad / file.name).write_bytes(file.read_bytes())
    state = load_file(bad / "model.safetensors")
    spoil(bad, state)
    save_file(state, bad / "model.safetensors")
    with pytest.raises(InputError) as caught:
        export_gguf(bad, tmp_path / "m.gguf", load_library())
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad"]


def test_bad_shards_are_refused_by_name(tmp_path: Path) -> None:
    folder = save_model(random_model("qwen3_moe"), tmp_path / "model", max_shard_size="100KB")
    shards = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())

    def refused(says: str) -> None:
        with pytest.raises(InputError) as caught:
            export_gguf(folder, tmp_path / "m.gguf", load_library())
        assert says in str(caught.value)

    other = next(shard.name for shard in shards if shard.name != good["weight_map"][GATE])
    index.write_text(json.dumps({"weight_map": good["weight_map"] | {GATE: other}}))
    refused(f"{GATE!r}, and model.safetensors.index.json lists it")
    index.write_text(json.dumps({"weight_map": good["weight_map"] | {GATE: "../elsewhere.safetensors"}}))
    refused("names the shard '../elsewhere.safetensors', no file beside it")
    index.write_text("{}")
    refused("has no weight_map of files")
    index.write_text(json.dumps(good))
    shards[1].unlink()
    refused(f"{shards[1].name}: this shard is missing: download it too")
    index.unlink()
    refused("model.safetensors: no such file")
    (folder / "pytorch_model.bin").touch()
    refused("holds PyTorch's pickles")


def test_places_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken.gguf"
    taken.write_text("mine")
    for out, says in (
        (taken, "exists already"),
        (tmp_path / "no" / "m.gguf", "there is no directory"),
        (folder / "model.safetensors", "exists already"),
    ):
        with pytest.raises(InputError, match=says):
            export_gguf(folder, out, load_library())
    with pytest.raises(InputError, match="is what the GGUF file is made from"):
        export_gguf(folder, folder / "model.safetensors", load_library(), force=True)
    assert taken.read_text() == "mine"
    export_gguf(folder, taken, load_library(), force=True)
    assert taken.read_bytes()[:4] == b"GGUF"
    with pytest.raises(InputError, match=r"no directory: name one that holds config\.json"):
        export_gguf(tmp_path / "nothing", tmp_path / "m.gguf", load_library())
    with pytest.raises(InputError, match="--type 'q4_q' is no kind of GGUF file: choices are f32, f16, bf16, q8_0"):
        export_gguf(folder, tmp_path / "m.gguf", load_library(), type="q4_q")


def test_stopped_in_between_nothing_is_left(folder: Path, tmp_path: Path) -> None:
    seen: list[float] = []

    def stop(done: float, total: float) -> None:
        seen.append(done / total)
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_gguf(folder, tmp_path / "m.gguf", load_library(), progress=stop)
    assert 0.5 < seen[-1] < 1 and not list(tmp_path.iterdir())
    export_gguf(folder, tmp_path / "m.gguf", load_library(), progress=lambda done, total: seen.append(done / total))
    assert seen[-1] == 1

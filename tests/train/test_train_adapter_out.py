"""LoRA adapters of torch models as GGUF files: served beside the exported model they give torch's own logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import peft
import pytest
import torch
from engine.harness import opened
from hf_models import logits_of, random_model, save_model
from oracles import llamacpp_adapted

from sluice.errors import InputError
from sluice.ggml import load_library
from sluice.train.adapter_out import export_adapter, write_peft
from sluice.train.gguf_out import export_gguf

torch.set_num_threads(1)
# PEFT's wrapper asks transformers for what it has renamed
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
IDS = np.random.default_rng(4).integers(0, 300, 64).tolist()
RELATIVE_L2 = 2e-5  # float32, as without an adapter (test_train_gguf_out)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("qwen3_moe", {"r": 4, "lora_alpha": 12, "target_modules": ATTENTION}),
    "interleaved rows": ("mixtral", {"r": 3, "lora_alpha": 6, "target_modules": ATTENTION, "use_rslora": True}),
    "several ranks": (
        "qwen3_moe",
        {"r": 4, "lora_alpha": 4, "target_modules": ATTENTION, "rank_pattern": {"layers.1.self_attn.q_proj": 7},
         "alpha_pattern": {"v_proj": 9}},
    ),
    "biased, shared experts": ("qwen2_moe", {"r": 4, "target_modules": [*ATTENTION, "shared_expert_gate"]}),
    "linear attention": (
        "qwen3_5_moe",
        {"r": 4, "target_modules": [*ATTENTION, "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]},
    ),
    "experts": (
        "qwen3_moe",
        {"r": 2, "target_modules": ["q_proj"],
         "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
}  # fmt: skip


def randomised(model: Any) -> Any:
    """B is zero when PEFT makes it, and an adapter without effect would prove nothing."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, values in model.named_parameters():
            if "lora_" in name:
                std = 0.05 if "lora_B" in name else values.shape[-1] ** -0.5
                values.copy_(torch.randn(values.shape, generator=draw) * std)
    return model.eval()


def exported(family: str, folder: Path, **changed: Any) -> tuple[Any, Path]:
    """A model, and its file."""
    model = random_model(family, **changed)
    save_model(model, folder / "model")
    export_gguf(folder / "model", folder / "m.gguf", load_library())
    return model, folder / "m.gguf"


def apart(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def served(path: Path, adapter: Path) -> np.ndarray:
    with opened(path, kv="f32", expert_slots=16, lora=((adapter, 1.0),)) as engine:
        return engine.logits(IDS)


@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped", "injected"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_torchs(case: str, wrapped: bool, tmp_path: Path) -> None:
    family, options = CASES[case]
    model, path = exported(family, tmp_path)
    plain = logits_of(model, IDS)
    config = peft.LoraConfig(**options)
    adapted = peft.get_peft_model(model, config) if wrapped else peft.inject_adapter_in_model(config, model)
    expected = logits_of(randomised(adapted), IDS)
    done = export_adapter(adapted, path, tmp_path / "a.gguf", load_library())
    assert apart(plain, expected) > 0.01
    assert apart(served(path, done.path), expected) < RELATIVE_L2
    assert apart(llamacpp_adapted(path, IDS, [(done.path, 1.0)]), expected) < RELATIVE_L2
    assert done.n_bytes == done.path.stat().st_size


def test_what_a_file_says(tmp_path: Path) -> None:
    model, path = exported("qwen3_moe", tmp_path)
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj"])
    adapted = randomised(peft.inject_adapter_in_model(config, model))
    done = export_adapter(adapted, path, tmp_path / "recovery.gguf", load_library())
    reader = gguf.GGUFReader(done.path)
    fields = {key: reader.fields[key].contents() for key in reader.fields}
    assert fields["general.architecture"] == "qwen3moe" and fields["general.type"] == "adapter"
    assert fields["adapter.type"] == "lora" and fields["adapter.lora.alpha"] == 4.0
    assert fields["general.name"] == "recovery"
    assert done.as_dict()["ranks"] == {f"blk.{i}.attn_q.weight": 4 for i in range(2)}
    found = {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors}
    layer = adapted.model.layers[0].self_attn.q_proj
    np.testing.assert_array_equal(found["blk.0.attn_q.weight.lora_a"], layer.lora_A["default"].weight.detach())
    np.testing.assert_array_equal(found["blk.0.attn_q.weight.lora_b"], 3 * layer.lora_B["default"].weight.detach())


def test_a_scale_set_by_hand_is_kept(tmp_path: Path) -> None:
    model, path = exported("qwen3_moe", tmp_path)
    adapted = randomised(peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=ATTENTION), model))
    for module in adapted.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.scaling["default"] *= 0.25
    done = export_adapter(adapted, path, tmp_path / "a.gguf", load_library())
    assert apart(served(path, done.path), logits_of(adapted, IDS)) < RELATIVE_L2


def test_one_of_several_adapters(tmp_path: Path) -> None:
    model, path = exported("qwen3_moe", tmp_path)
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]), adapter_name="one")
    adapted.add_adapter("two", peft.LoraConfig(r=4, target_modules=["v_proj"]))
    randomised(adapted)
    for name, matrix in (("one", "attn_q"), ("two", "attn_v")):
        adapted.set_adapter(name)
        done = export_adapter(adapted, path, tmp_path / f"{name}.gguf", load_library(), adapter=name)
        assert all(matrix in target for target in done.ranks)
        assert apart(served(path, done.path), logits_of(adapted, IDS)) < RELATIVE_L2


def test_what_is_refused(tmp_path: Path) -> None:
    model, path = exported("qwen3_moe", tmp_path)
    out = tmp_path / "a.gguf"

    def refused(model: Any, says: str, base: Path = path) -> None:
        with pytest.raises(InputError, match=says):
            export_adapter(model, base, out, load_library())
        assert not out.exists()

    refused(model, "the model has no LoRA adapter called default: train one first")
    variant = peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    refused(peft.get_peft_model(random_model("qwen3_moe"), variant), "the adapter default is no plain LoRA")
    plain: Any = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), model)
    (tmp_path / "other").mkdir()
    _, other = exported("qwen3_moe", tmp_path / "other", hidden_size=32)
    refused(plain, "the adapter is for another model", other)
    with torch.no_grad():
        plain.model.layers[0].self_attn.q_proj.lora_A["default"].weight[0, 0] = float("inf")
    refused(plain, "holds numbers that are not finite")
    out.write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        export_adapter(plain, path, out, load_library())
    assert out.read_text() == "mine"


def test_peft_reads_what_is_written_in_its_format(tmp_path: Path) -> None:
    options: dict[str, Any] = {"r": 4, "lora_alpha": 12, "target_modules": ATTENTION}
    adapted = randomised(peft.get_peft_model(random_model("qwen3_moe"), peft.LoraConfig(**options)))
    expected = logits_of(adapted, IDS)
    write_peft(adapted, tmp_path)
    again = peft.PeftModel.from_pretrained(random_model("qwen3_moe"), tmp_path)
    np.testing.assert_allclose(logits_of(again.eval(), IDS), expected, rtol=1e-4, atol=1e-4)

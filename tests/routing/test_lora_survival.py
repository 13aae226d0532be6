"""What merging leaves of an update: all in float32, nothing of a small one in few bits, as computed by hand."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from adapters import linear_names, random_factors, write_adapter
from tiny import T, TinyModel, quantize, write_tiny

from sluice.ggml import load_library
from sluice.gguf import open_gguf
from sluice.io.files import ModelFiles
from sluice.models import family_of
from sluice.routing import lora_survival
from sluice.routing.lora import Scaled, by_linear
from sluice.routing.lora_file import open_adapter
from sluice.routing.lora_survival import Survival, by_type, survival
from sluice.routing.stored import Converter


def measured(
    model: TinyModel, adapters: list[tuple[Path, float]], merged: dict[tuple[int, int], bytes] | None = None
) -> tuple[dict[str, Survival], dict[str, list[Scaled]]]:
    library = load_library()
    file = open_gguf(model.path, library)
    spec = family_of(file).read_spec(file)
    updates = by_linear([(open_adapter(path, file, spec, library), scale) for path, scale in adapters])

    def sink(index: int, offset: int, stored: bytearray) -> None:
        assert merged is not None
        merged[index, offset] = bytes(stored)

    with ModelFiles(file.paths) as files, Converter(library) as converter:
        return survival(updates, files, converter, sink=None if merged is None else sink), updates


def test_float32_keeps_everything(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", expert_type=T.F32, dense_type=T.F32)
    adapter = write_adapter(tmp_path / "a.gguf", "qwen3moe", random_factors(model, linear_names(model), 4))
    found, updates = measured(model, [(adapter, 0.5)])
    assert len(found) == len(updates) == 25
    for name, one in found.items():
        assert one.share == pytest.approx(1, abs=1e-5), name
        assert one.error is not None and one.error < 1e-4


def test_a_quantised_matrix_keeps_what_it_does_by_hand(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", expert_type=T.Q4_K, dense_type=T.Q8_0)
    factors = random_factors(model, linear_names(model), 4, std=0.02)
    adapter = write_adapter(tmp_path / "a.gguf", "qwen3moe", factors, alpha=2.0)
    found, updates = measured(model, [(adapter, 0.5)])
    for name, (a, b) in factors.items():
        change = np.float32(0.5 * 2.0 / 4) * (b @ a)
        _, t = model.stored[name]
        after = gguf.quants.dequantize(quantize(model.weights[name] + change, t), t) - model.weights[name]
        share = float((after * change).sum(dtype=np.float64) / (change * change).sum(dtype=np.float64))
        error = float(np.linalg.norm(after - change) / np.linalg.norm(change))
        assert found[name].share == pytest.approx(share, rel=1e-3, abs=1e-4), name
        assert found[name].error == pytest.approx(error, rel=1e-3), name
    types = by_type(found, updates)
    assert {type.name for type in types} == {"F32", "Q8_0", "Q4_K"}
    assert types[next(t for t in types if t.name == "F32")].share == pytest.approx(1, abs=1e-5)
    assert sum(found.values(), Survival()).update == pytest.approx(sum(one.update for one in types.values()))


def test_what_is_much_smaller_than_a_step_is_rounded_away(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", expert_type=T.Q4_0, dense_type=T.Q8_0)
    factors = random_factors(model, ["blk.0.ffn_up_exps.weight", "blk.0.attn_q.weight"], 4, std=0.0005)
    adapter = write_adapter(tmp_path / "a.gguf", "qwen3moe", factors, alpha=4.0)
    found, _ = measured(model, [(adapter, 1.0)])
    shares = [one.share for one in found.values()]
    assert all(share is not None and share < 0.2 for share in shares)
    large = write_adapter(tmp_path / "b.gguf", "qwen3moe", factors, alpha=40000.0)
    found, _ = measured(model, [(large, 1.0)])
    assert all(one.share is not None and one.share > 0.9 for one in found.values())


def test_no_update_has_no_share(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf")
    factors = {name: (a, 0 * b) for name, (a, b) in random_factors(model, ["blk.0.attn_q.weight"], 4).items()}
    found, _ = measured(model, [(write_adapter(tmp_path / "a.gguf", "qwen3moe", factors), 1.0)])
    assert found["blk.0.attn_q.weight"].as_dict() == {"share": None, "error": None}


@pytest.mark.parametrize("fused", [False, True])
def test_blocks_of_rows_make_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    model = write_tiny(tmp_path / "m.gguf", split=2, fused=fused)
    adapter = write_adapter(tmp_path / "a.gguf", "qwen3moe", random_factors(model, linear_names(model), 4))
    whole: dict[tuple[int, int], bytes] = {}
    expected, _ = measured(model, [(adapter, 1.0), (adapter, -0.5)], whole)
    monkeypatch.setattr(lora_survival, "BLOCK_BYTES", 7 * 4 * 256)  # 7 rows
    pieces: dict[tuple[int, int], bytes] = {}
    found, _ = measured(model, [(adapter, 1.0), (adapter, -0.5)], pieces)
    for name, one in expected.items():
        assert found[name].share == pytest.approx(one.share, rel=1e-5), name
    assert len(pieces) > 3 * len(whole)
    for (index, offset), stored in whole.items():
        inside = [raw for (i, at), raw in sorted(pieces.items()) if i == index and offset <= at < offset + len(stored)]
        assert b"".join(inside) == stored

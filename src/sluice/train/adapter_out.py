"""Writes the LoRA factors of a torch model as a GGUF adapter that llama.cpp and Sluice serve. It trains nothing.

PEFT may have wrapped the model (`get_peft_model`) or put its layers into it (`inject_adapter_in_model`). The factors go
through PEFT's own file format, in a folder for the time being, so that names, rows, columns and stacks of experts are
mapped in one place for every adapter there is: `sluice.routing.lora_peft`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from sluice.errors import InputError
from sluice.ggml import Library
from sluice.gguf import open_gguf
from sluice.models import family_of
from sluice.new_file import appearing, check_out
from sluice.routing.lora_file import Adapter, open_adapter
from sluice.routing.lora_peft import PREFIX
from sluice.safetensors_file import write_safetensors

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ExportedAdapter:
    """What was written. `ranks` by the names of the GGUF matrices that are adapted."""

    path: Path
    n_bytes: int
    ranks: Mapping[str, int]

    def as_dict(self) -> dict[str, Any]:
        return {"path": str(self.path), "bytes": self.n_bytes, "ranks": dict(self.ranks)}


def export_adapter(
    model: torch.nn.Module, base: Path, out: Path, library: Library, *, adapter: str = "default",
    name: str | None = None, force: bool = False,
) -> ExportedAdapter:  # fmt: skip
    """Write `model`'s adapter called `adapter`, for the GGUF file `base`, to `out`, whole or not at all.

    The scale that PEFT multiplies by is in B: --lora serves it at 1. Raises InputError where the model has no such
    adapter or one that is no plain LoRA, where it doesn't fit `base`, and for numbers that are not finite.
    """
    check_out(out, force=force, keep=[base], made="the adapter")
    with tempfile.TemporaryDirectory(prefix="sluice-adapter-") as folder:
        write_peft(model, Path(folder), adapter=adapter)
        file = open_gguf(base, library)
        spec = family_of(file).read_spec(file)
        opened = open_adapter(folder, file, spec, library)
        n_bytes = _write(opened, spec.architecture, out, name or out.stem, force=force, keep=[base])
    return ExportedAdapter(out, n_bytes, {name: update.rank for name, update in opened.updates.items()})


def write_peft(model: torch.nn.Module, folder: Path, *, adapter: str = "default") -> None:
    """Write `model`'s adapter into `folder` as PEFT saves one, its scales already in B.

    Raises InputError where there is none of that name, or its layers do more than add B A x.
    """
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    targets: dict[str, list[str]] = {"target_modules": [], "target_parameters": []}
    for module, layer in _layers(model):
        if adapter not in layer.lora_A:
            continue
        if adapter in layer.lora_variant or layer.lora_bias.get(adapter) or getattr(layer, "fan_in_fan_out", False):
            raise InputError(f"{module}: the adapter {adapter} is no plain LoRA, the only kind that is exported")
        name, parameter = module.replace(".base_layer", ""), getattr(layer, "parameter_name", None)
        name = f"{name}.{parameter}" if parameter else name  # as PEFT's patterns of ranks call it
        ranks[name] = layer.r[adapter]
        targets["target_parameters" if parameter else "target_modules"].append(name)
        for part, weight in (("A", layer.lora_A[adapter].weight), ("B", layer.lora_B[adapter].weight)):
            values = weight.detach().float().cpu().numpy()
            scale = layer.scaling[adapter] if part == "B" else 1.0
            tensors[f"{PREFIX}{module}.lora_{part}.weight"] = values * np.float32(scale)
    if not tensors:
        raise InputError(f"the model has no LoRA adapter called {adapter}: train one first")
    config = {
        "peft_type": "LORA", "r": max(ranks.values()), "lora_alpha": max(ranks.values()), "bias": "none",
        "rank_pattern": ranks, "alpha_pattern": ranks, "init_lora_weights": True, **targets,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    write_safetensors(folder / "adapter_model.safetensors", tensors, {}, force=True)


def _layers(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """The adapted modules by the names that they have without PEFT's wrapper, which puts PREFIX before them."""
    from peft.tuners.lora import LoraLayer

    found = [(name.removeprefix(PREFIX), module) for name, module in model.named_modules()]
    return [(name, module) for name, module in found if isinstance(module, LoraLayer)]


def _write(adapter: Adapter, architecture: str, out: Path, name: str, *, force: bool, keep: list[Path]) -> int:
    ranks = {update.rank for update in adapter.updates.values()}
    with appearing(out, "adapter", force=force, keep=keep, made="the adapter") as temporary:
        writer = gguf.GGUFWriter(temporary, architecture)
        try:
            writer.add_type(gguf.GGUFType.ADAPTER)
            writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
            writer.add_name(name)
            # alpha ÷ rank is 1; without an alpha it is 1 whatever the rank
            writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(ranks.pop()) if len(ranks) == 1 else 0.0)
            for target, update in adapter.updates.items():
                a, b = update.factors()
                writer.add_tensor(f"{target}.lora_a", np.ascontiguousarray(a))
                writer.add_tensor(f"{target}.lora_b", np.ascontiguousarray(b))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            assert writer.fout is not None
            writer.fout[0].flush()
            os.fsync(writer.fout[0].fileno())
            return writer.fout[0].tell()
        finally:
            writer.close()

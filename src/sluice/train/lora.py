"""LoRA adapters in a model of transformers', unmerged: put in, taken out, kept as PEFT keeps them. Knows no losses.

alpha is the rank, so that what is added is B A x and nothing multiplies it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from sluice.errors import InputError
from sluice.safetensors_file import quoted, read_safetensors
from sluice.train.adapter_out import write_peft

# What can be adapted, by the ends of modules' names; experts are two parameters [E, out, in] of one module
TARGETS: Mapping[str, str] = {
    "attention": r"self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)",
    "dense": r"mlp\.(shared_expert\.)?(gate|up|down)_proj",
    "experts": r"mlp\.experts",
}
MAX_RANK = 1024
ADAPTER = "default"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_PREFIX = "base_model.model."  # PEFT's, before names in its files


@dataclass(frozen=True)
class Lora:
    """An adapter's shape: its rank, and what of TARGETS it is on."""

    rank: int
    targets: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raises InputError for an unknown target, and ranks out of range."""
        if not 1 <= self.rank <= MAX_RANK:
            raise InputError(f"an adapter of rank {self.rank} is out of range: give 1 to {MAX_RANK}")
        if not self.targets:
            raise InputError(f"there is nothing to adapt: choose from {', '.join(TARGETS)}")
        if unknown := [target for target in self.targets if target not in TARGETS]:
            raise InputError(f"{unknown[0][:40]!r} can't be adapted: choose from {', '.join(TARGETS)}")


def add_lora(model: nn.Module, lora: Lora, seed: int = 0) -> dict[str, nn.Parameter]:
    """Freeze `model`, put an adapter beside its matrices that nothing comes of yet; returns its factors by name.

    A is drawn by `seed`, B is zero. Raises InputError for a target that the model has nothing of.
    """
    model.requires_grad_(False)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    modules: list[str] = []
    for target in lora.targets:
        found = [name for name in names if re.search(rf"\.({TARGETS[target]})$", name)]
        if not found and target != "experts":
            raise InputError(f"the model has no {target} matrices to adapt: choose others of {', '.join(TARGETS)}")
        modules += found
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(
            r=lora.rank, lora_alpha=lora.rank, lora_dropout=0.0, bias="none", target_modules=modules,
            target_parameters=list(_EXPERTS) if "experts" in lora.targets else None,
        )  # fmt: skip
        inject_adapter_in_model(config, model, ADAPTER)
    return factors(model)


def factors(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapter's A and B by PEFT's names for them, empty where the model has none."""
    found: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and ADAPTER in module.lora_A:
            for part, layers in (("A", module.lora_A), ("B", module.lora_B)):
                found[f"{name}.lora_{part}.weight"] = cast(nn.Parameter, layers[ADAPTER].weight)
    return found


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A sha256 that tells adapters apart by their numbers."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        values = tensor.detach().cpu().float().contiguous().numpy()
        found.update(json.dumps([name, list(values.shape)]).encode())
        found.update(values.astype("<f4").tobytes())
    return found.hexdigest()


def save_lora(model: nn.Module, folder: Path) -> None:
    """Write the model's adapter into `folder`, which is made, as PEFT saves one."""
    folder.mkdir(parents=True, exist_ok=True)
    write_peft(model, folder, adapter=ADAPTER)


def open_lora(model: nn.Module, folder: Path) -> tuple[Lora, dict[str, nn.Parameter]]:
    """Freeze `model` and give it the adapter that `save_lora` wrote; returns its shape, and its factors by name.

    Raises InputError for what is no such adapter, and for one of another model.
    """
    path = folder / CONFIG
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
        config = json.loads(raw) if len(raw) <= MAX_CONFIG_BYTES else None
    except OSError as error:
        raise InputError(f"{folder}: is no adapter ({CONFIG}: {error.strerror}): name one of `recover`'s") from None
    except (ValueError, RecursionError):
        config = None
    rank = config.get("r") if isinstance(config, dict) else None
    if type(rank) is not int:
        raise InputError(f"{path}: is broken: name an adapter of `recover`'s")
    stored = {name.removeprefix(_PREFIX): one for name, one in read_safetensors(folder / WEIGHTS)[1].items()}
    targets = tuple(
        target for target, pattern in TARGETS.items()
        if any(re.search(rf"\.({pattern})(\.base_layer)?\.lora_", name) for name in stored)
    )  # fmt: skip
    lora = Lora(rank, targets)
    parameters = add_lora(model, lora)
    for name in {**stored, **parameters}:
        there = list(stored[name].shape) if name in stored else None
        here = list(parameters[name].shape) if name in parameters else None
        if there != here:
            raise InputError(f"{folder}: is an adapter for another model: {quoted(name)} is {there or 'missing'} "
                             f"there, and {here or 'missing'} here: name one made for this model")  # fmt: skip
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(stored[name].read()))
    return lora, parameters

"""Prerouter heads as PyTorch modules, read from and written to their files; knows no passes through a model.

A head's arithmetic and the file are those of `sluice.routing.prerouter_file`. As in the engine, the columns of fc1 that
read ones and zeros are kept as rows, so that their product with them is a sum of k rows.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sluice.errors import InputError
from sluice.routing.prerouter_file import (
    MAX_NUMBER,
    MAX_WIDTH,
    WEIGHTS_FROM,
    PrerouterFile,
    PrerouterInfo,
    open_prerouter,
    write_prerouter,
)
from sluice.routing.prerouter_init import HIDDEN, TYPES
from sluice.train.families import config_of, family_of
from sluice.train.sharding import joined

# What GGUF files keep routers in: nearly all of them float32
_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Head(nn.Module):
    """One head: logits [n, E] = fc2(gelu(fc1 x)) + skip h of the hidden state h and two sets of experts."""

    def __init__(self, d: int, n_expert: int, hidden: int, *, before: bool, skip_bias: bool = False) -> None:
        super().__init__()
        self.fc1 = nn.Linear(d, hidden)
        self.here = nn.Parameter(torch.zeros(n_expert, hidden))
        self.before = nn.Parameter(torch.zeros(n_expert, hidden)) if before else None
        self.fc2 = nn.Linear(hidden, n_expert)
        self.skip = nn.Linear(d, n_expert, bias=skip_bias)

    def forward(self, h: Tensor, here: Tensor, before: Tensor | None) -> Tensor:
        """`h` [n, d] is what the owner's router read; `here`, `before` [n, k] are the experts executed in its layer and
        in the one before, None unless the head reads them."""
        assert (before is not None) == (self.before is not None)
        x = self.fc1(h) + F.embedding(here, self.here).sum(dim=-2)
        if before is not None and self.before is not None:
            x = x + F.embedding(before, self.before).sum(dim=-2)
        return self.fc2(F.gelu(x)) + self.skip(h)


class Heads(nn.ModuleDict):
    """The heads of a file that are used, by their owner's layer (its number as text); `info` is what the file says."""

    def __init__(self, info: PrerouterInfo, hidden: Mapping[int, int], skip_bias: Mapping[int, bool]) -> None:
        """All numbers as PyTorch draws them; `hidden` and `skip_bias` are of each owner."""
        super().__init__()
        self.info = info
        for owner in info.predicts:
            self[str(owner)] = Head(
                info.n_embd, info.n_expert, hidden[owner], before=info.reads_before(owner), skip_bias=skip_bias[owner]
            )  # fmt: skip

    @classmethod
    def untrained(
        cls, model: nn.Module, *, hidden: int = HIDDEN, seed: int = 0, name: str = "", weights: str = "head"
    ) -> Heads:
        """Heads for `model`, each the router of the layer it predicts, as `sluice prerouter init` makes them.

        Raises InputError for a model with too few layers of experts, and for sizes out of range.
        """
        if not 1 <= hidden <= MAX_WIDTH:
            raise InputError(f"heads of width {hidden} are out of range: give 1 to {MAX_WIDTH}")
        if weights not in WEIGHTS_FROM:
            raise InputError(f"routing weights from {weights[:40]!r}: choose from {', '.join(WEIGHTS_FROM)}")
        routers = family_of(model).routers(model)
        info = _described(model, name, weights, {"stages": [], "seed": seed})
        heads = cls(info, dict.fromkeys(info.owners, hidden), dict.fromkeys(info.owners, False))
        bound = 1 / math.sqrt(info.n_embd + 2 * info.n_expert)
        with torch.no_grad():
            for owner, following in info.predicts.items():
                head = heads.head(owner)
                generator = torch.Generator().manual_seed((seed << 16) + owner)
                for part in (head.fc1.weight, head.here, head.before):
                    if part is not None:
                        part.copy_(torch.empty(part.shape).uniform_(-bound, bound, generator=generator))
                for part in (head.fc1.bias, head.fc2.weight, head.fc2.bias):
                    part.zero_()
                head.skip.weight.copy_(cast(Tensor, routers[following].weight).float())
        return heads

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Heads:
        """The heads in a file. Raises InputError, naming what is wrong with it, numbers included."""
        file = open_prerouter(path)
        info, d, n = file.info, file.info.n_embd, file.info.n_expert
        bias = {owner: f"blk.{owner}.skip.bias" in file.tensors for owner in info.owners}
        heads = cls(info, {owner: file.hidden(owner) for owner in info.owners}, bias)
        with torch.no_grad():
            for owner in info.predicts:
                head = heads.head(owner)
                fc1 = _read(file, f"blk.{owner}.fc1.weight")
                head.fc1.weight.copy_(fc1[:, :d])
                head.here.copy_(fc1[:, d : d + n].T)
                if head.before is not None:
                    head.before.copy_(fc1[:, d + n :].T)
                for part, parameter in _plain(head):
                    parameter.copy_(_read(file, f"blk.{owner}.{part}"))
        return heads

    def head(self, owner: int) -> Head:
        """The head of layer `owner`."""
        return cast(Head, self[str(owner)])

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of training that these heads have been through, in order."""
        stages = self.info.training.get("stages", [])
        return tuple(str(stage) for stage in stages) if isinstance(stages, list) else ()

    def check_model(self, model: nn.Module, name: str = "the model") -> None:
        """Raise InputError, naming the difference, unless the heads are for `model`, whose routers are as they were."""
        own, other = self.info, _described(model, "", "head", {})
        for what, a, b in (
            ("architecture", own.architecture, other.architecture),
            ("layers", own.n_layers, other.n_layers),
            ("width", own.n_embd, other.n_embd),
            ("experts a layer", own.n_expert, other.n_expert),
            ("layers with experts", list(own.moe_layers), list(other.moe_layers)),
            ("experts a token", own.top_k, other.top_k),
        ):
            if a != b:
                raise InputError(f"heads for another model: {what} {a}, {name} has {b}: give heads made for this one")
        if own.fingerprint not in fingerprints(model).values():
            raise InputError(
                f"heads for another model: of the same shape, but with other router weights (fingerprint "
                f"{own.fingerprint[:12]}…, that of {name} is {other.fingerprint[:12]}…): give heads made for this one"
            )

    def save(
        self, path: str | os.PathLike[str], training: Mapping[str, Any], *, type: str = "f32", force: bool = False
    ) -> int:
        """Write them, `training` saying where the numbers come from; returns the file's bytes. Whole or not at all.

        Raises InputError for a path that can't be written or exists (unless `force`), and for numbers that heads can't
        have: what training leaves when it diverged.
        """
        if type not in TYPES:
            raise InputError(f"type {type!r} is unknown: choose from {', '.join(TYPES)}")
        tensors = {name: tensor.astype(TYPES[type]) for name, tensor in self._stored()}
        for name, tensor in tensors.items():
            if not (np.abs(tensor) <= MAX_NUMBER).all():
                raise InputError(f"{path}: {name} has numbers beyond ±{MAX_NUMBER:.0f}: its training diverged: go back")
        self.info = replace(self.info, owners=tuple(self.info.predicts), training=dict(training))
        return write_prerouter(Path(path), self.info, tensors, force=force)

    def _stored(self) -> Iterator[tuple[str, np.ndarray]]:
        """Tensors as the file has them, float32."""
        for owner in self.info.predicts:
            head = self.head(owner)
            before = torch.zeros_like(head.here) if head.before is None else head.before
            fc1 = torch.cat([head.fc1.weight, head.here.T, before.T], dim=1)
            yield f"blk.{owner}.fc1.weight", _array(fc1)
            for part, parameter in _plain(head):
                yield f"blk.{owner}.{part}", _array(parameter)


def fingerprints(model: nn.Module) -> dict[str, str]:
    """The names that `sluice.models.fingerprint` gives to GGUF files of `model`, by what routers are stored in.

    The same bytes are hashed: the model's shape, and its routers' weights as float32 (as converters write them), F16
    or BF16.
    """
    family, config = family_of(model), config_of(model)
    routers = family.routers(model)
    shape = (family.architecture, config.num_hidden_layers, config.hidden_size, config.num_experts, tuple(routers))
    names: dict[str, str] = {}
    for kind, dtype in _STORED.items():
        digest = hashlib.sha256(json.dumps(shape).encode())
        for router in routers.values():
            stored = joined(cast(Tensor, router.weight).detach()).to("cpu", dtype).contiguous()
            values = stored.view(torch.int16 if stored.element_size() == 2 else torch.int32).numpy()
            digest.update(values.astype(values.dtype.newbyteorder("<")).tobytes())
        names[kind] = digest.hexdigest()
    return names


def _described(model: nn.Module, name: str, weights: str, training: Mapping[str, Any]) -> PrerouterInfo:
    """What a file of heads on every layer of `model` but the last says of it."""
    family, config = family_of(model), config_of(model)
    moe = tuple(family.routers(model))
    if len(moe) < 2:
        raise InputError("only one layer has experts, nothing to predict from: use another model")
    return PrerouterInfo(
        fingerprint=fingerprints(model)["F32"],
        architecture=family.architecture,
        name=name,
        n_layers=config.num_hidden_layers,
        n_embd=config.hidden_size,
        n_expert=config.num_experts,
        moe_layers=moe,
        top_k=family.top_k(config),
        owners=moe[:-1],
        first_predicted=moe[1],
        weights=weights,
        training=training,
    )


def _plain(head: Head) -> list[tuple[str, nn.Parameter]]:
    """The parameters that the file has as they are, by their names there."""
    parts = [
        ("fc1.bias", head.fc1.bias),
        ("fc2.weight", head.fc2.weight),
        ("fc2.bias", head.fc2.bias),
        ("skip.weight", head.skip.weight),
        ("skip.bias", head.skip.bias),
    ]
    return [(name, parameter) for name, parameter in parts if parameter is not None]


def _read(file: PrerouterFile, name: str) -> Tensor:
    return torch.from_numpy(file.rows(name, 0, file.tensors[name].shape[0]).astype(np.float32))


def _array(tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.detach().cpu().float().numpy())

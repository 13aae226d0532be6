"""Makes files of random heads and says, from their definition in torch, what they compute; knows nothing of ggml."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sluice.routing import PrerouterFile, PrerouterInfo, open_prerouter, write_prerouter

Arrays = dict[str, np.ndarray]


def made_info(**more: Any) -> PrerouterInfo:
    """Of a model of 5 layers, of which 1 has no experts, with a head on each layer but the last."""
    fields: dict[str, Any] = {
        "fingerprint": "ab" * 32, "architecture": "qwen3moe", "name": "made", "n_layers": 5, "n_embd": 24,
        "n_expert": 8, "moe_layers": (0, 2, 3, 4), "top_k": 2, "owners": (0, 2, 3), "first_predicted": 2,
        "weights": "head", "training": {"stage": "made"},
    }  # fmt: skip
    return PrerouterInfo(**fields | more)


def made_tensors(
    info: PrerouterInfo, hidden: int = 16, *, dtype: Any = np.float32, skip_bias: bool = True, seed: int = 0
) -> Arrays:
    """Random heads whose paths all matter to the logits."""
    rng = np.random.default_rng(seed)
    tensors: Arrays = {}
    for owner in info.owners:
        for name, shape in info.shapes(owner, hidden).items():
            if skip_bias or not name.endswith("skip.bias"):
                wide = name.endswith(("fc2.weight", "skip.weight"))
                tensors[name] = (rng.standard_normal(shape) * (shape[1] ** -0.5 if wide else 0.3)).astype(dtype)
    return tensors


def made_file(path: Path, info: PrerouterInfo | None = None, tensors: Mapping[str, np.ndarray] | None = None,
              **more: Any) -> PrerouterFile:  # fmt: skip
    info = info or made_info()
    write_prerouter(path, info, made_tensors(info, **more) if tensors is None else tensors)
    return open_prerouter(path)


def defined_logits(
    tensors: Mapping[str, np.ndarray], owner: int, n_expert: int, h: np.ndarray, here: np.ndarray,
    before: np.ndarray | None,
) -> np.ndarray:  # fmt: skip
    """Logits [n, n_expert] of hidden states [n, d] and executed ids [n, k], in float64; id `n_expert` is no expert."""
    t = {name: torch.from_numpy(values).double() for name, values in tensors.items()}

    def linear(part: str, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, t[f"blk.{owner}.{part}.weight"], t.get(f"blk.{owner}.{part}.bias"))

    def ones(ids: np.ndarray | None) -> torch.Tensor:
        hot = torch.zeros(len(h), n_expert + 1, dtype=torch.double)
        if ids is not None:
            hot[torch.arange(len(h))[:, None], torch.from_numpy(ids).long()] = 1
        return hot[:, :n_expert]

    hidden = torch.from_numpy(h).double()
    x = torch.cat((hidden, ones(here), ones(before)), dim=1)
    return (linear("fc2", torch.nn.functional.gelu(linear("fc1", x))) + linear("skip", hidden)).numpy()

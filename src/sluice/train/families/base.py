"""What training asks of a model family: where its routers are, and the arithmetic of its routes; knows no training.

Transformers' MoE blocks call their router, a module of the layer, with the hidden states [n, d] that the experts read
as well, and take (logits [n, E], weights [n, k], ids [n, k]) from it. That call is the one seam: routes are recorded
and imposed there, and no forward pass of transformers' is copied.
Source: transformers/models/*/modeling_*.py (https://github.com/huggingface/transformers), as of 5.24.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from sluice.errors import InputError


@dataclass(frozen=True)
class Family:
    """One family. Configurations are transformers', of the text model where a model has several.

    `router` is where a layer's router is, from the layer; `architecture` is GGUF's name. `normalises` tells of a
    configuration whether weights are normalised over a token's chosen experts. `wide`: weights stay float32, where
    others take the logits' type.
    """

    model_type: str
    architecture: str
    router: str
    normalises: Callable[[Any], bool]
    wide: bool = False

    def routers(self, model: nn.Module) -> dict[int, nn.Module]:
        """The router modules by layer, ascending; layers without experts are left out.

        Raises InputError where no layer has one.
        """
        find = attrgetter(self.router)
        found: dict[int, nn.Module] = {}
        for i, layer in enumerate(decoder(model).layers):  # type: ignore[arg-type]  # a ModuleList
            try:
                router = find(layer)
            except AttributeError:
                continue
            if isinstance(getattr(router, "weight", None), Tensor):
                found[i] = router
        if not found:
            raise InputError(f"the {self.model_type} model has no layer with experts: use one that has")
        return found

    def top_k(self, config: Any) -> int:
        """Experts a token takes in a layer."""
        return text_config(config).num_experts_per_tok

    def scores(self, config: Any, logits: Tensor) -> Tensor:
        """What routing weights are taken from, [n, E] float32: shares of 1 over all experts."""
        return torch.softmax(logits, dim=-1, dtype=torch.float32)

    def choose(self, config: Any, logits: Tensor) -> Tensor:
        """The ids [n, k] that `logits` [n, E] choose, best first."""
        return self.route(config, logits)[1]

    def weights(self, config: Any, logits: Tensor, ids: Tensor) -> Tensor:
        """Routing weights [n, k] at `ids` [n, k], whoever chose them, from `logits` [n, E]."""
        return self._weights(config, logits, self.scores(config, logits).gather(-1, ids))

    def route(self, config: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and ids [n, k] as the family's router makes them of its logits, bit for bit."""
        values, ids = torch.topk(self.scores(config, logits), self.top_k(config), dim=-1)
        return self._weights(config, logits, values), ids

    def _weights(self, config: Any, logits: Tensor, chosen: Tensor) -> Tensor:
        if self.normalises(text_config(config)):
            chosen = chosen / chosen.sum(dim=-1, keepdim=True)
        return chosen if self.wide else chosen.to(logits.dtype)


def text_config(config: Any) -> Any:
    """A configuration's part that describes the text model: itself, in models of text alone."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def decoder(model: nn.Module) -> nn.Module:
    """The module whose `layers` are the decoder's, of a causal model or of the decoder itself."""
    inner = model.get_decoder() if hasattr(model, "get_decoder") else model  # type: ignore[operator]
    assert isinstance(inner, nn.Module)
    if not hasattr(inner, "layers"):
        raise InputError(f"{type(model).__name__} has no decoder layers: give a causal language model")
    return inner


def config_of(model_or_config: Any) -> Any:
    """The text model's configuration of a model, or of a configuration."""
    return text_config(getattr(model_or_config, "config", model_or_config))

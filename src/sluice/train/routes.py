"""Records and imposes a model's routes by hooks on its routers; knows no heads, no losses and no files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sluice.train.families import family_of

# (layer, hidden [n, d], the router's own logits [n, E]) -> (weights [n, k], ids [n, k]); None leaves the router's
Choose = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor] | None]


@dataclass(frozen=True)
class LayerRoutes:
    """A layer's routes in one pass over n tokens, batch by batch, position by position; gradients as they were.

    `hidden` [n, d] is what the router read, `logits` [n, E] its own, `weights` and `ids` [n, k] what experts were run
    by, imposed ones included.
    """

    hidden: Tensor
    logits: Tensor
    weights: Tensor
    ids: Tensor


class Routes(dict[int, LayerRoutes]):
    """Routes by layer, of the last pass. Passes are not added up: take what is needed between them."""


@contextmanager
def record(model: nn.Module) -> Iterator[Routes]:
    """Collects the routes of each pass of `model` while the context lasts.

    Entered inside `impose`, it sees what was imposed. Raises InputError for another kind of model.
    """
    routes = Routes()

    def watch(layer: int) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            logits, weights, ids = output
            routes[layer] = LayerRoutes(args[0].reshape(-1, args[0].shape[-1]), logits, weights, ids)

        return hook

    routers = family_of(model).routers(model)
    handles = [router.register_forward_hook(watch(layer)) for layer, router in routers.items()]
    try:
        yield routes
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def impose(model: nn.Module, choose: Choose) -> Iterator[None]:
    """Lets `choose` decide each layer's routes while the context lasts; the router's own logits stay as they are.

    Layers are asked in order, each once a pass. Raises InputError for another kind of model.
    """

    def decide(layer: int) -> Callable[[nn.Module, tuple[Any, ...], Any], Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            logits, weights, ids = output
            chosen = choose(layer, args[0].reshape(-1, args[0].shape[-1]), logits)
            if chosen is None:
                return None
            assert chosen[0].shape == weights.shape and chosen[1].shape == ids.shape
            return logits, *chosen

        return hook

    routers = family_of(model).routers(model)
    handles = [router.register_forward_hook(decide(layer)) for layer, router in routers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

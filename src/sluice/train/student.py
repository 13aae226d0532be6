"""The student path: a model whose routes are predicted a token ahead, as the engine serves it; knows no losses.

The head of layer N at position t says the routing logits of the layer it predicts at position t + 1. It reads what N's
router reads, and the experts executed at t in N and N - 1, whoever chose them. All of that is known when layer N has
routed, so a pass over T positions takes the layers in order and every layer's positions at once: there is no loop over
tokens. Positions that are `native` keep their own routers: a prompt of P tokens makes 0 to P native, as the engine
routes a prompt and the first token after it. A prompt has a token at least, so positions 0 and 1 always are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sluice.errors import InputError
from sluice.train.families import config_of, family_of
from sluice.train.heads import Heads
from sluice.train.routes import Routes, impose, record


@dataclass
class StudentOutput:
    """Of a pass over B sequences of T positions. `logits` [B, T, V]; `routes` of each layer, as executed.

    `said` [B, T, E] by predicted layer: what its head said of that position at the one before, of position 0 nothing
    (zeros). `predicted` [B, T]: where what was said is the route.
    """

    logits: Tensor
    routes: Routes
    said: dict[int, Tensor]
    predicted: Tensor


@dataclass
class _Stream:
    """What a pass leaves for the next one over the same sequences."""

    cache: Any = None
    position: int = 0
    said: dict[int, Tensor] = field(default_factory=dict)  # [B, E] of the position that follows, by predicted layer


class Student(nn.Module):
    """`model` with its routes from `heads`. Parameters are those of both; freeze what shall not learn.

    With weights from the head (as the heads' file says) gradients reach heads through routing weights; with weights
    from the router they don't.
    """

    def __init__(self, model: nn.Module, heads: Heads) -> None:
        """Raises InputError where the heads are for another model."""
        super().__init__()
        self.family = family_of(model)
        heads.check_model(model)
        self.model = model
        self.heads = heads
        self.config = config_of(model)

    def forward(self, ids: Tensor, native: Tensor | None = None) -> StudentOutput:
        """One pass over `ids` [B, T]; `native` [B, T] bool: where routers decide. None: at 0 and 1, as in scoring."""
        return self._pass(ids, native, _Stream(), use_cache=False)

    def _pass(self, ids: Tensor, native: Tensor | None, stream: _Stream, *, use_cache: bool) -> StudentOutput:
        B, T = ids.shape
        predicted = torch.ones(B, T, dtype=torch.bool, device=ids.device) if native is None else ~native.to(ids.device)
        if predicted.shape != ids.shape:
            raise ValueError(f"native is {list(predicted.shape)}, ids are {list(ids.shape)}")
        predicted = predicted & (torch.arange(T, device=ids.device) + stream.position > 1)
        n_expert, heads = self.heads.info.n_expert, self.heads
        flat = predicted.reshape(B * T, 1)
        said: dict[int, Tensor] = {}
        following: dict[int, Tensor] = {}
        executed: dict[int, Tensor] = {}

        def choose(layer: int, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Tensor] | None:
            chosen = None
            if layer in said:
                foretold = said[layer].reshape(B * T, n_expert).to(logits.dtype)
                routed = torch.where(flat, foretold, logits)
                weights, ids_ = self.family.route(self.config, routed)
                if heads.info.weights == "router":
                    weights = self.family.weights(self.config, logits, ids_)
                chosen = weights, ids_
                executed[layer] = ids_
            else:
                executed[layer] = self.family.choose(self.config, logits)
            if layer in heads.info.predicts:
                to = heads.info.predicts[layer]
                before = executed[layer - 1] if heads.info.reads_before(layer) else None
                out = heads.head(layer)(hidden, executed[layer], before).view(B, T, n_expert)
                first = stream.said[to] if to in stream.said else out.new_zeros(B, n_expert)
                said[to] = torch.cat([first[:, None].to(out.dtype), out[:, :-1]], dim=1)
                following[to] = out[:, -1]
            return chosen

        more: dict[str, Any] = {"use_cache": use_cache}
        if stream.cache is not None:
            more["cache"] = stream.cache
        with impose(self.model, choose), record(self.model) as routes:
            result = self.model(input_ids=ids, **more)
        stream.position += T
        if use_cache:
            stream.cache = result.cache
            stream.said = following
        return StudentOutput(result.logits, routes, said, predicted)

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Tensor], n: int, *, temperature: float = 1.0, seed: int = 0,
        stop: Sequence[int] = (),
    ) -> list[Tensor]:  # fmt: skip
        """Continue each of `prompts` (ids, 1-dimensional) by up to `n` tokens as the engine would, side by side.

        Returns prompts with what was added, which ends with the first token of `stop` if there was one. Temperature 0
        takes the likeliest. Longer prompts are fed token by token once the shortest has been read: prompts of like
        lengths are faster. The model's mode (train, eval) is left as it is.
        """
        if not prompts or min(len(prompt) for prompt in prompts) < 1 or n < 1:
            raise InputError("nothing to continue: give prompts of at least one token, and a number of tokens")
        device = next(self.model.parameters()).device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        shortest, total = int(lengths.min()), int(lengths.max()) + n
        B = len(prompts)
        ids = torch.zeros(B, total, dtype=torch.long, device=device)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = prompt.to(device)
        ends = torch.tensor(list(stop), dtype=torch.long, device=device)
        done = torch.zeros(B, dtype=torch.bool, device=device)
        until = lengths + n  # where each sequence ends
        generator = torch.Generator(device=device).manual_seed(seed)
        stream = _Stream()
        at = 0
        for t in range(shortest, total):  # position t is filled in this turn
            positions = torch.arange(at, t, device=device)
            out = self._pass(ids[:, at:t], positions[None] <= lengths[:, None], stream, use_cache=True)
            logits = out.logits[:, -1].float()
            if temperature > 0:
                shares = torch.softmax(logits / temperature, dim=-1)
                drawn = torch.multinomial(shares, 1, generator=generator)[:, 0]
            else:
                drawn = logits.argmax(dim=-1)
            growing = (lengths <= t) & (until > t) & ~done
            ids[:, t] = torch.where(growing, drawn, ids[:, t])
            ended = growing & torch.isin(drawn, ends)
            until = torch.where(ended, t + 1, until)
            done |= ended
            at = t
            if bool((done | (until <= t + 1)).all()):
                break
        return [row[: int(end)].clone() for row, end in zip(ids, until, strict=True)]

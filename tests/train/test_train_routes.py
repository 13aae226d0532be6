"""Routes recorded from and imposed on transformers' models, in every family."""

from __future__ import annotations

import pytest
import torch
from tiny_moe import EXPERTS, FAMILY_NAMES, TOP_K, WIDTH, random_ids, tiny_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sluice.errors import InputError
from sluice.train.families import family_of
from sluice.train.routes import impose, record

torch.set_num_threads(1)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_imposing_what_was_recorded_changes_no_bit(name: str) -> None:
    model, ids = tiny_model(name), random_ids(2, 9)
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with record(model) as routes:
            recorded = model(input_ids=ids).logits
        kept = dict(routes)
        with impose(model, lambda layer, hidden, logits: (kept[layer].weights, kept[layer].ids)):
            imposed = model(input_ids=ids).logits
    assert list(kept) == [0, 1, 2, 3]
    assert torch.equal(plain, recorded) and torch.equal(plain, imposed)
    for routed in kept.values():
        assert routed.hidden.shape == (18, WIDTH) and routed.logits.shape == (18, EXPERTS)
        assert routed.ids.shape == routed.weights.shape == (18, TOP_K)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_gradients_flow_through_what_is_imposed(name: str) -> None:
    model, ids = tiny_model(name), random_ids(1, 6)
    family, config = family_of(model), model.config
    said = torch.randn(6, EXPERTS, requires_grad=True)

    def choose(layer: int, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Tensor] | None:
        return family.route(config, said) if layer == 2 else None

    with impose(model, choose), record(model) as routes:
        model(input_ids=ids).logits.square().mean().backward()
    assert said.grad is not None and bool((said.grad != 0).any())
    assert torch.equal(routes[2].ids, family.choose(config, said))
    assert routes[1].logits.requires_grad and routes[1].hidden.requires_grad
    assert not torch.equal(routes[2].logits, said)  # the router's own stay


def test_hidden_is_what_the_router_reads() -> None:
    model, ids = tiny_model(), random_ids(2, 5)
    with torch.no_grad(), record(model) as routes:
        model(input_ids=ids)
        for layer, router in family_of(model).routers(model).items():
            assert torch.equal(router(routes[layer].hidden)[0], routes[layer].logits)


def test_other_experts_change_the_output_and_nothing_stays_behind() -> None:
    model, ids = tiny_model(), random_ids(1, 7)

    def turned(layer: int, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        return family_of(model).route(model.config, -logits)

    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with impose(model, turned):
            other = model(input_ids=ids).logits
        with pytest.raises(RuntimeError, match="stop"), impose(model, turned), record(model):
            raise RuntimeError("stop")
        assert torch.equal(model(input_ids=ids).logits, plain)
    assert not torch.allclose(plain, other)


def test_models_of_another_kind_are_refused() -> None:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                         num_attention_heads=1))  # fmt: skip
    with pytest.raises(InputError, match="'llama'"), record(model):
        pass
    with pytest.raises(InputError, match="'llama'"), impose(model, lambda *_: None):
        pass

"""Families: their routing arithmetic against transformers' own, bit for bit, and what is refused."""

from __future__ import annotations

import pytest
import torch
from tiny_moe import EXPERTS, FAMILY_NAMES, TOP_K, WIDTH, random_ids, tiny_model
from transformers import LlamaConfig

from sluice.errors import InputError
from sluice.models import FAMILIES as SERVED
from sluice.train.families import FAMILIES, config_of, family_of

torch.set_num_threads(1)


def test_each_family_is_served_under_the_name_it_has_in_gguf() -> None:
    assert set(FAMILIES) == set(FAMILY_NAMES)
    assert {family.architecture for family in FAMILIES.values()} <= set(SERVED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_routes_are_those_of_transformers_router(name: str, dtype: torch.dtype) -> None:
    model = tiny_model(name).to(dtype)
    family, config = family_of(model), config_of(model)
    assert family.model_type == name and family.top_k(config) == TOP_K
    routers = family.routers(model)
    assert list(routers) == [0, 1, 2, 3]
    hidden = torch.randn(50, WIDTH, dtype=dtype)
    for router in routers.values():
        logits, weights, ids = router(hidden)
        ours, chosen = family.route(config, logits)
        assert ours.dtype == weights.dtype
        assert torch.equal(ours, weights) and torch.equal(chosen, ids)
        assert torch.equal(family.choose(config, logits), ids)
        assert torch.equal(family.weights(config, logits, ids), weights)
        scores = family.scores(config, logits)
        assert scores.shape == (50, EXPERTS) and scores.dtype == torch.float32
        torch.testing.assert_close(scores.sum(-1), torch.ones(50))


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "olmoe"])
@pytest.mark.parametrize("normalised", [True, False])
def test_weights_are_normalised_where_the_configuration_says_so(name: str, normalised: bool) -> None:
    model = tiny_model(name, norm_topk_prob=normalised)
    logits, weights, _ = family_of(model).routers(model)[1](torch.randn(20, WIDTH))
    ours, _ = family_of(model).route(model.config, logits)
    assert torch.equal(ours, weights)
    assert bool(((ours.sum(-1) - 1).abs() < 1e-5).all()) == normalised


def test_layers_without_experts_are_left_out() -> None:
    model = tiny_model("qwen3_moe", mlp_only_layers=[0, 2], intermediate_size=16)
    assert list(family_of(model).routers(model)) == [1, 3]
    dense = tiny_model("qwen3_moe", mlp_only_layers=[0, 1, 2, 3], intermediate_size=16)
    with pytest.raises(InputError, match="no layer with experts"):
        family_of(dense).routers(dense)


def test_other_models_are_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"'llama'.*mixtral, olmoe, qwen2_moe, qwen3_5_moe, qwen3_moe"):
        family_of(LlamaConfig())
    with pytest.raises(InputError, match="can't be trained"):
        family_of(object())
    family = FAMILIES["qwen3_moe"]
    with pytest.raises(InputError, match="no decoder layers"):
        family.routers(torch.nn.Linear(2, 2))


def test_a_decoder_alone_has_its_routers_too() -> None:
    model = tiny_model("olmoe")
    inner = model.get_decoder()  # type: ignore[operator]
    assert family_of(inner).routers(inner) == family_of(model).routers(model)
    assert model(input_ids=random_ids(1, 3)).logits.shape == (1, 3, 64)

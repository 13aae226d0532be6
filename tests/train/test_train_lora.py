"""Adapters in tiny models: nothing at first, B A x afterwards, kept and put back, and told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_moe import WIDTH, random_ids, tiny_model

from sluice.errors import InputError
from sluice.train.lora import CONFIG, Lora, add_lora, digest, factors, open_lora, save_lora

torch.set_num_threads(1)


def stirred(parameters: dict[str, torch.nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize(
    ("name", "targets", "n"),
    [
        ("qwen3_moe", ("attention",), 4 * 4),
        ("qwen3_moe", ("attention", "experts"), 4 * 4 + 2 * 4),
        ("qwen2_moe", ("dense",), 3 * 4),
        ("mixtral", ("experts",), 2 * 4),
        ("qwen3_5_moe", ("attention", "dense"), 3 * 3 + 4 + 3 * 4),
    ],
)
def test_an_adapter_is_nothing_at_first_and_all_that_learns(
    name: str, targets: tuple[str, ...], n: int, tmp_path: Path
) -> None:
    model, ids = tiny_model(name), random_ids(1, 6)
    with torch.no_grad():
        plain = model(input_ids=ids).logits
    parameters = add_lora(model, Lora(2, targets), seed=4)
    assert len(parameters) == 2 * n and factors(model) == parameters
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in parameters.values()}
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, plain)
        stirred(parameters)
        adapted = model(input_ids=ids).logits
    assert not torch.allclose(adapted, plain, atol=1e-3)
    save_lora(model, tmp_path / "adapter")
    again = tiny_model(name)
    lora, loaded = open_lora(again, tmp_path / "adapter")
    assert lora == Lora(2, targets) and digest(loaded) == digest(parameters)
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, adapted)


def test_what_is_added_is_b_a_x() -> None:
    model = tiny_model()
    parameters = add_lora(model, Lora(3, ("attention",)))
    stirred(parameters)
    projection, x = model.model.layers[1].self_attn.q_proj, torch.randn(4, WIDTH)  # type: ignore[union-attr]
    a, b = (parameters[f"model.layers.1.self_attn.q_proj.lora_{part}.weight"] for part in "AB")
    with torch.no_grad():
        torch.testing.assert_close(projection(x), projection.base_layer(x) + x @ a.T @ b.T)  # type: ignore[operator]


def test_the_seed_draws_a_and_leaves_other_draws_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, same, other = (digest(add_lora(tiny_model(), Lora(2, ("attention",)), seed=s)) for s in (1, 1, 2))
    assert one == same != other
    torch.manual_seed(3)
    model = tiny_model()
    state = torch.get_rng_state()
    add_lora(model, Lora(2, ("attention",)))
    assert torch.equal(torch.get_rng_state(), state) and len(before) == len(state)


def test_what_can_not_be_adapted_is_refused() -> None:
    with pytest.raises(InputError, match="rank 0 is out of range"):
        Lora(0, ("attention",))
    with pytest.raises(InputError, match="'router' can't be adapted: choose from attention, dense, experts"):
        Lora(1, ("router",))
    with pytest.raises(InputError, match="there is nothing to adapt"):
        Lora(1, ())
    with pytest.raises(InputError, match="has no dense matrices"):
        add_lora(tiny_model("mixtral"), Lora(1, ("dense",)))


def test_adapters_of_other_models_and_broken_ones_are_refused(tmp_path: Path) -> None:
    model = tiny_model()
    add_lora(model, Lora(2, ("attention",)))
    save_lora(model, tmp_path / "a")
    with pytest.raises(InputError, match="an adapter for another model"):
        open_lora(tiny_model(num_hidden_layers=2), tmp_path / "a")
    with pytest.raises(InputError, match=r"an adapter for another model: .* \[2, 32\] there, and \[2, 64\] here"):
        open_lora(tiny_model(hidden_size=64), tmp_path / "a")
    with pytest.raises(InputError, match="is no adapter"):
        open_lora(tiny_model(), tmp_path)
    (tmp_path / "a" / CONFIG).write_text(json.dumps({"r": "2"}))
    with pytest.raises(InputError, match="is broken"):
        open_lora(tiny_model(), tmp_path / "a")

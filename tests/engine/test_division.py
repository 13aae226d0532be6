"""How a model is divided: every segment and tensor goes where it is needed, none is left out."""

from __future__ import annotations

import pytest
from tiny import T, write_tiny

from sluice.engine.division import last_layers, layers_of, of_experts, segment_layers, wanted
from sluice.engine.weights import dense_tensors
from sluice.ggml import load_library
from sluice.gguf import GgufFile, TensorInfo, open_gguf
from sluice.models import family_of
from sluice.models.spec import ModelSpec

N_LAYERS = 5


@pytest.fixture(scope="module", params=[(), (0, 1), (2,), (4,)], ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[GgufFile, ModelSpec]:
    path = tmp_path_factory.mktemp("m") / "m.gguf"
    write_tiny(
        path,
        n_layers=N_LAYERS,
        dense_layers=request.param,
        n_embd=32,
        n_ff_exp=32,
        n_expert=4,
        head_dim=32,
        expert_type=T.F32,
        dense_type=T.F32,
    )
    file = open_gguf(path, load_library())
    return file, family_of(file).read_spec(file)


def named(tensors: list[TensorInfo]) -> set[str]:
    return {info.name for info in tensors}


def test_segments_have_every_layer_once(model: tuple[GgufFile, ModelSpec]) -> None:
    spec = model[1]
    everything = [layer for i in range(len(spec.moe_layers) + 1) for layer in segment_layers(spec, i)]
    assert everything == list(range(N_LAYERS))


def test_the_last_layers_are_whole_segments(model: tuple[GgufFile, ModelSpec]) -> None:
    spec = model[1]
    assert last_layers(spec, 0) == frozenset()
    assert last_layers(spec, N_LAYERS) == frozenset(range(len(spec.moe_layers) + 1))
    for n in range(1, N_LAYERS + 1):
        segments = last_layers(spec, n)
        layers = layers_of(spec, segments)
        assert len(layers) <= n and layers == list(range(N_LAYERS - len(layers), N_LAYERS))
        assert segments >= last_layers(spec, n - 1)


def test_each_tensor_is_somewhere_and_those_of_a_layer_only_where_it_is_read(model: tuple[GgufFile, ModelSpec]) -> None:
    file, spec = model
    dense = dense_tensors(file, spec)
    everything = frozenset(range(len(spec.moe_layers) + 1))
    assert named(wanted(dense, spec, everything)) == named(dense)
    assert wanted(dense, spec, ()) == []
    for n in range(N_LAYERS + 1):
        there = last_layers(spec, n)
        up, down = named(wanted(dense, spec, there)), named(wanted(dense, spec, everything - there))
        assert up | down == named(dense)
        for layer in layers_of(spec, there):
            attention = {name for name in named(dense) if name.startswith(f"blk.{layer}.attn_")}
            followed = layer in spec.moe_layers and spec.moe_layers.index(layer) + 1 not in there
            assert attention <= up and (followed or not attention & down)
    assert of_experts(dense) == []

"""Stored rows to float32 and back, in every type of weights that ggml has."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from tiny import T

from sluice.errors import GgmlError
from sluice.ggml import GgmlType, load_library
from sluice.ggml.types import WEIGHT_TYPES
from sluice.routing.stored import Converter

ROWS = np.random.default_rng(0).standard_normal((3, 512)).astype(np.float32)
COARSE = {"IQ1_S", "IQ1_M", "Q1_0", "TQ1_0", "TQ2_0", "Q2_0"}  # a bit or two a number


@pytest.fixture
def converter():
    with Converter(load_library()) as converter:
        yield converter


@pytest.mark.parametrize("type", sorted(WEIGHT_TYPES), ids=lambda type: type.name)
def test_there_and_back(converter: Converter, type: GgmlType) -> None:
    again = converter.widened(type, 512, converter.stored(type, ROWS))
    error = np.linalg.norm(again - ROWS) / np.linalg.norm(ROWS)
    assert error < (0.9 if type.name in COARSE else 0.4)
    assert (error == 0) == (type == GgmlType.F32)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q4_0", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "IQ4_NL", "IQ2_XXS", "MXFP4"])
def test_widens_as_the_gguf_package_does(converter: Converter, name: str) -> None:
    raw = converter.stored(GgmlType[name], ROWS)
    expected = gguf.quants.dequantize(np.frombuffer(raw, np.uint8).reshape(3, -1), T[name])
    np.testing.assert_allclose(converter.widened(GgmlType[name], 512, raw), expected, rtol=1e-6, atol=1e-7)


def test_bytes_that_are_no_rows(converter: Converter) -> None:
    for type, raw in ((GgmlType.Q4_K, bytes(143)), (GgmlType.Q4_K, b""), (GgmlType.I32, bytes(2048))):
        with pytest.raises(GgmlError):
            converter.widened(type, 512, raw)
    with pytest.raises(GgmlError):
        converter.stored(GgmlType.I32, ROWS)

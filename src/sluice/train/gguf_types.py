"""Which type each tensor of a GGUF file is stored in, by llama.cpp's rules for a kind of file. Knows names and shapes.

Norms, routers, biases and what a recurrence computes with stay F32. Without an importance matrix llama-quantize gives
the head, and in some kinds of file the values and the networks' output, more bits than the rest; a row that a type's
blocks don't divide takes the type that llama-quantize falls back to.
Source: src/llama-quant.cpp and conversion/base.py in https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from sluice.ggml.types import GgmlType

T = GgmlType


@dataclass(frozen=True)
class FileType:
    """A kind of file: the type of most matrices, and the number that `general.file_type` has for it."""

    base: GgmlType
    number: int

    @property
    def quantised(self) -> bool:
        return self.base not in (T.F32, T.F16, T.BF16)


# By the names that llama-quantize takes; q2_k, q3_k, q4_k and q5_k are its mixtures ("Q4_K_M").
FILE_TYPES = {
    "f32": FileType(T.F32, 0),
    "f16": FileType(T.F16, 1),
    "bf16": FileType(T.BF16, 32),
    "q8_0": FileType(T.Q8_0, 7),
    "q6_k": FileType(T.Q6_K, 18),
    "q5_k": FileType(T.Q5_K, 17),
    "q5_1": FileType(T.Q5_1, 9),
    "q5_0": FileType(T.Q5_0, 8),
    "q4_k": FileType(T.Q4_K, 15),
    "q4_1": FileType(T.Q4_1, 3),
    "q4_0": FileType(T.Q4_0, 2),
    "iq4_nl": FileType(T.IQ4_NL, 25),
    "iq4_xs": FileType(T.IQ4_XS, 30),
    "mxfp4": FileType(T.MXFP4, 38),
    "q3_k": FileType(T.Q3_K, 12),
    "q2_k": FileType(T.Q2_K, 10),
}
FALL_BACK = {
    T.IQ4_XS: T.IQ4_NL,
    T.Q2_K: T.Q4_0,
    T.Q3_K: T.Q4_0,
    T.Q4_K: T.Q5_0,
    T.Q5_K: T.Q5_1,
    T.Q6_K: T.Q8_0,
}
_KEPT = ("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "ssm_conv1d")
_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class TypeRule:
    """What decides beside a tensor's name and shape. `n_gqa`: heads of queries for one of keys."""

    file_type: FileType
    n_layers: int
    n_expert: int
    n_gqa: int
    tied: bool
    block: Callable[[GgmlType], int]  # numbers of a row that a type stores together

    def chosen(self, name: str, shape: tuple[int, ...]) -> tuple[GgmlType, GgmlType]:
        """The type of tensor `name`, `shape` row-major, and the one it would have if its rows were divisible."""
        if len(shape) < 2 or not name.endswith(".weight") or any(part in name for part in _KEPT):
            return T.F32, T.F32
        if not self.file_type.quantised:
            return self.file_type.base, self.file_type.base
        wanted = self._wanted(name, shape)
        type = wanted
        if shape[-1] % self.block(type):
            type = FALL_BACK.get(type, T.F16)
        return (T.F16 if shape[-1] % self.block(type) else type), wanted

    def _wanted(self, name: str, shape: tuple[int, ...]) -> GgmlType:
        base, layer = self.file_type.base, _LAYER.match(name)
        if name == "output.weight" or (self.tied and name == "token_embd.weight"):
            return T.Q8_0 if base in (T.Q8_0, T.MXFP4) or shape[-1] % self.block(base) else T.Q6_K
        if base == T.MXFP4:
            return T.MXFP4 if len(shape) == 3 else T.Q8_0
        if layer is None:
            return base
        part, number = name[layer.end() :], int(layer[1])
        if part in ("attn_v.weight", "attn_qkv.weight"):
            return self._of_values(number)
        if part == "attn_k.weight":
            return T.Q8_0 if self.n_expert == 8 else base
        if part.startswith("ffn_down"):
            return self._of_networks_output(number)
        if part == "attn_output.weight":
            if self.n_expert == 8:
                return T.Q5_K if base in (T.Q2_K, T.Q3_K, T.Q4_K, T.IQ4_NL, T.IQ4_XS) else base
            return {T.Q2_K: T.Q3_K, T.Q3_K: T.Q4_K}.get(base, base)
        return base

    def _of_values(self, layer: int) -> GgmlType:
        if self.n_expert == 8:
            return T.Q8_0
        base, grouped = self.file_type.base, self.n_gqa >= 4
        if base == T.Q2_K:
            return T.Q4_K if grouped else T.Q3_K
        if base == T.Q3_K:
            return T.Q5_K if layer < 2 else T.Q4_K
        if base in (T.IQ4_NL, T.IQ4_XS) and grouped:
            return T.Q5_K
        return T.Q6_K if base in (T.Q4_K, T.Q5_K) and self._more_bits(layer) else base

    def _of_networks_output(self, layer: int) -> GgmlType:
        base, n = self.file_type.base, self.n_layers
        if base == T.Q2_K:
            return T.Q3_K
        if base == T.Q3_K:
            return T.Q5_K if layer < n // 16 else T.Q4_K
        if base in (T.IQ4_NL, T.IQ4_XS) and layer < n // 8:
            return T.Q5_K
        return T.Q6_K if base in (T.Q4_K, T.Q5_K) and self._more_bits(layer) else base

    def _more_bits(self, layer: int) -> bool:
        """The first and last eighth of the layers, and every third between."""
        n = self.n_layers
        return layer < n // 8 or layer >= 7 * n // 8 or (layer - n // 8) % 3 == 2

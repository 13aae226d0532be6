"""Qwen3-Next (GGUF architecture `qwen3next`): Qwen3-Next-80B-A3B, Qwen3-Coder-Next. Knows its graphs only.

Qwen3.5's layers with other matrices: what decides on writing and keeping comes from one, grouped by key head, and so,
in files from before `attn_qkv`, do queries, keys, values and the gate. Value heads of one key head are neighbours.
Source: https://huggingface.co/docs/transformers/model_doc/qwen3_next.
"""

from __future__ import annotations

from sluice.ggml import Context, Tensor
from sluice.gguf import GgufFile
from sluice.models.qwen35moe import Qwen35Moe
from sluice.models.spec import DeltaNetSpec, ModelSpec, Shape


class Qwen3Next(Qwen35Moe):
    """`qwen3next`."""

    architecture = "qwen3next"
    tiled = False

    def mixed_and_gate(self, c: Context, layer: int, h: Tensor) -> tuple[Tensor, Tensor]:
        together = self.weights.get(f"blk.{layer}.ssm_in.weight")
        if together is None:
            return super().mixed_and_gate(c, layer, h)
        d = self.spec.delta
        assert d is not None
        n_values = d.value_dim // d.n_k_heads
        q, k, v, z = _by_key_head(c, d, c.mul_mat(together, h), (d.head_dim, d.head_dim, n_values, n_values))
        return c.concat(c.concat(q, k), v), z

    def beta_and_alpha(self, c: Context, layer: int, h: Tensor) -> tuple[Tensor, Tensor]:
        d = self.spec.delta
        assert d is not None
        each = d.n_v_heads // d.n_k_heads
        beta, alpha = _by_key_head(c, d, c.mul_mat(self.weights[f"blk.{layer}.ssm_ba.weight"], h), (each, each))
        return beta, alpha

    @classmethod
    def delta_tensors(cls, file: GgufFile, s: ModelSpec, d: DeltaNetSpec, layer: int) -> dict[str, Shape]:
        b, tensors = f"blk.{layer}.", super().delta_tensors(file, s, d, layer)
        del tensors[b + "ssm_beta.weight"], tensors[b + "ssm_alpha.weight"]
        tensors[b + "ssm_ba.weight"] = (s.n_embd, 2 * d.n_v_heads)
        if b + "ssm_in.weight" in file.tensors:
            del tensors[b + "attn_qkv.weight"], tensors[b + "attn_gate.weight"]
            tensors[b + "ssm_in.weight"] = (s.n_embd, d.conv_dim + d.value_dim)
        return tensors


def _by_key_head(c: Context, d: DeltaNetSpec, y: Tensor, widths: tuple[int, ...]) -> list[Tensor]:
    """Columns `y` hold parts of these widths for each key head: each part of all heads [n_k_heads × width, n]."""
    n, stride, at, parts = y.shape[1], 4 * sum(widths), 0, []
    for width in widths:
        part = c.cont(c.view(y, (width, d.n_k_heads, n), (stride, y.strides[1]), at))
        parts.append(c.reshape(part, d.n_k_heads * width, n))
        at += 4 * width
    return parts

"""Writes tiny random GGUF files of any architecture, tensor by tensor; knows no architecture and nothing of Sluice.

A family's test says which keys and tensors there are. This owns the rest: the random numbers, the stored form of each
tensor, the tokenizer, the shards. Shapes are numpy's: rows before columns, a column contiguous; ggml lists them in
reverse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tiny import CHATML, StoredModel, T, add_tokenizer, quantize, vocabulary, write_tensors

N_CTX = 8192


@dataclass(frozen=True)
class FamilyModel(StoredModel):
    """A written file, with its metadata by the names of `FamilyFile.keys`."""

    keys: dict[str, Any]

    @property
    def top_k(self) -> int:
        """Experts a token takes in a layer."""
        return self.keys["expert_used_count"]


class FamilyFile:
    """A file being made. `keys` and `stored` are open to tests that want to leave something out or spoil it.

    A key without "general." or "tokenizer." before it is the architecture's own: "block_count" is
    "qwen3moe.block_count". Whole numbers are written as uint32, fractions as float32, lists as arrays.
    """

    def __init__(
        self, arch: str, *, n_vocab: int | None = None, pre: str = "qwen2", chat_template: str | None = CHATML,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.arch = arch
        self.rng = np.random.default_rng(seed)
        self.n_vocab = len(vocabulary(n_vocab)[0])
        self.keys: dict[str, Any] = {"context_length": N_CTX, "vocab_size": self.n_vocab}
        self.stored: dict[str, tuple[np.ndarray, T]] = {}
        self._n_vocab, self._pre, self._chat_template = n_vocab, pre, chat_template

    def metadata(self, keys: Mapping[str, Any]) -> None:
        """Adds keys or replaces them."""
        self.keys |= keys

    def matrix(self, name: str, t: T, *shape: int, gain: float = 1.0) -> None:
        """`name`.weight [..., rows, columns], such that unit-variance input gives output of deviation `gain`."""
        values = self.rng.standard_normal(shape, dtype=np.float32) * np.float32(gain * shape[-1] ** -0.5)
        self.stored[f"{name}.weight"] = (quantize(values, t), t)

    def norm(self, name: str, width: int) -> None:
        """`name`.weight [width], about one."""
        self.vector(f"{name}.weight", 1 + 0.1 * self.rng.standard_normal(width))

    def bias(self, name: str, *shape: int, scale: float = 0.3) -> None:
        """`name`.bias of any shape, about zero."""
        self.vector(f"{name}.bias", scale * self.rng.standard_normal(shape))

    def vector(self, name: str, values: np.ndarray | Sequence[float]) -> None:
        """A float32 tensor of the full `name`, with these very values, of any shape."""
        self.stored[name] = (np.array(values, np.float32), T.F32)

    def embeddings(self, t: T, n_embd: int, *, tied: bool = False) -> None:
        """token_embd, output_norm and, unless `tied`, output. Embeddings of unit variance, so that layers stand
        beside them; tied, of a fifth of that, because the head reads them too."""
        self.matrix("token_embd", t, self.n_vocab, n_embd, gain=n_embd**0.5 * (0.2 if tied else 1.0))
        self.norm("output_norm", n_embd)
        if not tied:
            self.matrix("output", t, self.n_vocab, n_embd, gain=2.0)

    def experts(self, block: str, t: T, n_expert: int, n_ff: int, n_embd: int, *,
                down: T | None = None, fused: bool = False) -> None:  # fmt: skip
        """The ffn_{gate,up,down}_exps of `block` ("blk.3."); `fused` stacks gate above up as ffn_gate_up_exps."""
        self.matrix(f"{block}ffn_gate_exps", t, n_expert, n_ff, n_embd)
        self.matrix(f"{block}ffn_up_exps", t, n_expert, n_ff, n_embd)
        if fused:  # every type quantises within a row, so rows can be stacked after quantising
            parts = [self.stored.pop(f"{block}ffn_{part}_exps.weight")[0] for part in ("gate", "up")]
            self.stored[f"{block}ffn_gate_up_exps.weight"] = (np.concatenate(parts, axis=1), t)
        self.matrix(f"{block}ffn_down_exps", down or t, n_expert, n_embd, n_ff, gain=2.0)

    def write(self, path: Path, *, split: int = 1, zeroed: str | None = None) -> FamilyModel:
        """The file at `path`, or its shards beside it. `zeroed` is a tensor to write as zeros."""
        stored = dict(self.stored)
        if zeroed is not None:
            raw, t = stored[zeroed]
            stored[zeroed] = (np.zeros_like(raw), t)
        per_shard = -(-len(stored) // split) if split > 1 else 0
        writer = gguf.GGUFWriter(path, self.arch, split_max_tensors=per_shard)
        writer.add_name(f"tiny-{self.arch}")
        for key, value in self.keys.items():
            name = key if key.startswith(("general.", "tokenizer.")) else f"{self.arch}.{key}"
            if isinstance(value, list | tuple):
                writer.add_array(name, value)
            elif isinstance(value, int) and not isinstance(value, bool):
                writer.add_uint32(name, value)
            else:
                writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
        add_tokenizer(writer, self._n_vocab, self._pre, self._chat_template)
        return FamilyModel(write_tensors(writer, path, stored, split), stored, dict(self.keys))

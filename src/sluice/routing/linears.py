"""The matrices of a model that an adapter may change: their names and shapes, and where each lies in the file.

Names are GGUF's; experts' matrices go by role (`blk.3.ffn_gate_exps.weight`), however the file stores them. It knows no
adapter.
"""

from __future__ import annotations

from dataclasses import dataclass

from sluice.ggml.types import GgmlType
from sluice.gguf import GgufFile
from sluice.models.spec import ModelSpec

SHARED_GATE = ".ffn_gate_inp_shexp.weight"  # a matrix of one row, which files store as a vector
NO_LINEARS = ("norm", "conv1d", ".conv.", "token_embd", "rope_freqs")
ROLES = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class Linear:
    """`n_stack` matrices [n_out, n_in] of one type, one of each expert or head; 0 stands for one that is no stack.

    Matrix i's rows are the bytes [offset + i × stride, …) of file number `file`. `tensor` is the name under which a
    model keeps it in memory, None for experts: they are `role` of `layer`.
    """

    name: str
    n_in: int
    n_out: int
    n_stack: int
    type: GgmlType
    file: int
    offset: int
    stride: int
    tensor: str | None
    layer: int = -1
    role: str = ""


def expert_name(layer: int, role: str) -> str:
    return f"blk.{layer}.ffn_{role}_exps.weight"


def linears(file: GgufFile, spec: ModelSpec) -> dict[str, Linear]:
    """All of a model's, by name. The head of a model whose embeddings are tied to it is `output.weight` here too."""
    found: dict[str, Linear] = {}
    skipped = set(spec.skipped)
    for name, info in file.tensors.items():
        vector = info.shape[1] == info.shape[2] == 1 and not name.endswith(SHARED_GATE)
        if name in skipped or vector or not name.endswith(".weight") or "_exps." in name:
            continue
        if any(part in name for part in NO_LINEARS):
            continue
        n_in, n_out, n_stack, _ = info.shape
        stride = info.n_bytes // n_stack
        found[name] = Linear(name, n_in, n_out, n_stack if n_stack > 1 else 0, info.type, info.file, info.offset,
                             stride, name)  # fmt: skip
    if spec.tied_embeddings:
        info = file.tensors["token_embd.weight"]
        found["output.weight"] = Linear("output.weight", info.shape[0], info.shape[1], 0, info.type, info.file,
                                        info.offset, info.n_bytes, "token_embd.weight")  # fmt: skip
    for layer in spec.moe_layers:
        for part in file.expert_parts(layer) or ():
            name = expert_name(layer, part.role)
            found[name] = Linear(name, part.n_in, part.n_out, spec.n_expert, part.type, part.file, part.offset,
                                 part.stride, None, layer, part.role)  # fmt: skip
    return found

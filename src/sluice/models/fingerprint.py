"""Tells models apart by their routers: files in which the same experts are chosen for the same reasons share a name."""

from __future__ import annotations

import hashlib
import json

from sluice.gguf import GgufFile
from sluice.io.aligned import AlignedBuffer
from sluice.io.files import ModelFiles
from sluice.models.spec import ModelSpec

PIECE_BYTES = 1 << 20


def fingerprint(file: GgufFile, spec: ModelSpec) -> str:
    """SHA-256, in hex, of the model's shape and of its routers' weights as they are stored.

    A stock, a packed and a split file of one model have the same, and so have quantisations of it that keep the
    routers' type (most keep F32). The weights are read past the page cache, a piece at a time. Raises ReadError.
    """
    shape = (spec.architecture, spec.n_layers, spec.n_embd, spec.n_expert, spec.moe_layers)
    digest = hashlib.sha256(json.dumps(shape).encode())
    piece = bytearray(PIECE_BYTES)
    with ModelFiles(file.paths) as files, AlignedBuffer(PIECE_BYTES) as scratch, memoryview(piece) as view:
        for layer in spec.moe_layers:
            info = file.tensors[f"blk.{layer}.ffn_gate_inp.weight"]
            for at in range(0, info.n_bytes, PIECE_BYTES):
                n = min(PIECE_BYTES, info.n_bytes - at)
                files.read_exact(info.file, info.offset + at, view[:n], scratch)
                digest.update(view[:n])
    return digest.hexdigest()

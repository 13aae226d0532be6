"""Makes heads that nobody has trained, each the router of the layer it predicts; knows files, runs no model."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial

import numpy as np

from sluice.errors import InputError
from sluice.ggml import Library
from sluice.gguf import GgufFile, open_gguf
from sluice.io.aligned import AlignedBuffer
from sluice.io.files import ModelFiles
from sluice.models import family_of
from sluice.models.fingerprint import PIECE_BYTES, fingerprint
from sluice.routing.prerouter_file import MAX_WIDTH, PrerouterInfo, write_prerouter
from sluice.routing.stored import Converter
from sluice.safetensors_file import MadeTensor, check_out

TYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}
HIDDEN = 128  # fc1 then costs about what a router of 128 experts does
MAX_SEED = (1 << 63) - 1


def init_prerouter(
    model: str | os.PathLike[str], out: str | os.PathLike[str], library: Library, *, hidden: int = HIDDEN,
    seed: int = 0, type: str = "f32", force: bool = False, progress: Callable[[int, int], None] | None = None,
) -> int:  # fmt: skip
    """Write untrained heads for every layer of `model` but the last that has experts; returns the file's bytes.

    A head's skip path is the next router, its bias included, in float32 or (`type` f16) float16; fc2 is zero, so the
    logits are the skip path's; fc1 is drawn by `seed`, so that fc2 can learn. `progress(done, total)` in heads.
    Raises InputError, also where `out` exists (unless `force`).
    """
    if not 1 <= hidden <= MAX_WIDTH:
        raise InputError(f"--hidden {hidden} is out of range: give 1 to {MAX_WIDTH}")
    if not 0 <= seed <= MAX_SEED:
        raise InputError(f"--seed {seed} is out of range: give 0 to {MAX_SEED}")
    if type not in TYPES:
        raise InputError(f"--type {type!r} is unknown: choose from {', '.join(TYPES)}")
    dtype = TYPES[type]
    file = open_gguf(model, library)
    spec = family_of(file).read_spec(file)
    path = check_out(out, force=force, keep=file.paths)
    if len(spec.moe_layers) < 2:
        raise InputError(f"{file.paths[0]}: only one layer has experts, nothing to predict from: use another model")
    name = file.metadata.get("general.name")
    info = PrerouterInfo(
        fingerprint=fingerprint(file, spec),
        architecture=spec.architecture,
        name=name if isinstance(name, str) else "",
        n_layers=spec.n_layers,
        n_embd=spec.n_embd,
        n_expert=spec.n_expert,
        moe_layers=tuple(spec.moe_layers),
        top_k=spec.top_k,
        owners=tuple(spec.moe_layers[:-1]),
        first_predicted=spec.moe_layers[1],
        weights="head",
        training={"stage": "init", "seed": seed},
    )
    with ModelFiles(file.paths) as files, AlignedBuffer(PIECE_BYTES) as scratch, Converter(library) as converter:
        tensors = _tensors(file, files, scratch, converter, info, hidden, seed, dtype, progress)
        return write_prerouter(path, info, tensors, force=force, keep=file.paths)


def _tensors(
    file: GgufFile, files: ModelFiles, scratch: AlignedBuffer, converter: Converter, info: PrerouterInfo, hidden: int,
    seed: int, dtype: np.dtype, progress: Callable[[int, int], None] | None,
) -> dict[str, MadeTensor]:  # fmt: skip
    """All heads' tensors, made one at a time as they are written."""

    def stored(name: str) -> np.ndarray:
        """A tensor of the model, in the heads' type."""
        tensor = file.tensors[name]
        raw = bytearray(tensor.n_bytes)
        with memoryview(raw) as view:
            files.read_exact(tensor.file, tensor.offset, view, scratch)
        wide = converter.widened(tensor.type, tensor.shape[0], raw)
        wide = wide[0] if name.endswith(".bias") else wide
        with np.errstate(over="ignore"):
            values = wide.astype(dtype)
        if not np.isfinite(values).all():
            large = "too large for float16: use --type f32"
            why = large if np.isfinite(wide).all() else "infinite or no numbers: the file is damaged"
            raise InputError(f"{file.paths[0]}: some weights of {name} are {why}")
        return values

    def drawn(owner: int, shape: tuple[int, ...]) -> np.ndarray:
        """Uniform within ± 1 / sqrt(n_in), as PyTorch's linear layers begin."""
        if progress is not None:
            progress(info.owners.index(owner), len(info.owners))
        bound = 1 / math.sqrt(info.n_embd + 2 * info.n_expert)
        return np.random.default_rng((seed, owner)).uniform(-bound, bound, shape).astype(dtype)

    tensors: dict[str, MadeTensor] = {}
    for owner, following in info.predicts.items():
        for name, shape in info.shapes(owner, hidden).items():
            router = f"blk.{following}.ffn_gate_inp.{name.rpartition('.')[2]}"
            if name.endswith("fc1.weight"):
                make = partial(drawn, owner, shape)
            elif ".skip." not in name:
                make = partial(np.zeros, shape, dtype)
            elif router in file.tensors:
                make = partial(stored, router)
            else:  # a router without a bias
                continue
            tensors[name] = MadeTensor(shape, dtype, make)
    return tensors

"""Files of prerouter heads: which model they belong to, their tensors, what is wrong with them; knows no graphs.

A head belongs to a layer N with experts, its owner, and predicts at token t the experts that the next layer with
experts (N + 1, where every layer has some) uses at token t + 1. The file is safetensors. Tensors of owner N, each
float32 or float16, `[out, in]`, for a model of width d with E experts a layer:

    blk.N.fc1.weight   [hidden, d + 2E]
    blk.N.fc1.bias     [hidden]
    blk.N.fc2.weight   [E, hidden]
    blk.N.fc2.bias     [E]
    blk.N.skip.weight  [E, d]
    blk.N.skip.bias    [E]               optional

Logits = fc2(gelu(fc1 x)) + skip h, gelu in its form with erf. h is what N's router reads: the hidden state, normed.
x is h, then ones at the experts executed for this token in layer N, then ones at those executed in layer N - 1 (only
zeros where there is no layer N - 1, or it has no experts). `hidden` is the head's own. Metadata, all texts:

    sluice.prerouter   1, the format
    fingerprint        of the model (sluice.models.fingerprint)
    architecture, name, n_layers, n_embd, n_expert, moe_layers    of the model
    top_k              experts a token takes in each layer, which the heads were made for
    owners             [layer, …] with a head, ascending
    first_predicted    the first layer whose routes are predicted; heads of layers before its owner go unused, and so
                       does a head of the last layer. Layers without a head keep their router.
    features           what the input is made of: FEATURES
    weights            "head": routing weights come from the head's logits; "router": from the layer's own router, at
                       the ids that the head predicts
    training           {…}, where the numbers come from; free

A file is somebody else's until it has been checked: every size and number in it is.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from sluice.errors import InputError
from sluice.models.spec import ModelSpec
from sluice.safetensors_file import (
    WRITTEN,
    Readable,
    StoredTensor,
    check_out,
    quoted,
    read_safetensors,
    write_safetensors,
)

FORMAT = "1"
FORMAT_KEY = "sluice.prerouter"
FEATURES = "hidden state, executed in N, executed in N-1"
WEIGHTS_FROM = ("head", "router")
PARTS = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "skip.weight")
OPTIONAL_PARTS = ("skip.bias",)
MAX_LAYERS = MAX_EXPERTS = 4096  # as of models
MAX_WIDTH = 1 << 16
MAX_NUMBER = 65504.0  # float16's largest; far larger ones would make logits that are no numbers, which can't be sorted
PIECE_BYTES = 4 << 20  # that a tensor is read by
_NUMBERS = {"n_layers": MAX_LAYERS, "n_embd": MAX_WIDTH, "n_expert": MAX_EXPERTS, "top_k": MAX_EXPERTS}
_TEXTS = ("fingerprint", "architecture", "name", "features", "weights")


@dataclass(frozen=True)
class PrerouterInfo:
    """What a file says of its model and heads; the fields are the module's metadata."""

    fingerprint: str
    architecture: str
    name: str
    n_layers: int
    n_embd: int
    n_expert: int
    moe_layers: tuple[int, ...]
    top_k: int
    owners: tuple[int, ...]
    first_predicted: int
    weights: str
    training: Mapping[str, Any]
    features: str = FEATURES

    @property
    def predicts(self) -> dict[int, int]:
        """The layer that each owner's head predicts, without the heads that go unused."""
        following = dict(zip(self.moe_layers, self.moe_layers[1:], strict=False))
        pairs = ((owner, following.get(owner, -1)) for owner in self.owners)
        return {owner: layer for owner, layer in pairs if layer >= self.first_predicted}

    def reads_before(self, owner: int) -> bool:
        """Whether the owner's head sees experts of the layer before: whether that has some."""
        return owner - 1 in self.moe_layers

    def shapes(self, owner: int, hidden: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a head's tensors by their names, the optional ones too."""
        d, n = self.n_embd, self.n_expert
        of_parts = ((hidden, d + 2 * n), (hidden,), (n, hidden), (n,), (n, d), (n,))
        return {
            f"blk.{owner}.{part}": shape
            for part, shape in zip((*PARTS, *OPTIONAL_PARTS), of_parts, strict=True)
        }  # fmt: skip


@dataclass(frozen=True)
class PrerouterFile:
    """An opened file: what it says, and its tensors, whose types and shapes fit that. Their numbers are unread."""

    path: Path
    info: PrerouterInfo
    tensors: Mapping[str, StoredTensor]

    def hidden(self, owner: int) -> int:
        """The width of the owner's head."""
        return self.tensors[f"blk.{owner}.fc1.weight"].shape[0]

    def rows(self, name: str, first: int, n: int) -> np.ndarray:
        """`n` rows of a tensor. Raises InputError where one of their numbers is none, infinite or past MAX_NUMBER."""
        values = self.tensors[name].read(first, n)
        if (wrong := ~(np.abs(values) <= MAX_NUMBER)).any():
            at = np.argwhere(wrong)[0]
            raise InputError(
                f"{self.path}: tensor {name} has {values[tuple(at)]:.3g} in row {first + int(at[0])}, not a number "
                f"up to ±{MAX_NUMBER:.0f}: the file is damaged, or its training diverged: use another"
            )
        return values

    def pieces(self, name: str) -> list[tuple[int, int]]:
        """Rows of a tensor, (first, n), that together are all of it and each take PIECE_BYTES or are one."""
        shape = self.tensors[name].shape
        step = max(1, PIECE_BYTES // (4 * math.prod(shape[1:])))
        return [(first, min(step, shape[0] - first)) for first in range(0, shape[0], step)]

    def check_numbers(self) -> None:
        """Read all of it. Raises InputError as `rows` does."""
        for name in self.tensors:
            for first, n in self.pieces(name):
                self.rows(name, first, n)

    def check_model(self, spec: ModelSpec, *, fingerprint: str, name: str = "", top_k: int | None = None) -> None:
        """Raise InputError, naming the difference, unless the heads were made for the model described.

        `top_k` is the model's own number of experts a token, where `spec` has been given another.
        """
        own, top_k = self.info, spec.top_k if top_k is None else top_k
        compared = {
            "architecture": (own.architecture, spec.architecture),
            "layers": (own.n_layers, spec.n_layers),
            "width": (own.n_embd, spec.n_embd),
            "experts a layer": (own.n_expert, spec.n_expert),
            "layers with experts": (len(own.moe_layers), len(spec.moe_layers)),
        }
        other = [f"{what} {quoted(a)}, this model has {quoted(b)}" for what, (a, b) in compared.items() if a != b]
        if not other and own.moe_layers != tuple(spec.moe_layers):
            other = ["other layers with experts"]
        if not other and own.top_k > top_k:
            other = [f"experts a token {own.top_k}, this model has {top_k}"]
        if not other and own.fingerprint != fingerprint:
            other = [
                f"of the same shape, but with other router weights (fingerprint {quoted(own.fingerprint[:12])}…, "
                f"this model's is {fingerprint[:12]}…)"
            ]
        if other:
            called = f" ({quoted(own.name)}; this is {quoted(name)})" if own.name != name else ""
            raise InputError(f"{self.path}: heads for another model{called}: {other[0]}: give heads made for this one")


def open_prerouter(path: str | os.PathLike[str]) -> PrerouterFile:
    """The heads in a file, their numbers still unread. Raises InputError, naming what is wrong with it."""
    path = Path(os.path.expanduser(path))  # noqa: PTH111  (Path's raises for an unknown user)
    metadata, tensors = read_safetensors(path)
    if FORMAT_KEY not in metadata:
        raise InputError(f"{path}: no prerouter heads (it lacks {FORMAT_KEY}): name a file of `sluice prerouter init`")
    if (version := metadata[FORMAT_KEY]) != FORMAT:
        raise InputError(f"{path}: heads in format {quoted(version)}, this version of Sluice reads {FORMAT}")
    try:
        info = _info(metadata)
        _check_tensors(info, tensors)
    except ValueError as error:
        raise InputError(f"{path}: the heads are damaged ({error}): get the file again, or make it anew") from None
    return PrerouterFile(path, info, tensors)


def _info(metadata: Mapping[str, str]) -> PrerouterInfo:
    known = {field.name for field in fields(PrerouterInfo)}
    if missing := known - set(metadata):
        raise ValueError(f"its metadata lacks {min(missing)}")
    values: dict[str, Any] = {name: metadata[name] for name in _TEXTS}
    for name in known - set(_TEXTS):
        try:
            values[name] = json.loads(metadata[name], parse_constant=_finite, parse_float=_finite)
        except (ValueError, RecursionError):
            raise ValueError(f"{name} is {quoted(metadata[name])}") from None
    for name, most in _NUMBERS.items():
        _whole(name, values[name], 1, most)
    n_layers, n_expert = values["n_layers"], values["n_expert"]
    for name in ("moe_layers", "owners"):
        values[name] = _layers(name, values[name], n_layers)
    if values["top_k"] > n_expert:
        raise ValueError(f"top_k is {values['top_k']}, of {n_expert} experts")
    if values["features"] != FEATURES:
        raise ValueError(f"features is {quoted(values['features'])}, not {FEATURES!r}")
    if values["weights"] not in WEIGHTS_FROM:
        raise ValueError(f"weights is {quoted(values['weights'])}, not one of {', '.join(WEIGHTS_FROM)}")
    if not isinstance(values["training"], dict):
        raise ValueError("training is no object")
    if other := set(values["owners"]) - set(values["moe_layers"]):
        raise ValueError(f"layer {min(other)} owns a head and has no experts")
    _whole("first_predicted", values["first_predicted"], 0, n_layers - 1)
    info = PrerouterInfo(**values)
    if min(info.predicts.values(), default=-1) != info.first_predicted:
        raise ValueError(f"first_predicted is {info.first_predicted}, a layer that no head predicts")
    return info


def _finite(text: str) -> float:
    """A number that JSON can say again."""
    if not math.isfinite(number := float(text)):
        raise ValueError
    return number


def _whole(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} is {quoted(value)}, not a whole number from {least} to {most}")


def _layers(name: str, value: object, n_layers: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= n_layers:
        raise ValueError(f"{name} is no list of 1 to {n_layers} layers")
    for number in value:
        _whole(name, number, 0, n_layers - 1)
    if value != sorted(set(value)):
        raise ValueError(f"{name} isn't ascending")
    return tuple(value)


def _check_tensors(info: PrerouterInfo, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise ValueError unless there is a head for each owner, each tensor of it as it should be, and nothing else."""
    known: set[str] = set()
    for owner in info.owners:
        fc1 = tensors.get(f"blk.{owner}.fc1.weight")
        hidden = fc1.shape[0] if fc1 is not None and fc1.shape else 1
        if hidden > MAX_WIDTH:
            raise ValueError(f"tensor blk.{owner}.fc1.weight has {hidden} rows, more than {MAX_WIDTH}")
        for name, shape in info.shapes(owner, hidden).items():
            known.add(name)
            tensor = tensors.get(name)
            if tensor is None:
                if name.endswith(OPTIONAL_PARTS):
                    continue
                raise ValueError(f"tensor {name} is missing")
            if tensor.shape != shape:
                raise ValueError(f"tensor {name} has the shape {quoted(list(tensor.shape))}, not {list(shape)}")
            if tensor.kind not in ("F32", "F16"):
                raise ValueError(f"tensor {name} is {tensor.kind}, neither F32 nor F16")
    if unknown := set(tensors) - known:
        raise ValueError(f"tensor {quoted(min(unknown))} belongs to no head")


def write_prerouter(
    path: str | os.PathLike[str], info: PrerouterInfo, tensors: Mapping[str, np.ndarray | Readable], *,
    force: bool = False, keep: Sequence[Path] = (),
) -> int:  # fmt: skip
    """Write heads; returns the file's bytes. It appears whole or not at all.

    `tensors` are the owners' by name, float32 or float16. Raises InputError for a path that can't be written, exists
    (unless `force`) or is one of `keep`, and ValueError for an `info` or `tensors` that could not be read again.
    """
    metadata = {FORMAT_KEY: FORMAT}
    for field in fields(info):
        value = getattr(info, field.name)
        metadata[field.name] = value if field.name in _TEXTS else json.dumps(value, allow_nan=False)
    path = check_out(path, force=force, keep=keep)
    described = {
        name: StoredTensor(path, name, WRITTEN.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), 0)
        for name, tensor in tensors.items()
    }
    _check_tensors(_info(metadata), described)
    return write_safetensors(path, tensors, metadata, force=force, keep=keep)

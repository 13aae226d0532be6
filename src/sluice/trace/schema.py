"""What a trace file holds: its columns, and what it says of the model it was recorded on. Reads and writes nothing.

A trace is a Parquet file with one row for each token in each layer with experts:

    step       int64          one execution of the layers; every row of a step has the same phase
    sequence   int32          one conversation; a number is never used again
    position   int32          of the token in its sequence
    phase      string         "prefill" or "decode"
    layer      int16
    experts    list<int16>    final ids, in router order
    weights    list<float32>  their routing weights, or null
    scores     list<float32>  of all experts, or null
    domain     string         a label that the recording was given, or null

Rows are ordered by step, then layer, then column of the batch. What a layer didn't compute (in a prompt's last layer,
most columns) has no row. The file's metadata holds a TraceInfo as JSON under "sluice.trace".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sluice.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 1
PHASES = ("prefill", "decode")
METADATA_KEY = b"sluice.trace"
REROUTED = ", rerouted within "  # in the source of a trace whose routes are not all the routers' own
MAX_EXPERTS, MAX_LAYERS = 1 << 15, 1 << 15  # what the columns' types can count
MAX_STEP = 1 << 47  # so that step × MAX_LAYERS + layer is an int64


@dataclass(frozen=True)
class TraceInfo:
    """What a trace was recorded on.

    `expert_bytes[i]` is the size of one expert of layer `moe_layers[i]`, 0 where that isn't known.
    """

    fingerprint: str  # of the model (sluice.models.fingerprint); "" where it isn't known
    architecture: str
    name: str
    n_layers: int
    moe_layers: tuple[int, ...]
    n_expert: int
    top_k: int
    expert_bytes: tuple[int, ...]
    source: str  # what made the trace
    format: int = FORMAT

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> TraceInfo:
        """Raises ValueError, naming the field, for anything that is not a TraceInfo."""
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError("no object")
        if fields.get("format") != FORMAT:
            raise ValueError(f"format {_short(fields.get('format'))}, this version reads {FORMAT}")
        for name, kind in (
            ("fingerprint", str), ("architecture", str), ("name", str), ("source", str), ("n_layers", int),
            ("n_expert", int), ("top_k", int), ("moe_layers", list), ("expert_bytes", list),
        ):  # fmt: skip
            value = fields.get(name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(f"{name} is {_short(value)}")
            if isinstance(value, list) and any(not isinstance(n, int) or isinstance(n, bool) for n in value):
                raise ValueError(f"{name} is no list of whole numbers")
        if unknown := set(fields) - set(cls.__dataclass_fields__):
            raise ValueError(f"{_short(min(unknown))} is unknown")
        for name in ("moe_layers", "expert_bytes"):
            fields[name] = tuple(fields[name])
        info = cls(**fields)
        if not 0 < info.n_layers <= MAX_LAYERS or not 0 < info.top_k <= info.n_expert <= MAX_EXPERTS:
            counts = f"{_short(info.n_layers)} layers, {_short(info.n_expert)} experts, top_k {_short(info.top_k)}"
            raise ValueError(counts)
        if list(info.moe_layers) != sorted(set(info.moe_layers)) or not info.moe_layers:
            raise ValueError("moe_layers isn't ascending")
        if info.moe_layers[0] < 0 or info.moe_layers[-1] >= info.n_layers:
            raise ValueError(f"moe_layers has more than the {info.n_layers} layers")
        if len(info.expert_bytes) != len(info.moe_layers) or min(info.expert_bytes) < 0:
            raise ValueError("expert_bytes doesn't give each layer's")
        if max(info.expert_bytes) >= 1 << 50:
            raise ValueError("expert_bytes has more than any expert's")
        return info


def _short(value: object) -> str:
    """An untrusted value as a few characters of one line."""
    try:
        return ascii(value)[:40]
    except ValueError:  # a number of more digits than Python prints
        return "too large"


def pyarrow() -> Any:
    """The library, with its Parquet part. Raises InputError where it isn't installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError("traces need pyarrow: pip install 'sluice[lab]'") from None
    return pyarrow


def schema(info: TraceInfo) -> pa.Schema:
    """The columns of a trace, with `info` as metadata."""
    pa = pyarrow()
    fields = [
        ("step", pa.int64()), ("sequence", pa.int32()), ("position", pa.int32()), ("phase", pa.string()),
        ("layer", pa.int16()), ("experts", pa.list_(pa.int16())), ("weights", pa.list_(pa.float32())),
        ("scores", pa.list_(pa.float32())), ("domain", pa.string()),
    ]  # fmt: skip
    return pa.schema(fields, metadata={METADATA_KEY: info.to_json().encode()})


def same_model(infos: Sequence[TraceInfo], names: Sequence[object]) -> None:
    """Raise InputError, naming the difference, unless all were recorded on one model.

    A fingerprint that isn't known (an imported trace's) is compared with none.
    """
    for field in ("fingerprint", "architecture", "n_layers", "moe_layers", "n_expert"):
        known = [(getattr(info, field), name) for info, name in zip(infos, names, strict=True) if getattr(info, field)]
        for value, name in known[1:]:
            if value != known[0][0]:
                raise InputError(
                    f"{name} was recorded on another model than {known[0][1]} ({field}): give traces of one"
                )

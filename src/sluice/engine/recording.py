"""Connects an engine to its trace: what it says of the model, where it goes, whose tokens a step has. Writes no row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sluice import __version__
from sluice.config import EngineConfig
from sluice.errors import InputError
from sluice.gguf import GgufFile
from sluice.models.fingerprint import fingerprint
from sluice.models.spec import ModelSpec
from sluice.trace import REROUTED, TraceInfo, TraceWriter

if TYPE_CHECKING:
    from sluice.engine.session import Session


def trace_info(file: GgufFile, spec: ModelSpec, *, source: str = f"sluice {__version__}") -> TraceInfo:
    """What a trace says of the model in `file`. An expert's bytes are those of its matrices. Raises ReadError."""
    name = file.metadata.get("general.name")
    return TraceInfo(
        fingerprint=fingerprint(file, spec),
        architecture=spec.architecture,
        name=name if isinstance(name, str) and name else file.paths[0].stem,
        n_layers=spec.n_layers,
        moe_layers=tuple(spec.moe_layers),
        n_expert=spec.n_expert,
        top_k=spec.top_k,
        expert_bytes=tuple(
            sum(part.n_bytes for part in file.expert_parts(layer) or ()) for layer in spec.moe_layers
        ),
        source=source,
    )  # fmt: skip


def open_trace(path: Path, config: EngineConfig, file: GgufFile, spec: ModelSpec, n_tokens: int) -> TraceWriter:
    """The writer of the trace at `path`; a step has up to `n_tokens` columns. Raises InputError or ReadError."""
    if path.exists() and any(path.samefile(model) for model in file.paths):
        raise InputError(f"{path}: the model itself: name another file for the trace")
    source = f"sluice {__version__}" + "".join(f", adapter {name.name} × {scale:g}" for name, scale in config.lora)
    if config.reroute:
        source += f"{REROUTED}{config.reroute:g} but for the best {config.reroute_keep}"
    info = trace_info(file, spec, source=source)
    return TraceWriter(path, info, scores=config.trace_scores, force=config.trace_force, least_rows=n_tokens)


def begin_step(
    recorder: TraceWriter, step: int, phase: str, parts: Sequence[tuple[Session, Sequence[int]]]
) -> None:  # fmt: skip
    """Tell `recorder` whose tokens the columns of a step are: each session's, which follow those it has been fed."""
    if len(parts) == 1:
        [(session, ids)] = parts
        n, at = len(ids), len(session.tokens)
        recorder.begin_step(step, phase, np.full(n, session.number, np.int32), np.arange(at, at + n, dtype=np.int32))
        return
    sequences = [np.full(len(ids), session.number, np.int32) for session, ids in parts]
    positions = [np.arange(len(ids), dtype=np.int32) + len(session.tokens) for session, ids in parts]
    recorder.begin_step(step, phase, np.concatenate(sequences), np.concatenate(positions))

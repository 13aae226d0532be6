"""Makes demands of a made-up model without any trace file; knows no expected values."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sluice.lab.replay import Demands
from sluice.trace import TraceInfo
from sluice.types import ExpertKey

Execution = tuple[int, int, bool, Iterable[int]]  # step, layer, decode, experts


def info(n_layers: int, n_expert: int, top_k: int) -> TraceInfo:
    layers = tuple(range(n_layers))
    return TraceInfo("", "made-up", "", n_layers, layers, n_expert, top_k, (1,) * n_layers, "a test")


def demands_of(of: TraceInfo, executions: Iterable[Execution]) -> Demands:
    """`executions` in order, with one sequence; a prefill step has as many tokens as its first layer has experts."""
    steps, layers, decode, sets = [], [], [], []
    for step, layer, is_decode, experts in executions:
        steps.append(step)
        layers.append(layer)
        decode.append(is_decode)
        sets.append(sorted(set(experts)))
    keys = sorted({ExpertKey(layer, e) for layer, experts in zip(layers, sets, strict=True) for e in experts})
    index = {key: i for i, key in enumerate(keys)}
    ids = [index[ExpertKey(layer, e)] for layer, experts in zip(layers, sets, strict=True) for e in experts]
    tokens = np.array([1 if d else len(experts) for d, experts in zip(decode, sets, strict=True)], np.int32)
    return Demands(
        of, keys, np.array(ids, np.int32), np.cumsum([0, *map(len, sets)]), np.array(steps, np.int64),
        np.array(layers, np.int16), np.array(decode), tokens, tokens, np.ones(len(steps), np.int32),
        np.array([len(experts) for experts in sets], np.int64),
    )  # fmt: skip

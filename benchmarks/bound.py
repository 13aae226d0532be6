"""What a step costs beside the least it could, from a streamed arm and the same tokens resident. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common import middle

Json = dict[str, Any]

PYTHON_S_PER_LAYER, PYTHON_S_PER_READ, PYTHON_S_PER_STEP = 60e-6, 15e-6, 1e-3  # the allowance


def pair(streamed: Sequence[Json], resident: Sequence[Json]) -> list[tuple[Json, Json]]:
    """The kept repeats of a streamed arm, each with the resident arm's quickest pass of the same walk and span.

    The quickest, because whatever disturbs the resident arm would flatter the streamed one.
    """

    def compute_s(one: Json) -> float:
        return one["ledger"][one["phase"]]["compute_s"]

    quickest: dict[tuple[int, tuple[int, ...]], Json] = {}
    for one in resident:
        place = (one["walk"], tuple(one.get("span", ())))
        if place not in quickest or compute_s(one) < compute_s(quickest[place]):
            quickest[place] = one
    return [(one, quickest[one["walk"], tuple(one.get("span", ()))]) for one in streamed if one["kept"]]


def decode_figures(streamed: Json, resident: Json) -> Json:
    """A decode repeat's step beside max(compute, bytes ÷ raw). Seconds a step; rates in bytes a second."""
    decode = streamed["ledger"]["decode"]
    steps, raw = decode["steps"], streamed["raw"]["bytes_per_s"]
    # all of the loop that is neither arithmetic nor waiting, sampling included
    python_s = (streamed["decode_s"] - decode["compute_s"] - decode["wait_s"]) / steps
    allowed_s = (
        PYTHON_S_PER_LAYER * streamed["arm"]["moe_layers"]
        + PYTHON_S_PER_READ * decode["reads"] / steps
        + PYTHON_S_PER_STEP
    )
    step_s = streamed["decode_s"] / steps
    compute_s = resident["ledger"]["decode"]["compute_s"] / resident["ledger"]["decode"]["steps"]
    read_s = decode["bytes_read"] / raw / steps
    busy_rate = decode["bytes_read"] / decode["io_busy_s"] if decode["io_busy_s"] else None
    return {
        "tok_per_s": streamed["decode_tok_per_s"],
        "step_s": step_s,
        "compute_s": compute_s,
        "resident_step_s": resident["decode_s"] / resident["ledger"]["decode"]["steps"],
        "streamed_compute_s": decode["compute_s"] / steps,  # the same arithmetic beside reading
        "wait_s": decode["wait_s"] / steps,
        "read_s": read_s,
        "over_bound": step_s / max(compute_s, read_s),
        "bytes_per_step": decode["bytes_read"] / steps,
        "hit_rate": decode["hits"] / decode["demands"],
        "raw_bytes_per_s": raw,
        "depth": decode["io_depth_mean"],
        "read_efficiency": None if busy_rate is None else busy_rate / raw,
        "python_s": python_s,
        "python_allowed_s": allowed_s,
        "ledger_host_s": decode["host_s"] / steps,
        "python_over_allowed": python_s / allowed_s,
        "itl_ms": streamed["itl_ms"],
    }


def prefill_figures(streamed: Json, resident: Json) -> Json:
    """A prompt's time beside max(compute, one scan of the experts it meets), seconds."""
    prefill = resident["ledger"]["prefill"]  # its demands are the experts met, once for each of its steps
    met_bytes = prefill["demands"] * resident["arm"]["expert_bytes"]
    scan_s = met_bytes / streamed["raw"]["bytes_per_s"]
    compute_s = prefill["compute_s"]
    return {
        "seconds": streamed["seconds"],
        "compute_s": compute_s,
        "scan_s": scan_s,
        "met_bytes": met_bytes,
        "bytes_read": streamed["ledger"]["prefill"]["bytes_read"],
        "raw_bytes_per_s": streamed["raw"]["bytes_per_s"],
        "over_bound": streamed["seconds"] / max(compute_s, scan_s),
    }


def median_of(figures: Sequence[Json], key: str) -> float | None:
    return middle([one[key] for one in figures])


def retakes(streamed: Sequence[Json]) -> int:
    """How many repeats were not kept, because plain reading changed around them."""
    return sum(not one["kept"] for one in streamed)

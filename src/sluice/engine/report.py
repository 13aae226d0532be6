"""Turns ledgers and timings into a run's JSON object and summary line; knows no engine, clock or terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice.config import format_size
from sluice.engine.ledger import PhaseLedger

if TYPE_CHECKING:
    from sluice.engine.placing import Placed

_WORK = {"reading": "wait_s", "arithmetic": "compute_s", "Python": "host_s"}


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value below which `share` of `values` lie, interpolated between neighbours; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def itl_ms(intervals_s: Sequence[float]) -> dict[str, float | None]:
    """Inter-token latencies in milliseconds: median, 95th percentile, largest."""
    figures = {"p50": quantile(intervals_s, 0.5), "p95": quantile(intervals_s, 0.95), "max": quantile(intervals_s, 1.0)}
    return {name: None if s is None else s * 1e3 for name, s in figures.items()}


def rate(count: float, seconds: float | None) -> float | None:
    """`count` a second; None where nothing was counted or timed."""
    return count / seconds if count and seconds else None


def difference(later: PhaseLedger, earlier: PhaseLedger) -> PhaseLedger:
    """What happened between two copies of one ledger."""
    result = PhaseLedger(cache=later.cache - earlier.cache)
    for each in fields(PhaseLedger):
        if each.name != "cache":
            setattr(result, each.name, getattr(later, each.name) - getattr(earlier, each.name))
    return result


def bottleneck(phase: Mapping[str, Any]) -> str | None:
    """What the main thread spent most of a phase on: "reading" (waiting for it), "arithmetic" or "Python"."""
    if not phase["steps"]:
        return None
    return max(_WORK, key=lambda name: phase[_WORK[name]])


def bound(
    phase: Mapping[str, Any], achieved_s: float | None, raw_bytes_per_s: float | None = None
) -> dict[str, float | None] | None:
    """The least time a step could take, max(compute, bytes ÷ bandwidth), beside the time it took, in seconds a step.

    The bandwidth is `raw_bytes_per_s` where that was measured, else the phase's own bytes_read ÷ io_busy_s. None for a
    phase without steps.
    """
    steps = phase["steps"]
    if not steps:
        return None
    read_s = phase["bytes_read"] / raw_bytes_per_s if raw_bytes_per_s else phase["io_busy_s"]
    compute_s, read_s = phase["compute_s"] / steps, read_s / steps
    return {
        "compute_s": compute_s,
        "read_s": read_s,
        "bound_s": max(compute_s, read_s),
        "achieved_s": None if achieved_s is None else achieved_s / steps,
    }


def run_result(
    *, text: Any, tokens: list[Any], finish_reason: str | None, prompt_tokens: int, generated_tokens: int,
    load_s: float, ttft_s: float | None, intervals_s: Sequence[float], tok_per_s: float | None,
    peak_rss_bytes: int, budget_bytes: int | None, slots: int, seed: int, mode: Mapping[str, Any],
    ledger: Mapping[str, Mapping[str, Any]], placed: Placed | None = None, cache_state: str | None = None,
    device: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A run as the object that `--json` prints. What was not measured is None, never 0; `plan` is there if one was.

    So are `device`, what one took of the model, and `cache_state`, the expert pool's when the run began, where the
    output depends on it.
    """
    prefill = ledger["prefill"]
    return {
        "text": text,
        "tokens": tokens,
        "finish_reason": finish_reason,
        "prompt_tokens": prompt_tokens,
        "generated_tokens": generated_tokens,
        "load_s": load_s,
        "ttft_s": ttft_s,
        "prefill_tok_per_s": rate(prefill["tokens"], prefill["wall_s"]),
        "tok_per_s": tok_per_s,
        "itl_ms": itl_ms(intervals_s),
        "peak_rss_bytes": peak_rss_bytes,
        "budget_bytes": budget_bytes,
        "slots": slots,
        "seed": seed,
        "mode": dict(mode),
        "ledger": {name: dict(phase) for name, phase in ledger.items()},
        **({} if cache_state is None else {"cache_state": cache_state}),
        **({} if placed is None else {"plan": placed.as_dict()}),
        **({} if device is None else {"device": dict(device)}),
    }


def hit_rate(phase: Mapping[str, Any]) -> float | None:
    """Share of demands that were resident; None without demands."""
    return phase["hits"] / phase["demands"] if phase["demands"] else None


def above(phase: Mapping[str, Any]) -> float | None:
    """Share of all demands that were met in a device's memory; None without demands."""
    demands = phase["demands"] + phase["device_hits"]
    return phase["device_hits"] / demands if demands else None


def wait_share(phase: Mapping[str, Any]) -> float | None:
    """Share of a phase's time in which the main thread waited for experts."""
    return phase["wait_s"] / phase["wall_s"] if phase["wall_s"] else None


def mode_text(mode: Mapping[str, Any]) -> str:
    """How routes and context were kept, in words; what is not the model's own is called lossy."""
    n, own = mode["top_k_experts"], mode["top_k_experts_of_model"]
    lossy = [] if n == own else [f"{n} expert{'s' * (n > 1)} a token instead of the model's {own}"]
    if "prerouter" in mode:
        lossy.append(f"routes predicted by {mode['prerouter']}")
    if (reroute := mode.get("reroute")) is not None and reroute["margin"]:
        best = f"the best {reroute['keep']} kept" if reroute["keep"] else "none kept"
        lossy.append(f"experts rerouted within {reroute['margin']:g} ({best}, nothing read ahead)")
    named = f"lossy, {', '.join(lossy)}: " if lossy else ""
    adapted = "".join(f", adapter {Path(one['file']).name} × {one['scale']:g}" for one in mode.get("lora", ()))
    replayed = f" by the routes of {mode['routes']}" if "routes" in mode else ""
    device = f", {mode['device']['layers']} layers on {mode['device']['name']}" if "device" in mode else ""
    return f"{named}{mode['routing']}{replayed}, kv {mode['kv']}{adapted}{device}"


def summary(result: Mapping[str, Any], *, random_seed: bool) -> str:
    """The line printed after a run: what mode it ran in, how fast, and what held it back."""
    mode, decode = result["mode"], result["ledger"]["decode"]
    parts = [mode_text(mode)]
    if "plan" in result:
        parts.append(f"plan {result['plan']['name']}, {result['plan']['pins']} pinned")
    if result["ttft_s"] is not None:
        speed = _text(result["prefill_tok_per_s"], "{:.1f}")
        parts.append(f"first token {result['ttft_s']:.2f} s (prefill {speed} tok/s)")
    if decode["steps"]:
        per_token = decode["bytes_read"] / decode["steps"]
        parts += [
            f"{_text(result['tok_per_s'], '{:.2f}')} tok/s",
            *([f"{_text(above(decode), '{:.1%}')} of experts on the device"] if "device_hits" in decode else []),
            f"hit rate {_text(hit_rate(decode), '{:.1%}')}",
            f"{format_size(round(per_token))} read a token",
            f"waiting {_text(wait_share(decode), '{:.0%}')}",
            f"bottleneck {bottleneck(decode)}",
        ]
        tok_per_s = result["tok_per_s"]
        limit = bound(decode, decode["steps"] / tok_per_s if tok_per_s else None)
        assert limit is not None
        ms = {name: _text(None if s is None else s * 1e3, "{:.1f}") for name, s in limit.items()}
        parts.append(
            f"bound {ms['bound_s']} ms a token (arithmetic {ms['compute_s']}, reading {ms['read_s']}), "
            f"achieved {ms['achieved_s']}"
        )
    else:
        parts.append("no token was decoded")
    parts.append(f"seed {result['seed']}{' (random)' if random_seed else ''}")
    return "; ".join(parts)


def _text(value: float | None, form: str) -> str:
    return "not measured" if value is None else form.format(value)

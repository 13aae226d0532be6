"""Measures what a device makes of prompts, and predicts prompts of models that are divided over it; opens nothing.

As with a token's step (device.py), a prompt step takes, but for waiting for reads, a time in a straight line from one
layer on the device to all of them, and each demand that is met there saves the same. Demands that the device doesn't
meet are computed by the processor, or the expert is uploaded first: how many are, and what that costs or saves each, is
taken from a prompt that found nothing there. Between the widths that were measured, figures lie on a line.

The prompts that are measured read their experts, as few have room in RAM meanwhile: what a device computes while a read
is waited for is not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sluice.plan.bandwidth import on_line, predict_prefill, prompt_cost, time_on_line
from sluice.plan.profile import MachineProfile
from sluice.plan.workload import TierPrompts

if TYPE_CHECKING:
    from sluice.plan.probe import Probe


class PromptRun(NamedTuple):
    """A prompt step: seconds but for waiting for reads, and what became of its demands."""

    seconds: float
    met: int  # on the device
    below: int  # not there
    uploads: int
    copies: int


@dataclass(frozen=True)
class PromptCosts:
    """A prompt step of `tokens` tokens, but for waiting for reads.

    Seconds with one part of the model on the device, and with all of them, experts in RAM; what a demand that is met
    there saves; what an upload adds; and the share of the other demands that are uploaded.
    """

    tokens: int
    first_s: float
    all_s: float
    saved_s: float
    upload_s: float
    uploaded: float


def run_prompt(probe: Probe, width: int, *, times: int) -> list[PromptRun]:
    """Feed the same `width` random tokens, no more than fit the context, to `times` new sessions.

    The first finds no expert on the device.
    """
    engine = probe.engine
    if engine.device_pool is not None:
        engine.device_pool.clear()
    tokens = probe.tokens(width)
    runs = (probe.feed(tokens) for _ in range(times))
    return [PromptRun(one.wall_s - one.wait_s, one.device_hits, one.demands, one.uploads, one.copies) for one in runs]


def prompt_costs(
    width: int, first: PromptRun, whole: PromptRun, empty: PromptRun, near: PromptRun, copy_s: float
) -> PromptCosts:
    """From prompts with one part on the device, with all, and with all experts that it holds there before, and after.

    `copy_s` are a copy's seconds. The last two runs are each whole - saved × met + upload × uploads + copies; where
    they don't tell saving from uploading, all of it is the uploads'.
    """
    gains = [whole.seconds + copy_s * one.copies - one.seconds for one in (empty, near)]
    apart = empty.uploads * near.met - near.uploads * empty.met
    saved = upload = 0.0
    if apart > 0:
        saved = (empty.uploads * gains[1] - near.uploads * gains[0]) / apart
        upload = (empty.met * gains[1] - near.met * gains[0]) / apart
    elif uploads := empty.uploads + near.uploads:
        upload = -sum(gains) / uploads
    elif near.met:
        saved = gains[1] / near.met
    share = empty.uploads / empty.below if empty.below else 0.0
    return PromptCosts(width, first.seconds, whole.seconds, saved, upload, share)


def costs_at(points: Sequence[PromptCosts], tokens: int) -> PromptCosts:
    """A step of `tokens` tokens, on the line through the two nearest of `points`, of which the first is of one token.

    Beyond the widest, times don't fall, and the share that is uploaded stays as it is.
    """
    first_s, all_s = (time_on_line(points, tokens, name) for name in ("first_s", "all_s"))
    saved, upload = (on_line(points, tokens, name) for name in ("saved_s", "upload_s"))
    uploaded = on_line(points, min(tokens, points[-1].tokens), "uploaded")
    return PromptCosts(tokens, first_s, all_s, saved, upload, uploaded)


def predict_prompts(
    profile: MachineProfile, points: Sequence[PromptCosts], layers: tuple[int, int, int], copy_s: float,
    load: TierPrompts, *, prefetch: bool, disk: float = 1.0,
) -> dict[str, Any] | None:  # fmt: skip
    """Prompts of one stream: tokens a second, and what a step's time goes on, in seconds. None without prompt steps.

    `layers`: with experts on the device; that `first_s` of `points` is with; that `all_s` is with.
    """
    with_reads = predict_prefill(profile, load.absences, load.tokens, prefetch=prefetch, disk=disk)
    without = predict_prefill(profile, load.absences.resident(), load.tokens, prefetch=prefetch, disk=disk)
    if with_reads is None or without is None:
        return None
    arithmetic = copies = uploads = 0.0
    least = min(points[0].first_s, points[0].all_s)  # of a token: no prompt takes less
    for tokens, above, below, moved in zip(load.tokens, load.above, load.below, load.copies, strict=True):
        at, host = costs_at(points, tokens), prompt_cost(profile, tokens)
        uploaded = at.uploaded * below
        uploads += uploaded
        resident = resident_s(*layers, host.compute_s + host.host_s, at.first_s, at.all_s)
        arithmetic += max(resident + uploaded * at.upload_s - above * at.saved_s, min(resident, least))
        copies += moved * (1 - at.uploaded) * copy_s
    total, steps = sum(load.tokens), len(load.tokens)
    reads = total * (1 / with_reads.tok_per_s - 1 / without.tok_per_s)
    wall = arithmetic + copies + reads
    parts = {"arithmetic": arithmetic, "disk": reads, "copies": copies}
    return {
        "tok_per_s": total / wall,
        "resident_s": arithmetic / steps,
        "reads_s": reads / steps,
        "copies_s": copies / steps,
        "device_demands": float(sum(load.above)) / steps,
        "uploads": uploads / steps,
        "bottleneck": max(parts, key=lambda name: parts[name]),
    }


def resident_s(layers: int, first: int, everything: int, host_s: float, first_s: float, all_s: float) -> float:
    """A step with `layers` on the device, on the line from `first` of them to `everything`; `host_s` with none."""
    if layers == 0:
        return host_s
    if everything == first:
        return all_s
    return first_s + (layers - first) / (everything - first) * (all_s - first_s)

"""What is served in numbers, as text that Prometheus reads. Knows a service's state, nothing of how it came about."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from sluice.server.jobs import Event, Finished, ServiceState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
_TPOT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_LEDGER = {
    "steps": "Steps of the engine.",
    "tokens": "Tokens that went through the model.",
    "demands": "Distinct experts asked for, layer by layer.",
    "hits": "Demands of experts that were in memory.",
    "late_hits": "Demands of experts whose read was under way.",
    "misses": "Demands of experts that no read had been issued for.",
    "evictions": "Experts that left the pool.",
    "bytes_read": "Bytes read from the model file.",
    "wall_s": "Seconds in steps.",
    "compute_s": "Seconds of arithmetic.",
    "wait_s": "Seconds waiting for experts.",
    "io_busy_s": "Seconds with at least one read outstanding.",
}


class Histogram:
    """Counts of observations by upper bound, their number and sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, help: str) -> Iterable[str]:
        yield from _heading(name, "histogram", help)
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum}"
        yield f"{name}_count {total}"


class Metrics:
    """Counts what is told to clients; an event loop's. `log` gets a line for each fault of the server's own."""

    def __init__(self, log: Callable[[str], object] = print) -> None:
        self._log = log
        self.answers: Counter[str] = Counter()  # by how they ended
        self.refusals: Counter[int] = Counter()  # by status
        self._ttft = Histogram(_TTFT_S)
        self._tpot = Histogram(_TPOT_S)

    def saw(self, event: Event) -> None:
        if isinstance(event, Finished):
            if event.ttft_s is not None:
                self._ttft.observe(event.ttft_s)
            if gaps := event.intervals_s:
                self._tpot.observe(sum(gaps) / len(gaps))

    def ended(self, error: BaseException | None) -> None:
        self.answers["answered" if error is None else type(error).__name__] += 1

    def refused(self, status: int) -> None:
        self.refusals[status] += 1

    def fault(self, error: BaseException) -> None:
        cause = error.__cause__ or error
        self._log(f"fault while serving ({type(cause).__name__}): {error}")

    def text(self, state: ServiceState) -> str:
        """All of it, one metric after the other."""
        totals = state.totals
        lines: list[str] = []
        gauges: dict[str, tuple[str, float | None]] = {
            "queued": ("Jobs that wait for a stream.", len(state.queue)),
            "running": ("Jobs that have a stream.", len(state.running)),
            "streams": ("Streams that there are.", state.streams),
            "streams_wide": ("Streams that may decode together now.", state.width_limit),
            "draining": ("1 while shutting down.", int(state.draining)),
            "uptime_seconds": ("Since the service began.", state.uptime_s),
            "decode_tokens_per_second": ("Over the last steps.", state.decode_tok_per_s),
            "kept_tokens": ("Prompt tokens that later requests may take over.", state.kept_tokens),
            "expert_slots": ("Experts that the pool holds.", state.slots),
            "expert_slots_resident": ("Experts in the pool.", state.slots_resident),
            "resident_memory_bytes": ("Of this process.", state.rss_bytes),
            "memory_budget_bytes": ("What --ram gives.", state.budget_bytes),
            "page_cache_bytes": ("Of the machine.", state.page_cache_bytes),
        }
        for name, (help, value) in gauges.items():
            if value is not None:
                lines += [*_heading(f"sluice_{name}", "gauge", help), f"sluice_{name} {value}"]
        counters: dict[str, tuple[str, float]] = {
            "jobs_submitted": ("Jobs taken; a request's choices are jobs.", totals.submitted),
            "jobs_refused": ("Jobs refused, the queue being full.", totals.refused),
            "prompt_tokens": ("Prompt tokens computed.", totals.prompt_tokens),
            "reused_prompt_tokens": ("Prompt tokens taken over from earlier requests.", totals.reused_tokens),
            "generated_tokens": ("Tokens given out.", totals.generated_tokens),
        }
        for name, (help, value) in counters.items():
            lines += [*_heading(f"sluice_{name}_total", "counter", help), f"sluice_{name}_total {value}"]
        finished = {"stop": totals.stopped, "length": totals.out_of_length, **totals.failures}
        lines += _labelled("jobs_ended", "Jobs that ended, by how.", "reason", finished)
        lines += _labelled("answers", "Requests whose answer ended, by how.", "outcome", self.answers)
        lines += _labelled("requests_refused", "Requests refused before a job was made of them.", "status",
                           {str(status): count for status, count in self.refusals.items()})  # fmt: skip
        for name, help in _LEDGER.items():
            metric = f"sluice_{name.removesuffix('_s') + '_seconds' if name.endswith('_s') else name}_total"
            lines += _heading(metric, "counter", help)
            lines += (f'{metric}{{phase="{phase}"}} {ledger[name]}' for phase, ledger in state.ledger.items())
        lines += self._ttft.lines("sluice_ttft_seconds", "From submission to the first token.")
        lines += self._tpot.lines("sluice_tpot_seconds", "Between tokens after the first, a request's mean.")
        return "\n".join(lines) + "\n"


def _heading(name: str, kind: str, help: str) -> list[str]:
    return [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]


def _labelled(name: str, help: str, label: str, values: Mapping[str, float]) -> list[str]:
    full = f"sluice_{name}_total"
    return [*_heading(full, "counter", help), *(f'{full}{{{label}="{key}"}} {n}' for key, n in values.items())]

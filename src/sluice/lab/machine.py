"""A simulated machine: the clock of one thread that computes and waits, and a disk that reads experts beside it.

It knows reads, their sizes and deadlines; which experts they are for, and why, it doesn't.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from sluice.types import Read


@dataclass(frozen=True)
class Speeds:
    """What a machine takes for its work: seconds, and bytes a second.

    Arithmetic is held back by the weights that it goes through, so an expert costs the same however many tokens want
    it. While reading and arithmetic go on beside each other, each keeps a share of its speed.
    """

    read_rate: float  # inf: a read takes its latency alone
    layer_s: float  # arithmetic of a layer but for its routed experts
    expert_s: float  # arithmetic of one routed expert in one execution of its layer
    step_s: float = 0.0  # of a step beside its layers; neither arithmetic nor reading, as what follows
    layer_host_s: float = 0.0  # of a layer
    read_host_s: float = 0.0  # of issuing a read
    latency_s: float = 0.0  # of a read, before its bytes come; those of several pass at once
    depth: int = 4  # reads under way at once
    compute_beside: float = 1.0  # share of its speed that arithmetic keeps while reading goes on
    read_beside: float = 1.0  # and the other way round

    def __post_init__(self) -> None:
        times = (self.layer_s, self.expert_s, self.step_s, self.layer_host_s, self.read_host_s, self.latency_s)
        assert self.read_rate > 0 and self.depth > 0 and min(times) >= 0
        assert 0 < self.compute_beside <= 1 and 0 < self.read_beside <= 1


class SimulatedMachine:
    """Whole-expert reads, `depth` at a time, begun in the order of (deadline, submission).

    A read that has begun waits its latency and then takes bytes ÷ rate of the channel, which serves one read at a time
    in the order of beginning. An idle channel earns nothing. `expert_bytes` is by layer.
    """

    def __init__(self, speeds: Speeds, expert_bytes: Mapping[int, int]) -> None:
        self.speeds = speeds
        self.now = 0.0  # seconds, as are the sums of what they went on
        self.compute_s = self.wait_s = self.host_s = 0.0
        self.bytes_asked = 0  # of all reads but the cancelled
        self._expert_bytes = expert_bytes
        self._disk_now = 0.0  # the disk's own clock, which is slower beside arithmetic
        self._free_at = 0.0  # when the channel has served all that has begun
        self._queue: list[tuple[int, int, Read]] = []  # heap of (deadline, order, read); promoted reads are in it twice
        self._waiting: dict[int, tuple[int, int]] = {}  # by serial: (deadline, order) of what has not begun
        self._running: deque[tuple[float, Read]] = deque()  # (end, read), ends ascending
        self._ended: list[Read] = []
        self._order = 0

    # -- the thread --

    def compute(self, seconds: float) -> None:
        """Arithmetic that takes `seconds` alone."""
        began, own, disk = self.now, self.speeds.compute_beside, self.speeds.read_beside
        while self._running:
            until = (self._running[0][0] - self._disk_now) / disk
            if seconds <= until * own:
                self._pass(seconds / own, disk)
                seconds = 0.0
                break
            seconds -= until * own
            self.now += until
            self._next_end()
        self._pass(seconds)
        self.compute_s += self.now - began

    def host(self, seconds: float) -> None:
        """Other work of the thread."""
        self._pass(seconds)
        self.host_s += seconds

    def ended(self, *, block: bool = False) -> list[Read]:
        """Reads that ended since the last call; with `block`, waits for one unless none is outstanding."""
        if block and not self._ended and self._running:
            waited = self._running[0][0] - self._disk_now
            self.now += waited
            self.wait_s += waited
            self._next_end()
        ended, self._ended = self._ended, []
        return ended

    def settle(self) -> list[Read]:
        """All reads end, at no cost to the thread."""
        while self._running:
            self._next_end()
        return self.ended()

    # -- the disk --

    def submit(self, read: Read) -> None:
        self._order += 1
        self._waiting[read.serial] = (read.deadline, self._order)
        heappush(self._queue, (read.deadline, self._order, read))
        self.bytes_asked += self._expert_bytes[read.key.layer]
        self._begin(self._disk_now)
        self.host(self.speeds.read_host_s)

    def promote(self, read: Read, deadline: int) -> None:
        """Give `read` a sooner deadline, unless it has begun."""
        place = self._waiting.get(read.serial)
        if place is not None and deadline < place[0]:
            self._waiting[read.serial] = (deadline, place[1])
            heappush(self._queue, (deadline, place[1], read))

    def cancel(self, read: Read) -> bool:
        """Take `read` back; False if it has begun."""
        if self._waiting.pop(read.serial, None) is None:
            return False
        self.bytes_asked -= self._expert_bytes[read.key.layer]
        return True

    def _pass(self, seconds: float, disk: float = 1.0) -> None:
        """Time passes, in which the disk has a share `disk` of its speed."""
        self.now += seconds
        self._advance(self._disk_now + seconds * disk)

    def _next_end(self) -> None:
        self._advance(self._running[0][0])

    def _advance(self, disk_now: float) -> None:
        self._disk_now = disk_now
        while self._running and self._running[0][0] <= disk_now:
            end, read = self._running.popleft()
            self._ended.append(read)
            self._begin(end)

    def _begin(self, now: float) -> None:
        while self._queue and len(self._running) < self.speeds.depth:
            deadline, order, read = heappop(self._queue)
            if self._waiting.get(read.serial) != (deadline, order):
                continue  # cancelled, promoted or begun since
            del self._waiting[read.serial]
            took = self._expert_bytes[read.key.layer] / self.speeds.read_rate
            self._free_at = max(now + self.speeds.latency_s, self._free_at) + took
            self._running.append((self._free_at, read))

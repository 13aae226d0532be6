"""Measures how fast a device's memory is, and copies between it and the host; knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np

from sluice.ggml import Context, Device, DeviceBackend, DeviceTensors, GgmlType, GraphAllocator

PROBE_BYTES = 64 << 20
TRIALS = 3


@dataclass(frozen=True)
class DeviceSpeeds:
    """Bytes a second: read or written by the device itself, copied there, and copied back."""

    memory_bytes_per_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float


def measure_device(device: Device, n_bytes: int = PROBE_BYTES) -> DeviceSpeeds:
    """Copy `n_bytes` there, back and within, a few times each; the fastest counts. Raises GgmlError."""
    n = n_bytes // 4
    data = np.ones(n, np.float32)
    with (
        DeviceBackend(device) as backend,
        Context(device.library, 2) as context,
        Context(device.library, 4, n_graphs=1) as work,
    ):
        source, target = context.tensor(GgmlType.F32, n), context.tensor(GgmlType.F32, n)
        with DeviceTensors(device, context) as memory, GraphAllocator(backend) as allocator:
            graph = work.graph()
            graph.add(work.cpy(source, target))
            allocator.reserve(graph)
            allocator.place(graph)
            times = []
            for work_of in (
                lambda: memory.write(source, data),
                lambda: memory.read(source, data),
                lambda: backend.compute(graph),
            ):
                work_of()
                each = []
                for _ in range(TRIALS):
                    began = perf_counter()
                    work_of()
                    each.append(perf_counter() - began)
                times.append(min(each))
    up, down, within = times
    return DeviceSpeeds(2 * n_bytes / within, n_bytes / up, n_bytes / down)

"""The only place that touches ggml's C API and raw pointers; knows tensors and graphs, nothing of models or experts."""

from sluice.ggml.backend import Backend, Buffer, GraphAllocator
from sluice.ggml.device import Device, DeviceBackend, DeviceTensors, devices
from sluice.ggml.library import Library, load_library
from sluice.ggml.tensor import Context, Graph, Tensor, chained
from sluice.ggml.types import GgmlType

__all__ = [
    "Backend",
    "Buffer",
    "Context",
    "Device",
    "DeviceBackend",
    "DeviceTensors",
    "GgmlType",
    "Graph",
    "GraphAllocator",
    "Library",
    "Tensor",
    "chained",
    "devices",
    "load_library",
]

"""Route traces: their schema, a writer that streams to disk, a reader that checks what it reads. Knows no engine."""

from sluice.trace.reader import TraceBatch, TraceReader
from sluice.trace.schema import REROUTED, TraceInfo, same_model, schema
from sluice.trace.writer import TraceWriter

__all__ = ["REROUTED", "TraceBatch", "TraceInfo", "TraceReader", "TraceWriter", "same_model", "schema"]

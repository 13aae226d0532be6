"""Traces the demo model on four domains and draws docs/figures from it: `sluice trace report` on a real run.

    python benchmarks/demo_trace.py                     # a minute; writes docs/figures/demo_*.png

Theory. The demo model's experts are one dense network with small differences, and its routers are random. So routes
depend on the hidden state, which differs between code and prose and hardly between prose and medicine, and nothing was
trained to balance or to specialise. Texts are those in benchmarks/texts, written for this, and fed a token at a time,
as if the model were writing them. The last line is JSON: the report's numbers.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from common import HERE, emit, log, run_main

from sluice.lab.analyze import analyze
from sluice.lab.plots import figures
from sluice.lab.report import facts, numbers
from sluice.trace import TraceReader

TEXTS = HERE / "texts"
MAX_BYTES = 300_000  # of a figure in the repository


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "figures", help="folder of the figures")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--trace", type=Path, help="draw this trace instead of recording one")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        trace = args.trace or Path(folder) / "demo.parquet"
        if args.trace is None:
            domains = [f"--domain={path.stem}={path}" for path in sorted(TEXTS.glob("*.txt"))]
            command = [sys.executable, "-m", "sluice", "trace", "record", args.model, str(trace), "--decode", *domains]
            subprocess.run(command, check=True)
        with TraceReader(trace) as reader:
            analysis = analyze([reader])
    for name, value in facts(analysis):
        log(f"{name:>16}  {value}")
    for plot, png in figures(analysis):
        path = args.out / f"demo_{plot.name}.png"
        assert len(png) <= MAX_BYTES, f"{path.name} has {len(png)} bytes"
        path.write_bytes(png)
        log(f"wrote {path} ({len(png) >> 10} KiB)")
    emit(numbers(analysis) | {"traces": [args.model]})


if __name__ == "__main__":
    run_main(main)

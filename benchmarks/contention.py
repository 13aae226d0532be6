"""What this machine's disk gives while its processors compute: plain reading alone, and beside arithmetic elsewhere.

    python benchmarks/contention.py BIG.gguf --busy SMALL.gguf

Theory. The bound of a streamed step, max(arithmetic, bytes ÷ raw), takes it that reading costs no processor time. On a
virtual disk the host reads for its guest, out of the same allowance, so raw falls once the guest's cores are busy for
more than a moment. Here another process decodes SMALL with everything resident, and plain O_DIRECT reads of one
expert matrix of BIG, spread over 2 GiB of memory, are timed alone and beside it, in turns. The engine can't read
faster than the second figure while it computes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from common import log, middle, ratio, report, row, run_main

from sluice.gguf import open_gguf
from sluice.io.probe import measure_read

WARM_UP_S = 6.0  # of arithmetic, so that no saved-up allowance is left
DECODE = """
import sys
from sluice import Engine
with Engine.open(sys.argv[1], expert_slots=1 << 24, prefetch=False) as engine, engine.session() as session:
    vocabulary = range(0, engine.tokenizer.n_vocab - 1, 16)
    session.feed([vocabulary[i % len(vocabulary)] for i in range(256)])
    print("ready", flush=True)
    while True:
        for i in range(0, len(vocabulary), 7):
            engine.decode([session], [vocabulary[i]])
            if session.n_left < 1:
                session.rewind(256)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--busy", required=True, help="a model that fits in memory")
    parser.add_argument("--depths", default="1,4")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    from sluice.ggml import load_library

    file = open_gguf(args.model, load_library())
    found = (file.expert_parts(layer) for layer in range(4096))
    n_bytes = next(parts[0].n_bytes for parts in found if parts is not None)
    depths = [int(word) for word in args.depths.split(",")]
    rates: dict[str, dict[int, list[float]]] = {"alone": {d: [] for d in depths}, "beside": {d: [] for d in depths}}

    def measure(name: str) -> None:
        for depth in depths:
            raw = measure_read(file.paths[0], n_bytes=n_bytes, depth=depth, seconds=args.seconds, memory_bytes=2 << 30)
            rates[name][depth].append(raw.bytes_per_s)
            log(f"  {name}, depth {depth}: {raw.bytes_per_s / 1e9:.2f} GB/s")

    for _ in range(args.repeat):
        measure("alone")
        busy = subprocess.Popen([sys.executable, "-c", DECODE, args.busy], stdout=subprocess.PIPE)
        try:
            assert busy.stdout is not None
            busy.stdout.readline()
            try:
                busy.wait(WARM_UP_S)
            except subprocess.TimeoutExpired:
                measure("beside")
        finally:
            busy.kill()
            busy.wait()
    rows = [
        row(
            f"reading beside arithmetic ÷ alone, depth {d}",
            ratio(middle(rates["beside"][d]), middle(rates["alone"][d])),
        )
        for d in depths
    ]
    report("contention", rows, vars(args), rates)


if __name__ == "__main__":
    run_main(main)

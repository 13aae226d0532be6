"""What an unmerged adapter costs: decoding with a rank-16 LoRA on all attention and dense matrices against without.

    python benchmarks/lora.py synth18.gguf

Theory. Beside y = W x an adapter computes B (A x): for a matrix of 2048 × 4096 and rank 16 that reads 0.4 MB (float32)
next to 4.7 MB (Q4_K), and it is two more products and an addition in every matrix's graph, which threads wait for at
each border. The adapter is random: its numbers change the text and not the time.

    tokens a second with ÷ without, everything resident      at least 0.95

The arms are processes of their own, in turns. Each runs its text twice, and the second time counts: its experts are
resident then (the pool is as large as the model, so it needs memory for what the text uses).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import middle, ratio, report, resident_speed, row, run_main

from sluice.ggml import load_library
from sluice.gguf import open_gguf
from sluice.models import family_of
from sluice.routing.linears import linears

Json = dict[str, Any]
ROUTER = "ffn_gate_inp"


def write_adapter(model: Path, out: Path, rank: int) -> int:
    """Write a random adapter of the model's attention and dense matrices; how many it has."""
    import gguf

    file = open_gguf(model, load_library())
    spec = family_of(file).read_spec(file)
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(out, spec.architecture)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    n = 0
    for name, linear in linears(file, spec).items():
        if linear.role or linear.n_stack or name == "output.weight" or ROUTER in name:
            continue
        a = rng.standard_normal((rank, linear.n_in), dtype=np.float32) * np.float32(linear.n_in**-0.5)
        b = rng.standard_normal((linear.n_out, rank), dtype=np.float32) * np.float32(0.01)
        writer.add_tensor(f"{name}.lora_a", a)
        writer.add_tensor(f"{name}.lora_b", b)
        n += 1
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path)
    add("--rank", type=int, default=16)
    add("--prompt", type=int, default=16, help="tokens")
    add("--gen", type=int, default=48, help="tokens")
    add("--repeat", type=int, default=5)
    add("--seed", type=int, default=7)
    args = parser.parse_args()
    speeds: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        adapter = Path(folder) / "adapter.gguf"
        n = write_adapter(args.model, adapter, args.rank)
        for i in range(args.repeat):
            for name, flags in (("without", ()), ("with", ("--lora", adapter)))[:: 1 if i % 2 else -1]:
                words = ("--prompt-tokens", args.prompt, "--gen", args.gen, "--seed", args.seed, "--no-prefetch")
                speeds[name].append(resident_speed(args.model, *words, *flags))
        size = adapter.stat().st_size
    with_, without = middle(speeds["with"]), middle(speeds["without"])
    rows = [
        row("tok/s with the adapter ÷ without", ratio(with_, without), at_least=0.95, n=args.repeat),
        row("matrices with an adapter", n),
        row("MB of the adapter", size / 1e6),
    ]
    report("lora", rows, settings=vars(args), raw=speeds)


if __name__ == "__main__":
    run_main(main)

"""The peer: llama.cpp (through xllamacpp) on the same GGUF, in one process; a JSON line per repeat.

    python benchmarks/llamacpp.py MODEL --cap 4G --threads 1        # cold, memory and page cache capped
    python benchmarks/llamacpp.py MODEL --warm --threads 2          # everything resident
    python benchmarks/llamacpp.py MODEL --cap 4G --streams 8        # concurrent requests, one slot each

Theory. llama.cpp maps the file, so what doesn't fit comes by page faults, and the memory it needs is page cache: a fair
cap counts that, which a memory cgroup does. A fault reads as much as the disk's read-ahead says. Linux's usual 128 KB
is set for the run and restored afterwards, as a virtual disk may come with 8192, which makes it many times slower
(--read-ahead 0 leaves the disk's own). Its workers spin, so fewer threads can be faster: try several.

Prompts and sampling are arm.py's: made-up ids, temperature 1 with nothing cut off, no end of text. Several streams are
as many concurrent requests; `decode_tok_per_s` is then the tokens after each stream's first over the time from the
first such token to the last, with other streams' prompts still in it. Needs xllamacpp (Linux, macOS); --cap, --cold
and --read-ahead need root on Linux.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

from common import WORKER, emit, log, rerun_as_worker, run_main
from machine import UnavailableError, cap_peak_bytes, disk_bytes_read, drop_page_cache, fill_page_cache, read_ahead
from walks import prompt_ids

from sluice.memory import peak_rss_bytes

KV_TYPES = {"f32": 0, "f16": 1}  # ggml's numbers
MADE_UP_VOCAB = 1 << 30  # the ids stay as they are: they must be within any vocabulary


def _serve(args: argparse.Namespace) -> Any:
    """A server with the model mapped, one slot for each stream."""
    try:
        xllamacpp: Any = importlib.import_module("xllamacpp")  # only now: its memory is to be charged to the cap
    except ImportError as error:
        raise UnavailableError(f"llama.cpp isn't there ({error}): pip install xllamacpp==2026.10.11549") from error
    params = xllamacpp.CommonParams()
    params.model.path = str(args.model)
    params.n_parallel = args.streams
    params.n_ctx = (args.ctx or 256 * -(-(args.prompt + args.gen) // 256)) * args.streams
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.n_ubatch = args.ubatch
    params.cache_type_k = params.cache_type_v = KV_TYPES[args.kv]
    params.no_extra_bufts = True  # a repacked second copy of the weights would not fit
    params.warmup = params.fit_params = False
    params.verbosity = 0
    return xllamacpp.Server(params)


def _complete(server: Any, args: argparse.Namespace, stream: int, repeat: int) -> dict[str, Any]:
    """One request's timings, and when it was over."""
    answer = server.handle_completions(
        {
            "prompt": prompt_ids(args.prompt, stream, MADE_UP_VOCAB), "n_predict": args.gen,
            "seed": 7 + repeat + stream, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
            "ignore_eos": True, "cache_prompt": False,
        }
    )  # fmt: skip
    ended = perf_counter()
    answer = json.loads(answer) if isinstance(answer, str) else answer
    if "timings" not in answer:
        raise UnavailableError(f"llama.cpp refused the request: {answer}")
    return answer["timings"] | {"ended": ended}


def measure(args: argparse.Namespace) -> None:
    """Load, complete, print a line for each repeat."""
    if args.cold:
        drop_page_cache()
    if args.warm:
        log(f"  reading {args.model} into the page cache")
        fill_page_cache(args.model)
    began = perf_counter()
    server = _serve(args)
    load_s = perf_counter() - began
    for repeat in range(args.repeat):
        read_before = disk_bytes_read()
        began = perf_counter()
        with ThreadPoolExecutor(args.streams) as pool:
            jobs = [pool.submit(_complete, server, args, stream, repeat) for stream in range(args.streams)]
            timings = [job.result() for job in jobs]
        read_after = disk_bytes_read()
        speed = timings[0]["predicted_per_second"]
        if args.streams > 1:
            first = min(one["ended"] - one["predicted_ms"] / 1e3 for one in timings)
            decoded = sum(one["predicted_n"] - 1 for one in timings)
            speed = decoded / (max(one["ended"] for one in timings) - first)
        log(f"  llama.cpp, {args.threads} threads: decode {speed:.2f} tok/s")
        emit(
            {
                "repeat": repeat, "streams": args.streams, "threads": args.threads,
                "read_ahead_kb": args.read_ahead_now,
                "prefill_tok_per_s": timings[0]["prompt_per_second"] if args.streams == 1 else None,
                "decode_tok_per_s": speed, "load_s": load_s, "wall_s": perf_counter() - began,
                "peak_rss_bytes": peak_rss_bytes(), "cap_peak_bytes": cap_peak_bytes() if args.cap else None,
                "major_faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
                "bytes_read": None if read_before is None or read_after is None else read_after - read_before,
            }
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path)
    add("--threads", type=int, default=1)
    add("--streams", type=int, default=1)
    add("--prompt", type=int, default=32, help="tokens")
    add("--gen", type=int, default=32, help="tokens of each stream")
    add("--repeat", type=int, default=1)
    add("--ctx", type=int, help="positions of each stream; by default what prompt and tokens need")
    add("--ubatch", type=int, default=512)
    add("--kv", choices=KV_TYPES, default="f16")
    add("--cap", help="run inside a memory cgroup of this size, cold")
    add("--read-ahead", type=int, default=128, help="of the disk, KB; 0 leaves it as it is")
    state = parser.add_mutually_exclusive_group()
    state.add_argument("--cold", action="store_true", help="empty the page cache first")
    state.add_argument("--warm", action="store_true", help="read the file once first")
    add("--read-ahead-now", type=int, help=argparse.SUPPRESS)
    add(WORKER, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    counts = ("threads", "streams", "prompt", "gen", "repeat")
    if any(getattr(args, name) < 1 for name in counts):
        parser.error(f"{', '.join(counts)} must be at least 1")
    if not args.model.is_file():
        raise UnavailableError(f"{args.model} is no file: give a GGUF")
    if args.worker:
        measure(args)
        return
    with read_ahead(args.model, args.read_ahead) as kb:
        rerun_as_worker(args.cap, "--read-ahead-now", str(kb))


if __name__ == "__main__":
    run_main(main)

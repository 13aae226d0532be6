"""The demo model: how long building it takes, and how soon a fresh process shows its first text.

    python benchmarks/demo.py

Theory. Building reads 90 MB and writes 400 MB, once, in a process of its own. Afterwards what passes before the first
text is the interpreter's start, imports, the header and tokenizer, reading what must be resident, and a short prompt
with the experts that it meets. The time is the user's: from starting `sluice run` to its first byte of output. --cold
empties the page cache before each start (needs root). The model is built in a folder of its own, and removed.
"""

from __future__ import annotations

import argparse
import os
import site
import subprocess
import sys
import tempfile
from time import perf_counter

from common import log, middle, report, row, run_main
from machine import UnavailableError, drop_page_cache

CACHE_VARIABLES = ("XDG_CACHE_HOME", "LOCALAPPDATA", "HOME")  # whichever the platform's cache folder follows
BUILD = "from sluice.demo import ensure_demo; print(ensure_demo())"


def build(environment: dict[str, str]) -> float:
    """Seconds that building takes."""
    began = perf_counter()
    built = subprocess.run([sys.executable, "-c", BUILD], env=environment, capture_output=True, text=True)
    if built.returncode:
        raise UnavailableError(built.stderr.strip().splitlines()[-1])
    return perf_counter() - began


def first_text(environment: dict[str, str], options: list[str]) -> float:
    """Seconds from starting the command to its first byte of text."""
    command = [sys.executable, "-m", "sluice", "run", "demo", *options]
    began = perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        shown = child.stdout.read(1)
        seconds = perf_counter() - began
        _, complaint = child.communicate()
    if not shown or child.returncode:
        raise UnavailableError(f"sluice run demo failed: {complaint.decode().strip()}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--repeat", type=int, default=3)
    add("--prompt", default="What is the capital of France?")
    add("--ram", help="the whole process's budget, as 300M; by default the command's own")
    add("--cold", action="store_true", help="empty the page cache before each start")
    args = parser.parse_args()
    options = ["-p", args.prompt, "-n", "4", "--seed", "1", *([] if args.ram is None else ["--ram", args.ram])]
    with tempfile.TemporaryDirectory() as folder:
        # with another HOME, packages in the user's own site folder would not be found
        environment = os.environ | dict.fromkeys(CACHE_VARIABLES, folder) | {"PYTHONUSERBASE": site.getuserbase()}
        build_s = build(environment)
        log(f"built in {build_s:.1f} s")
        times = []
        for _ in range(args.repeat):
            if args.cold:
                drop_page_cache()
            times.append(first_text(environment, options))
            log(f"first text after {times[-1]:.2f} s")
    rows = [row("first text, s", middle(times), at_most=3), row("building, s", build_s)]
    report("demo", rows, settings=vars(args), raw={"first_text_s": times, "build_s": build_s})


if __name__ == "__main__":
    run_main(main)

"""Starts `sluice train` as two processes of one run, on the CPU."""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def two_processes(*words: object, split: bool) -> str:
    """`sluice train` with these words; what it printed. `split`: each process holds a part of the weights."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(port)),
        *("-m", "sluice", "train", *map(str, words)),
    ]  # fmt: skip
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": str(split).lower()
    }  # fmt: skip
    ended = subprocess.run(launch, capture_output=True, text=True, timeout=500, env=environment)
    assert ended.returncode == 0, ended.stderr[-6000:]
    return ended.stdout

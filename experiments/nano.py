"""Makes the model that comes with Sluice: does the runs it is made of, where they aren't done, and copies their files.

    python experiments/nano.py [--work WORK] [--out src/sluice/nano]

It is the reference experiment's base model with seed 1 in 4 bits, with the heads and the adapter that its three stages
have left. The files' sizes and sha256, what they were trained on and what held-out text said of them go to nano.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path

from parts import model_of
from recipes import SIZES
from runner import Json, RunError, Work, execute, write_json
from runs import table

from sluice import nano
from sluice.ggml import load_library
from sluice.train.gguf_out import export_gguf

SEED = 1
RUNS = ("data", *(f"{name}-s{SEED}" for name in ("base", "text", "prerouter", "recover", "onpolicy", "stages")))


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: done. 1: a run failed."""
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=here.parent / "build" / "experiments", help="the folder of runs")
    parser.add_argument("--out", type=Path, default=nano.MODEL.parent, help="where the files go")
    given = parser.parse_args(arguments)
    work = Work(given.work.resolve())
    asked = work.folder / "work.json"
    if not asked.is_file():
        work.folder.mkdir(parents=True, exist_ok=True)
        write_json(asked, {"size": "reference", "text": None})
    known = json.loads(asked.read_text(encoding="utf-8"))
    texts = None if known["text"] is None else dict(one.split("=", 1) for one in known["text"])
    runs = table(SIZES[known["size"]], texts)
    try:
        for name in RUNS:
            execute(work, runs[name], log=lambda text: print(text, file=sys.stderr, flush=True))
        card = bundle(work, given.out, SIZES[known["size"]].quantised)
    except RunError as error:
        print(f"nano.py: {error}", file=sys.stderr)
        return 1
    print(json.dumps(card))
    return 0


def bundle(work: Work, out: Path, quantised: str) -> Json:
    """Put the files of runs that are done into the folder `out`; its nano.json, which is written last."""
    last = f"runs/onpolicy-s{SEED}/train"
    out.mkdir(parents=True, exist_ok=True)
    export_gguf(
        work.folder / model_of(f"base-s{SEED}"), out / nano.MODEL.name, load_library(), type=quantised,
        name="Sluice nano", force=True,
    )  # fmt: skip
    shutil.copyfile(work.folder / last / "heads.safetensors", out / nano.HEADS.name)
    shutil.copyfile(work.folder / last / "adapter.gguf", out / nano.ADAPTER.name)
    files: Json = {}
    for name in (nano.MODEL.name, nano.HEADS.name, nano.ADAPTER.name):
        data = (out / name).read_bytes()
        files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    corpora = (work.result("data") or {"steps": {}})["steps"].get("corpora")
    trained, measured = work.step(f"base-s{SEED}", "train"), work.step(f"stages-s{SEED}", "recovered")
    card = {
        "name": nano.NAME,
        "about": "A small MoE trained from scratch on code, mathematics, medicine and prose, to try things with.",
        "parameters": trained["parameters"],
        "trained_tokens": trained["tokens"],
        "data": {
            "fingerprint": work.step("data", "prepare")["fingerprint"],
            "sources": None if corpora is None else corpora["result"]["domains"],
        },
        "held_out": {key: measured[key] for key in ("teacher_ppl", "states")},
        "files": files,
    }
    write_json(out / nano.CARD.name, card)
    return card


if __name__ == "__main__":
    sys.exit(main())

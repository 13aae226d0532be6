"""Runs the parity tests of every model family and writes docs/models.md of what they compared and found.

    python benchmarks/models_table.py

Theory. A family is right when its logits are those of independent implementations on the same file. The tests write
tiny random models with every feature of a family and hold them against llama.cpp and, where it has the model, against
transformers. In float32 the distance is rounding, about 1e-6; quantised, activations are rounded to 8 bits before each
product, so a last bit may tip a step. Each figure below is the worst of its tests. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from common import emit, run_main

from sluice.errors import SluiceError
from sluice.models import FAMILIES

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "models"
HEAD = """# Models

Made by `python benchmarks/models_table.py`, which runs the tests in `tests/models/`: do not edit.

Tiny random models with every feature of their family on, compared at 64 or more positions: prefilled, decoded one
token at a time, and in a batch of four prompts of mixed lengths. *float32* and *transformers*: the worst relative L2 of
the logits with float32 weights, against llama.cpp b11549 and transformers; the bars are 1e-3 and 1e-4. *Quantised*: the
worst median difference of the log-probabilities of llama.cpp's 20 likeliest tokens, over the types tried; the likeliest
token is the same but at ties. *Far*: the worst relative L2 from position 4,100 on, where a family has windows, yarn or
states. Asserted beside: that 64 greedy tokens are llama.cpp's, that streaming from disk changes no bit, that a batch is
each of its prompts alone, and that nothing of a request is left for the next. `llama` and `qwen3moe` have more variants
in `tests/engine/`, `llama` there beside transformers too.

"""


def measure() -> list[dict[str, Any]]:
    """The figures that the tests recorded."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.jsonl"
        how = ["-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *how, str(TESTS)],
            cwd=ROOT, env={**os.environ, "SLUICE_FIGURES": str(path)}, stdout=sys.stderr, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SluiceError("the tests of the families fail: repair them before their figures are written down")
        return [json.loads(line) for line in path.read_text().splitlines()]


def family_rows(figures: list[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """The worst figure of each kind, by architecture."""
    kinds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for it in figures:
        match = re.search(r"test_(\w+)\.py::(?:\w+::)?(\w+)", it["test"])
        assert match is not None, it
        file, test = match.groups()
        if "transformers" in test:
            kinds[file]["transformers"].append(it["relative_l2"])
        elif "quantised" in test:
            kinds[file]["quantised"].append(it["median"])
        elif it["what"].startswith("position "):
            kinds[file]["far"].append(it["relative_l2"])
        elif "float32" in test:
            kinds[file]["float32"].append(it["relative_l2"])
    names = ("float32", "transformers", "quantised", "far")
    return {
        architecture: {name: max(kinds[_file(architecture)][name], default=None) for name in names}
        for architecture in sorted(FAMILIES)
    }


def _file(architecture: str) -> str:
    """The family's module, which its test is named after."""
    return FAMILIES[architecture].__module__.rpartition(".")[2]


def _described(architecture: str) -> tuple[str, str]:
    """Names of models and features, as the family's module says them."""
    text = sys.modules[FAMILIES[architecture].__module__].__doc__ or ""
    first, _, rest = text.partition("\n\n")
    models = first.replace("\n", " ").partition("): ")[2].partition(" Knows its graphs")[0].rstrip(".")
    features = re.sub(r"\s+", " ", rest.partition("Source:")[0]).strip()
    return models, features


def render(rows: dict[str, dict[str, float | None]]) -> str:
    lines = ["| architecture | models | float32 | transformers | quantised | far |", "|---|---|---|---|---|---|"]
    for architecture, row in rows.items():
        cells = ["–" if (x := row[name]) is None else f"{x:.0e}" if x else "0" for name in row]
        lines.append(f"| `{architecture}` | {_described(architecture)[0]} | {' | '.join(cells)} |")
    lines.append("")
    lines += [f"**{architecture}.** {_described(architecture)[1]}\n" for architecture in rows]
    return HEAD + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    rows = family_rows(measure())
    (ROOT / "docs" / "models.md").write_text(render(rows))
    emit({"benchmark": "models_table", "families": rows})


if __name__ == "__main__":
    run_main(main)

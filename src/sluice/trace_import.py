"""Makes traces of what other programs have recorded, CSV or JSONL; knows no model but what a TraceInfo says.

*CSV*, as llama.cpp's `moe-trace` writes it: a row `layer,expert` for each choice (other columns are passed over), a
token's choices in a layer one after the other. There is no token in it: a step ends where the layer goes down, a
layer's rows in a step are its tokens' in turn, and a layer with fewer tokens than the step's first has the last ones.

*JSONL*: an object {"layer", "token", "experts", "weights"} a line, `weights` in all lines or in none, `token` its
position. A step ends where the layer goes down, or where the token does within a layer; a new sequence begins where a
step's first token isn't beyond the last step's.

A step of one token is decode, any other prefill. Where only one layer was recorded, every token is a step.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from sluice.errors import InputError
from sluice.trace.schema import MAX_EXPERTS, MAX_LAYERS, TraceInfo
from sluice.trace.writer import Array, TraceWriter

MAX_LINE = 1 << 20  # bytes
MAX_RUN = 1 << 18  # choices of one layer in one step, which are held
ENOUGH_RUNS = 16  # layers in steps that must be there for top_k to be inferred
SAID_EVERY = 1 << 14  # lines between reports of progress

Progress = Callable[[float, float], None]


class Choice(NamedTuple):
    """What one line says. A CSV's has one expert, no token (-1) and no weights."""

    line: int
    layer: int
    token: int
    experts: list[int]
    weights: list[float] | None


class Run(NamedTuple):
    """Consecutive tokens of one layer in one step."""

    line: int  # of its first choice
    layer: int
    tokens: list[int]  # empty: not said
    experts: Array  # [n, top_k] int16
    weights: Array | None  # [n, top_k] float32


@dataclass
class Survey:
    """What a first pass over the file finds."""

    layers: set[int] = field(default_factory=set)
    largest: int = 0  # expert
    runs: int = 0
    common: int = 0  # divisor of the runs' numbers of choices
    top_k: int = 0  # JSONL's
    weights: bool = False


class ImportReport(NamedTuple):
    """What an import wrote."""

    info: TraceInfo
    rows: int
    steps: int
    sequences: int


def import_trace(
    source: str | os.PathLike[str], out: str | os.PathLike[str], *, model: TraceInfo | None = None,
    n_expert: int | None = None, top_k: int | None = None, force: bool = False,
    progress: Progress = lambda done, total: None,
) -> ImportReport:  # fmt: skip
    """Write the trace `out` of the CSV or JSONL (by its first character) file `source`, which is read twice.

    `model` says what it was recorded on; without it `n_expert` must be given, and the trace has no fingerprint and no
    sizes of experts. Of a CSV, `top_k` is inferred where the file leaves no doubt. `progress(done, total)` in bytes.
    Memory does not grow with the file. Raises InputError naming a bad line by its number, or what must be given; `out`
    is then not written.
    """
    lines = Lines(Path(source), progress)
    found = survey(lines)
    if model is None:
        if n_expert is None:
            named = f"{found.largest} is the last it names"
            raise InputError(
                f"{source}: doesn't say how many experts a layer has ({named}): give --experts N, or --model"
            )
        if not found.largest < n_expert <= MAX_EXPERTS:
            raise InputError(f"{source}: names expert {found.largest}: --experts {n_expert} is not the model's number")
    elif (beyond := min(found.layers - set(model.moe_layers), default=None)) is not None:
        raise InputError(f"{source}: layer {beyond} has no experts in {model.name}: give the model it was recorded on")
    elif found.largest >= model.n_expert:
        counts = f"names expert {found.largest} and {model.name} has {model.n_expert} in a layer"
        raise InputError(f"{source}: {counts}: give the model it was recorded on")
    most = n_expert if model is None or n_expert is not None else model.n_expert
    k, inferred = _top_k(source, lines, found, top_k, model, most or MAX_EXPERTS)
    if model is None:
        layers = tuple(sorted(found.layers))
        info = TraceInfo("", "", Path(source).stem, layers[-1] + 1, layers, n_expert or 0, k, (0,) * len(layers), "")
    else:
        info = model
    info = replace(info, top_k=k, source=f"import of {Path(source).name}")
    with TraceWriter(out, info, weights=found.weights, force=force) as writer:
        try:
            steps, sequences = _write(lines, writer, k, inferred, single=len(found.layers) == 1)
        except BaseException:
            writer.abandon()
            raise
    return ImportReport(info, writer.n_rows, steps, sequences)


def _top_k(
    source: object, lines: Lines, found: Survey, given: int | None, model: TraceInfo | None, most: int
) -> tuple[int, bool]:
    """Experts that a token chooses, and whether that is inferred and may be contradicted. Raises InputError."""
    if lines.jsonl:
        if given not in (None, found.top_k):
            raise InputError(f"{source}: its tokens choose {found.top_k} experts: leave out --top-k {given}")
        return found.top_k, False
    k, inferred = given or (model.top_k if model else 0), False
    if not k:
        k, inferred = found.common, True
        if found.runs < ENOUGH_RUNS or k > most:
            raise _not_inferred(source)
    if k > most:
        raise InputError(f"{source}: --top-k {k} is more than the {most} experts of a layer")
    if found.common % k:
        raise InputError(f"{source}: a layer has a number of rows that is no multiple of {k}: give the right --top-k N")
    return k, inferred


# --- reading


class Lines:
    """The choices in a file, from its start each time. Raises InputError for what is no file of choices."""

    def __init__(self, path: Path, progress: Progress) -> None:
        self.path = path
        self._progress = progress
        self._passes = 0
        if not path.is_file():  # a pipe could not be read twice
            what = "not a regular file" if path.exists() else "no such file"
            raise InputError(f"{path}: {what}: name a CSV or JSONL file")
        try:
            with path.open("rb") as file:
                self.jsonl = file.read(1) == b"{"
        except OSError as error:
            raise InputError(f"{path}: can't be read ({error.strerror}): check its permissions") from None

    def bad(self, line: int, what: str) -> InputError:
        return InputError(f"{self.path}: line {line}: {what}")

    def choices(self) -> Iterator[Choice]:
        """One for each line that has any."""
        self._passes += 1
        with self.path.open("rb") as file:
            yield from self._objects(file) if self.jsonl else self._rows(file)

    def _lines(self, file: BinaryIO) -> Iterator[tuple[int, str]]:
        total, done, number = self.path.stat().st_size, 0, 0
        while raw := file.readline(MAX_LINE + 1):
            number += 1
            done += len(raw)
            if number % SAID_EVERY == 0:
                self._progress((self._passes - 1) * total + done, 2 * total)
            if len(raw) > MAX_LINE:
                raise self.bad(number, f"is longer than {MAX_LINE >> 20} MiB: give a CSV or JSONL file of choices")
            try:
                text = raw.decode().strip()
            except UnicodeDecodeError:
                raise self.bad(number, "is no text: give a CSV or JSONL file of choices") from None
            if text:
                yield number, text

    def _rows(self, file: BinaryIO) -> Iterator[Choice]:
        at_layer, at_expert, begun = 0, 1, False
        for line, text in self._lines(file):
            cells = text.split(",")
            if not begun:
                begun = True
                names = [cell.strip().strip('"').lower() for cell in cells]
                if "layer" in names and "expert" in names:
                    at_layer, at_expert = names.index("layer"), names.index("expert")
                    continue
            try:
                layer, expert = int(cells[at_layer]), int(cells[at_expert])
            except (ValueError, IndexError):
                raise self.bad(line, f"{text[:40]!a} is not layer,expert") from None
            self._check(line, layer, (expert,))
            yield Choice(line, layer, -1, [expert], None)

    def _objects(self, file: BinaryIO) -> Iterator[Choice]:
        for line, text in self._lines(file):
            try:
                found = json.loads(text)
            except (ValueError, RecursionError):
                found = None
            if not isinstance(found, dict):
                raise self.bad(line, f"{text[:40]!a} is no JSON object")
            layer, token, experts = (found.get(name) for name in ("layer", "token", "experts"))
            if type(token) is not int or not 0 <= token < 1 << 31:
                raise self.bad(line, "token isn't a position")
            if not isinstance(experts, list) or not experts:
                raise self.bad(line, "experts isn't a list of them")
            self._check(line, layer, experts)
            assert isinstance(layer, int)
            weights = found.get("weights")
            right = isinstance(weights, list) and len(weights) == len(experts) and all(map(_weight, weights))
            if weights is not None and not right:
                raise self.bad(line, "weights isn't a number for each expert")
            yield Choice(line, layer, token, experts, weights)

    def _check(self, line: int, layer: object, experts: list[int] | tuple[int, ...]) -> None:
        if type(layer) is not int or not 0 <= layer < MAX_LAYERS:
            raise self.bad(line, f"layer {ascii(layer)[:40]} isn't one")
        for expert in experts:
            if type(expert) is not int or not 0 <= expert < MAX_EXPERTS:
                raise self.bad(line, f"expert {ascii(expert)[:40]} isn't one")
        if len(set(experts)) < len(experts):
            raise self.bad(line, "an expert is named twice")

    def runs(self, top_k: int, inferred: bool, *, single: bool) -> Iterator[tuple[Run, bool]]:
        """Each layer's tokens in each step, and whether a new step begins with it. `single`: every token is a step."""
        held: list[Choice] = []
        new = True
        for choice in self.choices():
            if held:
                before = held[-1]
                other = choice.layer != before.layer or (self.jsonl and choice.token <= before.token)
                if other or (single and (self.jsonl or len(held) == top_k)):
                    yield self._run(held, top_k, inferred), new
                    new = single or choice.layer <= before.layer
                    held = []
                elif len(held) * len(choice.experts) >= MAX_RUN:
                    what = f"more than {MAX_RUN} choices in one layer before the next"
                    raise self.bad(choice.line, f"{what}: write a text's tokens one after the other")
            held.append(choice)
        if held:
            yield self._run(held, top_k, inferred), new

    def _run(self, held: list[Choice], top_k: int, inferred: bool) -> Run:
        first = held[0]
        weights = None
        if self.jsonl:
            experts = np.array([choice.experts for choice in held], np.int16)
            if first.weights is not None:
                weights = np.array([choice.weights for choice in held], np.float32)
            return Run(first.line, first.layer, [choice.token for choice in held], experts, weights)
        experts = np.array([choice.experts[0] for choice in held], np.int16).reshape(-1, top_k)
        ordered = np.sort(experts, axis=1)
        twice = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
        if len(twice):
            if inferred:
                raise _not_inferred(self.path)
            line = held[int(twice[0]) * top_k].line
            raise self.bad(line, f"{top_k} rows from here name an expert twice: is --top-k right?")
        return Run(first.line, first.layer, [], experts, None)


def _weight(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < 1e30  # type: ignore[arg-type]


def _not_inferred(source: object) -> InputError:
    return InputError(f"{source}: where one token ends and the next begins can't be inferred: give --top-k N")


def survey(lines: Lines) -> Survey:
    """Read the file once. Raises InputError for a bad line, and for a file without any."""
    found = Survey()
    before: Choice | None = None
    length = 0
    for choice in lines.choices():
        if lines.jsonl:
            if before is None:
                found.top_k, found.weights = len(choice.experts), choice.weights is not None
            if len(choice.experts) != found.top_k:
                raise lines.bad(choice.line, f"{len(choice.experts)} experts, the lines before have {found.top_k}")
            if (choice.weights is not None) != found.weights:
                raise lines.bad(choice.line, "some lines have weights and some have none")
        if before is not None and choice.layer != before.layer:
            found.runs, found.common, length = found.runs + 1, math.gcd(found.common, length), 0
        length += 1
        found.layers.add(choice.layer)
        found.largest = max(found.largest, *choice.experts)
        before = choice
    if before is None:
        raise InputError(f"{lines.path}: has no choices: give a CSV of layer,expert rows or a JSONL file")
    found.runs, found.common = found.runs + 1, math.gcd(found.common, length)
    return found


def _write(lines: Lines, writer: TraceWriter, top_k: int, inferred: bool, *, single: bool) -> tuple[int, int]:
    """Write every run; the numbers of steps and of sequences."""
    step, sequence = -1, 0
    tokens: list[int] = []  # of the step
    for run, new in lines.runs(top_k, inferred, single=single):
        n = len(run.experts)
        if new:
            last = tokens[-1] if tokens else -1
            tokens = run.tokens or list(range(last + 1, last + 1 + n))
            step, sequence = step + 1, sequence + (tokens[0] <= last)
            if tokens[-1] >= 1 << 31:
                raise lines.bad(run.line, "more tokens than a trace can number")
            phase = "decode" if len(tokens) == 1 else "prefill"
            writer.begin_step(step, phase, np.full(len(tokens), sequence, np.int32), np.array(tokens, np.int32))
        writer.chose(run.layer, run.experts, columns=_columns(lines, run, tokens))
        writer.weighed(run.weights)
    return step + 1, sequence + 1


def _columns(lines: Lines, run: Run, tokens: list[int]) -> Array | None:
    """Which columns of the step, whose `tokens` ascend, a run has; None for all."""
    n = len(run.experts)
    if not run.tokens:
        if n > len(tokens):
            raise lines.bad(run.line, f"layer {run.layer} has more tokens than the layers before: is --top-k right?")
        return None if n == len(tokens) else np.arange(len(tokens) - n, len(tokens))
    if run.tokens == tokens:
        return None
    places = np.searchsorted(tokens, run.tokens)
    with suppress(IndexError):
        if np.array_equal(np.array(tokens)[places], run.tokens):
            return places
    raise lines.bad(run.line, f"layer {run.layer} has tokens that the step's first layer lacks")

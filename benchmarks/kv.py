"""What a quantised KV cache costs: bytes, perplexity, KL divergence and retrieval at several context lengths.

    python benchmarks/kv.py                                     # the demo model, 1024, 4096 and 8192 positions
    python benchmarks/kv.py --float16                           # with its weights in float16: less noise
    python benchmarks/kv.py MODEL --lengths 4096 --texts 4      # another model, four texts of one length
    python benchmarks/kv.py --types q8_0 q8_0,q4_0 --quick      # some types (K,V for two), a small run

Theory. A block of 32 numbers shares a scale of 16 bits: q8_0 takes 34 bytes for 32 numbers, q4_0 18, f16 64. Of 32
normal numbers the largest is about 2.4 σ, which is 127 steps of q8_0 and 8 of q4_0; rounding errs by step ÷ √12: 0.5 %
of σ and 9 %. KL grows with the square of a small error, so q4_0 should cost some hundred times what q8_0 does. An error
in a key moves an attention score, inside the exponential; errors in values are averaged over all positions that are
looked at. So keys should cost more than values, and a longer context should add little: values average over more,
while a score's error is the same at every distance. Retrieval rests on few positions, where nothing averages.

    bytes that the plan and `sluice inspect` count ÷ bytes by the model's shapes   1
    perplexity with q8_0 ÷ with f16, less 1, all lengths                           at most 0.001
    all else: other types, each length, KL, how much less sure it is of a key      reported

What can be seen. Quantised weights are multiplied with activations rounded to 8 bits, so whatever moves an activation
by one bit, even f32 in the place of f16, comes out as a change of many logits, and of routes: the type f32 shows how
much of a figure is that noise. With the same weights in float16 (`--float16`, a file of 2 bytes a weight in a
temporary folder) nearly nothing of it is left. Tokens drawn from f16's own predictions would cost the other type KL on
average, so KL is about what ln perplexity should rise by, and it is known far better than perplexity's change.

A text is fed once, as far as its longest length, and measured at each length on the way; all types get the same tokens
in the same steps. Perplexity and KL are of the last half of a length's tokens, which have half the length before them
or more. Among the text stand sentences such as "The pass key of Walrus is 41733. Remember it.", at 10, 30, 50, 70 and
90 % of each length, each with a name of its own; they are not scored. At the length's end one after the other is asked
for, in the place of the text's last tokens, as in the multi-key task of RULER (arXiv 2404.06654). What counts is the
mean log-probability of the key's digits: ln 0.1 = -2.3 is guessing, 0 certainty. "Exact" is the greedy answer.

Texts are by turns prose (Python's language reference, as pydoc_data.topics has it) and code (modules of the standard
library), the same for one version of Python; those of benchmarks/texts are too short. Intervals are of 95 %, from a
paired bootstrap over tokens as if they were independent, and over keys. Everything is resident; nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sysconfig
import tempfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import IO

import numpy as np
from common import EVERY_SLOT, Json, emit, log, report, row, run_main, sluice

from sluice.cli.opening import resolve_model
from sluice.config import EngineConfig
from sluice.engine import Engine, Session
from sluice.errors import InputError
from sluice.eval.paired import bootstrap, compare
from sluice.eval.windows import lead_of, log_softmax
from sluice.models.spec import ModelSpec
from sluice.text.tokenizer import Tokenizer

REFERENCE = "f16"
ALL = "all"
TYPES = ["f32", "q8_0", "q4_0", "q8_0,q4_0", "q4_0,q8_0"]
BLOCKS = {"f16": (1, 2), "f32": (1, 4), "q8_0": (32, 34), "q4_0": (32, 18)}  # numbers, bytes
POSITIONS, PAGE = 256, 4096  # what a cache's length and a tensor's bytes are rounded up to
BAR = 0.001
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
NAMES = (
    "Walrus", "Falcon", "Otter", "Badger", "Heron", "Lizard", "Panther", "Beetle", "Salmon", "Gorilla", "Rabbit",
    "Turtle", "Pigeon", "Donkey", "Leopard", "Spider", "Dolphin", "Camel", "Sparrow", "Buffalo", "Lobster", "Monkey",
    "Penguin", "Squirrel", "Hamster", "Giraffe", "Raven", "Cheetah", "Mosquito", "Octopus", "Parrot", "Jaguar",
    "Coyote", "Weasel", "Ostrich", "Panda", "Zebra", "Antelope", "Cobra", "Eagle",
)  # fmt: skip
MODULES = ("pathlib", "argparse", "inspect", "typing", "tarfile", "subprocess", "doctest", "datetime")
CHARACTERS_A_TOKEN = 8  # more than any text here has


@dataclass(frozen=True)
class Key:
    """A sentence in a text, and the question for it. `wanted`: which of the `answer`'s tokens are digits."""

    length: int
    depth: float
    question: list[int]
    answer: list[int]
    wanted: list[int]

    @property
    def size(self) -> int:
        return len(self.question) + len(self.answer)


@dataclass
class Passage:
    """A text with keys: `ids`, of which those that are `plain` are the text's own, as long as the last of `lengths`."""

    name: str
    ids: list[int]
    plain: list[bool]
    lengths: list[int]
    keys: list[Key]


@dataclass
class Scores:
    """What one type comes to at one length. `losses`, `kl`: nats, one a token; `keys`: nats a digit, one a key."""

    losses: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    keys: list[float] = field(default_factory=list)
    exact: list[bool] = field(default_factory=list)


# --- texts


def source(k: int, n: int) -> tuple[str, str]:
    """Name and characters, `n` at most, of the `k`-th text of 2 × len(MODULES)."""
    if k % 2:
        name = MODULES[k // 2]
        text = (Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py").read_text(encoding="utf-8")
        return f"{name}.py", text[:n]
    from pydoc_data.topics import topics

    start = k // 2 * n
    return f"topics, from {start}", "\n\n".join(topics.values())[start : start + n]


def make_passage(tokenizer: Tokenizer, lead: Sequence[int], k: int, lengths: list[int], args: Namespace) -> Passage:
    """The `k`-th text with keys at each depth of each length. Raises InputError if it, or a length, is too short."""
    name, text = source(k, args.lengths[-1] * CHARACTERS_A_TOKEN)
    own = tokenizer.encode(text[: lengths[-1] * CHARACTERS_A_TOKEN], bos=False)
    drawn = random.Random(k)
    animals = iter(drawn.sample(NAMES, len(NAMES)))
    keys, sentences = [], []
    for length in lengths:
        for depth in DEPTHS:
            for _ in range(args.keys):
                animal, digits = next(animals), "".join(drawn.choices("0123456789", k=5))
                said = f"The pass key of {animal} is"
                sentences.append((int(depth * length), length, f"\n\n{said} {digits}. Remember it.\n\n"))
                answer = tokenizer.encode(f" {digits}", bos=False)
                wanted = [i for i, id in enumerate(answer) if any(48 <= b < 58 for b in tokenizer.token_bytes(id))]
                question = tokenizer.encode(f"\n\nWhat is the pass key of {animal}? {said}", bos=False)
                keys.append(Key(length, depth, question, answer, wanted))
    room = max(key.size for key in keys)
    ids, plain, at = list(lead), [False] * len(lead), 0
    for position, length, sentence in [*sorted(sentences), (lengths[-1], 0, "")]:
        more = own[at : at + max(0, position - len(ids))]
        at += len(more)
        inserted = tokenizer.encode(sentence, bos=False) if sentence else []
        ids += more + inserted
        plain += [True] * len(more) + [False] * len(inserted)
        if sentence and len(ids) > length - room:
            raise InputError(f"{length} positions have no room for all keys: give fewer --keys or larger --lengths")
    if len(ids) < lengths[-1]:
        raise InputError(f"{name} has too few tokens for {lengths[-1]} positions: give fewer --lengths or --texts")
    return Passage(name, ids[: lengths[-1]], plain[: lengths[-1]], lengths, keys)


def write_float16(source: Path, out: Path) -> None:
    """Write the model in the one file `source` with its quantised tensors in float16."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for key, value in reader.fields.items():
        if key != "general.architecture" and not key.startswith(("GGUF.", "split.")):
            sub_type = value.types[-1] if value.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, value.contents(), value.types[0], sub_type)
    planned = []
    for tensor in reader.tensors:
        kept = tensor.tensor_type == gguf.GGMLQuantizationType.F32
        shape, dtype = [int(n) for n in reversed(tensor.shape)], np.dtype(np.float32 if kept else np.float16)
        writer.add_tensor_info(tensor.name, shape, dtype, int(np.prod(shape)) * dtype.itemsize)
        planned.append((tensor, shape, dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, shape, dtype in planned:
        writer.write_tensor_data(gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape).astype(dtype))
    writer.close()


# --- one type


def feed(engine: Engine, session: Session, passage: Passage, length: int) -> Iterator[tuple[int, np.ndarray]]:
    """Feed as far as `length`: (token, logits before it) of the text's own tokens in the last half."""
    start, first = len(session.tokens), length // 2
    found: list[tuple[int, np.ndarray]] = []

    def use(i: int, rows: np.ndarray) -> None:
        for at, logits in enumerate(rows, start + i + 1):
            if at < length and passage.plain[at]:
                found.append((passage.ids[at], logits.copy()))

    for _ in engine.prefill_rows(session, passage.ids[start:length], use, skip=max(0, first - 1 - start)):
        yield from found
        found.clear()


def ask(engine: Engine, session: Session, key: Key) -> tuple[float, bool]:
    """Mean log-probability of the key's digits, and whether they are the likeliest. The session stays as it was."""
    kept = len(session.tokens)
    ids = [*key.question, *key.answer[:-1]]
    logprobs, greedy = [], []

    def use(i: int, rows: np.ndarray) -> None:
        for at, logits in enumerate(rows, i - len(key.question) + 1):  # the answer's token that they predict
            if at in key.wanted:
                logprobs.append(float(log_softmax(logits)[key.answer[at]]))
                greedy.append(int(logits.argmax()) == key.answer[at])

    for _ in engine.prefill_rows(session, ids, use, skip=len(key.question) - 1):
        pass
    session.rewind(kept)
    return sum(logprobs) / len(logprobs), all(greedy)


def measure(
    path: Path, kv: str, passages: Sequence[Passage], threads: int | None, spool: IO[bytes]
) -> dict[int, Scores]:
    """All texts with one type of cache, by length. f16 writes its logits to `spool`, others read them there."""
    found: dict[int, Scores] = defaultdict(Scores)
    longest = max(passage.lengths[-1] for passage in passages)
    spool.seek(0)
    config = EngineConfig(expert_slots=EVERY_SLOT, ctx=longest, kv=kv, threads=threads)
    with Engine(path, config) as engine:
        n_bytes = engine.spec.n_vocab * 4
        for passage in passages:
            with engine.session() as session:
                for length in passage.lengths:
                    began = perf_counter()
                    scores = found[length]
                    for token, logits in feed(engine, session, passage, length):
                        ours = log_softmax(logits)
                        scores.losses.append(-float(ours[token]))
                        if kv == REFERENCE:
                            spool.write(logits.tobytes())
                            continue
                        reference = np.frombuffer(spool.read(n_bytes), np.float32)
                        theirs = log_softmax(reference)
                        scores.kl.append(max(0.0, float(np.exp(theirs) @ (theirs - ours))))
                        scores.same.append(int(reference.argmax()) == int(logits.argmax()))
                    asked = [key for key in passage.keys if key.length == length]
                    session.rewind(length - max(key.size for key in asked))
                    for key in asked:
                        logprob, exact = ask(engine, session, key)
                        scores.keys.append(logprob)
                        scores.exact.append(exact)
                    log(f"{kv}: {passage.name}, {length} positions, {perf_counter() - began:.0f} s")
    return dict(found)


# --- figures


def bytes_by_shape(spec: ModelSpec, kv: str, n: int) -> int:
    """Bytes that keys and values of `n` positions take, by the widths of the layers that attend."""
    k, _, v = kv.partition(",")
    total = 0
    for layer in spec.attending:
        shape = spec.kv_shape(layer)
        for width, (numbers, size) in (
            (shape.head_dim * shape.n_head_kv, BLOCKS[k]),
            (0 if spec.values_in_keys else shape.head_dim_v * shape.n_head_kv, BLOCKS[v or k]),
        ):
            total += -(-width // numbers * size * (-(-n // POSITIONS) * POSITIONS) // PAGE) * PAGE
    return total


def byte_rows(path: Path, types: Sequence[str], lengths: Sequence[int]) -> list[Json]:
    """What the plan and `sluice inspect` count against what the shapes say."""
    rows = []
    per_token = json.loads(sluice("inspect", path, "--json")[-1])["kv_bytes_per_token"]
    for kv in types:
        for n in lengths:
            engine = Engine(path, EngineConfig(expert_slots=EVERY_SLOT, ctx=n, kv=kv), plan_only=True)
            computed = bytes_by_shape(engine.spec, kv, n)
            rows.append(row(f"{kv}, {n}: bytes by the shapes", computed))
            counted = engine.plan.needs.kv / computed
            rows.append(row(f"{kv}, {n}: bytes the plan counts ÷ these", counted, at_least=1, at_most=1))
            if kv in per_token:
                shown = per_token[kv] * n / computed
                rows.append(row(f"{kv}, {n}: bytes inspect counts ÷ these", shown, at_least=1, at_most=1))
    return rows


def compared(reference: Scores, other: Scores) -> Json:
    """How a type stands to f16 at one length: changes with their intervals (low, high)."""
    lost = np.array(other.losses) - np.array(reference.losses)
    low, high = bootstrap(lost)
    return {
        "tokens": len(lost),
        "ppl_reference": float(np.exp(np.mean(reference.losses))), "ppl": float(np.exp(np.mean(other.losses))),
        "ppl_change": float(np.expm1(lost.mean())), "ppl_interval": [float(np.expm1(low)), float(np.expm1(high))],
        "kl": float(np.mean(other.kl)), "kl_max": max(other.kl), "same_top": float(np.mean(other.same)),
        "key_logprob_reference": float(np.mean(reference.keys)), "key_logprob": float(np.mean(other.keys)),
        "keys": compare(reference.keys, other.keys).as_dict(),
        "exact_reference": float(np.mean(reference.exact)), "exact": float(np.mean(other.exact)),
    }  # fmt: skip


def together(each: Sequence[Scores]) -> Scores:
    """All lengths as one."""
    return Scores(*([value for one in each for value in getattr(one, name)] for name in Scores.__dataclass_fields__))


def result_rows(kv: str, length: int | str, one: Json) -> list[Json]:
    bar = BAR if kv == "q8_0" and length == ALL else None
    name, keys = f"{kv}, {length}", one["keys"]
    return [
        row(f"{name}: perplexity ÷ f16's, less 1", one["ppl_change"], at_most=bar, n=one["tokens"]),
        row(f"{name}: KL from f16, nats", one["kl"], n=one["tokens"]),
        row(f"{name}: log-probability of a key's digits lost, nats", keys["lost"], n=keys["items"]),
    ]


def show(table: Mapping[int | str, Mapping[str, Json]]) -> None:
    """The table of a run, on stderr."""
    log(f"{'positions':>9} {'type':>10} {'ppl':>8} {'change':>9} {'95 %':>19} {'KL':>9} {'same':>7} "
        f"{'digit':>7} {'lost':>8} {'95 %':>17} {'exact':>6}")  # fmt: skip
    for length, types in table.items():
        one = next(iter(types.values()))
        log(f"{length:>9} {REFERENCE:>10} {one['ppl_reference']:8.4f} {'':47} {one['key_logprob_reference']:7.3f} "
            f"{'':26} {one['exact_reference']:6.0%}")  # fmt: skip
        for kv, one in types.items():
            (low, high), keys = one["ppl_interval"], one["keys"]
            log(f"{length:>9} {kv:>10} {one['ppl']:8.4f} {one['ppl_change']:9.4%} {low:9.4%} {high:9.4%} "
                f"{one['kl']:9.3g} {one['same_top']:7.2%} {one['key_logprob']:7.3f} {keys['lost']:8.4f} "
                f"{keys['low']:8.4f} {keys['high']:8.4f} {one['exact']:6.0%}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", nargs="?", default="demo")
    add("--types", nargs="+", default=TYPES, metavar="KV", help="to compare with f16")
    add("--lengths", nargs="+", type=int, default=[1024, 4096, 8192], help="each at least twice the one before")
    add("--texts", nargs="+", type=int, help="for each length; a text is measured at all lengths that have so many")
    add("--keys", type=int, default=2, help="at each depth of each length")
    add("--float16", action="store_true", help="the model with its weights in float16; it must be one file")
    add("--threads", type=int)
    add("--quick", action="store_true", help="the first length alone, one text, one key a depth")
    args = parser.parse_args()
    if args.quick:
        args.lengths, args.texts, args.keys = args.lengths[:1], [1], 1
    if args.texts is None:
        args.texts = [args.lengths[-1] // length for length in args.lengths]
    pairs = list(zip(args.lengths, args.lengths[1:], strict=False))
    if args.lengths[0] < 512 or any(b < 2 * a for a, b in pairs):
        parser.error("--lengths begin at 512, and each is at least twice the one before")
    if len(args.texts) != len(args.lengths) or any(b > a for a, b in zip(args.texts, args.texts[1:], strict=False)):
        parser.error("--texts are as many numbers as --lengths, none larger than the one before")
    if args.texts[0] > 2 * len(MODULES):
        parser.error(f"there are {2 * len(MODULES)} --texts")
    if args.texts[-1] < 1 or not 1 <= args.keys <= len(NAMES) // (len(DEPTHS) * len(args.lengths)):
        parser.error(f"--texts are at least 1, and all --keys of a text have one of {len(NAMES)} names each")
    path = resolve_model(args.model)
    if not args.float16:
        run(path, args)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_float16(path, Path(folder) / "float16.gguf")
        run(Path(folder) / "float16.gguf", args)


def run(path: Path, args: Namespace) -> None:
    """Measure the model at `path` as `args` say, and report."""
    types = [kv for kv in dict.fromkeys(args.types) if kv != REFERENCE]
    rows = byte_rows(path, [REFERENCE, *types], args.lengths)
    engine = Engine(path, EngineConfig(expert_slots=EVERY_SLOT, ctx=args.lengths[-1]), plan_only=True)
    counts = list(zip(args.lengths, args.texts, strict=True))
    passages = [
        make_passage(engine.tokenizer, lead_of(engine), k, [n for n, count in counts if k < count], args)
        for k in range(args.texts[0])
    ]
    table: dict[int | str, dict[str, Json]] = {length: {} for length in (*args.lengths, ALL)}
    with tempfile.TemporaryFile() as spool:
        reference = measure(path, REFERENCE, passages, args.threads, spool)
        reference_of_all = together([reference[length] for length in args.lengths])
        for kv in types:
            found = measure(path, kv, passages, args.threads, spool)
            for length in args.lengths:
                table[length][kv] = compared(reference[length], found[length])
            table[ALL][kv] = compared(reference_of_all, together([found[length] for length in args.lengths]))
            emit({kv: {length: table[length][kv] for length in table}})
    for length, by_type in table.items():
        for kv, one in by_type.items():
            rows += result_rows(kv, length, one)
    show(table)
    settings = vars(args) | {"python": platform.python_version(), "names": [passage.name for passage in passages]}
    report("kv", rows, settings, {"table": table, "keys": {n: one.keys for n, one in reference.items()}})


if __name__ == "__main__":
    run_main(main)

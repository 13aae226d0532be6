"""`sluice train data`: makes token shards of text files. Trains nothing but a vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.options import Json
from sluice.cli.terminal import emit, print_facts, print_table, progress_bar
from sluice.errors import InputError

if TYPE_CHECKING:
    from sluice.train.data import Meta

Out = Annotated[Path, typer.Argument(metavar="OUT", help="The data folder to make.")]
Domain = Annotated[
    list[str] | None,
    typer.Option("--domain", metavar="NAME=PATH", help="A domain and its text: a .jsonl file with a document as "
                 '"text" in each line, another text file, which is one document, or a folder of such files. Give it '
                 "for each domain; a name given again gets more text.", show_default=False),
]  # fmt: skip
Vocab = Annotated[
    int | None, typer.Option("--vocab", metavar="N", help="Learn a vocabulary of N tokens.", show_default=False)
]
ATokenizer = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="PATH", help="Take the tokenizer of a model's or data folder instead.",
                 show_default=False),
]  # fmt: skip
Valid = Annotated[float, typer.Option("--valid", metavar="SHARE", help="Share of the documents to hold out.")]
Seed = Annotated[int, typer.Option("--seed", metavar="S", help="Decides which documents are held out.")]
Force = Annotated[bool, typer.Option("--force", metavar="", help="Overwrite OUT if it is a data folder.")]


def data(
    out: Out, domain: Domain = None, vocab: Vocab = None, tokenizer: ATokenizer = None, valid: Valid = 0.05,
    seed: Seed = 0, force: Force = False, json: Json = False,
) -> int:  # fmt: skip
    """Make a folder of token ids out of text, by domain, part of it held out."""
    from sluice.train.data import prepare

    domains = parse_domains(domain)
    if vocab is None and tokenizer is None:
        raise InputError("there is no tokenizer: learn one with --vocab N, or give --tokenizer PATH")
    if vocab is not None and tokenizer is not None:
        raise InputError("--vocab and --tokenizer are both given: give one of them")
    with progress_bar("encoding") as progress:
        meta = prepare(
            out, domains, vocab=vocab, tokenizer=tokenizer, valid_share=valid, seed=seed, force=force, progress=progress
        )  # fmt: skip
    facts = _facts(out, meta)
    if json:
        emit(facts)
    else:
        _show(facts)
    return 0


def parse_domains(given: list[str] | None) -> dict[str, list[Path]]:
    """The paths of each domain that --domain names. Raises InputError."""
    domains: dict[str, list[Path]] = {}
    for text in given or ():
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise InputError(f"--domain {text[:80]!r} is not NAME=PATH: write it like code=texts/code")
        domains.setdefault(name, []).append(Path(path))
    if not domains:
        raise InputError("there is no text: give --domain NAME=PATH")
    return domains


def _facts(out: Path, meta: Meta) -> dict[str, Any]:
    """What was made, as one JSON object."""
    return {
        "path": str(out),
        "fingerprint": meta.fingerprint,
        "tokenizer": meta.tokenizer,
        "n_vocab": meta.n_vocab,
        "seed": meta.seed,
        "domains": {
            name: {
                split: {
                    "documents": shard.documents,
                    "tokens": shard.tokens,
                    "bytes": shard.bytes,
                    "bytes_per_token": round(shard.bytes / shard.tokens, 4),
                }
                for split, shard in splits.items()
            }
            | {"duplicates": meta.duplicates[name]}
            for name, splits in meta.domains.items()
        },
    }


def _show(facts: dict[str, Any]) -> None:
    rows = [
        (name, split, f"{part['documents']:,}", f"{part['tokens']:,}", f"{part['bytes_per_token']:.2f}")
        for name, splits in facts["domains"].items()
        for split, part in splits.items()
        if split != "duplicates"
    ]
    print_table(["domain", "split", "documents", "tokens", "bytes a token"], rows)
    dropped = sum(splits["duplicates"] for splits in facts["domains"].values())
    print_facts([
        ("folder", facts["path"]),
        ("vocabulary", f"{facts['n_vocab']} tokens, {facts['tokenizer'][:12]}…"),
        ("data", f"{facts['fingerprint'][:12]}…"),
        ("duplicates", f"{dropped} documents left out"),
    ])  # fmt: skip

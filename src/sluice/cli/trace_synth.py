"""`sluice trace synth`: writes a synthetic trace whose routing has the locality that is published. Measures nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.options import Json
from sluice.cli.terminal import emit, note

Out = Annotated[Path, typer.Argument(metavar="OUT", help="The trace to write, a Parquet file.")]
Tokens = Annotated[int, typer.Option("--tokens", metavar="N", help="Tokens, each a step of decoding.")]
Seed = Annotated[int, typer.Option("--seed", metavar="S", help="One seed always gives the same trace.")]
Layers = Annotated[int, typer.Option("--layers", metavar="N", help="Layers with experts.")]
Experts = Annotated[int, typer.Option("--experts", metavar="N", help="Experts of each layer.")]
TopK = Annotated[int, typer.Option("--top-k", metavar="N", help="Experts that a token chooses in each layer.")]
Force = Annotated[bool, typer.Option("--force", metavar="", help="Overwrite OUT.")]


def synth(
    out: Out, tokens: Tokens = 2000, seed: Seed = 0, layers: Layers = 48, experts: Experts = 128, top_k: TopK = 8,
    force: Force = False, json: Json = False,
) -> int:  # fmt: skip
    """Write a synthetic trace, with the routing that is published of Qwen3-30B-A3B unless its shape is changed."""
    from sluice.lab.synthetic import Shape, write

    shape = Shape(layers=layers, experts=experts, top_k=top_k, seed=seed)
    write(out, shape, tokens, force=force)
    written = {"path": str(out), "tokens": tokens, "token_demands": tokens * layers * top_k, "seed": seed}
    if json:
        emit(written)
    else:
        note(f"wrote {out}: {written['token_demands']} demands of {tokens} tokens")
    return 0

"""The commands under one name; knows none of their business."""

from __future__ import annotations

from typing import Annotated

import typer

from sluice import __version__
from sluice.cli.batch import batch
from sluice.cli.bench import bench
from sluice.cli.chat import chat
from sluice.cli.commands import register
from sluice.cli.doctor import doctor
from sluice.cli.eval import app as eval_app
from sluice.cli.gate import gate
from sluice.cli.inspect import inspect
from sluice.cli.lora import app as lora_app
from sluice.cli.pack import pack
from sluice.cli.plan import plan
from sluice.cli.prerouter import app as prerouter_app
from sluice.cli.run import run
from sluice.cli.serve import serve
from sluice.cli.simulate import simulate
from sluice.cli.trace import app as trace_app
from sluice.cli.train import app as train_app
from sluice.cli.tune import tune

app = typer.Typer(name="sluice", add_completion=False, pretty_exceptions_enable=False)
alone = (run, chat, serve, batch, bench, inspect, pack, doctor, simulate, plan, tune, gate)
register(app, {command.__name__: command for command in alone})
app.add_typer(trace_app)
app.add_typer(eval_app)
app.add_typer(prerouter_app)
app.add_typer(lora_app)
app.add_typer(train_app)


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", metavar="", help="Print the version.")] = False,
) -> None:
    """Run Mixture-of-Experts language models that are larger than memory: experts are read from the model file as the
    router asks for them, within the memory that --ram gives."""
    if version:
        print(__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())
    else:
        return
    raise typer.Exit

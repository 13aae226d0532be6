"""Puts commands under one name, with help made of their docstrings; knows none of their business."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import typer

Command = Callable[..., int | None]


def register(app: typer.Typer, commands: Mapping[str, Command]) -> None:
    """Add `commands` by name. A docstring's lines are joined to paragraphs, which the terminal breaks anew."""
    for name, command in commands.items():
        paragraphs = (command.__doc__ or "").split("\n\n")
        app.command(name, help="\n\n".join(" ".join(text.split()) for text in paragraphs))(command)


def group(name: str, about: str, commands: Mapping[str, Command]) -> typer.Typer:
    """Commands under a name of their own, which alone shows their help."""
    app = typer.Typer(name=name, add_completion=False)

    @app.callback(invoke_without_command=True, help=about)
    def top(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            print(context.get_help())
            raise typer.Exit

    register(app, commands)
    return app

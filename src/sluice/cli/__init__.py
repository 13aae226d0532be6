"""The command line: one file per subcommand, each of which parses, calls and prints. Environment variables end here."""

from sluice.cli.ending import main

__all__ = ["main"]

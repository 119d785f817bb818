"""The `anabranch` command."""

from __future__ import annotations

import sys

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def anabranch() -> None:
    """Elastic, key-ordered streams for Python and Spark, on the Kafka protocol."""


def main() -> None:
    """Run the command line."""
    from anabranch.cli.serve import serve

    app.command()(serve)
    sys.exit(app())

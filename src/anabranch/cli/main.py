"""The `anabranch` command. Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from anabranch import __version__
from anabranch.base.errors import AnabranchError
from anabranch.cli import group, topic
from anabranch.cli.checkpoint import convert_checkpoint
from anabranch.cli.consume import consume
from anabranch.cli.demo import demo
from anabranch.cli.explain import explain
from anabranch.cli.plan import verify_plan
from anabranch.cli.produce import produce
from anabranch.cli.repair import repair
from anabranch.cli.serve import serve

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(serve)
app.add_typer(topic.app, name="topic")
app.add_typer(group.app, name="group")
app.command()(produce)
app.command()(consume)
app.command()(explain)
app.command()(demo)
app.command()(repair)
app.command(name="verify-plan")(verify_plan)
app.command(name="convert-checkpoint")(convert_checkpoint)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"anabranch {__version__}")
        raise typer.Exit


@app.callback()
def anabranch(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Elastic, key-ordered streams for Python and Spark, on the Kafka protocol."""


def main() -> None:
    """Run the command line; an expected failure is one sentence on standard error."""
    try:
        app(prog_name="anabranch")
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(EXIT_FAILED)
    except (AnabranchError, OSError) as error:
        typer.echo(f"anabranch: {error}", err=True)
        sys.exit(EXIT_FAILED)

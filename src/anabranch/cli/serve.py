"""`anabranch serve`: one broker, until it is told to stop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli.broker import Options, serve_broker
from anabranch.server import settings as table


def serve(
    config: Annotated[Path | None, typer.Option(help="A properties file with settings.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="A setting, as name=value; may be repeated.")] = None,
    data: Annotated[Path | None, typer.Option(help="The data directory (log.dirs).")] = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT to listen on (listeners).")] = None,
    settings: Annotated[bool, typer.Option("--settings", help="List every setting, then exit.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="With --settings: as a table for documents.")] = False,
) -> None:
    """Run a broker: on localhost:9092, with its data in ./anabranch-data, unless you say otherwise.

    Settings have Kafka's names. They come from --config, the environment (ANABRANCH_LOG_DIRS is log.dirs) and --set.
    """
    if settings and markdown:
        typer.echo(table.as_markdown(), nl=False)
        return
    if settings:
        for item in table.described():
            typer.echo(f"{item.name} ({item.kind}, default {item.default or 'empty'})\n    {item.doc}")
        return
    raise typer.Exit(serve_broker(Options(config, set_ or [], data, listen)))

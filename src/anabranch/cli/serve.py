"""`anabranch serve` with the help and checks of typer: its options are those of `broker.OPTIONS`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from anabranch.cli.broker import OPTIONS, Option, Options, serve_broker
from anabranch.server.settings import described
from anabranch.server.settings.markdown import as_markdown

_TYPES: dict[str, Any] = {"path": Path | None, "text": str | None, "texts": list[str] | None}


def _parameter(option: Option) -> inspect.Parameter:
    annotation: Any = Annotated[_TYPES[option.kind], typer.Option(option.name, help=option.help)]
    return inspect.Parameter(option.field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes **options the parameters of `OPTIONS`."""
    signature = inspect.signature(command, eval_str=True)
    own = [it for it in signature.parameters.values() if it.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters = [*map(_parameter, OPTIONS), *own]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {it.name: it.annotation for it in parameters}
    return command


@_with_options
def serve(
    *,
    settings: Annotated[bool, typer.Option("--settings", help="List every setting, then exit.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="With --settings: as a Markdown table.")] = False,
    **options: Any,
) -> None:
    """Run a broker, by default on localhost:9092 with its data in ./anabranch-data.

    Settings have Kafka's names. They come from --config, the environment (ANABRANCH_LOG_DIRS is log.dirs) and --set;
    a later source overrides an earlier one.
    """
    if settings and markdown:
        typer.echo(as_markdown(), nl=False)
        return
    if settings:
        for item in described():
            typer.echo(f"{item.name} ({item.kind}, default {item.default or 'empty'})\n    {item.doc}")
        return
    raise typer.Exit(serve_broker(Options(**{**options, "given": options["given"] or []})))

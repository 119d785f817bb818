"""The output of commands: tables and progress bars for people, JSON and plain lines for programs.

Results go to standard output; progress, notes and errors go to standard error, so that output can be piped. A progress
bar is drawn on a terminal; elsewhere a line is written every few seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Protocol

import typer

PLAIN_INTERVAL_S = 5.0

Servers = Annotated[
    str,
    typer.Option(
        "--bootstrap-servers", "-b", envvar="ANABRANCH_BOOTSTRAP_SERVERS", help="HOST:PORT of brokers, with commas."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
DEFAULT_SERVERS = "localhost:9092"


class Advance(Protocol):
    """Moves a progress bar to `done` of its total, with a remark."""

    def __call__(self, done: float, remark: str = "") -> None: ...


def print_json(value: object) -> None:
    """Print one JSON document on a line."""
    typer.echo(json.dumps(value, default=str, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str | None = None) -> None:
    """Print a table for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def note(text: str) -> None:
    """Print a line about the work to standard error."""
    typer.echo(text, err=True)


@contextmanager
def progress(title: str, total: float | None) -> Iterator[Advance]:
    """Show the progress of long work; `total` is None if unknown."""
    if not sys.stderr.isatty():
        yield _plain_lines(title, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[remark]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=False) as bars:
        bar = bars.add_task(title, total=total, remark="")
        yield lambda done, remark="": bars.update(bar, completed=done, remark=remark)


def _plain_lines(title: str, total: float | None) -> Advance:
    printed_at = time.monotonic()

    def advance(done: float, remark: str = "") -> None:
        nonlocal printed_at
        if time.monotonic() - printed_at >= PLAIN_INTERVAL_S:
            printed_at = time.monotonic()
            share = f" {100 * done / total:.0f}%" if total else ""
            note(f"{title}{share} {remark}".rstrip())

    return advance

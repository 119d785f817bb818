"""`anabranch demo`: the main job on real data, checked against a plain pass over the file.

336,776 flights, in order of scheduled departure, keyed by aircraft, go into a topic while a Spark query follows every
aircraft and the topic is resized 2 → 6 → 3 → 8. Then the same without order, for contrast.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anabranch.cli.output import AsJson, note, print_json, progress

if TYPE_CHECKING:
    from anabranch.demo.run import Run


def demo(
    rows: Annotated[int | None, typer.Option("--rows", "-n", min=1_000, help="Only so many flights.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep broker and data in ./anabranch-demo.")] = False,
    contrast: Annotated[bool, typer.Option(help="Also run without key order.")] = True,
    report: Annotated[Path | None, typer.Option(help="Draw both runs in a page (HTML), and open it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Follow every aircraft of 2013 with Spark while the topic is resized, and compare with a plain pass."""
    from anabranch.demo.data import expected_results, load_flights
    from anabranch.demo.run import own_broker, run_all

    began = time.perf_counter()
    with progress("reading the flights of 2013", None):
        flights = load_flights(rows)
        expected = expected_results(flights)
    home = Path("anabranch-demo").absolute() if keep else Path(tempfile.mkdtemp(prefix="anabranch-demo-"))
    with own_broker(home, keep=keep) as address:
        runs = run_all(address, home, flights, expected, ("key", "none") if contrast else ("key",), progress)
    _report(runs, len(expected), time.perf_counter() - began, as_json=as_json)
    if report is not None:
        _draw(runs, len(expected), report)
    if keep:
        note(f"The broker still runs at {address}, data in {home}. Stop it with: kill $(cat {home / 'pid'})")
    else:
        shutil.rmtree(home, ignore_errors=True)
    if runs[0].wrong:
        raise typer.Exit(1)


def _draw(runs: list[Run], aircraft: int, path: Path) -> None:
    """Write the report, and open it where there is a display."""
    from anabranch.demo.report import page
    from anabranch.demo.story import tell

    path.write_text(page([tell(run.events) for run in runs], aircraft), encoding="utf-8")
    note(f"What happened, as a picture: {path}")
    if sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(path.absolute().as_uri())


def _report(runs: list[Run], aircraft: int, took_s: float, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "aircraft": aircraft,
                "took_s": round(took_s, 1),
                "runs": [
                    {
                        "ordering": run.ordering,
                        "rows": run.rows,
                        "batches": run.batches,
                        "took_s": round(run.took_s, 1),
                        "resizes": [
                            {"from": old, "to": new, "took_ms": round(took_ms, 1)}
                            for _, took_ms, old, new in run.events.resizes
                        ],
                        "differences": run.wrong,
                    }
                    for run in runs
                ],
            }
        )
        return
    for run in runs:
        how = "in order of keys" if run.ordering == "key" else "without order (enable.ordered.delivery=false)"
        steps = ", ".join(f"{old} → {new} in {took_ms:.0f} ms" for _, took_ms, old, new in run.events.resizes)
        typer.echo(f"\n{how}")
        typer.echo(f"  {run.rows:,} flights sent and read in {run.took_s:.1f} s, {run.batches} micro-batches")
        typer.echo(f"  resized: {steps}")
        verdict = f"differences: {run.wrong:,}"
        typer.echo(f"  {aircraft:,} aircraft compared with a plain pass over the file, {verdict}")
    typer.echo(f"\n{took_s:.0f} s in total.")
    if runs[0].wrong:
        note("The ordered run must have no differences. This is a bug of Anabranch; please report it.")

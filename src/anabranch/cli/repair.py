"""`anabranch repair`: restore the metadata of a stopped broker from its copy, and log starts from the logs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def repair(
    *,
    data: Annotated[Path, typer.Option("--data", help="The data directory (log.dirs) of a stopped broker.")] = Path(
        "anabranch-data"
    ),
    apply: Annotated[bool, typer.Option("--apply", help="Repair; without, only tell what would be done.")] = False,
) -> None:
    """Restore the metadata of a data directory so that it fits the logs. Files are renamed, never deleted."""
    from anabranch.base.errors import AnabranchError
    from anabranch.runtime.disk import Disk
    from anabranch.server.cluster.repair import plan_repair

    if not data.is_dir():
        raise AnabranchError(f"There is no data directory {data}.")
    directory, steps = plan_repair(data.absolute(), Disk())
    try:
        for step in steps:
            typer.echo(step.text if apply else f"would {step.text}")
            if apply:
                step.do()
    finally:
        directory.release()
    if not steps:
        typer.echo("Nothing to repair: the metadata and the logs fit each other.")
    elif apply:
        typer.echo("Repaired.")
    else:
        typer.echo("Nothing was changed; repeat with --apply.")

"""`anabranch verify-plan`: check the plans that Spark queries logged."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from anabranch.base.errors import AnabranchError
from anabranch.cli.output import AsJson, print_json


def verify_plan(
    source: Annotated[
        str, typer.Argument(metavar="FILE", help="A file with plans, one JSON object a line; - is stdin.")
    ],
    as_json: AsJson = False,
) -> None:
    """Check by brute force that the logged plans of a query keep every key in order, and leave nothing out."""
    from anabranch.spark.plan import verify_history

    try:
        lines = sys.stdin.readlines() if source == "-" else open(source, encoding="utf-8").readlines()  # noqa: SIM115
    except OSError as error:
        raise AnabranchError(f"{source} cannot be read: {error.strerror}.") from error
    try:
        found = verify_history(lines)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise AnabranchError(f"{source} has JSON that is not a plan: {type(error).__name__} {error}") from error
    checked = found.plans
    wrong = [{"line": each.line, "problem": each.problem} for each in found.problems]
    if as_json:
        print_json({"plans": checked, "problems": wrong, "torn": list(found.torn)})
    else:
        for problem in wrong:
            typer.echo(f"line {problem['line']}: {problem['problem']}")
        for line in found.torn:
            typer.echo(f"line {line} ends in the middle, as after a crash: no plan")
        typer.echo(f"{checked} plans checked, {len(wrong)} problems.")
    if wrong or not checked:
        raise typer.Exit(1)

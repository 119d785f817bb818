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
    """Check by brute force that the micro-batches of a logged query plan keep every key in order."""
    from anabranch.spark.plan import verify

    try:
        lines = sys.stdin.readlines() if source == "-" else open(source, encoding="utf-8").readlines()  # noqa: SIM115
    except OSError as error:
        raise AnabranchError(f"{source} cannot be read: {error.strerror}.") from error
    checked, wrong = 0, []
    for number, line in enumerate(lines, 1):
        start = line.find("{")
        if start < 0:
            continue
        try:
            problems = verify(line[start:])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise AnabranchError(f"{source}, line {number}: not a plan: {error}") from error
        checked += 1
        wrong += [{"line": number, "problem": problem} for problem in problems]
    if as_json:
        print_json({"plans": checked, "problems": wrong})
    else:
        for problem in wrong:
            typer.echo(f"line {problem['line']}: {problem['problem']}")
        typer.echo(f"{checked} plans checked, {len(wrong)} problems.")
    if wrong or not checked:
        raise typer.Exit(1)

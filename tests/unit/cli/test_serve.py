"""The options of `anabranch serve`: declared once, read the same with and without typer."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer.main

from anabranch.cli.broker import OPTIONS, Options, options_of
from anabranch.cli.main import app

LINES = [
    [],
    ["--data", "d"],
    ["--listen=127.0.0.1:0", "--config", "broker.properties"],
    ["--set", "a=1", "--set=b=2", "--data=x=y"],
    [word for option in OPTIONS for word in (option.name, "v")],
]


@pytest.mark.parametrize("words", LINES)
def test_both_ways_to_read_a_command_line_agree(words: list[str]) -> None:
    quick = options_of(["serve", *words])
    command = typer.main.get_command(app)
    with command.make_context("anabranch", ["serve", *words]) as context:
        serve = command.get_command(context, "serve")  # type: ignore[attr-defined]
        given = serve.make_context("serve", list(words), parent=context).params
    whole = Options(**{option.field: given[option.field] for option in OPTIONS})
    whole.given = list(whole.given or ())
    assert quick == whole


def test_every_option_has_a_field_and_every_field_an_option() -> None:
    assert [option.field for option in OPTIONS] == list(Options.__dataclass_fields__)
    assert options_of(["serve", "--data", "d"]) == Options(data=Path("d"))


@pytest.mark.parametrize(
    "words", [["topic"], ["serve", "--help"], ["serve", "--data"], ["serve", "d"], ["serve", "--settings"], []]
)
def test_what_needs_explaining_is_left_to_the_whole_command_line(words: list[str]) -> None:
    assert options_of(words) is None

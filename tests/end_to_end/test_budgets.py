"""The table of budgets in docs/reliability.md and the broker: every metric that it names is one that the broker has."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from anabranch.protocol.messages.metadata import MetadataRequest
from anabranch.server.settings import Settings
from tests.support.broker import running
from tests.support.wire import WireClient

DOCUMENT = Path(__file__).parents[2] / "docs" / "reliability.md"
NAME = re.compile(r"`((?:kafka|anabranch|\.\.\.)_[a-z_]+)`")

FROM_THE_FIRST_ON = {"anabranch_loop_long_steps_total"}
"""Counted by API: there once something was counted."""


def named_metrics() -> set[str]:
    """The metrics in the last column of the table; `..._waiting` has the beginning of the one before."""
    found: set[str] = set()
    for line in DOCUMENT.read_text().partition("## Bounds")[2].splitlines():
        if line.startswith("| "):
            prefix = ""
            for name in NAME.findall(line.rpartition(" |")[0].rpartition(" | ")[2]):
                if name.startswith("..."):
                    name = prefix + name.removeprefix("...")
                prefix = "_".join(name.split("_")[:3])
                found.add(name)
    return found


def test_every_metric_that_the_table_names_is_there(tmp_path: Path) -> None:
    named = named_metrics()
    assert len(named) > 30
    with running(tmp_path) as broker:
        with WireClient(broker.port) as client:
            client.call(MetadataRequest(topics=[]), 9)
        there = {name.partition("{")[0] for name in broker.metrics()}
    assert sorted(named - there - FROM_THE_FIRST_ON) == []


def test_every_budget_in_bytes_or_number_is_in_the_table() -> None:
    table = DOCUMENT.read_text().partition("## Bounds")[2]
    budgets = re.compile(r"queued\.max\..*|max\..*|.*\.(max\.bytes|bytes\.max|slots)|individual\.commit\.max\..*")
    settings = [it.metadata for it in fields(Settings) if not it.metadata["doc"].startswith("Accepted")]
    names = [it["name"] for it in settings if budgets.fullmatch(it["name"])]
    assert len(names) > 10
    assert not [name for name in names if f"`{name}`" not in table]

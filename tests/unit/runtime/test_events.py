"""The broker's log lines: one line per event whatever is in it, and seldom where it repeats."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from io import StringIO

import pytest

from anabranch.runtime.events import EventLimit, EventLogger, set_up


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    logger = logging.getLogger("anabranch")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


def test_fields_that_would_break_a_line_are_quoted() -> None:
    stream = StringIO()
    set_up("logfmt", "info", stream)
    EventLogger("network").warning("closed", peer="a b", reason='x\n"y"', count=3)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    assert lines[0].endswith('level=warning event=closed from=network peer="a b" reason="x\\n\\"y\\"" count=3')


def test_json_lines_keep_numbers_and_carry_the_exception() -> None:
    stream = StringIO()
    set_up("json", "debug", stream)
    EventLogger("log").error("failed", exception=OSError(5, "I/O"), offset=7, ok=False, name=None)
    line = json.loads(stream.getvalue())
    assert (line["level"], line["event"], line["offset"], line["ok"], line["name"]) == (
        "error",
        "failed",
        7,
        False,
        None,
    )
    assert "I/O" in line["exception"]


def test_events_below_the_level_are_not_logged() -> None:
    stream = StringIO()
    set_up("logfmt", "warning", stream)
    EventLogger("log").info("quiet")
    assert stream.getvalue() == ""


def test_one_event_in_an_interval_passes_and_the_others_are_counted() -> None:
    limit = EventLimit(10)
    assert [limit.admit(now) for now in (0, 1, 9, 10, 11, 30)] == [0, None, None, 2, None, 1]


def test_a_burst_is_admitted_and_what_follows_is_counted_until_the_next_interval() -> None:
    limit = EventLimit(10.0, 3)
    assert [limit.admit(now) for now in (0.0, 1.0, 2.0, 3.0, 9.9)] == [0, 0, 0, None, None]
    assert [limit.admit(now) for now in (10.0, 10.0, 10.0, 10.0, 20.0)] == [2, 0, 0, None, 1]

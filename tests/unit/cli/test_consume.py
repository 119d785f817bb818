from __future__ import annotations

import json
from contextlib import nullcontext

import pyarrow as pa
import pytest
import typer

from anabranch.cli.consume import _PRINTERS, Form, Protocol, _check_share, filter_of, share_of
from anabranch.client import RecordFilter
from anabranch.machines.keyspace import SPACE, SPACE_END, cuts

ROWS = [
    {"partition": 1, "offset": 5, "timestamp": 1_356_998_400_250, "key": b"k", "value": b"v"},
    {"partition": 1, "offset": 6, "timestamp": 1 << 60, "key": None, "value": b"\xff"},
    {"partition": 1, "offset": 7, "timestamp": -1, "key": b"", "value": None},
]


def printed(form: Form, capsys: pytest.CaptureFixture[str]) -> list[str]:
    table = pa.Table.from_pylist(
        ROWS,
        pa.schema(
            {
                "partition": pa.int32(),
                "offset": pa.int64(),
                "timestamp": pa.int64(),
                "key": pa.binary(),
                "value": pa.binary(),
            }
        ),
    )
    place = table.schema.get_field_index("timestamp")
    _PRINTERS[form]().print(table.set_column(place, "timestamp", table.column(place).cast(pa.timestamp("ms", "UTC"))))
    return capsys.readouterr().out.splitlines()


def test_times_in_no_calendar_are_printed_as_numbers_or_not_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in printed(Form.JSON, capsys)]
    assert [row["timestamp"] for row in rows] == [
        "2013-01-01T00:00:00.250+00:00",
        1 << 60,
        "1969-12-31T23:59:59.999+00:00",
    ]
    assert [list(row) for row in rows] == [["partition", "offset", "timestamp", "key", "value"]] * 3
    assert rows[1]["value"] == {"base64": "/w=="}
    _, first, second, third = printed(Form.TABLE, capsys)
    assert "2013-01-01 00:00:00" in first
    assert second.split() == ["1", "6", "\\xff"]
    assert "1969-12-31 23:59:59" in third


def test_a_share_is_one_of_even_ones_or_a_range() -> None:
    assert [share_of(f"{k}/3") for k in (1, 2, 3)] == cuts(SPACE, 3)
    assert share_of("5-9") == (5, 9)
    assert share_of(f"0-{SPACE_END}") == SPACE


@pytest.mark.parametrize(
    "text", ["", "3", "0/3", "4/3", "1/0", "1/1001", "9-5", f"0-{SPACE_END + 1}", "a-b", "-1-5", "1/²"]
)
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no share"):
        share_of(text)


@pytest.mark.parametrize(
    ("group", "share", "protocol", "wrong"),
    [
        (None, "keys", Protocol.CONSUMER, "--share keys is for members of a group"),
        (None, "any", Protocol.CONSUMER, "--share any is for members of a group"),
        ("g", "keys", Protocol.CLASSIC, "--share keys needs --group-protocol consumer"),
        ("g", "keys", Protocol.CONSUMER, None),
        ("g", "any", Protocol.CLASSIC, None),
        ("g", "1/3", Protocol.CONSUMER, None),
        (None, "1/3", Protocol.CONSUMER, None),
    ],
)
def test_a_share_of_members_needs_a_group_that_can_share(
    group: str | None, share: str, protocol: Protocol, wrong: str | None
) -> None:
    with nullcontext() if wrong is None else pytest.raises(typer.BadParameter, match=wrong):
        _check_share(group, share, protocol)


def test_a_filter_is_made_of_what_is_given_and_none_where_nothing_is() -> None:
    assert filter_of(None, [], None, None) is None
    assert filter_of(["k1", "\u00fc"], None, None, None) == RecordFilter(keys=(b"k1", b"\xc3\xbc"))
    assert filter_of(None, ["k1"], 0, 9) == RecordFilter(keys_refused=(b"k1",), size_min=0, size_max=9)
    assert filter_of(None, None, 5, None) == RecordFilter(size_min=5)
    assert filter_of(None, None, None, 0) == RecordFilter(size_max=0)


def test_a_filter_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="--key or --refuse-key"):
        filter_of(["a"], ["b"], None, None)
    with pytest.raises(typer.BadParameter, match="at least 6 and at most 5"):
        filter_of(None, None, 6, 5)

"""The text of `anabranch group describe`, column by column."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from anabranch.base.errors import AnabranchError
from anabranch.base.ids import TopicPartition
from anabranch.cli.group import _document, _of_types, _offsets, _print, _split
from anabranch.client import Gap, GroupDescription, MemberDescription, OffsetAndMetadata, WaitedOn, WaitingPartition
from anabranch.client.admin.groups import GroupListing
from anabranch.machines.keyspace import SPACE_END, Interval


def partitions(*numbers: int) -> frozenset[TopicPartition]:
    return frozenset(TopicPartition("flights", number) for number in numbers)


def member(name: str, assigned: frozenset[TopicPartition], target: frozenset[TopicPartition]) -> MemberDescription:
    return MemberDescription(
        member_id=name,
        instance_id=None,
        client_id="app",
        client_host="/10.0.0.1",
        epoch=7,
        topics=("flights",) if name == "m1" else (),
        pattern=None if name == "m1" else "fl.*",
        assigned=assigned,
        target=target,
        type="consumer",
    )


def test_members_are_shown_with_what_they_subscribe_to_and_what_they_revoke(
    capsys: pytest.CaptureFixture[str],
) -> None:
    members = (member("m1", partitions(0, 1, 2, 5), partitions(0, 1)), member("m2", partitions(), partitions(2, 5)))
    group = GroupDescription("billing", "consumer", "Reconciling", "uniform", 8, 8, members, "localhost:9092")
    offsets = [
        {"topic": "flights", "partition": 0, "committed": 3, "log_end": 10, "lag": 7, "owner": "m1"},
        {"topic": "flights", "partition": 9, "committed": None, "log_end": None, "lag": None, "owner": None},
    ]
    _print(group, offsets)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "billing  (consumer, Reconciling, assignor uniform, epoch 8, assigned at 8)",
        "  coordinator localhost:9092",
        "",
        "member  client         epoch  subscribed  current        target       pending      revoking",
        "m1      app /10.0.0.1  7      flights     flights 0-2,5  flights 0-1               flights 2,5",
        "m2      app /10.0.0.1  7      /fl.*/                     flights 2,5  flights 2,5",
        "",
        "topic    partition  committed offset  log end offset  lag  member",
        "flights  0          3                 10              7    m1",
        "flights  9",
        "",
    ]


def test_the_keys_of_shared_partitions_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    tp = TopicPartition("flights", 0)
    half = (SPACE_END + 1) // 2
    lower, upper = (Interval(0, half - 1),), (Interval(half, SPACE_END),)
    first = replace(member("m1", partitions(0, 1), partitions(0, 1)), target_key_ranges={tp: lower})
    second = replace(member("m2", partitions(0), partitions(0)), key_ranges={tp: upper}, target_key_ranges={tp: upper})
    assert (first.pending, first.revoking) == (frozenset(), partitions(0)), "it has all keys, and is to have half"
    assert (second.pending, second.revoking) == (frozenset(), frozenset())
    third = replace(second, key_ranges={tp: lower})
    assert (third.pending, third.revoking) == (partitions(0), partitions(0))
    group = GroupDescription("billing", "consumer", "Reconciling", "uniform", 8, 8, (second,), "localhost:9092")
    _print(group, [])
    shown = capsys.readouterr().out.splitlines()[4]
    assert "flights 0 (50.0-100.0 %)  flights 0 (50.0-100.0 %)" in shown
    assert _document(group, [])["members"][0]["key_ranges"] == [
        {"topic": "flights", "partition": 0, "start": half, "end": SPACE_END}
    ]


def test_work_finished_out_of_turn_is_shown_with_what_is_missing_below_and_whose_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    members = (member("m1", partitions(0), partitions(0)),)
    group = GroupDescription("billing", "consumer", "Stable", "uniform", 8, 8, members, "localhost:9092")
    middle = 1 << 62
    shares = [
        {"start": 0, "end": middle - 1, "offset": 3, "owners": ["m1"]},
        {"start": middle, "end": 2 * middle - 1, "offset": 9, "owners": ["m1", "m2"]},
    ]
    many = [[2 * number, 2 * number] for number in range(5, 17)]
    row = {"topic": "flights", "committed": 3, "log_end": 40, "lag": 37}
    offsets: list[dict[str, Any]] = [
        {**row, "partition": 0, "owner": "m1", "shares": shares, "ranges": [[5, 6]], "gaps": [[3, 4]]},
        {**row, "partition": 1, "owner": None, "ranges": many, "gaps": [[first - 1, first - 1] for first, _ in many]},
    ]
    offsets[0]["gap_owners"] = [["m1", "gone"]]
    offsets[1]["gap_owners"] = [[] for _ in many]
    _print(group, offsets)
    written = capsys.readouterr()
    rows = [line.split() for line in written.out.splitlines()]
    begin = rows.index(["topic", "partition", "keys", "next", "offset", "member"])
    assert rows[begin + 1 : begin + 10] == [
        ["flights", "0", "0.0-50.0", "%", "3", "m1"],
        ["flights", "0", "50.0-100.0", "%", "9", "m1,", "m2"],
        [],
        ["topic", "partition", "missing", "offsets", "offsets", "done", "up", "to", "member"],
        ["flights", "0", "3-4", "2", "6", "m1,", "gone"],
        *(["flights", "1", str(2 * at - 1), "1", str(2 * at), "no", "member"] for at in range(5, 9)),
    ]
    assert "2 more gaps; --json shows all." in written.err


class Committed:
    """An Admin that knows what the group has committed in partition 0."""

    def __init__(self, at: OffsetAndMetadata) -> None:
        self.at = at

    def list_group_offsets(self, group: str) -> dict[TopicPartition, OffsetAndMetadata]:
        return {TopicPartition("flights", 0): self.at}

    def topics(self) -> dict[str, Any]:
        return {}

    def describe_slices(self, group: str, existing: list[TopicPartition]) -> dict[TopicPartition, Any]:
        return {}


def test_shares_and_gaps_of_a_shared_partition_are_told_with_their_owners() -> None:
    tp, half = TopicPartition("flights", 0), (SPACE_END + 1) // 2
    parts = {"m3": (0, half // 2 - 1), "m2": (half // 2, half - 1), "m1": (half, SPACE_END)}
    members = tuple(
        replace(member(name, partitions(0), partitions(0)), key_ranges={tp: (Interval(*keys),)})
        for name, keys in sorted(parts.items())
    )
    group = GroupDescription("billing", "consumer", "Stable", "uniform", 8, 8, members, "localhost:9092")
    shares = [(0, half - 1, 100), (half, SPACE_END, 43)]
    gap = Gap(43, 44, ("m1",))
    at = OffsetAndMetadata(43, ranges=[(45, 47)], shares=shares, gaps=[gap])
    (row,) = _offsets(cast(Any, Committed(at)), "billing", group)
    assert (row["owner"], row["owners"]) == ("m3", ["m3", "m2", "m1"])
    assert (row["gaps"], row["gap_owners"]) == ([[43, 44]], [["m1"]])
    assert [(share["offset"], share["owner"], share["owners"]) for share in row["shares"]] == [
        (100, "m3", ["m3", "m2"]),
        (43, "m1", ["m1"]),
    ]
    (alone,) = _offsets(cast(Any, Committed(at)), "billing", replace(group, members=members[1:2]))
    assert [(share["owner"], share["owners"]) for share in alone["shares"]] == [("m2", ["m2"]), (None, [])]


def test_a_group_without_members_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    _print(GroupDescription("old", "classic", "Empty", "", -1, -1, (), "localhost:9092"), [])
    assert capsys.readouterr().out == (
        "old  (classic, Empty, assignor none)\n  coordinator localhost:9092\n\nNo members.\n\n"
    )


class Groups:
    """An Admin that knows three groups."""

    def list_groups(self) -> list[GroupListing]:
        return [GroupListing(name, kind, "Empty", "") for name, kind in TYPES.items()]


TYPES = {"a": "classic", "b": "consumer", "c": "consumer"}


@pytest.mark.parametrize(
    ("named", "types", "described"),
    [
        ([], ["consumer"], ["b", "c"]),
        ([], ["classic", "Consumer"], ["a", "b", "c"]),
        ([], ["share"], []),
        (["c"], ["consumer"], ["c"]),
        (["a", "missing"], [], ["a", "missing"]),
        (["missing"], ["classic"], ["missing"]),
    ],
)
def test_groups_are_described_by_name_and_by_type(named: list[str], types: list[str], described: list[str]) -> None:
    assert _of_types(cast(Any, Groups()), named, types) == described


def test_a_named_group_of_another_type_is_refused_with_its_type() -> None:
    with pytest.raises(AnabranchError, match="group 'a' is of type classic, not consumer; leave --type out"):
        _of_types(cast(Any, Groups()), ["b", "a"], ["consumer"])


def test_an_option_takes_names_with_commas_and_may_be_repeated() -> None:
    assert _split(["classic,consumer", " stable , "]) == ["classic", "consumer", "stable"]
    assert _split(None) == []


def test_waiting_partitions_are_shown_with_what_they_wait_on(capsys: pytest.CaptureFixture[str]) -> None:
    flights = [TopicPartition("flights", number) for number in range(4)]
    waits = (WaitedOn(flights[0], "m1", 40, 12.34), WaitedOn(flights[1], "", None, 0.0))
    group = GroupDescription(
        "billing",
        "consumer",
        "Reconciling",
        "uniform",
        8,
        8,
        (member("m1", partitions(0), partitions(0)),),
        "localhost:9092",
        (WaitingPartition(flights[2], 1_500, waits), WaitingPartition(flights[3], 60_000, waits[:1], True)),
    )
    _print(group, [])
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()][-5:-1] == [
        "waiting partition  gate          waited  waits on   owner   records left  records/s",
        "flights-2          closed        1.5 s   flights-0  m1      40            12.3",
        "                                         flights-1  nobody  log offline   0.0",
        "flights-3          open by time  60.0 s  flights-0  m1      40            12.3",
    ]
    assert _document(group, [])["waiting"] == [
        {
            "topic": "flights",
            "partition": 2,
            "waits_ms": 1_500,
            "opened_by_time": False,
            "waits_on": [
                {"partition": 0, "owner": "m1", "records_left": 40, "records_per_second": 12.3},
                {"partition": 1, "owner": None, "records_left": None, "records_per_second": 0.0},
            ],
        },
        {
            "topic": "flights",
            "partition": 3,
            "waits_ms": 60_000,
            "opened_by_time": True,
            "waits_on": [{"partition": 0, "owner": "m1", "records_left": 40, "records_per_second": 12.3}],
        },
    ]

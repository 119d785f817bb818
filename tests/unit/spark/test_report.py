"""What a query tells about itself in progress reports."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from anabranch.machines.lineage import Lineage
from anabranch.spark.plan import TopicOffsets, TopicSnapshot, extent, report
from anabranch.spark.progress import PartitionProgress, partitions_of

GROWN = Lineage.of_ends(1, (1, 2, 4), ({0: 3}, {0: 3, 1: 0}))
LOOK = TopicSnapshot("t", "id", GROWN, dict.fromkeys(range(4), 0), {0: 3, 1: 0, 2: 0, 3: 7})


def progress(*latest: Any) -> Any:
    return SimpleNamespace(sources=[SimpleNamespace(latestOffset=text) for text in latest])


def test_a_report_names_ends_lag_and_the_gates_that_hold_records_back() -> None:
    reached = extent({"t": LOOK}, {}, limit=2).end
    assert report({"t": LOOK}, reached, {"t": {0: 5, 3: 7}}) == {
        "t": {
            "layouts": 3,
            "offsets": {"0": 3, "1": 0, "2": 0, "3": 7},
            "lag": {"0": 1, "1": 0, "2": 0, "3": 7},
            "gates": {"3": {"at": 0, "waits": {"0": 3}}},
            "transactions": {"0": 2},
        }
    }


def test_a_report_of_a_query_without_order_or_of_some_partitions_names_no_gates() -> None:
    some = extent({"t": LOOK}, {}, assigned={"t": frozenset({3})}).end
    (known,) = report({"t": LOOK}, some, {}).values()
    assert (known["offsets"], known["lag"], known["gates"]) == ({"3": 7}, {"3": 0}, {})
    unordered = TopicSnapshot("t", "id", GROWN, LOOK.starts, LOOK.ends, ordered=False)
    assert report({"t": unordered}, extent({"t": unordered}, {}, 1).end, {})["t"]["gates"] == {}


def test_of_many_gates_those_of_the_partitions_furthest_behind_are_reported() -> None:
    """A hundred partitions became 500: each of the new ones waits for the one that its keys come from."""
    lineage = Lineage.of_ends(100, (100, 500), (dict.fromkeys(range(100), 1),))
    ends = {p: 1 + p for p in range(500)}
    look = TopicSnapshot("t", "id", lineage, dict.fromkeys(range(500), 0), ends)
    gates = report({"t": look}, {"t": TopicOffsets(dict.fromkeys(range(500), 0))}, {})["t"]["gates"]
    assert sorted(map(int, gates)) == list(range(400, 500))


def test_a_listener_gets_partitions_and_passes_other_sources_over() -> None:
    reached = extent({"t": LOOK}, {}, limit=2).end
    ours = json.dumps(report({"t": LOOK}, reached, {"t": {0: 5}}))
    found = partitions_of(progress(None, "17", "not JSON", '{"t": {"0": 5}}', ours))
    assert found[0] == PartitionProgress("t", 0, end=3, lag=1, gate=None, waits={}, undecided=2)
    assert found[3] == PartitionProgress("t", 3, end=7, lag=7, gate=0, waits={0: 3}, undecided=0)
    assert len(found) == 4

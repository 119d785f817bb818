"""What a query tells about itself in progress reports."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from anabranch.machines.lineage import Lineage
from anabranch.spark.plan import TopicSnapshot, extent, report
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


def test_a_listener_gets_partitions_and_passes_other_sources_over() -> None:
    reached = extent({"t": LOOK}, {}, limit=2).end
    ours = json.dumps(report({"t": LOOK}, reached, {"t": {0: 5}}))
    found = partitions_of(progress(None, "17", "not JSON", '{"t": {"0": 5}}', ours))
    assert found[0] == PartitionProgress("t", 0, end=3, lag=1, gate=None, waits={}, undecided=2)
    assert found[3] == PartitionProgress("t", 3, end=7, lag=7, gate=0, waits={0: 3}, undecided=0)
    assert len(found) == 4

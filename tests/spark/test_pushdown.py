"""Filters on keys that brokers evaluate: every record of the keys, in order, through resizes, and few bytes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, In, IsNotNull

from anabranch.spark.plan import verify_history
from tests.spark.flow import Flow, batch_read
from tests.support.broker import BrokerProcess

SENT = "kafka_server_brokertopicmetrics_bytesout_total"
KEY = ("key",)


@pytest.fixture(params=["false", "true"], ids=["whole", "filtered"])
def flow(address: str, request: pytest.FixtureRequest) -> Iterator[Flow]:
    name = request.node.name.replace("[", "-").replace("]", "")
    flow = Flow(address, name, configs={"accept.range.fetch": request.param})
    flow.send(2_000)
    flow.resize(5)
    flow.producer.send_arrow(name, pa.table({"key": pa.nulls(50, pa.binary()), "value": ["-1"] * 50}))
    # Some other client's records, where no layout has their keys.
    flow.producer.send_arrow(name, pa.table({"key": ["key-7"] * 5, "value": ["7"] * 5}), partition=0)
    flow.send(2_000)
    flow.resize(3)
    flow.send(2_000)
    yield flow
    flow.close()


@pytest.mark.parametrize(
    "options",
    [{}, {"minPartitions": "9"}, {"minPartitions": "9", "split": "offset"}],
    ids=["tasks", "ranges", "offsets"],
)
def test_a_batch_of_some_keys_has_all_of_their_records_in_order(
    address: str, flow: Flow, options: dict[str, str]
) -> None:
    wanted = {"key-3": flow.expected()["key-3"], "key-11": flow.expected()["key-11"]}
    found = batch_read(address, flow.topic, [In(KEY, (b"key-3", b"key-11", b"nobody"))], **options)
    if "split" in options:  # Stretches of offsets are tasks in no order.
        found = {key: sorted(values) for key, values in found.items()}
    assert found == wanted
    one = batch_read(address, flow.topic, [IsNotNull(KEY), EqualTo(KEY, b"key-7")], **options)
    assert sorted(one["key-7"]) == sorted([*flow.expected()["key-7"], *[7] * 5])
    assert batch_read(address, flow.topic, [EqualTo(KEY, b"key-3"), EqualTo(KEY, b"key-4")], **options) == {}
    many = [b"other-%d" % number for number in range(2_000)]
    ancient = GreaterThanOrEqual(("timestamp",), datetime(1900, 1, 1, tzinfo=UTC))
    since = batch_read(address, flow.topic, [In(KEY, (b"key-3", b"key-11")), ancient], left=[ancient], **options)
    assert {key: sorted(values) for key, values in since.items()} == wanted
    late = batch_read(
        address, flow.topic, [In(KEY, (*many, b"key-3")), GreaterThanOrEqual(("offset",), 100)], **options
    )
    assert set(late) == {"key-3"} and set(late["key-3"]) < set(wanted["key-3"])


def test_brokers_send_only_the_records_of_the_keys_where_the_topic_allows_it(
    broker: BrokerProcess, address: str, flow: Flow
) -> None:
    def sent(*filters: EqualTo) -> float:
        before = sum(value for name, value in broker.metrics().items() if name.startswith(SENT))
        batch_read(address, flow.topic, filters)
        return sum(value for name, value in broker.metrics().items() if name.startswith(SENT)) - before

    part = sent(EqualTo(KEY, b"key-3")) / sent()
    assert part < 0.1 if "filtered" in flow.topic else part == 1


def test_the_plan_of_a_batch_that_begins_beyond_the_log_is_right(address: str, flow: Flow, tmp_path: Path) -> None:
    """The checker of plans called it a gap between what was read and the end of the log."""
    plans = tmp_path / "plans"
    beyond = GreaterThanOrEqual(("offset",), 1_000_000)
    assert batch_read(address, flow.topic, [beyond], planLog=str(plans)) == {}
    assert not verify_history(plans.read_text().splitlines()).problems

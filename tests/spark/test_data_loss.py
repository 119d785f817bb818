"""What is a loss and what is none: partitions folded back, removed, trimmed, topics made anew, on a real broker."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.spark.options import OptionError
from anabranch.spark.plan import DataLossError, verify_history
from anabranch.spark.snapshot import METADATA_AGE_MAX_S
from tests.spark.flow import KEYS, Flow, MicroBatches, _take, batch_read
from tests.support.broker import BrokerProcess, running

pytestmark = pytest.mark.timeout(120)
COMPACTED = {"cleanup.policy": "compact", "segment.bytes": "2000", "min.cleanable.dirty.ratio": "0.01"}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    quick = {"log_retention_check_interval_ms": 100, "log_cleaner_backoff_ms": 100}
    with running(tmp_path_factory.mktemp("broker"), **quick) as process:
        yield process


@pytest.fixture
def flow(broker: BrokerProcess, request: pytest.FixtureRequest) -> Iterator[Flow]:
    name = request.node.name.translate({ord("["): "-", ord("]"): None, ord(","): "-"})[:100]
    flow = Flow(broker.address, name, 1, COMPACTED if "folded" in name else {})
    yield flow
    flow.close()


def await_removal(flow: Flow, partition: int) -> None:
    deadline = time.monotonic() + 60
    while partition in flow.admin.topics([flow.topic])[flow.topic].partitions:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def trim(flow: Flow, partition: int) -> None:
    flow.admin.delete_records({(flow.topic, partition): -1})


def noted(query: MicroBatches) -> Any:
    """The offsets of a query, as they come back from a checkpoint."""
    return json.loads(json.dumps(query.offset))


def last_values(found: dict[str, list[int]]) -> dict[str, int]:
    return {key: values[-1] for key, values in found.items()}


@pytest.mark.parametrize("policy", ["compact", "compact,delete"])
def test_a_query_that_stands_in_what_is_folded_back_goes_on_and_has_the_last_value_of_each_key(
    flow: Flow, tmp_path: Path, policy: str
) -> None:
    flow.admin.alter_configs("topic", flow.topic, {"cleanup.policy": policy})
    plans = str(tmp_path / "plans")
    flow.resize(2)
    flow.send(400)
    query = MicroBatches(flow.address, flow.topic, maxOffsetsPerTrigger="100", planLog=plans)
    query.step()
    start = noted(query)
    assert start[flow.topic]["offsets"]["1"] < start[flow.topic]["seen"]["1"]
    planned = json.loads(json.dumps(query.reader.latestOffset(query.offset, query.reader.getDefaultReadLimit())))
    tasks = query.reader.partitions(query.offset, planned)
    flow.resize(1)
    flow.send(10)
    await_removal(flow, 1)
    # The tasks of the planned micro-batch find the partition gone, and so does the driver that plans it again.
    for task in tasks:
        _take(query.reader, task, query.keys)
    query.offset = planned
    assert last_values(query.all_available()) == last_values(flow.expected())
    query.close()
    again = MicroBatches(flow.address, flow.topic, offset=start)
    again.run(planned)
    assert again.all_available()
    again.close()
    fresh = MicroBatches(flow.address, flow.topic, offset=start)
    fresh.all_available()
    fresh.close()
    assert verify_history(Path(plans).read_text().splitlines()).problems == ()
    assert last_values(batch_read(flow.address, flow.topic)) == last_values(flow.expected())


def test_a_query_that_ends_with_what_is_there_has_what_is_folded_back_meanwhile(flow: Flow) -> None:
    flow.resize(2)
    flow.send(400)
    query = MicroBatches(flow.address, flow.topic, maxOffsetsPerTrigger="50")
    query.reader.prepareForTriggerAvailableNow()
    query.step()
    flow.resize(1)
    await_removal(flow, 1)
    assert last_values(query.all_available()) == last_values(flow.expected())
    query.close()


def test_what_was_folded_back_while_a_query_was_down_is_no_loss_when_the_topic_has_grown_again(flow: Flow) -> None:
    flow.admin.alter_configs("topic", flow.topic, {"cleanup.policy": "compact,delete"})
    flow.resize(2)
    flow.send(400)
    query = MicroBatches(flow.address, flow.topic, maxOffsetsPerTrigger="100")
    query.step()
    start = noted(query)
    assert start[flow.topic]["offsets"]["1"] < start[flow.topic]["seen"]["1"]
    query.close()
    flow.resize(1)
    flow.send(10)
    await_removal(flow, 1)
    flow.resize(2)
    flow.send(100)
    again = MicroBatches(flow.address, flow.topic, offset=start)
    again.all_available()
    assert last_values(query.keys | again.keys) == last_values(flow.expected())
    again.close()


def test_a_query_hears_that_a_topic_is_not_compacted_any_more(flow: Flow) -> None:
    """What goes from then on is lost: nothing folds it back."""
    flow.admin.alter_configs("topic", flow.topic, {"cleanup.policy": "compact"})
    flow.send(400)
    query = MicroBatches(flow.address, flow.topic, maxOffsetsPerTrigger="50")
    query.step()
    flow.admin.alter_configs("topic", flow.topic, {"cleanup.policy": "delete"})
    time.sleep(METADATA_AGE_MAX_S + 0.1)
    flow.admin.delete_records({(flow.topic, 0): 300})
    with pytest.raises(DataLossError, match=rf"{flow.topic}-0"):
        query.step()
    query.close()


def test_a_query_hears_that_a_topic_is_ordered_now(flow: Flow) -> None:
    flow.admin.alter_configs("topic", flow.topic, {"enable.ordered.delivery": "false"})
    flow.send(400)
    flow.resize(2)
    flow.send(400)
    query = MicroBatches(flow.address, flow.topic, maxOffsetsPerTrigger="50")
    query.step()
    before = noted(query)[flow.topic]["offsets"]
    assert before["1"] > 0, "it waited for nothing"
    flow.admin.alter_configs("topic", flow.topic, {"enable.ordered.delivery": "true"})
    time.sleep(METADATA_AGE_MAX_S + 0.1)
    query.step()
    after = noted(query)[flow.topic]["offsets"]
    assert (after["0"], after["1"]) == (before["0"] + 50, before["1"]), "what was sent before the resize comes first"
    query.close()


def test_a_topic_that_a_restarted_query_names_wrongly_is_refused(flow: Flow) -> None:
    flow.send(10)
    query = MicroBatches(flow.address, flow.topic)
    query.step()
    at = noted(query)
    query.close()
    again = MicroBatches(flow.address, f"{flow.topic},{flow.topic}-misspelt", offset=at)
    again.reader.prepareForTriggerAvailableNow()
    with pytest.raises(OptionError, match=r"misspelt.*does not exist"):
        again.step()
    again.close()


@pytest.mark.parametrize("fails", [True, False])
def test_a_topic_that_was_deleted_while_the_query_was_down_is_a_loss_and_no_wrong_option(
    flow: Flow, *, fails: bool
) -> None:
    flow.send(100)
    query = MicroBatches(flow.address, flow.topic)
    query.step()
    at = noted(query)
    query.close()
    flow.admin.delete_topics(flow.topic)
    again = MicroBatches(flow.address, flow.topic, offset=at, failOnDataLoss=str(fails).lower())
    again.reader.prepareForTriggerAvailableNow()
    if fails:
        with pytest.raises(DataLossError, match=rf"{flow.topic}.*deleted"):
            again.step()
    else:
        again.step()
        assert not again.keys
    again.close()


def test_records_of_a_partition_that_was_removed_while_the_query_was_down_are_a_loss(flow: Flow) -> None:
    flow.resize(2)
    flow.send(200)
    query = MicroBatches(flow.address, flow.topic)
    assert query.all_available() == flow.expected()
    at = noted(query)
    query.close()
    flow.send(1_000)
    flow.resize(1)
    trim(flow, 1)
    await_removal(flow, 1)
    failing = MicroBatches(flow.address, flow.topic, offset=at)
    with pytest.raises(DataLossError, match=rf"{flow.topic}-1: the partition was removed before its records up to"):
        failing.step()
    failing.close()
    passing = MicroBatches(flow.address, flow.topic, offset=at, failOnDataLoss="false")
    left = sum(map(len, passing.all_available().values()))
    assert 0 < left < 1_000
    after = noted(passing)
    passing.close()
    # What was reported counts as read; a partition that is created again begins where it ended.
    flow.resize(2)
    flow.send(KEYS)
    later = MicroBatches(flow.address, flow.topic, offset=after)
    assert sum(map(len, later.all_available().values())) == KEYS
    later.close()


def test_a_partition_that_was_read_to_its_end_and_removed_is_none_and_one_never_seen_is_one(flow: Flow) -> None:
    flow.resize(2)
    flow.send(200)
    query = MicroBatches(flow.address, flow.topic)
    query.all_available()
    flow.resize(1)
    trim(flow, 1)
    await_removal(flow, 1)
    flow.send(100)
    assert query.all_available() == flow.expected()
    at = noted(query)
    query.close()
    flow.resize(3)
    flow.send(200)
    trim(flow, 2)
    failing = MicroBatches(flow.address, flow.topic, offset=at)
    with pytest.raises(DataLossError, match=rf"{flow.topic}-2: wanted offset 0, available from offset"):
        failing.step()
    failing.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_planned_micro_batch_reads_nothing_of_a_topic_that_was_made_anew(flow: Flow, fails: bool) -> None:
    flow.send(90)
    options = {} if fails else {"failOnDataLoss": "false"}
    query = MicroBatches(flow.address, flow.topic, maxOffsetsPerTrigger="40", **options)
    query.step()
    start = noted(query)
    end = json.loads(json.dumps(query.reader.latestOffset(query.offset, query.reader.getDefaultReadLimit())))
    tasks = query.reader.partitions(query.offset, end)
    flow.admin.delete_topics(flow.topic)
    flow.admin.create_topics(flow.topic, partitions=1)
    flow.sent = 0
    flow.send(100)
    # An executor has the tasks already, and a restarted driver plans the same micro-batch.
    query.keys.clear()
    again = MicroBatches(flow.address, flow.topic, offset=start, **options)
    if fails:
        with pytest.raises(DataLossError, match="the topic was deleted and created again"):
            _take(query.reader, tasks[0], query.keys)
        with pytest.raises(DataLossError, match="the topic was deleted"):
            again.run(end)
    else:
        _take(query.reader, tasks[0], query.keys)
        again.run(end)
        assert not again.keys
        assert again.all_available() == flow.expected()
    assert not query.keys
    query.close()
    again.close()


def test_a_query_goes_on_with_all_of_a_topic_that_was_made_anew_under_it(flow: Flow) -> None:
    """Its tasks run where the old topic was read: what is known of that there must not count for the new one."""
    flow.send(90)
    query = MicroBatches(flow.address, flow.topic, failOnDataLoss="false")
    query.all_available()
    for count in (60, 120):
        flow.admin.delete_topics(flow.topic)
        flow.admin.create_topics(flow.topic, partitions=1)
        flow.sent = 0
        flow.send(count)
        time.sleep(METADATA_AGE_MAX_S)
        query.keys.clear()
        assert query.all_available() == {key: values for key, values in flow.expected().items() if values}
    query.close()


def test_a_query_that_leaves_a_partition_out_for_a_while_reads_on_where_it_left_it(flow: Flow) -> None:
    """After each restart it has other options; what it had read was read again."""
    flow.resize(2)
    offset, found = None, dict[str, list[int]]()
    for assigned, lost in (([0, 1], False), ([0], True), ([0], False), ([0, 1], False)):
        flow.send(3 * KEYS)
        options = {"subscribe": None, "assign": json.dumps({flow.topic: assigned})}
        query = MicroBatches(flow.address, flow.topic, offset, **options)
        if lost:
            with pytest.raises(DataLossError, match=f"{flow.topic}-1: the option assign does not name the partition"):
                query.all_available()
            query.close()
            query = MicroBatches(flow.address, flow.topic, offset, failOnDataLoss="false", **options)
        for key, values in query.all_available().items():
            found[key] = found.get(key, []) + values
        offset = noted(query)
        query.close()
    assert sorted(number for values in found.values() for number in values) == [*range(flow.sent)]


def test_what_went_while_it_was_left_out_is_a_loss_when_it_is_read_again(flow: Flow) -> None:
    flow.resize(2)
    offset = None
    alone = {"subscribe": None, "assign": json.dumps({flow.topic: [0]}), "failOnDataLoss": "false"}
    for options in ({}, alone):
        flow.send(3 * KEYS)
        query = MicroBatches(flow.address, flow.topic, offset, **options)
        query.all_available()
        offset = noted(query)
        query.close()
    trim(flow, 1)
    query = MicroBatches(flow.address, flow.topic, offset)
    with pytest.raises(DataLossError, match=f"{flow.topic}-1: wanted offset"):
        query.all_available()
    query.close()

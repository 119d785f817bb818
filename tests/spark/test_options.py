"""Every option of a query, by what it does on a real broker; the option names what is wrong when it fails."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from traceback import format_exception
from typing import Any

import pytest

from anabranch.client.sync import Admin
from anabranch.spark import reader
from anabranch.spark.options import OptionError, for_batch, parse
from anabranch.spark.plan import DataLossError, verify_history
from anabranch.spark.snapshot import METADATA_AGE_MAX_S
from anabranch.spark.source import BatchReader, full_schema
from tests.spark.flow import Flow, MicroBatches, batch_read
from tests.support.broker import BrokerProcess, running

NUMBERS = count()


@pytest.fixture
def flow(address: str, request: pytest.FixtureRequest) -> Iterator[Flow]:
    flow = Flow(address, f"{request.node.originalname}-{next(NUMBERS)}")
    yield flow
    flow.close()


def timed(flow: Flow, *timestamps: int) -> None:
    """Send a record of each time to partition 0; its value is its time."""
    for at in timestamps:
        flow.producer.send(flow.topic, b"%d" % at, key=b"k", timestamp=at, partition=0).result(30)


def values(found: dict[str, list[int]]) -> list[int]:
    return sorted(value for each in found.values() for value in each)


def json_of(flow: Flow, **partitions: int) -> str:
    return json.dumps({flow.topic: {name[1:]: wanted for name, wanted in partitions.items()}})


def test_topics_of_a_pattern_are_found_when_they_appear(address: str, flow: Flow) -> None:
    flow.send(10)
    stream = MicroBatches(address, "", subscribe=None, subscribePattern=f"{flow.topic}.*")
    assert values(stream.all_available()) == list(range(10))
    other = Flow(address, f"{flow.topic}-2")
    other.send(20)
    time.sleep(METADATA_AGE_MAX_S + 0.1)
    assert values(stream.all_available()) == sorted([*range(10), *range(20)])
    stream.close()
    other.close()


def test_assigned_partitions_alone_are_read(address: str, flow: Flow) -> None:
    flow.send(100)
    one = batch_read(address, "", subscribe=None, assign=json.dumps({flow.topic: [1]}))
    other = batch_read(address, "", subscribe=None, assign=json.dumps({flow.topic: [0]}))
    assert one and other and not one.keys() & other.keys()
    assert values(one) + values(other) != [] and sorted(values(one) + values(other)) == list(range(100))


@pytest.mark.parametrize(
    "start", [{"startingTimestamp": "2000"}, {"startingOffsetsByTimestamp": {"p0": 2000, "p1": 2000}}], ids=str
)
def test_times_are_looked_up_in_assigned_partitions_alone(address: str, flow: Flow, start: dict[str, Any]) -> None:
    timed(flow, 1000, 2000, 3000)  # Partition 1 has no record.
    given = {name: json_of(flow, **each) if isinstance(each, dict) else each for name, each in start.items()}
    given |= {"subscribe": None, "assign": json.dumps({flow.topic: [0]})}
    assert values(batch_read(address, "", **given)) == [2000, 3000]
    stream = MicroBatches(address, "", **given)
    assert values(stream.all_available()) == [2000, 3000]
    stream.close()


@pytest.mark.parametrize("option", ["subscribe", "subscribePattern", "assign"])
def test_a_topic_that_is_no_longer_read_is_not_called_deleted(address: str, flow: Flow, option: str) -> None:
    other = Flow(address, f"{flow.topic}-2")
    flow.send(10)
    other.send(10)
    stream = MicroBatches(address, f"{flow.topic},{other.topic}", maxOffsetsPerTrigger="4")
    stream.step()
    stream.close()
    one = {"subscribe": flow.topic, "subscribePattern": flow.topic, "assign": json.dumps({flow.topic: [0, 1]})}
    given = {"subscribe": None, option: one[option]}
    again = MicroBatches(address, "", stream.offset, **given)
    verb = "match" if option == "subscribePattern" else "name"
    with pytest.raises(DataLossError, match=f"{other.topic}: the option {option} does not {verb} the topic any more"):
        again.step()
    again.close()
    again = MicroBatches(address, "", stream.offset, **given, failOnDataLoss="false")
    again.all_available()
    left = again.offset[other.topic]
    assert not left["offsets"] and sum(left["left"].values()) > 0
    again.close()
    back = MicroBatches(address, f"{flow.topic},{other.topic}", json.loads(json.dumps(again.offset)))
    back.all_available()
    back.close()
    found = sorted(number for each in (stream, again, back) for numbers in each.keys.values() for number in numbers)
    assert found == sorted((*range(flow.sent), *range(other.sent))), "it is read on where it was left"
    other.admin.delete_topics(other.topic)
    time.sleep(METADATA_AGE_MAX_S + 0.1)
    given = {"subscribe": None, "subscribePattern": f"{flow.topic}.*", "fetchOffset.numRetries": "3"}
    again = MicroBatches(address, "", stream.offset, **given)
    with pytest.raises(DataLossError, match=f"{other.topic}: the topic was deleted"):
        again.step()
    again.close()
    other.close()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"startingTimestamp": "2000"}, [2000, 3000]),
        ({"startingOffsetsByTimestamp": {"p0": 2500}}, [3000]),
        ({"startingOffsets": {"p0": 1}}, [2000, 3000]),
        ({"startingOffsets": {"p0": -2, "p1": -2}}, [1000, 2000, 3000]),
        ({"endingTimestamp": "2000"}, [1000]),
        ({"endingOffsetsByTimestamp": {"p0": 2500}}, [1000, 2000]),
        ({"endingOffsets": {"p0": 2}}, [1000, 2000]),
        ({"startingOffsets": {"p0": 1}, "endingOffsets": {"p0": 2, "p1": -1}}, [2000]),
        ({"startingTimestamp": "9000", "startingOffsetsByTimestampStrategy": "latest"}, []),
    ],
    ids=str,
)
def test_where_a_batch_begins_and_ends(address: str, flow: Flow, options: dict[str, Any], expected: list[int]) -> None:
    timed(flow, 1000, 2000, 3000)
    given = {name: json_of(flow, **each) if isinstance(each, dict) else each for name, each in options.items()}
    if "startingTimestamp" in given:
        given.setdefault("startingOffsetsByTimestampStrategy", "latest")  # Partition 1 has no record.
    assert values(batch_read(address, flow.topic, **given)) == expected


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"subscribe": "no-such-topic"},
            "^subscribe names topic 'no-such-topic', which does not exist. .*reate it: anab",
        ),
        ({"subscribe": None, "assign": '{"no-such-topic":[0]}'}, "^assign names topic 'no-such-topic', which"),
        ({"startingOffsets": {"p0": 9}}, "^startingOffsets names offset 9 of .*-0, which ends at offset 1. Name that"),
        ({"endingOffsets": {"p0": 9}}, "^endingOffsets names offset 9 of .*-0, which ends at offset 1. Name that"),
        ({"startingOffsets": {"p7": 0}}, "^startingOffsets names partition 7 of .*, which has partitions 0 to 1"),
        ({"startingTimestamp": "9000"}, "^startingTimestamp: .* has no record at 9000 ms or later. Choose an earlier"),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_refused_by_the_name_of_its_option(
    address: str, flow: Flow, options: dict[str, Any], says: str
) -> None:
    timed(flow, 1000)
    given = {name: json_of(flow, **each) if isinstance(each, dict) else each for name, each in options.items()}
    with pytest.raises(OptionError, match=says):
        batch_read(address, flow.topic, **given)
    if not any(name.startswith("ending") for name in given):
        stream = MicroBatches(address, flow.topic, **given)
        with pytest.raises(OptionError, match=says):
            stream.step()
        stream.close()


def test_a_start_or_an_end_beyond_the_log_is_taken_where_loss_is_no_failure(address: str, flow: Flow) -> None:
    timed(flow, 1000)
    lenient = {"failOnDataLoss": "false"}
    assert values(batch_read(address, flow.topic, endingOffsets=json_of(flow, p0=9), **lenient)) == [1000]
    assert values(batch_read(address, flow.topic, startingOffsets=json_of(flow, p0=9), **lenient)) == []


def test_lost_records_are_passed_over_if_that_is_no_failure(address: str, flow: Flow) -> None:
    flow.send(100)
    stream = MicroBatches(address, flow.topic, failOnDataLoss="false", maxOffsetsPerTrigger="10")
    stream.step()
    spans = flow.admin.topic_offsets(flow.topic)
    flow.admin.delete_records({(flow.topic, number): span.end for number, span in spans.items()})
    flow.send(10)
    assert values(stream.all_available())[-10:] == list(range(100, 110))
    stream.close()


def test_micro_batches_and_tasks_are_as_small_as_they_are_to_be(address: str, flow: Flow) -> None:
    flow.send(100)
    stream = MicroBatches(address, flow.topic, maxOffsetsPerTrigger="30")
    stream.all_available()
    assert stream.batches == 4
    stream.close()
    for option, least in (("maxRecordsPerPartition", 10), ("minPartitions", 7)):
        given = {"kafka.bootstrap.servers": address, "subscribe": flow.topic, option: str(least)}
        batch = BatchReader(for_batch(parse(given)), full_schema(headers=False))
        assert len(batch.partitions()) >= (7 if option == "minPartitions" else 10)


def test_progress_is_committed_to_the_group(address: str, flow: Flow) -> None:
    flow.send(50)
    stream = MicroBatches(address, flow.topic, **{"kafka.group.id": flow.topic, "groupIdPrefix": "other"})
    stream.all_available()
    stream.close()
    committed = flow.admin.list_group_offsets(flow.topic)
    assert sum(each.offset for each in committed.values()) == flow.sent


def test_each_query_with_a_prefix_has_a_group_of_its_own_also_after_a_restart(address: str, flow: Flow) -> None:
    def groups() -> dict[str, int]:
        found = [each.group_id for each in flow.admin.list_groups() if each.group_id.startswith(f"{flow.topic}-")]
        return {name: sum(at.offset for at in flow.admin.list_group_offsets(name).values()) for name in found}

    def run(offset: Any = None, **options: str) -> Any:
        stream = MicroBatches(address, flow.topic, offset, **options)
        stream.all_available()
        stream.close()
        return stream.offset

    flow.send(50)
    first = run(groupIdPrefix=flow.topic)
    flow.send(50)
    run(groupIdPrefix=flow.topic)
    assert sorted(groups().values()) == [50, 100]
    flow.send(50)
    run(first, groupIdPrefix=flow.topic)
    assert sorted(groups().values()) == [100, 150]
    given_later = run(run(startingOffsets="latest"))
    flow.send(50)
    run(given_later, groupIdPrefix=flow.topic)
    assert len(groups()) == 3


@pytest.mark.parametrize(("ordering", "batches"), [("key", 2), ("none", 1)])
def test_without_order_a_micro_batch_reads_to_the_ends(address: str, flow: Flow, ordering: str, batches: int) -> None:
    flow.send(100)
    flow.resize(5)
    flow.send(100)
    stream = MicroBatches(address, flow.topic, ordering=ordering)
    assert values(stream.all_available()) == list(range(200))
    assert stream.batches == batches
    stream.close()


@pytest.mark.parametrize("given", ["true", "false"])
def test_checksums_are_compared_if_they_are_to_be(
    address: str, flow: Flow, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[bool] = []
    decode = reader.decode_range

    def noted(*arguments: Any, **options: Any) -> Any:
        checked.append(options["check_crc"])
        return decode(*arguments, **options)

    monkeypatch.setattr(reader, "decode_range", noted)
    flow.send(10)
    batch_read(address, flow.topic, **{"kafka.check.crcs": given})
    assert set(checked) == {given == "true"}


@pytest.mark.parametrize("before", [30, 0])
def test_a_first_micro_batch_that_is_run_again_begins_where_it_began(
    address: str, flow: Flow, before: int, tmp_path: Path
) -> None:
    """Spark asks a source anew where to begin, until the first micro-batch is done: by then `latest` is elsewhere."""
    options = {"startingOffsets": "latest", "planLog": str(tmp_path / "plans")}
    flow.send(10)
    killed = MicroBatches(address, flow.topic, **options)
    flow.send(before)
    planned = killed.reader.latestOffset(killed.offset, killed.reader.getDefaultReadLimit())
    killed.reader.partitions(killed.offset, planned)
    killed.close()
    flow.send(5)
    again = MicroBatches(address, flow.topic, **options)
    again.run(planned)
    assert values(again.keys) == list(range(10, 10 + before))
    assert values(again.all_available()) == list(range(10, 15 + before))
    assert not again.step(), "only the first micro-batch is one without a record"
    again.close()
    assert verify_history((tmp_path / "plans").read_text().splitlines()).problems == ()


@pytest.mark.parametrize("start", ["time", "assign"])
def test_a_first_micro_batch_is_run_again_though_the_options_do_not_fit_the_resized_topic(
    address: str, flow: Flow, start: str
) -> None:
    """It says where it began; a new query with these options is refused."""
    now = int(time.time() * 1000)
    by_time = {"startingTimestamp": str(now - 60_000)}
    by_name = {"subscribe": None, "assign": json.dumps({flow.topic: [0, 1, 2]})}
    options: dict[str, str | None] = by_time if start == "time" else by_name  # type: ignore[assignment]
    if start == "assign":
        flow.resize(3)
    flow.send(100)
    killed = MicroBatches(address, flow.topic, **options)
    planned = json.loads(json.dumps(killed.reader.latestOffset(killed.offset, killed.reader.getDefaultReadLimit())))
    killed.close()
    if start == "time":
        flow.resize(3)
        for number in range(40):
            flow.producer.send(flow.topic, b"100", key=b"key-%d" % number, timestamp=now - 120_000)
        flow.producer.flush()
    else:
        flow.resize(2)
        flow.admin.delete_records({(flow.topic, 2): -1})
        deadline = time.monotonic() + 60
        while 2 in flow.admin.topics([flow.topic])[flow.topic].partitions:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    again = MicroBatches(address, flow.topic, failOnDataLoss="false", **options)
    again.run(planned)
    left = values(again.keys)
    assert left == list(range(100)) if start == "time" else 0 < len(left) < 100
    again.step()
    again.close()
    new = MicroBatches(address, flow.topic, **options)
    without_begun = {name: each for name, each in planned[flow.topic].items() if name != "begun"}
    with pytest.raises(OptionError, match=r"has no record at|names partition 2"):
        new.step()
    with pytest.raises(OptionError, match=r"has no record at|names partition 2"):
        new.reader.partitions(new.offset, {flow.topic: without_begun})
    new.close()


def test_a_partition_that_has_just_been_added_is_read_from_its_beginning_by_a_query_that_begins_at_a_time(
    address: str, flow: Flow
) -> None:
    flow.send(100)
    flow.resize(3)
    query = MicroBatches(address, flow.topic, startingTimestamp=str(int(time.time() * 1000) - 60_000))
    flow.send(200)
    assert query.all_available() == flow.expected()
    query.close()


# -- brokers that are down ---------------------------------------------------------------------------------------------


def test_a_broker_that_is_down_at_the_start_is_named_at_once() -> None:
    began = time.monotonic()
    for read in (batch_read, MicroBatches):
        with pytest.raises(ConnectionError, match=r"^kafka.bootstrap.servers is 127.0.0.1:1: no connection to 127"):
            read("127.0.0.1:1", "t")
    with pytest.raises(ValueError, match=r"bootstrap.servers: 'localhost:abc' is not host:port"):
        batch_read("localhost:abc", "t")
    assert time.monotonic() - began < 30


@pytest.fixture
def own(tmp_path: Path) -> Iterator[BrokerProcess]:
    with running(tmp_path / "own") as process:
        process.settings["listeners"] = f"127.0.0.1:{process.port}"
        yield process


def test_a_stream_outlives_a_restart_of_its_broker_and_fails_if_it_may_not_ask_again(own: BrokerProcess) -> None:
    flow = Flow(own.address, "restarted")
    flow.send(50)
    flow.close()
    patient = MicroBatches(own.address, "restarted", **{"fetchOffset.retryIntervalMs": "200"})
    hasty = MicroBatches(own.address, "restarted", **{"fetchOffset.numRetries": "0"})
    assert values(patient.all_available()) == values(hasty.all_available()) == list(range(50))
    own.stop()
    time.sleep(METADATA_AGE_MAX_S)
    with pytest.raises(ConnectionError, match=r"kafka.bootstrap.servers is .* no connection"):
        hasty.step()
    restart = threading.Timer(1.0, own.start)
    restart.start()
    assert not patient.step()
    restart.join()
    hasty.close()
    patient.close()


def test_a_task_whose_broker_went_away_says_how_long_it_tried(own: BrokerProcess) -> None:
    with Admin(own.address) as admin:
        admin.create_topics("away", partitions=1)
    flow = Flow(own.address, "away-2")
    flow.send(50)
    flow.close()
    given = {"kafka.bootstrap.servers": own.address, "subscribe": "away-2", "kafkaConsumer.pollTimeoutMs": "300"}
    batch = BatchReader(for_batch(parse(given)), full_schema(headers=False))
    (task, *_) = batch.partitions()
    own.stop()
    with pytest.raises(ConnectionError) as failed:
        list(batch.read(task))
    said = "".join(format_exception(failed.value))
    assert "Tried for 300 ms (kafkaConsumer.pollTimeoutMs)." in said and f"no connection to {own.address}" in said

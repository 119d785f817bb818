"""Stock consumers in groups of the consumer protocol whose topic is resized: what they are handed, and when."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from anabranch.client import sync
from tests.support.broker import BrokerProcess, running
from tests.support.group_client import GroupClient

TOPIC = "rivers"
SETTINGS = {
    "group.consumer.heartbeat.interval.ms": 200,
    "group.consumer.min.heartbeat.interval.ms": 100,
    "group.consumer.session.timeout.ms": 4_000,
    "group.consumer.min.session.timeout.ms": 1_000,
}
POLL_INTERVAL_MS = 300_000
"""The default of every stock consumer: whoever waits for it has waited too long."""
SOON_S = 20.0
OPENED_BY_TIME = "kafka_server_group_coordinator_metrics_gates_opened_by_time_count"


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running(tmp_path_factory.mktemp("stock"), **SETTINGS) as found:
        yield found


class World:
    """A topic of one test, and what its consumers were handed."""

    def __init__(self, process: BrokerProcess, name: str) -> None:
        self.address = f"127.0.0.1:{process.port}"
        self.topic = f"{TOPIC}-{name}"
        self.admin = sync.Admin(self.address)

    def resize(self, count: int) -> None:
        self.admin.resize(self.topic, count)

    def write(self, partition: int, *values: str, producer: Producer | None = None) -> None:
        # A new producer, as one that exists does not know new partitions for a while.
        writer = producer or Producer({"bootstrap.servers": self.address, "linger.ms": 0, "log_level": 0})
        for value in values:
            writer.produce(self.topic, value, partition=partition)
        assert writer.flush(10) == 0

    def transaction(self, partition: int, *values: str, commit: bool = True) -> None:
        writer = Producer({"bootstrap.servers": self.address, "transactional.id": self.topic, "log_level": 0})
        writer.init_transactions(10)
        writer.begin_transaction()
        self.write(partition, *values, producer=writer)
        (writer.commit_transaction if commit else writer.abort_transaction)(10)

    def waits(self) -> set[tuple[int, int]]:
        """The partitions that the coordinator withholds from the group, each with one that it waits on."""
        group = f"g-{self.topic}"
        waiting = self.admin.describe_groups(group)[group].waiting
        return {(each.partition[1], on.partition[1]) for each in waiting for on in each.waits_on}

    def re_opens(self, reader: Reading) -> None:
        """Have partition 1, which the reader has committed to its end, retire and re-open: "a" in it, then "b"."""
        self.resize(2)
        reader.holds(0, 1)
        self.write(1, "a")
        reader.has("a")
        reader.commit()
        self.resize(1)
        self.write(0, "b")
        reader.has("b")
        self.resize(2)
        reader.holds(0)

    @contextmanager
    def consumer(self, *, reset: str = "earliest", poll_interval_ms: int = POLL_INTERVAL_MS) -> Iterator[Reading]:
        made = Reading(self, reset, poll_interval_ms)
        try:
            yield made
        finally:
            made.consumer.close()


class Reading:
    """One stock consumer that commits by hand, `offset + 1` of what it was handed, when the test says so."""

    def __init__(self, world: World, reset: str, poll_interval_ms: int) -> None:
        self.world = world
        self.values: list[str] = []
        self.owned: set[int] = set()
        self.left_unread: set[int] = set()
        """Partitions that are paused as soon as they are given."""
        self.takings = 0
        """How many partitions were taken away."""
        self._uncommitted: dict[int, int] = {}
        self.consumer = Consumer(
            {
                "bootstrap.servers": world.address,
                "group.id": f"g-{world.topic}",
                "group.protocol": "consumer",
                "auto.offset.reset": reset,
                "enable.auto.commit": False,
                "max.poll.interval.ms": poll_interval_ms,
                "topic.metadata.refresh.interval.ms": 200,
                "fetch.wait.max.ms": 100,
                "log_level": 0,
            }
        )
        self.consumer.subscribe([world.topic], on_assign=self._given, on_revoke=self._taken, on_lost=self._taken)

    def _given(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        self.owned |= {each.partition for each in partitions}
        if self.left_unread:
            consumer.incremental_assign(partitions)
            consumer.pause([each for each in partitions if each.partition in self.left_unread])

    def _taken(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        self.owned -= {each.partition for each in partitions}
        self.takings += len(partitions)

    def is_at(self, partition: int, offset: int) -> bool:
        """Whether the client has begun to read a partition, at an offset that its reset gave it."""
        _, high = self.consumer.get_watermark_offsets(TopicPartition(self.world.topic, partition), cached=True)
        return bool(high == offset)

    def poll(self) -> None:
        for message in self.consumer.consume(100, 0.05):
            if message.error() is None:
                self.values.append(message.value().decode())
                self._uncommitted[message.partition()] = message.offset() + 1

    def polls_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.poll()

    def until(self, true: Callable[[], bool], within_s: float = SOON_S) -> None:
        deadline = time.monotonic() + within_s
        while not true():
            assert time.monotonic() < deadline, (self.owned, self.values)
            self.poll()

    def has(self, *values: str, within_s: float = SOON_S) -> None:
        self.until(lambda: set(values) <= set(self.values), within_s)

    def holds(self, *partitions: int, within_s: float = SOON_S) -> None:
        self.until(lambda: self.owned == set(partitions), within_s)

    def commit_at(self, partition: int, offset: int) -> None:
        """Commit one partition, wherever the records end that were handed out."""
        self._uncommitted = {partition: offset}
        self.commit()

    def commit(self) -> None:
        found = [TopicPartition(self.world.topic, number, offset) for number, offset in self._uncommitted.items()]
        deadline = time.monotonic() + SOON_S
        while True:
            try:
                self.consumer.commit(offsets=found, asynchronous=False)
                break
            except KafkaException as error:  # The group has a new epoch, which the next heartbeat brings.
                if error.args[0].code() != KafkaError.STALE_MEMBER_EPOCH or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        self._uncommitted.clear()


@pytest.fixture
def world(process: BrokerProcess, request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(process, request.node.name[5:35].replace("_", "-"))
    made.admin.create_topics(made.topic, partitions=1)
    yield made
    made.admin.close()


def test_a_marker_at_the_cut_is_no_record_that_the_group_has_left_to_read(world: World) -> None:
    """Fault 2: a commit is `record.offset + 1`, and the marker behind the record kept the gate closed for ever."""
    world.transaction(0, "a")
    with world.consumer() as reader:
        reader.has("a")
        world.resize(2)
        world.write(1, "b")
        reader.commit()
        reader.has("b")


def test_an_aborted_transaction_at_the_cut_is_nothing_to_read(world: World) -> None:
    world.write(0, "a")
    world.transaction(0, "void", commit=False)
    with world.consumer() as reader:
        reader.has("a")
        world.resize(2)
        world.write(1, "b")
        reader.commit()
        reader.has("b")
        assert "void" not in reader.values


def test_records_deleted_behind_the_commit_are_nothing_to_read(world: World) -> None:
    """Fault 2: the unread tail of a parent was deleted, and no commit could pass it.

    Nobody can tell whether its owner hands out deleted records still, but the next owner has none.
    """
    world.write(0, "a", "b", "c")
    with world.consumer() as reader:
        reader.has("a", "b", "c")
        reader.commit_at(0, 1)
        world.resize(2)
        world.write(1, "d")
        time.sleep(0.5)
        reader.poll()
        assert reader.owned == {0} and "d" not in reader.values
        group = f"g-{world.topic}"
        (waiting,) = world.admin.describe_groups(group)[group].waiting
        (on,) = waiting.waits_on
        assert (waiting.partition, on.partition) == ((world.topic, 1), (world.topic, 0))
        assert on.records_left == 2 and on.member_id and waiting.waits_ms > 0
        world.admin.delete_records({(world.topic, 0): 3})
        time.sleep(0.5)
        reader.poll()
        assert reader.owned == {0} and "d" not in reader.values
    with world.consumer() as heir:
        heir.has("d")


def test_an_application_that_leaves_records_uncommitted_is_waited_for_until_its_poll_interval(
    world: World, process: BrokerProcess
) -> None:
    """Fault 9: an application that commits every tenth record waited for ever when five were left."""
    world.write(0, "a", "b", "c")
    opened = process.metrics()[OPENED_BY_TIME]
    with world.consumer(poll_interval_ms=3_000) as reader:
        reader.has("a", "b", "c")
        reader.commit_at(0, 2)
        world.resize(2)
        world.write(1, "d")
        began = time.monotonic()
        reader.has("d")
        assert time.monotonic() - began > 2.0
    assert process.metrics()[OPENED_BY_TIME] == opened + 1


def test_a_latest_group_formed_after_a_resize_reads_no_history_and_waits_once(world: World) -> None:
    """Fault 7; and fault 8: what is written while a partition waits is handed out."""
    world.write(0, "old")
    world.resize(2)
    world.write(1, "history")
    with world.consumer(reset="latest", poll_interval_ms=3_000) as reader:
        reader.holds(0)
        world.write(1, "while it waited")
        reader.holds(0, 1)
        reader.has("while it waited")
        assert reader.values == ["while it waited"]
    with world.consumer(reset="latest") as reader:
        reader.holds(0, 1)


def test_a_latest_group_reads_no_history_when_the_partition_before_is_committed_while_one_waits(
    world: World, process: BrokerProcess
) -> None:
    """Fault 7: the gate opened by the commit, and the new partition was read from offset 0."""
    world.write(0, "old")
    world.resize(2)
    world.write(1, "history")
    with world.consumer(reset="latest") as reader:
        reader.holds(0)
        world.write(1, "while it waited")
        # Its position at the end of the log is known when it is handed the first record.
        reader.until(lambda: reader.is_at(0, 1))
        world.write(0, "live")
        reader.has("live")
        reader.commit()
        reader.has("while it waited")
        world.write(1, "later")
        reader.has("later")
        assert reader.values == ["live", "while it waited", "later"]


def test_what_the_coordinator_has_heard_of_a_reset_outlives_the_broker(tmp_path: Path) -> None:
    """The member goes on where it is, and asks no leader for its first offset again."""
    with running(tmp_path, **SETTINGS) as broker:
        broker.settings["listeners"] = f"127.0.0.1:{broker.port}"
        world = World(broker, "killed")
        world.admin.create_topics(world.topic, partitions=1)
        world.write(0, "old")
        world.resize(2)
        world.write(1, "history")
        with world.consumer(reset="latest") as reader:
            reader.holds(0)
            world.write(1, "while it waited")
            reader.until(lambda: reader.is_at(0, 1))
            broker.kill()
            broker.start()
            world.write(0, "live")
            reader.has("live")
            reader.commit()
            reader.has("while it waited")
            assert reader.values == ["live", "while it waited"]
        world.admin.close()


def test_an_earliest_group_formed_after_a_resize_reads_all_history_in_order(world: World) -> None:
    world.write(0, "old")
    world.resize(2)
    world.write(1, "history")
    with world.consumer() as reader:
        reader.holds(0)
        world.write(1, "while it waited")
        world.write(0, "live")
        reader.has("old", "live")
        assert reader.values == ["old", "live"]
        reader.commit()
        reader.has("history", "while it waited")


def test_a_latest_group_loses_nothing_of_partitions_that_appear_later(world: World) -> None:
    with world.consumer(reset="latest") as reader:
        reader.holds(0)
        time.sleep(1.0)
        world.write(0, "a")
        reader.has("a")
        world.resize(3)
        world.write(1, "b")
        world.write(2, "c")
        time.sleep(0.5)
        reader.poll()
        assert reader.values == ["a"]
        reader.commit()
        reader.has("b", "c")


def test_a_group_that_was_empty_at_the_resize_loses_nothing_either(world: World) -> None:
    world.write(0, "a")
    with world.consumer() as reader:
        reader.has("a")
        reader.commit()
    world.resize(2)
    world.write(1, "b")
    with world.consumer(reset="latest") as reader:
        reader.has("b")


def test_a_group_whose_offsets_are_reset_waits_at_its_gates_again(world: World) -> None:
    """What the coordinator noted when a gate was open said, after the reset, that it is open still."""
    world.write(0, "a")
    with world.consumer() as reader:
        reader.has("a")
        world.resize(2)
        world.write(1, "b")
        reader.until(lambda: world.waits() == {(1, 0)})
        reader.commit()
        reader.has("b")
        reader.commit()
    world.admin.alter_group_offsets(f"g-{world.topic}", {(world.topic, 0): 0, (world.topic, 1): 0})
    with world.consumer() as reader:
        reader.has("a")
        reader.until(lambda: world.waits() == {(1, 0)})
        reader.commit()
        reader.has("b")
    assert reader.values == ["a", "b"]


def test_what_was_read_of_a_deleted_topic_opens_no_gate_of_the_one_created_under_its_name(world: World) -> None:
    """Stock consumers commit by name, also after the topic is another one of which they do not know yet."""
    world.write(0, *"opqrs")
    with world.consumer() as reader:
        reader.has("s")
        world.admin.delete_topics(world.topic)
        world.admin.create_topics(world.topic, partitions=1)
        world.write(0, "a")
        world.resize(2)
        world.write(1, "b")
        with pytest.raises(KafkaException, match="UNKNOWN_TOPIC_OR_PART"):
            reader.commit()
        reader.has("a")
        reader.until(lambda: world.waits() == {(1, 0)})
        reader.commit()
        reader.has("b")
    assert reader.values == [*"opqrs", "a", "b"]


def test_a_partition_that_re_opens_is_taken_away_until_the_records_between_are_read(world: World) -> None:
    """Fault 8: the owner of a retiring partition read on when it re-opened."""
    with world.consumer() as reader:
        world.re_opens(reader)
        world.write(1, "c")
        time.sleep(0.5)
        reader.poll()
        assert reader.values == ["a", "b"]
        reader.commit()
        reader.holds(0, 1)
        reader.has("c")


def test_nothing_is_taken_away_any_more_when_ordered_delivery_is_switched_off(world: World) -> None:
    """The gates of before were used for ever, and the partition was handed out and taken away in turn."""
    with world.consumer() as reader:
        world.re_opens(reader)
        world.admin.alter_configs("topic", world.topic, {"enable.ordered.delivery": "false"})
        reader.holds(0, 1)
        taken = reader.takings
        world.write(1, "c")
        reader.polls_for(3.0)
        assert reader.owned == {0, 1} and reader.takings == taken and reader.values == ["a", "b", "c"]
        assert not world.waits()


def test_what_an_owner_without_a_commit_has_not_read_is_not_skipped_when_its_partition_re_opens(world: World) -> None:
    """It was taken for one that reads from the end, and the next owner began where the partition had re-opened.

    It has asked for both ends, so that nobody knows where it began.
    """
    world.resize(2)
    world.write(0, "a")
    world.write(1, *"bcd")
    world.resize(1)
    with world.consumer(poll_interval_ms=3_000) as slow:
        slow.left_unread = {1}
        slow.has("a")
        assert slow.consumer.get_watermark_offsets(TopicPartition(world.topic, 1), 10) == (0, 3)
        slow.polls_for(4.0)
        world.write(0, "e")
        slow.has("e")
        world.resize(2)
        slow.polls_for(2.0)
        world.write(1, "f")
        assert slow.owned == {0, 1} and slow.values == ["a", "e"]
    with world.consumer() as reader:
        reader.has(*"bcd")
        reader.commit_at(1, 3)
        reader.has("a", "e")
        reader.commit_at(0, 2)
        reader.has("f")
        assert sorted(reader.values) == [*"abcdef"]


def test_what_is_written_while_a_partition_waits_is_read_after_the_broker_was_killed(tmp_path: Path) -> None:
    """The wait had begun under a coordinator that is gone: what was written before was left to the client's reset."""
    with running(tmp_path, **SETTINGS) as broker:
        broker.settings["listeners"] = f"127.0.0.1:{broker.port}"
        world = World(broker, "killed-while-it-waits")
        world.admin.create_topics(world.topic, partitions=1)
        with world.consumer(reset="latest") as reader:
            reader.until(lambda: reader.is_at(0, 0))
            world.resize(2)
            reader.holds(0, 1)
            world.write(1, "a")
            reader.has("a")
        world.resize(1)
        with world.consumer(reset="latest") as reader:
            reader.holds(1)
            world.write(0, "while it waited")
            broker.kill()
            broker.start()
            world.write(0, "and after that")
            reader.until(lambda: world.waits() == {(0, 1)})
            reader.has("a")
            reader.commit()
            reader.has("while it waited", "and after that")
        assert reader.values == ["a", "while it waited", "and after that"]
        world.admin.close()


def test_what_a_transaction_commits_is_not_overtaken_by_the_position_of_the_next_owner(world: World) -> None:
    """The log start was written for it, and what the transaction had read was read again."""
    world.write(0, *"abcd")
    producer = Producer({"bootstrap.servers": world.address, "transactional.id": world.topic, "log_level": 0})
    producer.init_transactions(10)
    with world.consumer() as reader:
        reader.has(*"abcd")
        reader.commit()
        world.resize(2)
        reader.holds(0, 1)
        world.write(1, "e")
        world.resize(1)
        world.write(0, "f", "g")
        reader.has("e", "f", "g")
        producer.begin_transaction()
        read = [TopicPartition(world.topic, 0, 6)]
        producer.send_offsets_to_transaction(read, reader.consumer.consumer_group_metadata(), 10)
    with world.consumer() as reader:
        reader.holds(1)
        world.admin.delete_records({(world.topic, 0): 5})
        reader.has("e")
        reader.commit()
        reader.polls_for(2.0)
        producer.commit_transaction(10)
        reader.holds(0, 1)
        world.write(0, "h")
        reader.has("h")
        assert reader.values == ["e", "h"]


def test_a_partition_of_a_member_that_never_speaks_again_is_not_taken_for_read(
    world: World, process: BrokerProcess
) -> None:
    """Its poll interval is shorter than its session: gates opened before anybody could have read the partition."""
    world.write(0, "a")
    world.resize(2)
    world.write(1, "b")
    with GroupClient(process.port) as silent:
        silent.ready(f"g-{world.topic}")
        joined = silent.beat(f"g-{world.topic}", "silent", 0, topics=[world.topic], rebalance_timeout_ms=1_000)
        assert [part.partitions for part in joined.assignment.topic_partitions] == [[0]]
        with world.consumer() as reader:
            reader.has("a")
            assert reader.values == ["a"]
            reader.commit()
            reader.has("b")


def test_a_position_that_was_waited_for_in_vain_holds_later_gates_when_it_moves_again(world: World) -> None:
    """A gate has opened by time; the group reads on in the parent, and a gate of the next layout waits for that.

    Commits follow each other until the gate is seen closed, so that it does not open by time.
    """
    values = [f"a{number}" for number in range(200)]
    world.write(0, *values)
    with world.consumer(poll_interval_ms=4_000) as reader:
        reader.has(*values)
        reader.commit_at(0, 1)
        world.resize(2)
        world.write(1, "b")
        reader.has("b")
        reader.commit_at(0, 2)
        world.resize(4)
        for offset in range(3, len(values)):
            reader.commit_at(0, offset)
            reader.poll()
            assert not reader.owned & {2, 3}, "handed out before its parent was read"
            if (2, 0) in world.waits():
                break
        else:
            pytest.fail("the gate of the new partition is not closed")
        world.write(2, "c")
        reader.commit_at(0, len(values))
        reader.has("c")

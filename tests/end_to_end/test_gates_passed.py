"""What gates do not hold back: records behind a gate that was open once, and records of aborted transactions.

Both are said in docs/consumer-groups.md. The poll interval, after which gates open by time, is far longer than a test.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from anabranch.base.ids import TopicPartition
from anabranch.client.sync import Admin, Consumer, Producer
from anabranch.machines.placement import place
from anabranch.records.hashing import placement_hash
from tests.support.broker import BrokerProcess

STAY, MOVE = (
    next(key for n in range(99) if place(placement_hash(key := b"%d" % n), 1, 2) == partition) for partition in (0, 1)
)
"""Keys that stay in partition 0, and move to partition 1, when a topic of one partition gets two."""
CLOSED_S = 2.0
REWINDS = 5
TIMEOUT_S = 30.0


@contextlib.contextmanager
def reader(broker: BrokerProcess, topic: str, group: str, **settings: Any) -> Iterator[Consumer]:
    said = {"auto_offset_reset": "earliest", "enable_auto_commit": False, "retry_backoff_ms": 20, **settings}
    with Consumer(broker.address, group_id=group, **said) as consumer:
        consumer.subscribe(topic)
        yield consumer


def send(broker: BrokerProcess, topic: str, *records: tuple[bytes, str]) -> None:
    with Producer(broker.address) as producer:
        for key, value in records:
            producer.send(topic, value, key=key)


def read(consumer: Consumer, count: int, *others: Consumer) -> list[str]:
    """Read so many records of one consumer; `others` poll meanwhile, and must be handed nothing."""
    found: list[str] = []
    until(lambda: _polled(consumer, count - len(found), found, others) >= count, lambda: found)
    return found


def _polled(consumer: Consumer, most: int, found: list[str], others: tuple[Consumer, ...]) -> int:
    found += [(each.value or b"").decode() for each in consumer.poll(0.05, max_records=most)]
    assert not [each for other in others for each in other.poll(0.05)]
    return len(found)


def read_for(seconds: float, *consumers: Consumer) -> list[str]:
    """Read for some time."""
    deadline = time.monotonic() + seconds
    found: list[str] = []
    while time.monotonic() < deadline:
        found += [(each.value or b"").decode() for consumer in consumers for each in consumer.poll(0.05)]
    return found


def until(holds: Callable[[], object], what: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline, what()


def test_a_seek_back_closes_no_gate_and_a_reset_of_the_group_closes_all(shared: BrokerProcess) -> None:
    topic = group = "sought"
    with Admin(shared.address) as admin:
        admin.create_topics(topic, partitions=1)
        send(shared, topic, (MOVE, "old 1"), (MOVE, "old 2"))
        admin.resize(topic, 2)
        send(shared, topic, (MOVE, "new 1"))
        with reader(shared, topic, group) as consumer:
            assert read(consumer, 2) == ["old 1", "old 2"]
            consumer.commit()
            assert read(consumer, 1) == ["new 1"]
            consumer.commit()
            consumer.seek(topic, 0, 0)
            assert read(consumer, 1) == ["old 1"]
            consumer.commit()
            assert consumer.committed()[topic, 0].offset == 1
            consumer.pause((topic, 0))
            send(shared, topic, (MOVE, "new 2"))
            assert read(consumer, 1) == ["new 2"], "'old 2' is not committed any more"
            consumer.resume((topic, 0))
            assert read(consumer, 1) == ["old 2"]
        admin.alter_group_offsets(group, {(topic, 0): 0, (topic, 1): 0})
        with reader(shared, topic, group) as consumer:
            assert read(consumer, 2) == ["old 1", "old 2"]
            deadline = time.monotonic() + CLOSED_S
            while time.monotonic() < deadline:
                assert not consumer.poll(0.1), "the gate is open although nothing is committed before it"
            consumer.commit()
            assert read(consumer, 2) == ["new 1", "new 2"]


def test_a_member_that_rewinds_both_partitions_has_the_gate_closed_again(shared: BrokerProcess) -> None:
    """What the member, and the coordinator, had told each other was so of what was committed then."""
    topic = group = "rewound"
    with Admin(shared.address) as admin:
        admin.create_topics(topic, partitions=1)
        admin.resize(topic, 2)
        send(shared, topic, (MOVE, "old 1"), (MOVE, "old 2"), (STAY, "stays"))
        admin.resize(topic, 1)
        send(shared, topic, (MOVE, "new"))
        with reader(shared, topic, group) as consumer:
            for _ in range(REWINDS):
                assert sorted(read(consumer, 3)) == ["old 1", "old 2", "stays"]
                assert not consumer.poll(CLOSED_S / 8), "the gate is open although nothing is committed before it"
                consumer.commit()
                assert read(consumer, 1) == ["new"]
                consumer.commit()
                consumer.pause((topic, 1))
                consumer.seek(topic, 0, 0)
                consumer.seek(topic, 1, 0)
                consumer.commit({(topic, 0): 0, (topic, 1): 0})
                assert read(consumer, 1) == ["stays"]
                assert not consumer.poll(CLOSED_S / 8), "the gate is open although all is to be read again"
                consumer.seek(topic, 0, 0)
                consumer.resume((topic, 1))


def test_members_that_rewind_parent_and_child_have_the_gate_closed_again(shared: BrokerProcess) -> None:
    """The member of the child was told of the parent's offset when that was committed further on."""
    topic = group = "rewound-by-two"
    with Admin(shared.address) as admin:
        admin.create_topics(topic, partitions=1)
        send(shared, topic, (MOVE, "old 1"), (MOVE, "old 2"))
        admin.resize(topic, 2)
        send(shared, topic, (MOVE, "new"))
    with reader(shared, topic, group) as one, reader(shared, topic, group) as other:
        both = one, other
        found: list[str] = []

        def polled() -> list[str]:
            found.extend(read_for(0.1, *both))
            return found

        until(lambda: len(polled()) == 2, lambda: found)
        for consumer in both:
            consumer.commit()
        until(lambda: len(polled()) == 3, lambda: found)
        assert found == ["old 1", "old 2", "new"]
        of_parent, of_child = both if TopicPartition(topic, 0) in one.assignment() else both[::-1]
        assert of_child.assignment() == (TopicPartition(topic, 1),)
        for _ in range(REWINDS):
            of_child.commit()
            of_parent.pause((topic, 0))
            for partition, consumer in enumerate((of_parent, of_child)):
                consumer.seek(topic, partition, 0)
                consumer.commit({(topic, partition): 0})
            assert read_for(CLOSED_S / 4, *both) == [], "the gate is open although all before it is to be read again"
            of_parent.resume((topic, 0))
            assert read(of_parent, 2, of_child) == ["old 1", "old 2"]
            of_parent.commit()
            assert read(of_child, 1, of_parent) == ["new"]


def test_a_seek_past_a_closed_gate_opens_it_for_nobody(shared: BrokerProcess) -> None:
    """What was sought was committed, and a commit behind a gate says that it was open."""
    topic = group = "sought-past"
    with Admin(shared.address) as admin:
        admin.create_topics(topic, partitions=1)
        admin.resize(topic, 2)
        send(shared, topic, (MOVE, "old"), (STAY, "stays"))
        admin.resize(topic, 1)
        send(shared, topic, (MOVE, "skipped"))
        with reader(shared, topic, group) as consumer:
            assert sorted(read(consumer, 2)) == ["old", "stays"]
            consumer.seek(topic, 1, 0)
            consumer.pause((topic, 1))
            consumer.commit()
            consumer.seek_to_end((topic, 0))
            assert not consumer.poll(0.1)
            consumer.commit()
            assert consumer.committed()[topic, 0].offset == 1
            send(shared, topic, (MOVE, "new"))
            assert not consumer.poll(CLOSED_S / 4)
            consumer.resume((topic, 1))
            assert read(consumer, 1) == ["old"]
            consumer.commit()
            assert read(consumer, 1) == ["new"]
            consumer.commit()
            assert consumer.committed()[topic, 0].offset == 3


def test_no_gate_waits_for_aborted_records(shared: BrokerProcess) -> None:
    topic = group = "aborted"
    with Admin(shared.address) as admin:
        admin.create_topics(topic, partitions=1)
        send(shared, topic, (MOVE, "old"))
        with Producer(shared.address, transactional_id=topic) as producer:
            producer.init_transactions()
            producer.begin_transaction()
            producer.send(topic, "aborted", key=MOVE)
            producer.flush()
            producer.abort_transaction()
        with reader(shared, topic, group) as first:
            assert read(first, 1) == ["old"]
            first.commit()
            first.pause((topic, 0))
            admin.resize(topic, 2)
            send(shared, topic, (MOVE, "new"))
            with reader(shared, topic, group) as second:
                assert read(second, 1, first) == ["new"]
                first.resume((topic, 0))
                assert read(first, 1, second) == ["aborted"]

"""Members that share a partition and commit in transactions: what they say counts for their own keys alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client import OffsetAndMetadata, Record
from anabranch.client.sync import Admin, Consumer, Producer
from anabranch.machines.keyspace import SPACE, cuts
from tests.end_to_end.test_gates_passed import read_for, reader, send, until
from tests.support.broker import BrokerProcess

LOWER, UPPER = cuts(SPACE, 2)
COUNT = 100
MANY = 2_000


def until_shared(topic: str, *members: Consumer) -> None:
    """Let members poll until each has one range of the keys, or the only one all."""
    at = TopicPartition(topic, 0)

    def are_assigned() -> bool:
        assert not read_for(0.05, *members)
        return all(len(it.key_ranges().get(at, (SPACE,) * 2)) == (len(members) > 1) for it in members)

    until(are_assigned, lambda: [it.key_ranges() for it in members])


@contextlib.contextmanager
def sharers(broker: BrokerProcess, topic: str) -> Iterator[tuple[Consumer, Consumer]]:
    """Two members, of the lower and of the upper half of the keys, before there are any records."""
    with Admin(broker.address) as admin:
        admin.create_topics(topic, partitions=1, configs={"accept.range.fetch": "true"})
    said = {"allow_key_share": True, "isolation_level": "read_committed"}
    with reader(broker, topic, topic, **said) as one, reader(broker, topic, topic, **said) as other:
        until_shared(topic, one, other)
        yield (one, other) if LOWER in one.key_ranges()[TopicPartition(topic, 0)] else (other, one)


@contextlib.contextmanager
def transactional(broker: BrokerProcess, name: str) -> Iterator[Producer]:
    with Producer(broker.address, transactional_id=name, max_block_ms=10_000) as producer:
        producer.init_transactions()
        yield producer


@pytest.mark.parametrize("has_committed", [False, True])
def test_an_offset_counts_for_the_members_keys_whatever_the_group_has_committed(
    shared: BrokerProcess, has_committed: bool
) -> None:
    """Before the first commit of a group it was refused; a commit of ranges meanwhile made it void."""
    topic = f"own-keys-{has_committed}"
    tp = TopicPartition(topic, 0)
    with sharers(shared, topic) as (lower, upper), transactional(shared, topic) as producer:
        send(shared, topic, *((b"k%d" % number, str(number)) for number in range(COUNT)))
        if has_committed:
            for consumer in (lower, upper):
                consumer.commit({tp: 0})
        with producer.transaction():
            producer.send_offsets_to_transaction({tp: 10}, lower.group_metadata())
            if has_committed:
                upper.commit(ranges={tp: [(50, 52)]})
        wanted = [(LOWER.start, LOWER.end, 10), (UPPER.start, UPPER.end, 0)]
        until(lambda: (at := lower.committed(tp)[tp]) is not None and list(at.shares) == wanted, lower.committed)
        at = lower.committed(tp)[tp]
        assert at is not None and list(at.ranges) == ([(50, 52)] if has_committed else [])


def test_metadata_of_a_sharers_offsets_is_kept(shared: BrokerProcess) -> None:
    topic = "metadata"
    tp = TopicPartition(topic, 0)
    with sharers(shared, topic) as (lower, upper), transactional(shared, topic) as producer:
        send(shared, topic, *((b"k%d" % number, str(number)) for number in range(COUNT)))
        for consumer in (lower, upper):
            consumer.commit({tp: 0})

        def committed() -> tuple[str, list[tuple[int, int, int]]] | None:
            at = lower.committed(tp)[tp]
            return None if at is None else (at.metadata, list(at.shares))

        def commit(said: OffsetAndMetadata, offset: int) -> None:
            with producer.transaction():
                producer.send_offsets_to_transaction({tp: said}, lower.group_metadata())
            wanted = said.metadata, [(LOWER.start, LOWER.end, offset), (UPPER.start, UPPER.end, 0)]
            until(lambda: committed() == wanted, committed)

        commit(OffsetAndMetadata(10, "of the member"), 10)
        commit(OffsetAndMetadata(0, "of its keys", shares=[(LOWER.start, LOWER.end, 14)]), 14)


def test_records_of_keys_that_have_just_come_to_a_member_are_not_committed_unread(shared: BrokerProcess) -> None:
    """The member is far ahead with the keys that it had, and commits after each few records that it is handed."""
    topic = "arriving"
    tp = TopicPartition(topic, 0)
    handed: set[int] = set()
    was_between = False
    with sharers(shared, topic) as (staying, leaving), transactional(shared, topic) as producer:
        send(shared, topic, *((b"k%d" % number, str(number)) for number in range(MANY)))

        def process(consumer: Consumer) -> Sequence[Record]:
            records = consumer.poll(0.05, max_records=20)
            if records:
                handed.update(record.offset for record in records)
                try:
                    with producer.transaction():
                        producer.send_offsets_to_transaction(consumer.offsets_to_commit(), consumer.group_metadata())
                except ApiError as refused:  # The epoch moved meanwhile: the next transaction takes the offsets along.
                    if refused.code is not ErrorCode.STALE_MEMBER_EPOCH:
                        raise
            return records

        until(lambda: process(leaving), lambda: handed)
        until(lambda: process(staying) and len(handed) > MANY // 10, lambda: handed)
        leaving.close()
        while len(handed) < MANY:
            if process(staying):
                at = staying.committed(tp)[tp]
                assert at is not None and set(range(at.offset)) <= handed, "records were committed unread"
                was_between = was_between or len({step[2] for step in at.shares}) > 1
        assert was_between, "the member's old keys were not ahead of those that had come"
        until(lambda: (at := staying.committed(tp)[tp]) is not None and at.offset == MANY, staying.committed)

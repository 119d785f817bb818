"""Bugs that other systems had, tried with real members and a real broker process; each test's name says the trap."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator

import pytest

from anabranch.client import Consumer, TopicPartition, sync
from benchmarks.peers.anabranch import Anabranch
from tests.conformance.conftest import GROUP_SETTINGS, Broker
from tests.conformance.kinds import KINDS
from tests.conformance.members.group import Group, Kind
from tests.conformance.members.process import Workers, until

BY_NAME = {str(kind): kind for kind in KINDS}
OF_EACH_LIBRARY = [kind for number, kind in enumerate(KINDS) if kind.library not in {k.library for k in KINDS[:number]}]
EXACT = [kind for kind in KINDS if kind.protocol == "consumer" and kind.is_exact]
CLEANING = {
    "offsets.topic.segment.bytes": "4000",
    "log.retention.check.interval.ms": "100",
    "log.cleaner.backoff.ms": "100",
    "log.segment.min.bytes": "14",
    "log.cleaner.min.cleanable.ratio": "0.01",
    "log.cleaner.delete.retention.ms": "0",
}


@pytest.fixture(scope="module")
def mortal() -> Iterator[Anabranch]:
    """A broker that is killed, and compacts what its coordinators will load all the time."""
    with Anabranch(settings={**GROUP_SETTINGS, **CLEANING}) as broker:
        yield broker


@pytest.fixture(scope="module")
def its_workers(mortal: Anabranch) -> Iterator[Workers]:
    made = Workers(mortal.address)
    yield made
    made.close()


@pytest.mark.parametrize(
    "kinds",
    [
        ["confluent-consumer", "ours-consumer"],
        ["confluent-classic-range", "python-classic-range"],
        ["confluent-classic-cooperative-sticky", "ours-consumer"],
    ],
    ids="+".join,
)
def test_a_broker_killed_in_the_middle_of_a_groups_life_loads_what_is_being_compacted(
    kinds: list[str], mortal: Anabranch, its_workers: Workers
) -> None:
    topic = f"killed-{uuid.uuid4().hex[:8]}"
    with sync.Admin(mortal.address) as admin:
        admin.create_topics(topic, partitions=4)
    group = Group(its_workers, topic, topic)
    members = [group.join(BY_NAME[name]) for name in kinds]
    group.settles(4)
    for life in range(2):
        for _ in range(10):
            group.produce(8)
            group.reads_all()
        mortal.kill()
        mortal.start()
        group.produce(40)
        group.reads_all()
        group.settles(4)
        if life == 0:
            members.append(group.join(BY_NAME[kinds[0]]))
            group.settles(4)
    group.leave(members[0])
    group.settles(4)
    group.produce(40)
    group.reads_all()
    group.close()
    group.check()


@pytest.mark.parametrize("kind", EXACT, ids=str)
def test_a_stale_member_epoch_at_offset_fetch_is_not_taken_for_latest(kind: Kind, group: Group) -> None:
    group.produce(40, partitions=range(4))
    steady = group.join(kind)
    group.settles(4)
    group.reads_all()
    group.leave(steady)
    with sync.Admin(group.address) as admin:
        for _ in range(4):
            joining = [group.join(kind, reset="latest"), group.join(kind, reset="latest")]
            group.produce(20)
            group.settles(4)
            group.produce(20)
            group.leave(*joining[:1])
            group.produce(20)
            group.leave(*joining[1:])
        assert admin.list_group_offsets(group.group_id)
    group.join(kind, reset="latest")
    group.reads_all()


@pytest.mark.parametrize("kind", EXACT, ids=str)
def test_latest_means_the_same_in_partitions_that_wait_for_others(
    kind: Kind, group: Group, group_broker: Broker
) -> None:
    """Formed after a resize, the group reads no history, and what was written while partitions waited."""
    if not group_broker.elastic:
        pytest.skip("only our broker has partitions wait")
    group.produce(40, partitions=range(4))
    group.resize(6)
    group.produce_at_once(12, partitions=(4, 5))
    member = group.join(kind, reset="latest")
    until(lambda: len(member.owned) >= 4, lambda: f"{member} should own what does not wait")
    group.produce_at_once(12, partitions=(4, 5))
    rounds = 0
    while {at[1] for at, _, _ in member.received} < {0, 1, 2, 3}:
        group.produce_at_once(4, partitions=range(4))
        rounds += 1
        assert rounds < 100, member
        time.sleep(0.1)
    while_they_waited = {str(number) for number in range(52, 64)}
    until(lambda: while_they_waited <= {value for _, _, value in member.received}, lambda: f"{member} lost something")
    assert min(int(value) for _, _, value in member.received) >= 52, "history"


@pytest.mark.parametrize("kind", OF_EACH_LIBRARY, ids=str)
def test_a_fetch_offset_inside_a_batch_returns_that_batch(kind: Kind, group: Group) -> None:
    group.produce(80, partitions=range(4))
    middle = {(group.topics[0], number): 7 for number in range(4)}
    with sync.Admin(group.address) as admin:
        admin.alter_group_offsets(group.group_id, middle)
    member = group.join(kind)
    group.reads_all(beyond=middle)
    assert sorted(offset for _, offset, _ in member.received) == sorted([*range(7, 20)] * 4)


@pytest.mark.parametrize("protocol", ["consumer", "classic"])
def test_the_leave_heartbeat_is_not_sent_before_what_is_revoked_was_committed(
    protocol: str, group: Group, group_broker: Broker
) -> None:
    topic = group.topics[0]
    group.produce(40, partitions=range(4))

    async def scenario() -> None:
        consumer = Consumer(
            group_broker.address,
            group_id=group.group_id,
            group_protocol=protocol,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )
        count = 0

        async def commit(partitions: list[TopicPartition]) -> None:
            assert len(partitions) == 4
            await asyncio.sleep(0.3)  # longer than a heartbeat takes
            await consumer.commit()

        consumer.subscribe(topic, on_partitions_revoked=commit)
        while count < 40:
            count += len(await consumer.poll(1))
        await consumer.close()

    asyncio.run(scenario())
    with sync.Admin(group_broker.address) as admin:
        offsets = admin.list_group_offsets(group.group_id)
    assert {at.partition: found.offset for at, found in offsets.items()} == dict.fromkeys(range(4), 10)


@pytest.mark.parametrize("protocol", ["consumer", "classic"])
def test_what_is_committed_when_its_partitions_are_revoked_is_not_handed_out_again(
    protocol: str, group: Group, group_broker: Broker
) -> None:
    """platformatic/kafka#340: nobody was told before partitions moved, so that what was done already was done again."""
    group.produce(40, partitions=range(4))
    values: list[bytes | None] = []

    def member() -> Consumer:
        return Consumer(
            group_broker.address,
            group_id=group.group_id,
            group_protocol=protocol,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )

    async def scenario() -> None:
        async with member() as first, member() as second:
            told: list[int] = []

            async def commit(partitions: list[TopicPartition]) -> None:
                told.append(len(partitions))
                await first.commit()

            first.subscribe(group.topics[0], on_partitions_revoked=commit)
            while len(values) < 40:
                values.extend(record.value for record in await first.poll(1))
            second.subscribe(group.topics[0])
            while len(second.assignment()) < 2:
                for consumer in (first, second):
                    values.extend(record.value for record in await consumer.poll(0.1))
            assert sum(told) >= 2
            group.produce(40, partitions=range(4))
            while len(values) < 80:
                for consumer in (first, second):
                    values.extend(record.value for record in await consumer.poll(0.1))

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert len(set(values)) == len(values) == 80


def test_a_new_partition_is_not_read_from_its_latest_offset(group: Group) -> None:
    """KAFKA-20539: what was produced before members knew of the partition was lost under `latest`."""
    first = group.join(BY_NAME["ours-consumer"], reset="latest")
    second = group.join(BY_NAME["ours-consumer"], reset="latest")
    group.settles(4)
    group.resize(6)
    group.produce_at_once(60, (4, 5))
    group.settles(6)
    group.reads_all()
    assert first.received and second.received

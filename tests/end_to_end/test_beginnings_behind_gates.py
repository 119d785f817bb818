"""Members that begin behind a closed gate: others have finished what lies before, or the application has sought there.

What such a member commits says where the group stands. It does not say that the gate was open.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from anabranch.base.ids import TopicPartition
from anabranch.client import OffsetAndMetadata
from anabranch.client.sync import Admin, Consumer, Producer
from anabranch.machines.keyspace import SPACE, cuts
from tests.end_to_end.test_gates_passed import CLOSED_S, MOVE, STAY, read_for, send
from tests.support.broker import BrokerProcess

GATE = 1
"""Where partition 0 has its gate: 'stays' lies before it, and 'old', the record of partition 1, is to be committed."""
LONG_MS = 600_000
TIMEOUT_S = 15.0


class Members:
    """A member that has the whole partition 0, or several that share it; 'old' is handed out, and not committed."""

    def __init__(
        self, broker: BrokerProcess, topic: str, count: int, protocol: str = "consumer", poll_interval_ms: int = LONG_MS
    ) -> None:
        self.topic = topic
        self.found: list[str] = []
        self.made = [
            Consumer(
                broker.address,
                group_id=topic,
                group_protocol=protocol,
                auto_offset_reset="earliest",
                enable_auto_commit=False,
                retry_backoff_ms=20,
                allow_key_share=count > 1,
                max_poll_interval_ms=poll_interval_ms,
            )
            for _ in range(count)
        ]

    def __enter__(self) -> Members:
        for consumer in self.made:
            consumer.subscribe(self.topic)
        self.read_until(lambda: "old" in self.found)
        return self

    def __exit__(self, *_: object) -> None:
        for consumer in self.made:
            consumer.close()

    @property
    def behind(self) -> list[str]:
        return [value for value in self.found if value.startswith("new")]

    def read_until(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not holds():
            assert time.monotonic() < deadline, (self.found, [consumer.key_ranges() for consumer in self.made])
            self.found += read_for(0.05, *self.made)

    def read_until_all_have_their_share(self) -> None:
        at, count = TopicPartition(self.topic, 0), int(len(self.made) > 1)
        self.read_until(lambda: all(len(it.key_ranges().get(at, (SPACE,) * 2)) == count for it in self.made))

    def check_closed(self) -> None:
        self.found += read_for(CLOSED_S / 2, *self.made)
        assert self.behind == [], "the gate is open although 'old' is not committed"

    def open(self) -> None:
        for consumer in self.made:
            if (self.topic, 1) in consumer.assignment():
                consumer.commit({(self.topic, 1): 1})
        self.read_until(lambda: self.behind)


def joined(broker: BrokerProcess, topic: str, *records: tuple[bytes, str]) -> None:
    """Make a topic whose second partition, with the record 'old', has retired: these records lie behind the gate."""
    with Admin(broker.address) as admin:
        admin.create_topics(topic, partitions=1, configs={"accept.range.fetch": "true"})
        admin.resize(topic, 2)
        send(broker, topic, (STAY, "stays"), (MOVE, "old"))
        admin.resize(topic, 1)
        send(broker, topic, *records)


@pytest.mark.parametrize("in_transaction", [False, True])
@pytest.mark.parametrize(("protocol", "count"), [("classic", 1), ("consumer", 2)])
def test_who_commits_a_position_with_metadata_behind_a_gate_keeps_the_metadata_and_opens_no_gate(
    shared: BrokerProcess, protocol: str, count: int, in_transaction: bool
) -> None:
    """Other members have finished what lies before the position, and did not wait for the keys that this one has."""
    topic = f"position-{count}-{in_transaction}"
    tp, position = TopicPartition(topic, 0), GATE + 1
    joined(shared, topic, (STAY, "finished"), (MOVE, "new"))
    _, upper = cuts(SPACE, 2)
    with Consumer(shared.address, group_id=topic) as consumer:
        consumer.assign([(topic, 0), (topic, 1)])
        consumer.commit({(topic, 0): GATE if count == 1 else 0, (topic, 1): 0})
        consumer.commit(ranges={(topic, 0): [(GATE, GATE)]})
        if count > 1:
            consumer.commit({(topic, 0): OffsetAndMetadata(GATE, shares=[(upper.start, upper.end, GATE)])})
    with (
        Members(shared, topic, count, protocol) as group,
        Producer(shared.address, transactional_id=topic) as producer,
    ):
        producer.init_transactions()
        group.read_until_all_have_their_share()
        consumer = next(it for it in group.made if it.key_ranges()[tp] in ((), (upper,)))
        assert consumer.position(*tp) == position
        said = {tp: OffsetAndMetadata(position, "host-1")}
        if in_transaction:
            with producer.transaction():
                producer.send_offsets_to_transaction(said, consumer.group_metadata())
        else:
            consumer.commit(said)
        group.read_until(lambda: (at := consumer.committed(tp)[tp]) is not None and at.metadata == "host-1")
        group.check_closed()
    with Members(shared, topic, count, protocol) as group:
        group.read_until_all_have_their_share()
        group.check_closed()
        group.open()


@pytest.mark.parametrize("count", [1, 2])
def test_who_seeks_behind_a_closed_gate_and_leaves_opens_it_for_no_next_owner(
    shared: BrokerProcess, count: int
) -> None:
    topic = f"sought-{count}"
    sought = GATE + 1
    joined(shared, topic, (MOVE, "new 1"), (MOVE, "new 2"))
    with Members(shared, topic, count) as group:
        group.read_until_all_have_their_share()
        for consumer in group.made:
            consumer.seek(topic, 0, sought)
        group.check_closed()
        for consumer in group.made:
            consumer.commit({(topic, 0): sought})
        (at,) = consumer.committed((topic, 0)).values()
        assert at is not None and at.offset == sought
    with Members(shared, topic, count) as group:
        group.check_closed()
        group.open()
        assert group.behind == ["new 2"]


def test_a_gate_that_opened_by_time_for_who_began_behind_it_is_open_for_the_next_owner(shared: BrokerProcess) -> None:
    """What is committed by key behind it, as of work that is finished out of order, says that it was open."""
    topic = "begun-and-opened"
    sought = GATE + 1
    joined(shared, topic, (MOVE, "new 1"), (MOVE, "new 2"), (MOVE, "new 3"))
    with Members(shared, topic, 1, poll_interval_ms=1_500) as group:
        group.read_until_all_have_their_share()
        (consumer,) = group.made
        consumer.seek(topic, 0, sought)
        consumer.commit({(topic, 0): sought})
        group.read_until(lambda: len(group.behind) == 2)
        assert group.behind == ["new 2", "new 3"]
        by_key = OffsetAndMetadata(sought, shares=[(SPACE.start, SPACE.end, sought + 1)])
        consumer.commit({(topic, 0): by_key})
    with Members(shared, topic, 1) as group:
        group.read_until(lambda: group.behind)
        assert group.behind == ["new 3"]

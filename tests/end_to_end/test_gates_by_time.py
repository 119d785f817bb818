"""Gates that must not open by time: the owner of what they wait for cannot go on, or nobody knows whether it would.

All applications but one commit what they are handed at once. Their poll interval, after which gates open by time, is
shorter than a gate is closed here, as in the field where a backlog, a transaction or a dead member's session is long.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from anabranch.client.sync import Consumer, Producer
from anabranch.machines.placement import place
from anabranch.records.hashing import placement_hash
from tests.support.applications import Stage, Workers, stage
from tests.support.broker import BrokerProcess
from tests.support.thorough import THOROUGH

OPENED_BY_TIME = "kafka_server_group_coordinator_metrics_gates_opened_by_time_count"


def name_at(*places: tuple[int, int]) -> str:
    """A name for `Load.send` whose first key lies in these partitions at these counts, of one at creation."""
    for name in map("n{}".format, itertools.count()):
        hashed = placement_hash(f"{name}-0".encode())
        if all(int(place(hashed, 1, count)) == partition for count, partition in places):
            return name
    raise AssertionError


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_partition_that_waits_at_a_gate_itself_is_waited_for(
    shared: BrokerProcess, workers: Workers, protocol: str
) -> None:
    """Two partitions become one, then four: 2 and 3 wait for 0, which waits for a backlog that takes long."""
    with stage(shared.address, f"behind-{protocol}", 1, workers) as it:
        group = it.group(
            members=2, commit="each", protocol=protocol, poll_interval_ms=2_500, delay_ms=60, records_max=4
        )
        it.until_all_owned()
        it.resize(2)
        it.until(lambda: all(len(member.owned) == 1 for member in group.members), "one has everything")
        in_1, in_0 = name_at((2, 1), (4, 3)), name_at((2, 0), (4, 2))
        it.load.send(65, keys=1, name=in_1)
        for count in (1, 4):
            it.resize(count)
            it.load.send(3, keys=1, name=in_1)
            it.load.send(3, keys=1, name=in_0)
        it.finish(60)
        assert {number for _, number in group.edge.by_partition} == {0, 1, 2, 3} and group.edge.moves >= 3


def test_records_behind_a_gate_do_not_count_with_those_that_an_application_keeps_uncommitted(
    shared: BrokerProcess, workers: Workers
) -> None:
    """Of partition 0 two records before its own gate stay uncommitted: 2 and 3 wait for those behind it."""
    with stage(shared.address, "kept", 1, workers) as it:
        group = it.group(members=3, commit="told", patient=True, poll_interval_ms=2_500, delay_ms=60, records_max=4)
        it.until_all_owned()
        it.resize(2)
        it.until_owned(group, [0, 1])
        assert group.owner(0) is not group.owner(1)
        in_1, in_0 = name_at((2, 1), (4, 3)), name_at((2, 0), (4, 2))
        group.owner(1).commit_on()
        it.load.send(5, keys=1, name=in_0)
        it.until(lambda: group.handed_from[0] == 5, "partition 0 is not read")
        group.owner(0).commit({0: 3})
        it.load.send(80, keys=1, name=in_1)
        for count in (1, 4):
            it.resize(count)
            it.load.send(3, keys=1, name=in_1)
            it.load.send(3, keys=1, name=in_0)
        it.until(lambda: group.handed_from[2] or group.handed_from[3], "no gate opens by time")
        assert group.handed_from[0] == 5 + 3 + 3, "records were handed out before those that they wait for"
        it.finish(60)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_gate_before_which_a_member_stops_is_described_and_counted_once_when_it_opens(
    shared: BrokerProcess, workers: Workers, protocol: str
) -> None:
    """Two partitions become one: its owner stops there, as three records of the other one stay uncommitted."""
    with stage(shared.address, f"counted-{protocol}", 1, workers) as it:
        group = it.group(members=2, commit="told", patient=True, protocol=protocol, poll_interval_ms=3_000)

        def described() -> list[tuple[int, bool, int, int | None]]:
            """Of each waiting partition whether its gate is open, and which waits on how many records of which."""
            found = it.admin.describe_groups(group.name)[group.name]
            members = {member.member_id for member in found.members}
            assert all(on.member_id in members for each in found.waiting for on in each.waits_on)
            return [
                (each.partition.partition, each.opened_by_time, on.partition.partition, on.records_left)
                for each in found.waiting
                for on in each.waits_on
            ]

        it.until_all_owned()
        it.resize(2)
        it.until_owned(group, [0, 1])
        in_0, in_1 = name_at((2, 0)), name_at((2, 1))
        for name in (in_0, in_1):
            it.load.send(5, keys=1, name=name)
        it.until(lambda: group.handed_from == {0: 5, 1: 5}, "the partitions are not read")
        group.owner(0).commit({0: 5})
        group.owner(1).commit({1: 2})
        it.until(lambda: group.committed == {0: 5, 1: 2}, "nothing is committed")
        opened = shared.metrics()[OPENED_BY_TIME]
        it.resize(1)
        it.load.send(3, keys=1, name=in_1)
        it.until(lambda: described() == [(0, False, 1, 3)], "what waits is not described")
        it.until(lambda: group.handed_from[0] == 5 + 3, "the gate does not open by time")
        assert described() == [(0, True, 1, 3)]
        assert shared.metrics()[OPENED_BY_TIME] == opened + 1
        for member in group.members:
            member.commit_on()
        it.until(lambda: not described(), "an open gate is described although nothing is left")
        for member in group.members[1:]:
            member.leave()
        it.until(lambda: len(group.present) == 1 and group.owners(0), "its partitions are not handed out again")
        it.finish(60)
        assert shared.metrics()[OPENED_BY_TIME] == opened + 1
        told = [line for line in shared.said("warning", "gate opened by time") if line["group"] == group.name]
        (line,) = told
        assert (line["partition"], line["records_left"]) == (f"{it.topic}-0", 3)
        assert line["waited_on"] == 1


def test_a_later_gate_waits_again_for_records_that_came_later(shared: BrokerProcess, workers: Workers) -> None:
    """A gate has opened by time, and the position before it stands still; another one waits for records written then.

    They were handed out behind those of their keys in the next layout, at once.
    """
    with stage(shared.address, "later", 1, workers) as it:
        group = it.group(members=2, commit="told", patient=True, poll_interval_ms=3_000)
        it.until_all_owned()
        in_1, in_2 = name_at((2, 1)), name_at((2, 0), (4, 2))
        it.load.send(5, keys=1, name=in_1)
        it.until(lambda: group.handed_from[0] == 5, "partition 0 is not read")
        group.owner(0).commit({0: 3})
        it.resize(2)
        it.load.send(3, keys=1, name=in_1)
        it.until(lambda: group.handed_from[1] == 3, "no gate opens by time")
        group.owner(0).stand(1.0)
        it.load.send(4, keys=1, name=in_2)
        it.resize(4)
        it.load.send(3, keys=1, name=in_2)
        it.keeps(lambda: not group.handed_from[2], "the time of the first gate opened the second", 2.0)
        it.finish(60)
        assert group.edge.by_partition[f"{it.topic}~1", 2] == 3


@pytest.mark.parametrize("library", ["ours", "stock"])
def test_a_partition_with_an_open_transaction_is_waited_for(
    shared: BrokerProcess, workers: Workers, library: str
) -> None:
    """One transaction has records before and after a resize; it is open for twice the poll interval."""
    with stage(shared.address, f"open-{library}", 1, workers) as it:
        group = it.group(library, members=2, commit="each", poll_interval_ms=1_500, isolation="read_committed")
        it.until_all_owned()
        name = name_at((2, 1))
        it.load.send(3, keys=1, name=name)
        group.read_all()
        with Producer(shared.address, transactional_id=it.topic) as producer:
            producer.init_transactions()
            with producer.transaction():
                send_in_transaction(it, producer, name, 5)
                it.resize(2)
                send_in_transaction(it, producer, name, 5)
                it.keeps(lambda: not group.owners(1) and not group.handed_from[1], "the gate opened by time", 2.5)
        it.finish()
        assert group.edge.moves == 1


def send_in_transaction(it: Stage, producer: Producer, name: str, count: int) -> None:
    """Send records of one key as a part of an open transaction."""
    load, stream = it.load, (name, f"{name}-0")
    for _ in range(count):
        number = load.sent[stream]
        load.sent[stream] = number + 1
        found = producer.send(it.topic, f"1|{name}|{name}-0|{number}", key=f"{name}-0")
        producer.flush()
        load.places[stream][number] = (f"{it.topic}~1", found.result().partition), found.result().offset
        load.appended_ms[stream, number] = time.monotonic_ns() // 1_000_000


@pytest.mark.parametrize("library", ["ours", "stock"] if THOROUGH else ["stock"])
def test_a_partition_of_a_dead_member_is_waited_for(shared: BrokerProcess, workers: Workers, library: str) -> None:
    """The session is longer than the poll interval: others read what the dead member has left when that is over."""
    with stage(shared.address, f"dead-{library}", 1, workers) as it:
        it.admin.alter_configs("group", f"{it.topic}-g0", {"consumer.session.timeout.ms": "6000"})
        group = it.group(library, process="dead", commit="each", poll_interval_ms=2_000, delay_ms=20, records_max=5)
        it.until_all_owned()
        it.load.send(20)
        it.until(lambda: group.handed_from[0] > 10, "nothing is read")
        group.join(process="heir")
        it.until(lambda: len(it.admin.describe_groups(group.name)[group.name].members) == 2, "the heir does not come")
        group.members[0].stand(1.5)
        it.resize(2)
        it.load.send(5)
        time.sleep(0.5)
        group.members[0].kill()
        it.finish(60)
        assert group.edge.moves > 0 and group.members[1].handed > 0


def test_a_gate_opens_by_time_for_a_static_member_that_came_back(shared: BrokerProcess, workers: Workers) -> None:
    """By the classic protocol its generation goes on, with another id of the member. It keeps two records."""
    settings: dict[str, Any] = {"group_protocol": "classic", "group_instance_id": "one", "session_timeout_ms": 20_000}
    settings |= {"max_poll_interval_ms": 3_000, "heartbeat_interval_ms": 300, "metadata_max_age_ms": 500}
    settings |= {"enable_auto_commit": False, "auto_offset_reset": "earliest"}

    def read(member: Consumer, count: int) -> list[int]:
        found: list[int] = []
        until = time.monotonic() + 20
        while len(found) < count and time.monotonic() < until:
            found += [each.partition for each in member.poll(0.2)]
        return found

    with stage(shared.address, "came-back", 1, workers) as it:
        name = name_at((2, 1))
        it.load.send(5, keys=1, name=name)
        with Consumer(shared.address, group_id=it.topic, **settings) as former:
            former.subscribe(it.topic)
            assert read(former, 5) == [0] * 5
            former.commit({(it.topic, 0): 3})
            it.resize(2)
            while len(former.assignment()) < 2:
                former.poll(0.2)
            generation = former.group_metadata().generation_id
        it.load.send(5, keys=1, name=name)
        with Consumer(shared.address, group_id=it.topic, **settings) as member:
            member.subscribe(it.topic)
            assert read(member, 2 + 5) == [0] * 2 + [1] * 5
            assert member.group_metadata().generation_id == generation


def test_the_time_of_a_classic_owner_begins_when_its_generation_is_handed_out(
    shared: BrokerProcess, workers: Workers
) -> None:
    """A rebalance waits for a dead member; the owner keeps two records, and has all of its time afterwards."""
    with stage(shared.address, "again", 1, workers) as it:
        plan: dict[str, Any] = {"protocol": "classic", "commit": "told", "patient": True}
        group = it.group(process="one", poll_interval_ms=9_000, session_ms=7_500, **plan)
        owner = group.owner(0)
        dead = group.join(process="dead")
        it.until(lambda: len(it.admin.describe_groups(group.name)[group.name].members) == 2, "it does not come")
        assert owner is group.owner(0)
        name = name_at((2, 1))
        it.load.send(5, keys=1, name=name)
        it.until(lambda: group.handed_from[0] == 5, "partition 0 is not read")
        owner.commit({0: 3})
        it.resize(2)
        it.until_owned(group, [0, 1])
        it.load.send(3, keys=1, name=name)
        before = owner.assignments
        dead.kill()
        group.join(process="heir")
        it.until(lambda: owner.assignments > before, "the rebalance is not over")
        it.until_owned(group, [0, 1])
        assert owner is group.owner(0), [(it.name, sorted(it.owned), it.assignments) for it in group.members]
        it.keeps(lambda: not group.handed_from[1], "the time of the rebalance counted", 3.0)
        it.finish(60)
        assert group.edge.moves == 1


def test_deleted_records_that_a_member_has_fetched_stay_behind_their_gate(
    shared: BrokerProcess, workers: Workers
) -> None:
    """What lies below the log start counts as read: no gate was in front of it, and it was handed out early."""
    with stage(shared.address, "deleted", 1, workers) as it:
        group = it.group(members=2, commit="told", protocol="classic", patient=True, poll_interval_ms=300_000)
        it.until_all_owned()
        name = name_at((2, 1))
        it.load.send(20, keys=1, name=name)
        it.until(lambda: group.handed_from[0] == 20, "partition 0 is not read")
        group.owner(0).commit({0: 5})
        it.resize(2)
        it.load.send(6, keys=1, name=name)
        it.until_owned(group, [0, 1])
        it.keeps(lambda: not group.handed_from[1], "the gate is open")
        it.delete_records(1, 3)
        it.keeps(lambda: not group.handed_from[1], "deleted records were handed out before those that they wait for")
        for member in group.members:
            member.commit_on()
        it.finish(60)

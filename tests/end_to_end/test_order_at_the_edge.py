"""The order of keys as applications see it: real brokers, real clients in processes of their own, resizes, deaths.

Every application tells what it is given, handed and has committed; `ApplicationEdge` reads the promise off that. Every
test also shows that it tested something: records came from partitions that did not exist at first; and, where what it
tests brings that about, keys moved there, gates were closed for a while, and producers were refused for an old
partition count.
"""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.placement import place
from anabranch.records.hashing import placement_hash
from tests.support.applications import CLOSED_S, QUICK, Group, Stage, Workers, stage
from tests.support.broker import BrokerProcess, running
from tests.support.wire import WireClient, batch


def place_of(name: str, initial: int, partitions: int) -> int:
    """The partition of the first key of `Load.send(name=name)`."""
    return int(place(placement_hash(f"{name}-0".encode()), initial, partitions))


# -- growing and shrinking --------------------------------------------------------------------------------------------


def test_groups_of_every_kind_keep_the_order_while_a_topic_grows(shared: BrokerProcess, workers: Workers) -> None:
    """Ours with both protocols, and stock consumers, all somewhat slow; and one group that comes when all is over."""
    with stage(shared.address, "growing", 1, workers) as it:
        it.group(members=2, commit="each", delay_ms=2)
        it.group(members=2, commit="each", protocol="classic", delay_ms=2)
        it.group("stock", members=2, commit="each", delay_ms=2)
        it.until_all_owned()
        it.load.start()
        it.grow(2, 3, 8)
        it.check_that_producers_were_refused(shared)
        it.group(members=2, commit="each")
        it.group("stock", members=2, commit="each")
        it.finish()
        it.check_that_it_tested()


def test_ours_keep_the_order_while_a_topic_grows_and_shrinks(shared: BrokerProcess, workers: Workers) -> None:
    with stage(shared.address, "breathing", 2, workers) as it:
        it.group(members=2, commit="each", delay_ms=2)
        it.group(members=2, commit="each", protocol="classic", delay_ms=2)
        it.until_all_owned()
        it.load.start()
        it.grow(5, 2, 7, 3)
        it.check_that_producers_were_refused(shared)
        it.group(members=2, commit="each")
        it.finish()
        it.check_that_it_tested()


def test_automatic_commits_come_before_the_records_that_follow_them(shared: BrokerProcess, workers: Workers) -> None:
    with stage(shared.address, "automatic", 2, workers) as it:
        it.group(members=1, commit="auto", delay_ms=2)
        it.group(members=2, commit="auto", delay_ms=2)
        it.until_all_owned()
        it.load.start()
        it.grow(5, 2, 7, 3)
        it.check_that_producers_were_refused(shared)
        it.finish()
        it.check_that_it_tested(closed=False)


@pytest.mark.parametrize("library", ["ours", "stock"])
def test_parents_without_records_hide_no_grandparents(shared: BrokerProcess, workers: Workers, library: str) -> None:
    with stage(shared.address, f"idle-{library}", 1, workers) as it:
        group = it.group(library, members=2, commit="each", delay_ms=5, records_max=10)
        it.until_owned(group, [0])
        it.resize_held(2, 4, before=20, after=5)
        it.finish()
        it.check_that_it_tested()


# -- stock consumers and ours in one group ----------------------------------------------------------------------------


def test_ours_and_stock_in_one_group_of_the_consumer_protocol_keep_the_order_while_a_topic_grows(
    shared: BrokerProcess, workers: Workers
) -> None:
    """The coordinator holds new partitions back from stock members; nobody is excused."""
    with stage(shared.address, "mixed-growing", 2, workers) as it:
        group = it.group(commit="each", delay_ms=2)
        group.join()
        for _ in range(2):
            group.join(library="stock")
        it.until_all_owned()
        it.load.start()
        it.grow(4, 8)
        it.check_that_producers_were_refused(shared)
        until_both_read(it, group)
        it.finish()
        it.check_that_it_tested()


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_members_of_ours_keep_the_order_of_what_they_own_beside_stock_members(
    shared: BrokerProcess, workers: Workers, protocol: str
) -> None:
    """The classic protocol hands stock members every partition at once, and by both they read on across a shrink."""
    with stage(shared.address, f"mixed-{protocol}", 2, workers) as it:
        group = it.group(commit="each", delay_ms=2, protocol=protocol, without_order=["stock"])
        group.join()
        for _ in range(2):
            group.join(library="stock")
        it.until_all_owned()
        it.load.start()
        it.grow(4, 8, 3, 7)
        it.check_that_producers_were_refused(shared)
        it.finish()
        it.check_that_it_tested()
        assert all(handed(group, library) > 20 for library in LIBRARIES)


@pytest.mark.parametrize(("protocol", "waits"), [("classic", False), ("consumer", True)])
def test_a_stock_member_is_handed_what_waits_for_a_member_of_ours_by_the_classic_protocol_only(
    shared: BrokerProcess, workers: Workers, protocol: str, waits: bool
) -> None:
    """The parent is read by a member of ours, which has committed nothing."""
    with stage(shared.address, f"beside-{protocol}", 1, workers) as it:
        group = it.group(commit="told", protocol=protocol, without_order=["stock"])
        it.until_owned(group, [0])
        it.load.send(5)
        it.until(lambda: group.handed_from[0] == 20, "the parent is not read")
        group.join(library="stock")
        it.until(lambda: all(member.assignments for member in group.members) or waits, "the group is not balanced")
        it.resize(2)
        it.load.send(1)
        if waits:
            it.keeps(lambda: not group.handed_from[1], "it was not held back", 2 * CLOSED_S)
        else:
            it.until(lambda: group.handed_from[1], "it was held back")
        group.owner(0).commit_on()
        it.finish()


LIBRARIES = ("ours", "stock")


def handed(group: Group, library: str) -> int:
    """How many records the members of a library were handed after the first resize."""
    return sum(member.handed for member in group.members if member.library == library)


def until_both_read(it: Stage, group: Group) -> None:
    """Wait until members of both libraries are handed records, under load."""
    for library in LIBRARIES:
        it.until(lambda library=library: handed(group, library) > 50, f"members of {library} read nothing")  # type: ignore[misc]


# -- commits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["ours", "stock"])
def test_an_application_that_leaves_records_uncommitted_gets_on_after_its_poll_interval(
    shared: BrokerProcess, workers: Workers, library: str
) -> None:
    """Some commit every tenth record and have fewer, some never commit: gates open by time."""
    with stage(shared.address, f"lazy-{library}", 1, workers) as it:
        tenth = it.group(library, commit="10", poll_interval_ms=2_000, patient=True)
        never = it.group(library, commit="never", poll_interval_ms=2_000)
        it.until_all_owned()
        it.load.send(16, keys=1)
        it.resize(2)
        it.load.send(4, keys=8, name="others")
        it.load.send(1, keys=1)
        it.finish()
        for group in (tenth, never):
            assert group.edge.by_partition[f"{it.topic}~1", 1], "no record of the new partition"


@pytest.mark.parametrize("library", ["ours", "stock"])
def test_a_parent_that_ends_in_a_marker_is_read_when_its_last_record_is_committed(
    shared: BrokerProcess, workers: Workers, library: str
) -> None:
    with stage(shared.address, f"marked-{library}", 1, workers) as it:
        group = it.group(library, members=2, commit="each", isolation="read_committed")
        it.until_owned(group, [0])
        for count in (2, 4, 8):
            it.load.send(10, transactional=True)
            it.until(lambda: not shared.metrics()["anabranch_transactions_completing"], "markers are missing")
            it.resize(count)
        it.load.send(5, transactional=True)
        it.finish(20)
        it.check_that_it_tested(closed=False)


def test_a_position_that_was_waited_for_in_vain_counts_again_when_it_moves(
    shared: BrokerProcess, workers: Workers
) -> None:
    """A gate opens by time, as records stay uncommitted; then the parent is read on, and later gates wait for it."""
    with stage(shared.address, "resumed", 1, workers) as it:
        group = it.group("stock", members=2, commit="10", delay_ms=4, poll_interval_ms=2_000, patient=True)
        it.until_owned(group, [0])
        it.load.send(15, keys=1)
        it.resize(2)
        it.load.send(5, keys=8, name="others")
        it.until(lambda: group.owners(1), "the gate does not open by time")
        it.resize_held(4, before=30, after=10, keys=8)
        it.finish()
        it.check_that_it_tested()


# -- deletions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["ours", "stock"])
def test_a_parent_whose_unread_end_was_deleted_holds_nothing_up(
    shared: BrokerProcess, workers: Workers, library: str
) -> None:
    with stage(shared.address, f"forgotten-{library}", 1, workers) as it:
        group = it.group(library, commit="each", delay_ms=20, records_max=5)
        it.until_owned(group, [0])
        it.load.send(60)
        it.until(lambda: group.members[0].handed > 20, "nothing was read")
        group.members[0].leave()
        it.until(lambda: not group.present, "the member does not leave")
        it.resize(2)
        it.load.send(5)
        it.delete_records(0)
        for _ in range(2):
            group.join()
        it.finish(20)
        assert group.edge.skipped > 0, "everything was read before it was deleted"
        it.check_that_it_tested(closed=False, moved=False)


def resize_under_a_slow_reader(it: Stage, group: Group) -> None:
    """Have the group read a few of 100 records of one key, and send more of it to a new partition."""
    name = next(name for name in map("moves{}".format, itertools.count()) if place_of(name, 1, 2) == 1)
    it.load.send(100, keys=1, name=name)
    it.until(lambda: group.handed_from[0] > 5, "nothing was read")
    it.resize(2)
    it.load.send(5, keys=1, name=name)


@pytest.mark.parametrize("library", ["ours", "stock"])
def test_records_deleted_under_a_slow_owner_come_before_those_that_another_member_waits_with(
    shared: BrokerProcess, workers: Workers, library: str
) -> None:
    """It has fetched them, and hands them out one by one: the log start said that the group had read them."""
    with stage(shared.address, f"fetched-{library}", 1, workers) as it:
        group = it.group(library, members=2, commit="each", delay_ms=50, records_max=1)
        it.until_owned(group, [0])
        resize_under_a_slow_reader(it, group)
        it.delete_records(0)
        handed = group.handed_from[0]
        it.finish(20)
        assert group.handed_from[0] > handed + 20, "nothing was handed out that was deleted"
        it.check_that_it_tested(closed=False)


def test_partitions_that_are_made_again_keep_the_order(shared: BrokerProcess, workers: Workers) -> None:
    """Shrink, delete, remove the empty partitions, grow again; one group has read everything before, one nothing."""
    with stage(shared.address, "again", 1, workers) as it:
        it.group(members=2, commit="each")
        it.until_all_owned()
        it.load.start()
        it.grow(4, 1)
        it.load.pause()
        for group in it.groups:
            group.read_all()
        it.delete_records(0, 40)
        for number in (1, 2, 3):
            it.delete_records(number)
        it.until_partitions(1)
        it.group(members=2, commit="each", delay_ms=2)
        it.load.resume()
        it.grow(3, 6)
        it.finish()
        it.check_that_it_tested(it.groups[0])


def test_a_topic_that_is_made_again_with_another_count_at_creation_is_another_topic(
    shared: BrokerProcess, workers: Workers
) -> None:
    """One with 1 partition that grew to 4, then one that had 4 from the beginning: keys lie elsewhere."""
    with stage(shared.address, "reborn", 1, workers) as it:
        group = it.group(members=2, commit="each")
        it.until_all_owned()
        it.load.start()
        it.grow(4)
        it.load.pause()
        group.read_all()
        it.make_again(4)
        it.load.resume()
        it.grow(6)
        it.finish()
        it.check_that_it_tested(closed=False)


# -- compaction -------------------------------------------------------------------------------------------------------


COMPACTED_LATER = {
    "cleanup.policy": "compact",
    "segment.bytes": "2000",
    "min.cleanable.dirty.ratio": "0.01",
    "min.compaction.lag.ms": "3600000",
}
"""Of a topic that is compacted as soon as the lag is 0."""


@pytest.mark.parametrize(("library", "restarts"), [("ours", False), ("stock", False), ("ours", True)])
def test_records_compacted_away_under_a_slow_owner_come_before_those_that_another_member_waits_with(
    tmp_path: Path, own_workers: Workers, library: str, restarts: bool
) -> None:
    """It has fetched them, and hands them out one by one: the leader said that none of them was left to read.

    `restarts`: the broker does then; all are in the newest file, as nothing is appended behind the cut.
    """
    configs = COMPACTED_LATER | ({"segment.bytes": "1000000"} if restarts else {})
    with (
        running(tmp_path / "data", log_cleaner_backoff_ms=50, **QUICK) as broker,
        stage(broker.address, f"held-{library}", 1, own_workers, configs) as it,
    ):
        broker.settings["listeners"] = broker.address
        group = it.group(library, members=2, commit="each", delay_ms=100, records_max=1)
        it.until_owned(group, [0])
        resize_under_a_slow_reader(it, group)
        it.admin.alter_configs("topic", it.topic, {"min.compaction.lag.ms": "0"})
        it.until_compacted(0, range(50, 100))
        if restarts:
            broker.kill()
            broker.start()
        handed = group.handed_from[0]
        it.finish(40)
        assert group.handed_from[0] > handed + 20, "nothing was handed out that was compacted away"
        it.check_that_it_tested(closed=False)


@pytest.mark.parametrize("library", ["ours", "stock"])
def test_a_parent_whose_uncommitted_end_was_compacted_away_holds_nothing_up(
    tmp_path: Path, own_workers: Workers, library: str
) -> None:
    """Newer records of its keys wait in the new partition: not longer than until the cleaner has removed the old ones.

    Before, nothing is excused: what was handed out and not committed keeps the gate closed. Every key has one record in
    the new layout, so that the cleaner finds only the records behind the commit to remove. A member of ours tells that
    it holds none of them any more; a stock consumer has its time, as it may hold some.
    """
    with (
        running(tmp_path / "data", log_cleaner_backoff_ms=50, **QUICK) as broker,
        stage(broker.address, f"compacted-{library}", 1, own_workers, COMPACTED_LATER) as it,
    ):
        times = {} if library == "ours" else {"poll_interval_ms": 8_000, "patient": True}
        group = it.group(library, members=2, commit="told", **times)
        it.until_owned(group, [0])
        it.load.send(1, keys=1, name="head")
        it.load.send(10, keys=8)
        it.until(lambda: group.handed_from[0] == 81, "not all is read")
        group.owner(0).commit({0: 1})
        it.until(lambda: group.committed == {0: 1}, "nothing is committed")
        it.resize(2)
        it.load.send(1, keys=8)
        it.load.send(1, keys=300, name="others")
        it.keeps(lambda: not group.handed_from[1], "a record was handed out before its predecessor was committed")
        group.check()
        it.admin.alter_configs("topic", it.topic, {"min.compaction.lag.ms": "0"})
        it.until_compacted(0, range(1, 81))
        it.finish()
        assert group.committed == {0: 1}, "something else than the cleaner opened the gate"
        assert all(len(member.owned) == 1 for member in group.members), "one member has both partitions"
        it.check_that_it_tested(closed=False)


# -- reading from the end ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["ours", "stock"])
def test_a_group_that_reads_from_the_end_misses_nothing_after_it_began(
    shared: BrokerProcess, workers: Workers, library: str
) -> None:
    """It begins after a resize, and reads no history of what was there; then the topic grows, and it misses nothing."""
    with stage(shared.address, f"latest-{library}", 1, workers) as it:
        it.load.send(20)
        it.resize(2)
        it.load.send(20)
        began = dict(it.load.sent)
        group = it.group(library, members=2, commit="each", reset="latest", delay_ms=1, poll_interval_ms=2_000)
        it.until_owned(group, [0, 1])
        it.wait_until_positioned(group)
        group.since = dict(it.load.sent)
        it.load.start()
        it.grow(4, 8)
        it.finish(20)
        assert group.edge.first_deliveries <= sum(it.load.sent.values()) - sum(began.values()), "it read history"
        it.check_that_it_tested(closed=False)


# -- owners -----------------------------------------------------------------------------------------------------------


def test_a_partition_is_given_away_only_when_its_owner_has_let_go(shared: BrokerProcess, workers: Workers) -> None:
    """The owner of all partitions works on its records for a while when a second member comes."""
    with stage(shared.address, "shared", 4, workers) as it:
        group = it.group(commit="each")
        it.until_owned(group, range(4))
        it.load.send(5)
        it.until(lambda: group.members[0].handed == 20, "nothing is read")
        group.members[0].stand(1.5)
        second = group.join()
        it.until(lambda: len(second.owned) == 2, "the second member is given nothing")
        it.load.send(5)
        it.finish()


def test_a_retiring_partition_takes_nothing_after_its_survivor_counts_anew(shared: BrokerProcess) -> None:
    """Producers with the old count write to a retiring partition while one with the new count tries its survivor."""
    count = 100
    with WireClient(shared.port) as client, WireClient(shared.port) as old, WireClient(shared.port) as new:
        client.create("closing", 1)
        for _ in range(3):
            assert client.resize("closing", count) is ErrorCode.NONE
            first_new: list[int] = []
            sent_old: list[int] = []

            def write_old(sent: list[int] = sent_old) -> None:
                while True:
                    at = time.monotonic_ns()
                    if old.produce("closing", count - 1, batch([b"a"]), count=count).error_code:
                        return
                    sent.append(at)

            def write_new(first: list[int] = first_new) -> None:
                while new.produce("closing", 0, batch([b"b"]), count=1).error_code:
                    pass
                first.append(time.monotonic_ns())

            writers = [threading.Thread(target=write) for write in (write_old, write_new)]
            for writer in writers:
                writer.start()
            while len(sent_old) < 20:
                time.sleep(0.001)
            assert client.resize("closing", 1) is ErrorCode.NONE
            for writer in writers:
                writer.join(20)
            assert sent_old[-1] < first_new[0], "the retiring partition took a record after its survivor did"


def test_a_member_that_gets_its_topic_back_is_told_again_what_others_have_read(
    shared: BrokerProcess, workers: Workers
) -> None:
    """An eager rebalance takes an empty child away, and gives it back; its parent gets no more records."""
    with stage(shared.address, "back", 1, workers) as it:
        group = it.group(members=2, commit="each", protocol="classic")
        it.until_owned(group, [0])
        it.load.send(5)
        group.read_all()
        it.resize(2)
        it.until(lambda: all(len(member.owned) == 1 for member in group.present), "the child has no owner of its own")
        owned = {member: set(member.owned) for member in group.members}
        before = {member: member.assignments for member in group.members}
        passing = group.join()
        it.until(lambda: all(member.assignments > before[member] for member in owned) or passing.owned, "no rebalance")
        passing.leave()
        it.until(lambda: passing.is_gone and all(member.owned == owned[member] for member in owned), "no way back")
        assert all(member.assignments > before[member] for member in owned), "nothing was taken away"
        it.load.send(5, keys=1, name=next(name for name in map(str, itertools.count()) if place_of(name, 1, 2) == 1))
        it.finish(10)
        assert group.edge.by_partition[f"{it.topic}~1", 1] == 5


# -- deaths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["ours", "stock"])
def test_a_member_that_is_killed_while_it_owns_a_parent_holds_the_order(
    shared: BrokerProcess, workers: Workers, library: str
) -> None:
    with stage(shared.address, f"bereft-{library}", 1, workers) as it:
        it.admin.alter_configs("group", f"{it.topic}-g0", {"consumer.session.timeout.ms": "2000"})
        group = it.group(library, process="victim", commit="each", delay_ms=5)
        it.until_owned(group, [0])
        victim = group.members[0]
        it.load.start()
        it.until(lambda: victim.handed > 20, "nothing was read")
        group.join(process="heir")
        it.grow(2, 4)
        victim.kill()
        it.finish()
        assert any(member.handed for member in group.members if member is not victim)
        it.check_that_it_tested()


def test_brokers_that_are_killed_hold_the_order(tmp_path: Path, own_workers: Workers) -> None:
    broker = BrokerProcess(tmp_path / "data", **QUICK).start()
    broker.settings["listeners"] = broker.address
    try:
        with stage(broker.address, "killed", 1, own_workers) as it:
            it.group(members=2, commit="each", delay_ms=1)
            it.group("stock", members=2, commit="each", delay_ms=1)
            it.until_all_owned()
            it.load.start()
            for count in (2, 4):
                it.grow(count)
                broker.kill()
                broker.start()
            it.grow(6)
            it.check_that_producers_were_refused(broker)
            it.finish(60)
            it.check_that_it_tested(closed=False)
    finally:
        broker.kill()

"""Positions that are to be written later: who asks for one meanwhile must not be told that there is none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.image import Image
from anabranch.machines.groups.records import CoordinatorRecord
from anabranch.machines.groups.settling import OWED_MAX_MS
from anabranch.machines.outcome import Outcome
from anabranch.protocol.messages.join_group import JoinGroupResponse
from anabranch.protocol.messages.offset_fetch import OffsetFetchRequestGroup, OffsetFetchRequestTopics
from anabranch.protocol.messages.sync_group import SyncGroupRequestAssignment
from tests.support.groups import GROUP, assignment, subscription
from tests.unit.machines.groups.test_positions_asked import Asking, settle
from tests.unit.machines.groups.test_starts import (
    LOOK_MS,
    PRODUCER,
    Topic,
    assigned,
    commit_in_transaction,
    committed,
    made_again,
    unopened,
)

OWED = -1, ErrorCode.UNSTABLE_OFFSET_COMMIT


def fetched(
    world: Asking, numbers: Iterable[int], *, stable: bool = True, version: int = 8
) -> Mapping[int, tuple[int, ErrorCode]]:
    """What a member is told that asks for stable offsets, or for any."""
    topics = [OffsetFetchRequestTopics(name="foo", partition_indexes=list(numbers))]
    asked = OffsetFetchRequestGroup(group_id=GROUP, topics=topics)
    found = world.coordinator.offset_fetch(asked, stable, version, world.now_ms)
    return {it.partition_index: (it.committed_offset, ErrorCode(it.error_code)) for it in found.topics[0].partitions}


def join(world: Asking, owned: str) -> None:
    """Have a classic member join, and be given partitions."""
    joining = world.join_classic("", {"range": subscription("foo")}, version=3)
    world.advance(3_001)
    joined = joining if isinstance(joining, JoinGroupResponse) else world.answers[joining]
    handed = SyncGroupRequestAssignment(member_id=joined.member_id, assignment=assignment(owned))
    world.sync_classic(joined.member_id, joined.generation_id, [handed])


def while_a_log_is_closed() -> tuple[Topic, Asking]:
    """A classic member has both partitions; of the later one, which begins at 20, the log is not open."""
    topic = Topic()
    topic.ends[0] = 2
    world = Asking(topic.image())
    world.commit("", -1, 0, 2)
    made_again(topic)
    world.set_topics(unopened(topic, 1))
    join(world, "foo-0 foo-1")
    return topic, world


def log_opens(topic: Topic, world: Asking) -> None:
    made_again(topic)
    world.set_topics(topic.image())
    world.advance(100)


def test_a_classic_member_is_not_told_that_a_later_partition_has_no_position_while_its_log_is_not_open() -> None:
    """It would begin where its reset says, for good: a generation is handed out whatever logs are open."""
    topic, world = while_a_log_is_closed()
    assert fetched(world, [0, 1]) == {0: (2, ErrorCode.NONE), 1: OWED}
    log_opens(topic, world)
    assert fetched(world, [0, 1]) == {0: (2, ErrorCode.NONE), 1: (20, ErrorCode.NONE)}


@pytest.mark.parametrize("version", [1, 6, 9])
def test_nor_is_one_that_does_not_ask_for_stable_offsets(version: int) -> None:
    """Most clients do not, as they come, and may know no such error: they ask for all again."""
    topic, world = while_a_log_is_closed()
    later = -1, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert fetched(world, [0, 1], stable=False, version=version) == {0: later, 1: later}
    log_opens(topic, world)
    assert fetched(world, [0, 1], stable=False, version=version) == {0: (2, ErrorCode.NONE), 1: (20, ErrorCode.NONE)}


@pytest.mark.parametrize("stable", [True, False])
def test_a_member_is_told_so_for_half_a_minute_at_the_most(stable: bool) -> None:
    """Most clients begin none of their partitions meanwhile, and a log may be closed for good."""
    topic, world = while_a_log_is_closed()
    assert fetched(world, [1], stable=stable) != {1: (-1, ErrorCode.NONE)}
    world.advance(OWED_MAX_MS - 1)
    assert fetched(world, [1], stable=stable) != {1: (-1, ErrorCode.NONE)}
    world.advance(1)
    assert fetched(world, [0, 1], stable=stable) == {0: (2, ErrorCode.NONE), 1: (-1, ErrorCode.NONE)}
    log_opens(topic, world)
    assert fetched(world, [1], stable=stable) == {1: (20, ErrorCode.NONE)}


def closed(topic: Topic, number: int) -> Image:
    """The topic while a log is not open."""
    was = dict(topic.starts), dict(topic.ends)
    image = topic.image()
    known = image.by_name["foo"]
    starts, ends = ({n: at for n, at in each.items() if n != number} for each in was)
    made = replace(
        known,
        is_open=lambda n: n != number,
        log_start=lambda n: starts.get(n, 0),
        log_end=lambda n: ends.get(n, 0),
    )
    return Image(image.version, {"foo": made})


@pytest.mark.parametrize("ordered", [True, False])
def test_a_position_that_is_the_log_start_at_least_is_not_told_while_the_log_is_not_open(ordered: bool) -> None:
    """What was deleted was out of range when the log was open, so that `latest` took the rest."""
    topic = Topic(ordered=ordered)
    topic.ends[0] = 2
    world = Asking(topic.image())
    world.commit("", -1, 0, 2)
    world.set_topics(topic.resize(2))
    topic.ends[1], topic.starts[1] = 9, 3
    world.set_topics(closed(topic, 1))
    join(world, "foo-0 foo-1")
    assert fetched(world, [0, 1]) == {0: (2, ErrorCode.NONE), 1: OWED}
    world.set_topics(topic.image())
    assert fetched(world, [0, 1]) == {0: (2, ErrorCode.NONE), 1: (3, ErrorCode.NONE)}


def test_nor_is_a_partition_handed_out_that_waited_until_its_log_is_open() -> None:
    """It existed when the group began, and waited: its position was written at 0, which was told as the log start."""
    topic = Topic(2)
    world = Asking(topic.image())
    a = settle(world, "A", world.join("A").member_epoch)
    topic.ends = {0: 0, 1: 0}
    world.set_topics(topic.resize(3))
    a = settle(world, "A", a)
    topic.ends[2] = 4
    world.set_topics(topic.resize(2))
    topic.ends[0] = 20
    world.leave("A")
    b = settle(world, "B", world.join("B").member_epoch)
    world.advance(LOOK_MS)
    b = settle(world, "B", b)
    assert "foo-0" not in assigned(world, "B").split() and 0 not in committed(world)
    topic.starts[0], topic.ordered = 15, False
    world.image = closed(topic, 0)
    world.reload()
    b = settle(world, "B", world.beat("B", b).member_epoch)
    world.set_topics(topic.image())
    world.advance(LOOK_MS)
    settle(world, "B", b)
    assert "foo-0" in assigned(world, "B").split()
    assert fetched(world, [0]) == {0: (15, ErrorCode.NONE)}


@pytest.mark.parametrize("fails_over", [True, False])
def test_what_is_deleted_after_an_owner_that_committed_nothing_is_not_where_the_next_one_begins(
    fails_over: bool,
) -> None:
    """That nobody had begun there was not to be seen any more when the partition had been handed out."""
    topic = Topic()
    topic.ends[0] = 5
    world = Asking(topic.image())
    a = settle(world, "A", world.join("A").member_epoch)
    world.commit("A", a, 0, 2)
    world.set_topics(topic.resize(2))
    topic.ends[1] = 9
    a = settle(world, "A", a)
    assert assigned(world) == "foo-0"
    world.commit("A", a, 0, 5)
    world.advance(LOOK_MS)
    a = settle(world, "A", a)
    assert assigned(world) == "foo-0 foo-1"
    world.leave("A")
    topic.starts[1] = 6
    if fails_over:
        world.reload()
    assert fetched(world, [1]) == {1: (6, ErrorCode.NONE)}
    b = settle(world, "B", world.join("B").member_epoch)
    world.advance(LOOK_MS)
    settle(world, "B", b)
    assert assigned(world, "B") == "foo-0 foo-1" and committed(world) == {0: 5, 1: 6}


def test_a_log_that_is_not_open_gets_no_position_where_no_order_is_kept_either() -> None:
    """It was written at 0, where the log does not begin: out of range, so that `latest` took the rest."""
    topic = Topic(ordered=False)
    topic.ends[0] = 2
    world = Asking(topic.image())
    world.commit("", -1, 0, 2)
    made_again(topic)
    opened = topic.image().by_name["foo"]
    world.set_topics(Image(topic.version, {"foo": replace(opened, is_open=lambda number: number != 1)}))
    join(world, "foo-0 foo-1")
    assert committed(world) == {0: 2} and fetched(world, [1]) == {1: OWED}
    world.set_topics(topic.image())
    world.advance(100)
    assert committed(world) == {0: 2, 1: 20}


def test_nor_is_a_partition_handed_out_whose_log_is_not_open_where_no_order_is_kept() -> None:
    topic = Topic(ordered=False)
    world = Asking(topic.image())
    a = settle(world, "A", world.join("A").member_epoch)
    made_again(topic)
    opened = topic.image().by_name["foo"]
    world.set_topics(Image(topic.version, {"foo": replace(opened, is_open=lambda number: number != 1)}))
    a = settle(world, "A", a)
    assert assigned(world) == "foo-0" and committed(world) == {}
    world.set_topics(topic.image())
    world.advance(LOOK_MS)
    settle(world, "A", a)
    assert assigned(world) == "foo-0 foo-1" and committed(world) == {1: 20}


@pytest.mark.parametrize("is_classic", [False, True])
@pytest.mark.parametrize("fails_over", [False, True])
def test_what_is_deleted_before_a_later_partition_is_read_is_not_where_it_begins(
    is_classic: bool, fails_over: bool
) -> None:
    """With what was deleted the old layouts went, so that nothing said any more that the partition had waited."""
    topic = Topic()
    world = Asking(topic.image())
    topic.ends[0] = 5
    a = 0 if is_classic else settle(world, "A", world.join("A").member_epoch)
    world.commit("" if is_classic else "A", a or -1, 0, 2)
    world.set_topics(topic.resize(2))
    topic.ends = {0: 12, 1: 9}
    assert committed(world) == {0: 2, 1: 0}
    topic.starts = {0: 7, 1: 6}
    topic.counts, topic.cuts = [2], []
    folded = replace(topic.image().by_name["foo"], initial=1)
    image = Image(topic.version, {"foo": folded})
    if fails_over:
        world.image = image
        world.reload()
    else:
        world.set_topics(image)
    if is_classic:
        join(world, "foo-0 foo-1")
    else:
        settle(world, "A", world.beat("A", a).member_epoch)
        assert assigned(world) == "foo-0 foo-1" and committed(world) == {0: 2, 1: 6}
    assert fetched(world, [0, 1]) == {0: (2, ErrorCode.NONE), 1: (6, ErrorCode.NONE)}


def test_an_offset_that_a_client_has_committed_stays_where_it_is_when_its_record_is_deleted() -> None:
    """`auto.offset.reset` is for that."""
    topic = Topic()
    topic.ends[0] = 2
    world = Asking(topic.image())
    world.commit("", -1, 0, 2)
    world.set_topics(topic.resize(2))
    topic.ends[1] = 9
    world.commit("", -1, 1, 3)
    topic.starts[1] = 6
    assert fetched(world, [1]) == {1: (3, ErrorCode.NONE)}


def test_a_classic_member_is_not_told_so_between_the_end_of_a_transaction_and_the_decision_that_follows() -> None:
    topic = Topic()
    topic.ends[0] = 2
    world = Asking(topic.image())
    world.commit("", -1, 0, 2)
    for number in range(200):
        world.join("A", group=f"a{number:03}")
    world.set_topics(topic.resize(2))
    topic.ends[1] = 9
    assert fetched(world, [1]) == {1: OWED}, "its turn has not come"
    commit_in_transaction(world, "", -1, 1, 4)
    join(world, "foo-0 foo-1")
    world.marker(PRODUCER, committed=False)
    assert fetched(world, [0, 1]) == {0: (2, ErrorCode.NONE), 1: OWED}
    world.advance(100)
    assert fetched(world, [0, 1]) == {0: (2, ErrorCode.NONE), 1: (0, ErrorCode.NONE)}


def test_what_is_owed_to_a_group_goes_with_it() -> None:
    """A log that stays closed let a client grow what the coordinator remembers, a group at a time."""
    topic = Topic()
    world = Asking(topic.image())
    made_again(topic)
    world.set_topics(unopened(topic, 1))
    world.commit("", -1, 0, 2)
    epoch = world.join("A").member_epoch
    assert epoch > 0 and fetched(world, [1]) == {1: OWED}
    world.leave("A")
    assert world.submit(lambda machine: machine.delete_group(GROUP, world.now_ms)) is ErrorCode.NONE
    assert fetched(world, [1]) == {1: (-1, ErrorCode.NONE)}


def test_the_end_of_a_transaction_settles_nobody_who_waits_for_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each end settled all of them again, whatever group it was of."""
    topic = Topic()
    world = Asking(topic.image())
    world.commit("", -1, 0, 2)
    made_again(topic)
    world.set_topics(unopened(topic, 1))
    world.advance(100)
    decided: list[int] = []
    decide = world.coordinator.settling.decide_more

    def decide_more(now_ms: int) -> Outcome[None, CoordinatorRecord]:
        decided.append(now_ms)
        return decide(now_ms)

    monkeypatch.setattr(world.coordinator.settling, "decide_more", decide_more)
    world.marker(900, committed=True)
    world.advance(100)
    assert not decided and fetched(world, [1]) == {1: OWED}


def test_a_partition_that_is_withheld_for_a_transaction_is_not_offered_with_every_look() -> None:
    """All members were reconciled again and again, for as long as a client kept its transaction open."""
    topic = Topic(2)
    world = Asking(topic.image())
    world.join("A")
    world.set_topics(topic.resize(3))
    a = settle(world, "A", 1)
    topic.ends = {0: 8, 1: 0, 2: 4}
    world.set_topics(topic.resize(2))
    topic.ends[0] = 20
    b = settle(world, "B", world.join("B").member_epoch)
    a = settle(world, "A", a)
    b = settle(world, "B", b)
    mine = [number for _, numbers in world.group.members["A"].assigned for number in numbers]
    for number in mine:
        commit_in_transaction(world, "A", a, number, 0)
    world.leave("A")
    b = settle(world, "B", b)
    other = next(number for number in range(3) if number not in mine)
    gates = world.coordinator.keeper.known(GROUP)
    assert gates is not None and gates.unstable
    world.ask("B", b, needs=[(other, 0)], wait_ms=60_000)
    world.advance(4 * LOOK_MS)
    before = gates.freed
    for _ in range(10):
        gates.outdate(list(gates.evaluated))
        world.advance(LOOK_MS)
    assert gates.freed == before
    world.marker(PRODUCER, committed=False)
    world.advance(LOOK_MS)
    assert gates.freed > before and not gates.unstable

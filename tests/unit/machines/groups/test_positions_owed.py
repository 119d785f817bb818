"""Positions that are to be written later: who asks for one meanwhile must not be told that there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.image import Image
from anabranch.machines.groups.records import CoordinatorRecord
from anabranch.machines.groups.settings import GroupSettings
from anabranch.machines.groups.settling import ASKED_MAX, GROUPS_AT_A_TIME, OWED_MAX_MS, SILENT_MS
from anabranch.machines.lineage import Lineage
from anabranch.machines.outcome import Outcome
from anabranch.protocol.messages.join_group import JoinGroupResponse
from anabranch.protocol.messages.offset_commit import (
    KeyRangeOffset,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetRange,
)
from anabranch.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopic,
    OffsetFetchRequestTopics,
)
from anabranch.protocol.messages.sync_group import SyncGroupRequestAssignment
from anabranch.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from anabranch.server.handlers.offsets import NAMED_MAX, handle_offset_fetch
from tests.support.groups import GROUP, assignment, subscription
from tests.support.ranged_group import PLACES
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
    for number in range(2 * GROUPS_AT_A_TIME):
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


@pytest.mark.parametrize("is_unknown", [True, False])
def test_nor_is_one_whose_owner_has_committed_to_its_gate(is_unknown: bool) -> None:
    """Records behind the gate may be deleted: its next owner was out of range when the log was open."""
    topic = Topic(2)
    topic.ends = {0: 10, 1: 10}
    world = Asking(topic.image())
    a = settle(world, "A", world.join("A").member_epoch)
    for number in (0, 1):
        world.commit("A", a, number, 10)
    world.set_topics(topic.resize(3))
    topic.ends[2] = 4
    settle(world, "A", a)
    world.set_topics(topic.resize(2))
    topic.ends[0] = topic.ends[1] = 50
    world.leave("A")
    topic.starts[0] = 30
    world.commit("", -1, 2, 4)
    world.image = closed(topic, 0)
    if is_unknown:
        image, known = world.image, world.image.by_name["foo"]
        cuts = [{n: at for n, at in ends.items() if n != 0} for ends in topic.cuts]
        lineage = Lineage.of_ends(2, topic.counts, cuts, unknown={0: 1})
        world.image = Image(image.version, {"foo": replace(known, lineage=lineage)})
    world.reload()
    b = settle(world, "B", world.join("B").member_epoch)
    world.advance(LOOK_MS)
    b = settle(world, "B", b)
    assert assigned(world, "B") == "foo-1 foo-2"
    topic.ends, topic.starts = {0: 50, 1: 50, 2: 4}, {0: 30}
    world.set_topics(topic.image())
    world.advance(LOOK_MS)
    settle(world, "B", b)
    assert assigned(world, "B") == "foo-0 foo-1 foo-2" and fetched(world, [0]) == {0: (30, ErrorCode.NONE)}


@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("kind", ["offsets", "keys", "transaction"])
def test_a_commit_by_ranges_begins_where_its_member_was_told_to(kind: str, ordered: bool, is_closed: bool) -> None:
    """It left the group where the coordinator had written, below the log start, and the next owner to its reset."""
    topic = Topic(ordered=ordered)
    topic.ends[0] = 2
    world = Asking(topic.image())
    a = settle(world, "A", world.join("A").member_epoch)
    world.commit("A", a, 0, 2)
    world.set_topics(topic.resize(2))
    a = settle(world, "A", a)
    world.advance(LOOK_MS)
    a = settle(world, "A", a)
    assert assigned(world) == "foo-0 foo-1"
    topic.ends[1], topic.starts[1] = 200, 100
    told = {1: (100, ErrorCode.NONE)}
    assert fetched(world, [1]) == told
    if is_closed:
        world.set_topics(closed(topic, 1))
    keys = [KeyRangeOffset(start=0, end=PLACES[3], offset=110)] if kind == "keys" else []
    ranges = [] if kind == "keys" else [OffsetRange(start=101, end=105)]
    if kind == "transaction":
        commit_ranges_in_transaction(world, "A", a, ranges)
    else:
        part = OffsetCommitRequestPartition(
            partition_index=1, committed_offset=100, offset_ranges=ranges, key_range_offsets=keys
        )
        request = OffsetCommitRequest(
            group_id=GROUP,
            member_id="A",
            generation_id_or_member_epoch=a,
            topics=[OffsetCommitRequestTopic(name="foo", partitions=[part])],
        )
        answer = world.submit(lambda machine: machine.offset_commit(request, Caller(version=9), world.now_ms))
        found = answer.topics[0].partitions[0]
        assert (found.error_code, found.last_stable_offset) == (ErrorCode.NONE, 100)
    world.set_topics(topic.image())
    assert fetched(world, [1]) == told
    world.leave("A")
    assert fetched(world, [1]) == told


def commit_ranges_in_transaction(world: Asking, member: str, epoch: int, ranges: list[OffsetRange]) -> None:
    part = TxnOffsetCommitRequestPartition(partition_index=1, committed_offset=100, offset_ranges=ranges)
    keys = TxnOffsetCommitRequestPartition(
        partition_index=1, committed_offset=100, key_range_offsets=[KeyRangeOffset(start=0, end=5, offset=120)]
    )
    caller = Caller("client", "/host", 4, "fresh", 0)
    for producer_id, each in ((PRODUCER, keys), (PRODUCER + 1, part)):
        request = TxnOffsetCommitRequest(
            group_id=GROUP,
            producer_id=producer_id,
            member_id=member,
            generation_id=epoch,
            topics=[TxnOffsetCommitRequestTopic(name="foo", partitions=[each])],
        )
        world.submit(lambda machine, request=request: machine.name_ranges(request, world.now_ms))
        world.submit(lambda machine, request=request: machine.txn_offset_commit(request, caller, 1, world.now_ms))
    world.marker(PRODUCER + 1, committed=False)
    world.marker(PRODUCER, committed=True)


def test_the_position_of_a_partition_that_is_removed_is_owed_to_nobody() -> None:
    """Its log is open nowhere, and whoever lists the offsets of the group was told to ask again."""
    topic = Topic()
    topic.ends[0] = 2
    world = Asking(topic.image())
    world.commit("", -1, 0, 2)
    world.set_topics(topic.resize(2))
    assert committed(world) == {0: 2, 1: 0}
    image = Topic().image()
    known = replace(image.by_name["foo"], highest_count=2, is_open=lambda number: number == 0)
    world.set_topics(Image(topic.version + 1, {"foo": known}))
    assert fetched(world, [0, 1], stable=False) == {0: (2, ErrorCode.NONE), 1: (0, ErrorCode.NONE)}


def test_who_was_silent_for_long_is_told_to_ask_again_anew_and_not_remembered_for_ever() -> None:
    topic, world = while_a_log_is_closed()
    later = {1: (-1, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)}
    assert fetched(world, [1], stable=False) == later
    world.advance(OWED_MAX_MS)
    assert fetched(world, [1], stable=False) == {1: (-1, ErrorCode.NONE)}
    world.advance(SILENT_MS - 1)
    assert fetched(world, [1], stable=False) == {1: (-1, ErrorCode.NONE)}, "asked again and again"
    world.advance(SILENT_MS)
    assert fetched(world, [1], stable=False) == later
    log_opens(topic, world)
    owing = world.coordinator.settling
    with mock.patch.object(owing, "_owes", return_value=True):
        for number in range(5 * ASKED_MAX):
            owing.is_owed(f"g{number}", "foo", 1, world.now_ms + number * SILENT_MS // 100)
    assert len(owing._asked) <= 2 * ASKED_MAX


@pytest.mark.parametrize("stable", [True, False])
@pytest.mark.parametrize("version", [1, 8])
def test_half_a_minute_is_that_of_a_request_with_many_partitions_too(stable: bool, version: int) -> None:
    """It is answered in steps, and the first with an owed position ended it: the time of the next began later."""
    count = 10 * NAMED_MAX
    topic = Topic(ordered=False)
    topic.ends[0] = 2
    world = Asking(topic.image())
    world.commit("", -1, 0, 2)
    made = topic.resize(count)
    known = replace(made.by_name["foo"], is_open=lambda number: number % NAMED_MAX != 5)
    world.set_topics(Image(made.version, {"foo": known}))
    world.advance(100)
    join(world, " ".join(f"foo-{number}" for number in range(count)))

    class Shard:
        def read(self, look: Callable[..., Any], weigh: object = None) -> Any:
            return look(world.coordinator, world.now_ms)

    broker: Any = SimpleNamespace(groups=SimpleNamespace(shard_of=lambda group_id: Shard()))

    def codes() -> set[ErrorCode]:
        topics = [OffsetFetchRequestTopic(name="foo", partition_indexes=list(range(count)))]
        named = [OffsetFetchRequestTopics(name="foo", partition_indexes=list(range(count)))]
        groups = [OffsetFetchRequestGroup(group_id=GROUP, topics=named)]
        request = OffsetFetchRequest(
            group_id=GROUP, topics=topics, groups=groups if version >= 8 else [], require_stable=stable
        )
        call: Any = SimpleNamespace(api_version=version)
        answer: Any = asyncio.run(handle_offset_fetch(broker, request, call))  # type: ignore[arg-type]
        found = answer.make()
        parts = (found.groups[0] if version >= 8 else found).topics[0].partitions
        assert [part.partition_index for part in parts] == list(range(count))
        return {ErrorCode(part.error_code) for part in parts}

    again = {ErrorCode.NONE, ErrorCode.UNSTABLE_OFFSET_COMMIT} if stable else {ErrorCode.COORDINATOR_LOAD_IN_PROGRESS}
    assert codes() == again
    world.advance(OWED_MAX_MS)
    assert codes() == {ErrorCode.NONE}


def test_where_a_partition_waited_is_written_when_its_log_opens_after_its_group_has_become_a_classic_one() -> None:
    topic = Topic()
    topic.ends[0] = 5
    topic.resize(2)
    world = Asking(topic.image(), GroupSettings(consumer_migration_policy="bidirectional"))
    settle(world, "A", world.join("A").member_epoch)
    world.advance(LOOK_MS)
    assert assigned(world) == "foo-0"
    topic.ends[1] = 9
    world.set_topics(closed(topic, 1))
    joining = world.join_classic("", {"range": subscription("foo")}, version=3)
    world.leave("A")
    world.advance(3_001)
    joined = joining if isinstance(joining, JoinGroupResponse) else world.answers[joining]
    handed = SyncGroupRequestAssignment(member_id=joined.member_id, assignment=assignment("foo-0 foo-1"))
    world.sync_classic(joined.member_id, joined.generation_id, [handed])
    assert fetched(world, [1]) == {1: OWED}
    world.set_topics(topic.image())
    world.advance(100)
    assert fetched(world, [1]) == {1: (0, ErrorCode.NONE)}

"""Partitions that were removed and made again: what a group knew of a former life says nothing of the present one."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.image import Image, Life
from anabranch.machines.groups.positions import Unread
from anabranch.machines.groups.settling import GROUPS_AT_A_TIME
from anabranch.protocol.messages.offset_fetch import OffsetFetchRequestGroup, OffsetFetchRequestTopics
from anabranch.server.coordinators.weights import of_loading
from tests.support.groups import GROUP
from tests.support.ranged_group import RangedGroup, keys
from tests.unit.machines.groups.test_positions_asked import Asking
from tests.unit.machines.groups.test_starts import FOO, PRODUCER, Topic, commit_in_transaction, committed

NUMBER = 1
"""The partition that is removed and made again."""
BORN = 4


def shrunk(topic: Topic) -> Image:
    """The topic without its last partition, which was removed."""
    topic.resize(NUMBER)
    image = topic.image()
    return replace(image, by_name={"foo": replace(image.by_name["foo"], retiring=())})


def made_again(topic: Topic, begins: int) -> Image:
    """The topic with that partition again, whose new log goes on at an offset."""
    topic.starts[NUMBER] = begins
    topic.ends[NUMBER] = max(begins, topic.ends.get(NUMBER, 0))
    topic.resize(NUMBER + 1)
    image = topic.image()
    return replace(image, by_name={"foo": replace(image.by_name["foo"], lives={NUMBER: Life(BORN, begins)})})


@pytest.mark.parametrize("is_seen", [False, True])
@pytest.mark.parametrize("has_members", [False, True])
def test_a_position_of_a_former_life_is_none(*, is_seen: bool, has_members: bool) -> None:
    """The group goes on where the present life begins, whatever the resets of its clients say."""
    topic = Topic(NUMBER + 1, ordered=False)
    topic.ends = {0: 3, NUMBER: 10}
    world = Asking(topic.image())
    epoch = world.join("A").member_epoch if has_members else -1
    member = "A" if has_members else ""
    world.commit(member, epoch, 0, 3)
    world.commit(member, epoch, NUMBER, 5)
    gone = shrunk(topic)
    if is_seen:
        world.set_topics(gone)
    world.set_topics(made_again(topic, 10))
    assert committed(world) == {0: 3, NUMBER: 10}
    world.reload()
    assert committed(world) == {0: 3, NUMBER: 10}


def test_a_position_at_the_end_of_a_former_life_is_one_of_the_present_one() -> None:
    topic = Topic(NUMBER + 1, ordered=False)
    topic.ends = {0: 3, NUMBER: 10}
    world = Asking(topic.image())
    world.commit("", -1, NUMBER, 10)
    before = world.coordinator.positions.get(GROUP, "foo", NUMBER)
    world.set_topics(shrunk(topic))
    world.set_topics(made_again(topic, 10))
    assert world.coordinator.offsets.current(GROUP, "foo", NUMBER) == before


@pytest.mark.parametrize("is_noted", [False, True])
def test_a_partition_that_existed_in_a_former_life_appeared_later(*, is_noted: bool) -> None:
    """Nothing was ever written to it: where logs begin and end tells no life from another."""
    topic = Topic(NUMBER + 1, ordered=False)
    world = Asking(topic.image())
    if is_noted:  # The group begins in a topic that was resized already.
        topic.resize(NUMBER)
        world.set_topics(topic.resize(NUMBER + 1))
    world.commit("", -1, 0, 3)
    world.join("A")
    starts, foo = world.coordinator.keeper.starts, world.image.by_name["foo"]
    assert starts.existed(GROUP, foo, NUMBER)
    again = made_again(topic, 0)
    world.set_topics(again)
    assert not starts.existed(GROUP, again.by_name["foo"], NUMBER)
    assert committed(world) == {0: 3, NUMBER: 0}, "it begins at its log start for every client"
    world.reload()
    assert committed(world) == {0: 3, NUMBER: 0}


def test_a_group_that_begins_in_a_later_life_existed_with_that() -> None:
    topic = Topic(NUMBER + 1, ordered=False)
    world = Asking(topic.image())
    world.set_topics(shrunk(topic))
    again = made_again(topic, 0)
    world.set_topics(again)
    world.join("A")
    foo = again.by_name["foo"]
    assert world.coordinator.keeper.starts.existed(GROUP, foo, NUMBER)
    world.reload()
    assert world.coordinator.keeper.starts.existed(GROUP, foo, NUMBER)
    assert committed(world) == {}, "where it begins is what its clients say"
    later = replace(foo, lives={NUMBER: Life(BORN + 2, 0)})
    assert not world.coordinator.keeper.starts.existed(GROUP, later, NUMBER)
    world.check()


def test_a_partition_that_was_emptied_before_it_came_back_goes_on_with_what_came_since() -> None:
    topic = Topic(1)
    topic.resize(2)
    topic.ends = {0: 3, 1: 10}
    world = Asking(topic.image())
    world.commit("", -1, 0, 3)
    world.commit("", -1, 1, 5)
    topic.starts[1] = 10
    world.set_topics(topic.resize(1))
    assert committed(world) == {0: 3, 1: 5}, "retired, not back"
    world.set_topics(topic.resize(2))
    assert committed(world) == {0: 3, 1: 10}


def test_ranges_that_were_done_above_what_was_emptied_are_kept() -> None:
    topic = Topic(1)
    topic.resize(2)
    topic.ends = {0: 3, 1: 10}
    group = RangedGroup(topic.image())
    group.committed(5, partition=1)
    group.committed(ranges=[(10, 12), (20, 30)], partition=1)
    topic.starts[1] = 10
    for count in (1, 2):
        group.image = topic.resize(count)
        group.submit(lambda machine: machine.topics_changed(group.image, group.now_ms))
    position = group.coordinator.positions.get("g", "foo", 1)
    assert position is not None and position.offset == 13 and not position.is_begun
    assert [(it.start, it.end) for it in group.fetched(1).committed_range_offsets] == [(20, 30)]


def test_a_shard_in_which_no_topic_was_resized_reads_no_position_when_it_is_loaded() -> None:
    world = Asking(Topic(2).image())
    world.commit("", -1, 0, 3)
    positions = world.coordinator.positions
    positions.unread = mock.Mock(Unread, __len__=lambda _: 1)
    assert of_loading(world.coordinator) > 0
    assert not world.coordinator.settling._left
    world.coordinator.loaded(world.now_ms)
    positions.unread.names.assert_not_called()
    positions.unread.take.assert_not_called()


def test_what_retention_deletes_of_a_partition_that_never_retired_is_left_to_the_client() -> None:
    topic = Topic(2)
    topic.ends = {0: 3, 1: 10}
    world = Asking(topic.image())
    world.commit("", -1, 0, 1)
    world.commit("", -1, 1, 5)
    topic.starts = {0: 3, 1: 10}
    world.set_topics(topic.resize(3))
    assert committed(world) == {0: 1, 1: 5, 2: 0}


def test_groups_without_members_are_settled_when_the_shard_is_loaded() -> None:
    """The broker ended right behind the resize: no change of the topics follows."""
    topic = Topic(1)
    world = Asking(topic.image())
    groups = [f"g{number:03}" for number in range(GROUPS_AT_A_TIME + 5)]
    for group in groups:
        world.commit("", -1, 0, 3, group)
    world.image = topic.resize(2)
    world.reload()
    positions = world.coordinator.positions
    assert sum(positions.get(group, "foo", 1) is not None for group in groups) == GROUPS_AT_A_TIME
    world.advance(100)
    assert all(positions.get(group, "foo", 1) is not None for group in groups)
    assert FOO in world.coordinator.offsets.image.by_id


def emptied(topic: Topic) -> Asking:
    """A group stands at 5 in foo-1, which is emptied to 10 while it is retiring."""
    topic.resize(2)
    topic.ends = {0: 3, 1: 10}
    world = Asking(topic.image())
    world.commit("", -1, 0, 3)
    world.commit("", -1, 1, 5)
    world.set_topics(topic.resize(1))
    return world


def told(world: Asking, number: int) -> tuple[int, ErrorCode]:
    """What a client is told that does not ask for stable offsets."""
    topics = [OffsetFetchRequestTopics(name="foo", partition_indexes=[number])]
    asked = OffsetFetchRequestGroup(group_id=GROUP, topics=topics)
    answer = world.coordinator.offset_fetch(asked, False, 8, world.now_ms).topics[0].partitions[0]
    return answer.committed_offset, ErrorCode(answer.error_code)


@pytest.mark.parametrize("is_committed", [False, True])
def test_a_partition_that_was_emptied_goes_on_when_the_transaction_in_its_way_has_ended(*, is_committed: bool) -> None:
    """It was left where it stood, out of range: clients that read from the end skipped what came since."""
    topic = Topic(1)
    world = emptied(topic)
    commit_in_transaction(world, "", -1, 1, 6)
    topic.starts[1] = 10
    world.set_topics(topic.resize(2))
    world.advance(100)
    assert told(world, 1) == (-1, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
    world.marker(PRODUCER, committed=is_committed)
    world.advance(100)
    assert committed(world) == {0: 3, 1: 10} and told(world, 1) == (10, ErrorCode.NONE)


def test_a_partition_that_was_emptied_goes_on_when_its_log_is_open() -> None:
    topic = Topic(1)
    world = emptied(topic)
    topic.starts[1] = 10
    image = topic.resize(2)
    foo = image.by_name["foo"]
    closed = replace(foo, is_open=lambda number: number != 1, log_start=lambda _: 0)
    world.set_topics(replace(image, by_name={"foo": closed}))
    world.advance(100)
    assert committed(world) == {0: 3, 1: 5}
    assert told(world, 1) == (-1, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
    world.set_topics(replace(image, version=image.version + 1, by_name={"foo": foo}))
    world.advance(100)
    assert committed(world) == {0: 3, 1: 10}


def test_keys_of_a_partition_that_was_emptied_are_not_told_below_what_retention_has_deleted_since() -> None:
    topic = Topic(1)
    topic.resize(2)
    topic.ends = {0: 3, 1: 30}
    group = RangedGroup(topic.image())
    group.committed(5, partition=1)
    group.committed(shares=[keys(0, 3, 20)], partition=1)
    topic.starts[1] = topic.ends[1] = 10
    for count in (1, 2):
        group.image = topic.resize(count)
        group.submit(lambda machine: machine.topics_changed(group.image, group.now_ms))
    topic.starts[1], topic.ends[1] = 15, 100
    assert {it.offset for it in group.fetched(1).key_range_offsets} == {20, 15}
    assert group.commit(shares=[keys(0, 3, 40)], partition=1).last_stable_offset == 15
    assert {it.offset for it in group.fetched(1).key_range_offsets} == {40, 15}


@pytest.mark.parametrize("in_transaction", [False, True])
def test_a_late_commit_of_a_former_life_leaves_the_position_of_the_present_one(*, in_transaction: bool) -> None:
    """It took the place of that, and left the next owner to its reset: one that reads from the end skipped records."""
    topic = Topic(NUMBER + 1, ordered=False)
    topic.ends = {0: 3, NUMBER: 10}
    world = Asking(topic.image())
    world.commit("", -1, 0, 3)
    world.commit("", -1, NUMBER, 5)
    world.set_topics(shrunk(topic))
    world.set_topics(made_again(topic, 10))
    if in_transaction:
        commit_in_transaction(world, "", -1, NUMBER, 7)
        world.marker(PRODUCER, committed=True)
    else:
        world.commit("", -1, NUMBER, 7)
    assert told(world, NUMBER) == (10, ErrorCode.NONE) and committed(world) == {0: 3, NUMBER: 10}
    world.check()


def test_a_former_life_that_a_transaction_ends_in_leaves_a_position_in_the_present_one() -> None:
    """What was pending as the partition was removed and made again counts in the log, and is none."""
    topic = Topic(NUMBER + 1, ordered=False)
    topic.ends = {0: 3, NUMBER: 10}
    world = Asking(topic.image())
    world.commit("", -1, 0, 3)
    world.commit("", -1, NUMBER, 5)
    commit_in_transaction(world, "", -1, NUMBER, 7)
    world.set_topics(shrunk(topic))
    world.set_topics(made_again(topic, 10))
    world.advance(100)
    world.marker(PRODUCER, committed=True)
    world.advance(100)
    assert told(world, NUMBER) == (10, ErrorCode.NONE) and committed(world) == {0: 3, NUMBER: 10}
    world.check()

"""Assigning: which partitions are read while topics change, and where they begin."""

from __future__ import annotations

import dataclasses
from uuid import UUID

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.fetching import assigning, receiving
from anabranch.machines.clients.fetching.assigning import FAILURES_UNTIL_MISSING
from anabranch.machines.clients.fetching.state import FetchingState
from anabranch.machines.clients.fetching.values import (
    EARLIEST,
    LATEST,
    FetcherSettings,
    FetchFrom,
    FetchResult,
    TopicView,
)
from anabranch.machines.lineage import Lineage

ID, OTHER = UUID(int=1), UUID(int=2)
P0, P1, P2 = (TopicPartition("t", number) for number in range(3))


def view(*partitions: int, topic_id: UUID = ID, leader: int = 1) -> TopicView:
    lineage = Lineage.flat(max(partitions, default=0) + 1)
    return TopicView("t", topic_id, lineage, dict.fromkeys(partitions, leader), dict.fromkeys(partitions, 0), True)


def reading(*tps: TopicPartition, whole: bool = False, reset: str = "latest") -> FetchingState:
    state = FetchingState(FetcherSettings(auto_offset_reset=reset))
    assigning.assign(state, tps, ["t"] if whole else [], awaiting=False)
    return state


def numbers(state: FetchingState) -> list[int]:
    return [partition.number for partition in state.partitions()]


def test_a_partition_that_stays_assigned_keeps_its_position() -> None:
    state = reading(P0, P1)
    state.partition(P1).position = 7
    assigning.assign(state, [P1, P2], [], awaiting=False)
    assert numbers(state) == [1, 2] and state.partition(P1).position == 7
    assigning.assign(state, [], ["t"], awaiting=False)
    assert state.partition(P1).position == 7, "now with the partitions to come"
    assigning.assign(state, [], ["other"], awaiting=False)
    assert numbers(state) == [] and list(state.topics) == ["other"]


def test_partitions_there_at_first_begin_by_reset_and_later_ones_at_their_beginning() -> None:
    state = reading(whole=True)
    assigning.learn(state, state.topics["t"], view(0), 0)
    assigning.learn(state, state.topics["t"], view(0, 1), 0)
    assert [part.wanted_timestamp for part in state.partitions()] == [LATEST, EARLIEST]
    assigning.learn(state, state.topics["t"], view(1), 0)
    assert numbers(state) == [1]


def test_an_assigned_partition_that_never_was_is_an_error_and_one_that_was_removed_leaves() -> None:
    state = reading(P0, P2)
    assigning.learn(state, state.topics["t"], view(0), 0)
    assert numbers(state) == [0] and "topic t has no partition 2" in str(state.errors.popitem()[1])
    assigning.learn(state, state.topics["t"], view(), 0)
    assert numbers(state) == [] and not state.errors


def test_an_assigned_partition_that_a_topic_created_again_does_not_have_is_an_error() -> None:
    """It left without a word, and the application polled for nothing, for ever."""
    state = reading(P0, P2)
    assigning.learn(state, state.topics["t"], view(0, 2), 0)
    assigning.learn(state, state.topics["t"], view(0, topic_id=OTHER), 0)
    assert numbers(state) == [0] and "topic t has no partition 2" in str(state.errors.popitem()[1])


def test_the_same_error_is_kept_once() -> None:
    """Of a partition that cannot be read one came with each try, and all were kept until the application polled."""
    state = reading(P0)
    for _ in range(FAILURES_UNTIL_MISSING + 100):
        missing = ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "no such topic")
        assigning.learn_unknown(state, state.topics["t"], missing, 0)
    assert len(state.errors) == 1


def test_granted_partitions_leave_only_when_the_coordinator_takes_them_back() -> None:
    state = reading()
    assigning.grant(state, [(P0, ID), (P1, None)])
    assert all(partition.awaiting for partition in state.partitions())
    assigning.learn(state, state.topics["t"], view(0), 0)
    assert numbers(state) == [0, 1]
    assigning.withdraw(state, [P0])
    assigning.withdraw(state, [P1, P2])
    assert not state.topics


def test_a_topic_of_the_same_name_is_read_from_its_beginning() -> None:
    state = reading(P0)
    topic = state.topics["t"]
    assigning.learn(state, topic, view(0), 0)
    part = state.partition(P0)
    part.position, part.wanted_timestamp = 9, LATEST
    assigning.learn(state, topic, view(0), 0)
    assert part.position == 9
    assigning.learn(state, topic, view(0, topic_id=OTHER), 0)
    assert (part.position, part.wanted_timestamp) == (None, EARLIEST)


def test_a_partition_without_a_leader_is_asked_about_again() -> None:
    state = reading(P0)
    assigning.learn(state, state.topics["t"], view(0, leader=-1), 50)
    assert state.topics["t"].stale and state.topics["t"].ask_at_ms == 150


def test_a_topic_that_does_not_exist_is_told_after_a_few_refreshes() -> None:
    state = reading(P0)
    missing = ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "no such topic")
    for _ in range(FAILURES_UNTIL_MISSING):
        assert not state.errors
        assigning.learn_unknown(state, state.topics["t"], missing, 0)
    assert list(state.errors.values()) == [missing]


def test_a_refusal_is_told_at_once() -> None:
    state = reading(P0)
    refusal = ApiError(ErrorCode.TOPIC_AUTHORIZATION_FAILED, "not yours")
    assigning.learn_unknown(state, state.topics["t"], refusal, 0)
    assert list(state.errors.values()) == [refusal]


def test_a_member_whose_topic_was_deleted_is_not_told_its_group_is() -> None:
    state = reading()
    assigning.grant(state, [(P0, ID)])
    for _ in range(2 * FAILURES_UNTIL_MISSING):
        missing = ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "no such topic")
        assigning.learn_unknown(state, state.topics["t"], missing, 0)
    assert not state.errors


@pytest.mark.parametrize("reset", ["earliest", "latest", "none"])
def test_the_start_of_an_assigned_partition_follows_the_reset(reset: str) -> None:
    state = reading(P0, reset=reset)
    assert state.partition(P0).wanted_timestamp == (EARLIEST if reset == "earliest" else LATEST)


def begun_by_hand(*, position: int | None, log_start: int = 0) -> FetchingState:
    """A partition with a group: where it began, or that its first position is still looked up."""
    state = reading(P0)
    assigning.learn(state, state.topics["t"], view(0), 0)
    partition = state.partition(P0)
    partition.start = partition.position = position
    partition.log_start = log_start
    return state


@pytest.mark.parametrize(("position", "log_start", "anew"), [(5, 0, 5), (5, 9, 9), (None, 0, None)])
def test_a_partition_that_begins_anew_begins_no_later_than_before_and_with_a_record_that_is_there(
    position: int | None, log_start: int, anew: int | None
) -> None:
    state = begun_by_hand(position=position, log_start=log_start)
    assert assigning.begin_anew(state, P0), "also while its first position is looked up: something may be committed"
    assert state.partition(P0).awaiting and state.partition(P0).anew_from == anew
    assert not assigning.begin_anew(state, P0), "what is committed is being asked already"


def test_a_partition_of_a_topic_that_is_created_again_begins_anew_at_its_beginning() -> None:
    state = begun_by_hand(position=5)
    assigning.begin_anew(state, P0)
    asked = state.partition(P0).arrivals
    assigning.learn(state, state.topics["t"], view(0, topic_id=OTHER), 0)
    assert state.partition(P0).anew_from == 0
    assert state.partition(P0).arrivals != asked, "what is answered is of the other topic"


@pytest.mark.parametrize("log_start", [9, -1])
def test_a_partition_that_begins_anew_behind_whose_position_all_was_deleted_begins_where_its_log_does(
    log_start: int,
) -> None:
    """A stock Kafka does not say where that is."""
    state = begun_by_hand(position=5)
    state.settings = dataclasses.replace(state.settings, auto_offset_reset="latest")
    assigning.begin_anew(state, P0)
    partition = state.partition(P0)
    partition.awaiting = False
    partition.stand(5)
    gone = FetchResult(ErrorCode.OFFSET_OUT_OF_RANGE, log_start_offset=log_start)
    receiving.take(state, partition, FetchFrom(5, 0, 1, ID, 1), gone, 0)
    assert partition.wanted_timestamp == EARLIEST, "latest would leave out what it had read before"


@pytest.mark.parametrize("is_sought", [False, True])
def test_an_offset_behind_the_end_is_reset_as_the_application_says_though_its_partition_began_anew(
    *, is_sought: bool
) -> None:
    state = begun_by_hand(position=5)
    state.settings = dataclasses.replace(state.settings, auto_offset_reset="latest")
    assigning.begin_anew(state, P0)
    partition = state.partition(P0)
    partition.awaiting, partition.is_sought = False, is_sought
    partition.stand(10_000)
    gone = FetchResult(ErrorCode.OFFSET_OUT_OF_RANGE, log_start_offset=10_001 if is_sought else 0)
    receiving.take(state, partition, FetchFrom(10_000, 0, 1, ID, 1), gone, 0)
    assert partition.wanted_timestamp == LATEST


def test_a_topic_that_is_created_again_is_read_from_its_beginning_also_where_its_partition_begins_anew_then() -> None:
    state = begun_by_hand(position=5)
    assigning.learn(state, state.topics["t"], view(0, topic_id=OTHER), 0)
    assert assigning.begin_anew(state, P0)
    assert state.partition(P0).anew_from == 0, "the reset may say latest"

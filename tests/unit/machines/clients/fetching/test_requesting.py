"""Requesting: one fetch per broker at a time, in sessions that say only what changed."""

from __future__ import annotations

from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.fetching import assigning, requesting
from anabranch.machines.clients.fetching.requesting import PARTITION_SIZE_MIN
from anabranch.machines.clients.fetching.state import FetchingState
from anabranch.machines.clients.fetching.values import FetcherSettings, TopicView
from anabranch.machines.lineage import Lineage

NODES = {0: 1, 1: 1, 2: 2}
VIEW = TopicView("t", UUID(int=1), Lineage.flat(3), NODES, {0: 4, 1: 4, 2: 4}, elastic=True)
P0, P1, P2 = (TopicPartition("t", number) for number in range(3))


def known(*positions: int | None, **settings: int) -> FetchingState:
    """Three partitions, the first two led by node 1, the third by node 2."""
    state = FetchingState(FetcherSettings(**settings))  # type: ignore[arg-type]
    assigning.assign(state, [P0, P1, P2], [], awaiting=False)
    assigning.learn(state, state.topics["t"], VIEW, 0)
    for partition, position in zip(state.partitions(), positions, strict=True):
        partition.position = position
        partition.fetch_offset = position or 0
    return state


def test_a_stale_topic_is_refreshed_once_and_again_after_a_while() -> None:
    state = FetchingState(FetcherSettings())
    assigning.assign(state, [P0], [], awaiting=False)
    assert requesting.request(state, 0).refresh == ["t"]
    assert requesting.request(state, 0).refresh == []
    state.topics["t"].asked = False
    work = requesting.request(state, 99)
    assert (work.refresh, work.wake_at_ms) == ([], 100)
    assert requesting.request(state, 100).refresh == ["t"]


def test_partitions_without_a_position_are_looked_up_once_and_the_others_fetched() -> None:
    state = known(5, None, 7)
    work = requesting.request(state, 0)
    assert [(lookup.node, dict(lookup.partitions)) for lookup in work.lookups] == [(1, {P1: (-1, 4)})]
    assert [(fetch.node, [*fetch.partitions]) for fetch in work.fetches] == [(1, [P0]), (2, [P2])]
    origin = work.fetches[0].partitions[P0]
    assert (origin.offset, origin.leader_epoch, origin.count) == (5, 4, 3)
    again = requesting.request(state, 0)
    assert (again.lookups, again.fetches) == ([], []), "one request per broker at a time"


def test_a_session_says_only_what_changed_and_what_it_forgot() -> None:
    state = known(0, 0, 0)
    first = requesting.request(state, 0).fetches[0]
    assert (first.session_id, first.session_epoch) == (0, 0)
    assert requesting.session_answered(state, first.request_id, ErrorCode.NONE, 9, 0) is not None
    state.partition(P1).fetch_offset = 3
    second = requesting.request(state, 0).fetches[0]
    assert (second.session_id, second.session_epoch, [*second.partitions]) == (9, 1, [P1])
    requesting.session_answered(state, second.request_id, ErrorCode.NONE, 9, 0)
    state.partition(P0).paused = True
    third = requesting.request(state, 0).fetches[0]
    assert ([*third.partitions], [tp for tp, _ in third.forgotten]) == ([], [P0])


def test_a_lost_session_begins_anew_at_once_and_other_errors_after_a_while() -> None:
    for code, wait_ms in ((ErrorCode.FETCH_SESSION_ID_NOT_FOUND, 0), (ErrorCode.UNKNOWN_SERVER_ERROR, 100)):
        state = known(0, 0, 0)
        fetch = requesting.request(state, 0).fetches[0]
        assert requesting.session_answered(state, fetch.request_id, code, 0, 0) is None
        assert state.sessions[1].retry_at_ms == wait_ms


def test_a_lost_fetch_makes_its_topics_stale_and_waits_longer_every_time() -> None:
    state = known(0, 0, 0)
    waits = []
    for _ in range(3):
        at_ms = state.sessions[1].retry_at_ms if 1 in state.sessions else 0
        fetch = next(fetch for fetch in requesting.request(state, at_ms).fetches if fetch.node == 1)
        requesting.lost(state, fetch.request_id, at_ms)
        waits.append(state.sessions[1].retry_at_ms - at_ms)
        assert state.topics["t"].stale
    assert waits == [100, 200, 400]


def test_an_answer_to_a_request_that_was_given_up_does_not_count() -> None:
    state = known(0, 0, 0)
    fetch = requesting.request(state, 0).fetches[0]
    requesting.lost(state, fetch.request_id, 0)
    assert requesting.session_answered(state, fetch.request_id, ErrorCode.NONE, 9, 0) is None


def test_what_is_held_paused_or_awaited_is_not_fetched() -> None:
    state = known(0, 0, 0)
    state.partition(P0).paused = True
    state.partition(P1).held_size = 1 << 30
    state.partition(P2).awaiting = True
    assert requesting.request(state, 0).fetches == []


def test_a_partition_is_fetched_only_from_the_topic_it_was_granted_of() -> None:
    state = FetchingState(FetcherSettings())
    assigning.grant(state, [(P0, UUID(int=99))])
    assigning.learn(state, state.topics["t"], VIEW, 0)
    part = state.partition(P0)
    part.awaiting, part.position = False, 0
    work = requesting.request(state, 0)
    assert work.fetches == [] and state.topics["t"].stale and work.wake_at_ms == 100


def test_a_granted_partition_that_the_view_does_not_know_has_its_topic_asked_about_at_once() -> None:
    """It was the only one of its topic: no refused fetch told that the topic had grown, for five minutes."""
    state = FetchingState(FetcherSettings())
    assigning.grant(state, [(P0, UUID(int=1))])
    assigning.learn(state, state.topics["t"], VIEW, 0)
    new = TopicPartition("t", 3)
    assigning.grant(state, [(new, UUID(int=1))])
    assigning.withdraw(state, [P0])
    work = requesting.request(state, 1_000)
    assert (work.refresh, work.wake_at_ms) == ([], 1_000)
    assert requesting.request(state, 1_000).refresh == ["t"]
    assigning.learn(state, state.topics["t"], VIEW, 1_000)
    work = requesting.request(state, 1_000)
    assert (work.refresh, work.wake_at_ms) == ([], 1_100), "not there yet"
    assert requesting.request(state, 1_100).refresh == ["t"]


def test_partitions_share_what_one_fetch_may_take() -> None:
    sizes = []
    for fetch_max in (30, 30 * PARTITION_SIZE_MIN):
        state = known(0, 0, 0, fetch_max_bytes=fetch_max)
        sizes.append(requesting.request(state, 0).fetches[0].partitions[P0].size_max)
    assert sizes == [PARTITION_SIZE_MIN, 8 * PARTITION_SIZE_MIN]

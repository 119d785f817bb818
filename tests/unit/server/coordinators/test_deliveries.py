"""Deliveries of markers: tried until every partition has its marker, or needs none; on virtual time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.machines.controller.topics import DeleteTopic, decide_delete_topic
from anabranch.machines.transactions.coordinator import WriteMarkers
from anabranch.protocol.messages.write_txn_markers import (
    WritableTxnMarkerPartitionResult,
    WritableTxnMarkerResult,
    WritableTxnMarkerTopicResult,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)
from anabranch.server.cluster.feed import everything
from anabranch.server.cluster.view import ClusterView
from anabranch.server.coordinators.deliveries import (
    NAMED_MAX,
    ON_THEIR_WAY_MAX,
    ON_THEIR_WAY_TO_SHARD_MAX,
    RETRY_MAX_S,
    RETRY_S,
    SENT_AT_A_TIME,
    Deliveries,
)
from tests.simulation.virtual_time import run
from tests.unit.machines.controller.transcript import Cluster

OK = ErrorCode.NONE
GROUPS = "__consumer_offsets"
DECIDED = WriteMarkers("tx", 7, 3, 1_000, True, frozenset({TopicPartition("t", 0), TopicPartition("t", 1)}))


class Leaders:
    """Answers what a test says, and notes when it was asked for which partitions."""

    def __init__(self, answer: Callable[[int, int], ErrorCode]) -> None:
        """`answer` gives the error for a partition at the n-th attempt, from 0 on."""
        self.attempts: list[tuple[float, list[int]]] = []
        self._answer = answer

    async def write_markers(self, request: WriteTxnMarkersRequest) -> WriteTxnMarkersResponse:
        (marker,) = request.markers
        if not marker.topics:
            return WriteTxnMarkersResponse(markers=[])
        (topic,) = marker.topics
        attempt, numbers = len(self.attempts), list(topic.partition_indexes)
        self.attempts.append((asyncio.get_running_loop().time(), numbers))
        await asyncio.sleep(0)
        results = [
            WritableTxnMarkerPartitionResult(partition_index=it, error_code=self._answer(it, attempt)) for it in numbers
        ]
        topics = [WritableTxnMarkerTopicResult(name=topic.name, partitions=results)]
        return WriteTxnMarkersResponse(markers=[WritableTxnMarkerResult(producer_id=marker.producer_id, topics=topics)])


def view_of(cluster: Cluster) -> ClusterView:
    view = ClusterView()
    view.update(everything(cluster.state, 1))
    return view


def deliver(leaders: Leaders, view: ClusterView, *, until_s: float = 60.0) -> bool:
    """Deliver for a minute; whether it was delivered."""

    async def story() -> bool:
        delivered: list[bool] = []

        def report() -> bool:
            delivered.append(True)
            return True

        deliveries = Deliveries(leaders, view, GROUPS)
        deliveries.begin(DECIDED, 5, report)
        deliveries.begin(DECIDED, 5, report)
        assert len(deliveries) == 1, "a second request for the same delivery begins nothing"
        await asyncio.sleep(until_s)
        assert len(deliveries) == (0 if delivered else 1)
        deliveries.cancel()
        await asyncio.sleep(0.1)
        assert len(deliveries) == 0
        return bool(delivered)

    return run(story(), 1)


def test_only_what_failed_is_tried_again_at_growing_intervals() -> None:
    refusals = {1: 12}
    leaders = Leaders(
        lambda number, attempt: OK if attempt >= refusals.get(number, 0) else ErrorCode.KAFKA_STORAGE_ERROR
    )
    assert deliver(leaders, view_of(Cluster(partitions=2)))
    assert [numbers for _, numbers in leaders.attempts] == [[0, 1]] + [[1]] * 12
    times = [at for at, _ in leaders.attempts]
    pauses = [round(later - sooner, 6) for sooner, later in itertools.pairwise(times)]
    assert (pauses[0], pauses[-1]) == (RETRY_S, RETRY_MAX_S)
    assert pauses == sorted(pauses)


def test_a_transaction_without_partitions_ends() -> None:
    leaders = Slow(0.01)
    assert written_when_delivered(leaders, replace(DECIDED, partitions=frozenset())) == {"tx": 0}


def test_a_partition_that_knows_of_a_later_epoch_is_not_asked_again() -> None:
    errors = {0: ErrorCode.INVALID_PRODUCER_EPOCH, 1: ErrorCode.TRANSACTION_COORDINATOR_FENCED}
    leaders = Leaders(lambda number, attempt: errors[number])
    assert deliver(leaders, view_of(Cluster(partitions=2)))
    assert len(leaders.attempts) == 1


def test_a_partition_that_exists_is_waited_for_and_one_that_was_removed_needs_no_marker() -> None:
    missing = Leaders(lambda number, attempt: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    assert not deliver(missing, view_of(Cluster(partitions=2)))
    shrunk = Cluster(partitions=1)
    one_left = Leaders(lambda number, attempt: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if number else OK)
    assert deliver(one_left, view_of(shrunk))
    assert len(one_left.attempts) == 1


def test_a_topic_that_is_deleted_needs_no_marker() -> None:
    cluster = Cluster(partitions=2)
    cluster.submit(lambda state: decide_delete_topic(state, DeleteTopic("t")))
    leaders = Leaders(lambda number, attempt: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    assert deliver(leaders, view_of(cluster))


class Crashing(Leaders):
    """Raises for the first attempts."""

    def __init__(self, error: Exception, times: int) -> None:
        super().__init__(lambda number, attempt: OK)
        self._error, self._times = error, times

    async def write_markers(self, request: WriteTxnMarkersRequest) -> WriteTxnMarkersResponse:
        response = await super().write_markers(request)
        if len(self.attempts) <= self._times:
            raise self._error
        return response


@pytest.mark.parametrize("error", [OSError("disk"), AssertionError("ours"), KeyError("t")])
def test_a_delivery_goes_on_after_any_exception(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    leaders = Crashing(error, times=3)
    assert deliver(leaders, view_of(Cluster(partitions=2)))
    assert len(leaders.attempts) == 4
    assert caplog.text.count("markers not written yet") == 1


def test_a_partition_without_a_result_has_no_marker_yet() -> None:
    class Forgetful(Leaders):
        async def write_markers(self, request: WriteTxnMarkersRequest) -> WriteTxnMarkersResponse:
            response = await super().write_markers(request)
            del response.markers[0].topics[0].partitions[1:]
            return response

    leaders = Forgetful(lambda number, attempt: OK)
    assert deliver(leaders, view_of(Cluster(partitions=2)))
    assert [numbers for _, numbers in leaders.attempts] == [[0, 1], [1]]


class Slow(Leaders):
    """Takes some time for each request, and counts the markers that wait for it."""

    def __init__(self, takes_s: float) -> None:
        super().__init__(lambda number, attempt: OK)
        self.now = self.most = self.written = 0
        self._takes_s = takes_s

    async def write_markers(self, request: WriteTxnMarkersRequest) -> WriteTxnMarkersResponse:
        count = sum(len(topic.partition_indexes) for marker in request.markers for topic in marker.topics)
        self.now += count
        self.most = max(self.most, self.now)
        await asyncio.sleep(self._takes_s)
        self.now -= count
        self.written += count
        return await super().write_markers(request)


def large(name: str, count: int) -> WriteMarkers:
    return WriteMarkers(name, 7, 3, 1_000, True, frozenset(TopicPartition("t", number) for number in range(count)))


def written_when_delivered(leaders: Slow, *decided: WriteMarkers) -> dict[str, int]:
    """How many markers were written, of all transactions, when each had all of its own."""

    async def story() -> dict[str, int]:
        found: dict[str, int] = {}

        def report(name: str) -> bool:
            found[name] = leaders.written
            return True

        deliveries = Deliveries(leaders, view_of(Cluster(partitions=2)), GROUPS)
        for each in decided:
            deliveries.begin(each, 5, partial(report, each.transactional_id))
        while len(deliveries):
            await asyncio.sleep(0.1)
        return found

    return run(story(), 1)


def test_the_markers_on_their_way_are_bounded_over_all_deliveries() -> None:
    leaders = Slow(0.01)
    found = written_when_delivered(leaders, *(large(f"t{number}", 550) for number in range(60)))
    assert len(found) == 60
    assert leaders.written == 60 * 550
    assert ON_THEIR_WAY_MAX // 2 < leaders.most < ON_THEIR_WAY_MAX + SENT_AT_A_TIME


def test_a_small_transaction_does_not_wait_for_all_markers_of_a_large_one() -> None:
    leaders = Slow(0.01)
    found = written_when_delivered(leaders, large("large", 10_000), large("larger", 10_000), large("small", 1))
    assert found["small"] <= 2 * ON_THEIR_WAY_MAX + SENT_AT_A_TIME, "what was on its way, and the first of each since"
    assert found["large"] > 10_000


def test_a_delivery_that_waits_to_try_again_holds_no_other_up() -> None:
    class Refusing(Slow):
        async def write_markers(self, request: WriteTxnMarkersRequest) -> WriteTxnMarkersResponse:
            response = await super().write_markers(request)
            if request.markers[0].producer_id == 8 and self.written < 5_000:
                raise OSError("disk")
            return response

    leaders = Refusing(0.01)
    refused = WriteMarkers("refused", 8, 3, 1_000, True, large("", ON_THEIR_WAY_MAX * 2).partitions)
    found = written_when_delivered(leaders, refused, *(large(f"t{number}", 1) for number in range(10)))
    assert [*found][-1] == "refused"
    assert found["t9"] < 5_000


class Busy(Slow):
    """The shards of group coordinators take their time; all others answer soon."""

    def __init__(self, takes_s: float) -> None:
        super().__init__(0.01)
        self.to_shards: dict[int, int] = {}
        self.most_to_a_shard = 0
        self._shards_take_s = takes_s

    async def write_markers(self, request: WriteTxnMarkersRequest) -> WriteTxnMarkersResponse:
        (topic,) = request.markers[0].topics
        if topic.name == GROUPS:
            (number,) = topic.partition_indexes
            self.to_shards[number] = self.to_shards.get(number, 0) + 1
            self.most_to_a_shard = max(self.most_to_a_shard, self.to_shards[number])
            await asyncio.sleep(self._shards_take_s)
            self.to_shards[number] -= 1
        return await super().write_markers(request)


def test_transactions_without_offsets_in_a_shard_do_not_wait_for_it() -> None:
    leaders = Busy(2.0)
    many = [large(f"t{number}", 19) for number in range(ON_THEIR_WAY_MAX)]
    many = [replace(it, partitions=it.partitions | {TopicPartition(GROUPS, 3)}) for it in many]
    beside = replace(large("beside", 19), partitions=large("", 19).partitions | {TopicPartition(GROUPS, 4)})
    found = written_when_delivered(leaders, *many, beside, large("other", 1))
    assert found.keys() == {it.transactional_id for it in (*many, beside)} | {"other"}
    order = [*found]
    assert order[0] == "other", "though those before it have more markers than may be on their way"
    assert order.index("beside") <= 1 + ON_THEIR_WAY_TO_SHARD_MAX, "it waits for the other shard alone"
    assert leaders.most_to_a_shard == ON_THEIR_WAY_TO_SHARD_MAX
    assert leaders.most < ON_THEIR_WAY_MAX + SENT_AT_A_TIME + 2 * ON_THEIR_WAY_TO_SHARD_MAX


def test_a_delivery_ends_when_its_coordinator_has_recorded_it(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        leaders, asked = Leaders(lambda number, attempt: OK), 0

        def report() -> bool:
            nonlocal asked
            asked += 1
            if asked == 1:
                raise AssertionError("ours")
            return asked == 5

        deliveries = Deliveries(leaders, view_of(Cluster(partitions=2)), GROUPS)
        deliveries.begin(DECIDED, 5, report)
        await asyncio.sleep(RETRY_S)
        deliveries.begin(DECIDED, 5, report)
        assert len(deliveries) == 1
        await asyncio.sleep(10)
        assert (len(deliveries), len(leaders.attempts), asked) == (0, 1, 5)

    run(story(), 1)
    assert caplog.text.count("markers not written yet") == 1


def test_markers_of_many_partitions_that_are_not_written_take_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    many = replace(DECIDED, partitions=frozenset(TopicPartition("t", number) for number in range(10_000)))
    leaders = Leaders(lambda number, attempt: ErrorCode.NOT_LEADER_OR_FOLLOWER)

    async def story() -> None:
        deliveries = Deliveries(leaders, view_of(Cluster(partitions=2)), GROUPS)
        deliveries.begin(many, 5, lambda: True)
        await asyncio.sleep(5)
        deliveries.cancel()
        await asyncio.sleep(0.1)

    run(story(), 1)
    (line,) = [it for it in caplog.records if "not written yet" in it.getMessage()]
    fields = line.anabranch_fields  # type: ignore[attr-defined]
    assert fields["partitions"] == "t-0,t-1,t-2,t-3,t-4 and 9995 more"


def test_markers_that_many_partitions_refuse_take_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    many = replace(DECIDED, partitions=frozenset(TopicPartition("t", number) for number in range(1_000)))
    leaders = Leaders(lambda number, attempt: ErrorCode.INVALID_PRODUCER_EPOCH)

    async def story() -> bool:
        delivered: list[bool] = []

        def report() -> bool:
            delivered.append(True)
            return True

        deliveries = Deliveries(leaders, view_of(Cluster(partitions=2)), GROUPS)
        for number in range(3):
            deliveries.begin(replace(many, producer_id=number), 5, report)
        await asyncio.sleep(5)
        return len(delivered) == 3

    assert run(story(), 1)
    assert len([it for it in caplog.records if "marker refused" in it.getMessage()]) == NAMED_MAX

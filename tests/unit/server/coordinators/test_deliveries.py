"""Deliveries of markers: tried until every partition has its marker, or needs none; on virtual time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace

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
    RETRY_MAX_S,
    RETRY_S,
    SENT_AT_A_TIME,
    Deliveries,
)
from tests.simulation.virtual_time import run
from tests.unit.machines.controller.transcript import Cluster

OK = ErrorCode.NONE
DECIDED = WriteMarkers("tx", 7, 3, True, frozenset({TopicPartition("t", 0), TopicPartition("t", 1)}))


class Leaders:
    """Answers what a test says, and notes when it was asked for which partitions."""

    def __init__(self, answer: Callable[[int, int], ErrorCode]) -> None:
        """`answer` gives the error for a partition at the n-th attempt, from 0 on."""
        self.attempts: list[tuple[float, list[int]]] = []
        self._answer = answer

    async def write_markers(self, request: WriteTxnMarkersRequest) -> WriteTxnMarkersResponse:
        (marker,) = request.markers
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
        deliveries = Deliveries(leaders, view)
        deliveries.begin(DECIDED, 5, lambda: delivered.append(True))
        deliveries.begin(DECIDED, 5, lambda: delivered.append(True))
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
    return WriteMarkers(name, 7, 3, True, frozenset(TopicPartition("t", number) for number in range(count)))


def written_when_delivered(leaders: Slow, *decided: WriteMarkers) -> dict[str, int]:
    """How many markers were written, of all transactions, when each had all of its own."""

    async def story() -> dict[str, int]:
        found: dict[str, int] = {}
        deliveries = Deliveries(leaders, view_of(Cluster(partitions=2)))
        for each in decided:
            name = each.transactional_id
            deliveries.begin(each, 5, lambda name=name: found.update({name: leaders.written}))  # type: ignore[misc]
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
    refused = WriteMarkers("refused", 8, 3, True, large("", ON_THEIR_WAY_MAX * 2).partitions)
    found = written_when_delivered(leaders, refused, *(large(f"t{number}", 1) for number in range(10)))
    assert [*found][-1] == "refused"
    assert found["t9"] < 5_000


def test_markers_of_many_partitions_that_are_not_written_take_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    many = replace(DECIDED, partitions=frozenset(TopicPartition("t", number) for number in range(10_000)))
    leaders = Leaders(lambda number, attempt: ErrorCode.NOT_LEADER_OR_FOLLOWER)

    async def story() -> None:
        deliveries = Deliveries(leaders, view_of(Cluster(partitions=2)))
        deliveries.begin(many, 5, lambda: None)
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
        deliveries = Deliveries(leaders, view_of(Cluster(partitions=2)))
        for number in range(3):
            deliveries.begin(replace(many, producer_id=number), 5, lambda: delivered.append(True))
        await asyncio.sleep(5)
        return len(delivered) == 3

    assert run(story(), 1)
    assert len([it for it in caplog.records if "marker refused" in it.getMessage()]) == NAMED_MAX

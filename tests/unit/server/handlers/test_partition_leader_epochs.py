"""PartitionLeaderEpochsForPartitions: cuts of each partition, bounded answers, other work in between."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.limits import PARTITIONS_PER_TOPIC_MAX
from anabranch.machines.cuts import decode_cuts
from anabranch.machines.lineage import Cuts
from anabranch.protocol.messages.partition_leader_epochs_for_partitions import (
    PartitionLeaderEpochsForPartitionsRequest,
    PartitionLeaderEpochsForPartitionsRequestTopic,
    PartitionLeaderEpochsForPartitionsResponse,
)
from anabranch.server.context import ANONYMOUS, BrokerContext, RequestContext
from anabranch.server.handlers import partition_leader_epochs
from anabranch.server.handlers.partition_leader_epochs import handle_partition_leader_epochs
from anabranch.server.partitions.partition import KnownCuts
from tests.unit.machines.controller.transcript import TOPIC_ID
from tests.unit.server.cluster.test_view import Published

CALL = RequestContext(ANONYMOUS, None, "peer:1", 1, 0)


class Leader:
    """A broker with a topic t that was resized twice, and leads its partitions."""

    def __init__(self, *, partitions: int = 4, cuts: Sequence[tuple[int, int]] = ((0, 10), (1, 20))) -> None:
        self.published = Published(partitions=1)
        for count in (partitions + 1, partitions):
            self.published.resize(count)
            self.published.run()
        self.led: dict[int, Any] = {
            number: SimpleNamespace(
                offline_reason=None,
                topic_id=TOPIC_ID,
                leadership=SimpleNamespace(layout=2),
                cuts=KnownCuts(2, Cuts.of(cuts)),
                log=SimpleNamespace(log_start=0),
                unavailable=lambda: ErrorCode.NONE,
            )
            for number in range(partitions)
        }
        replicas = SimpleNamespace(
            get=lambda topic, number: self.led.get(number),
            missing=lambda topic, number: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        )
        self.context = cast(BrokerContext, SimpleNamespace(view=self.published.view, replicas=replicas))

    def ask(
        self, *partitions: int, cuts: bool = True, epochs: bool = False, first_layout: int = 0, topic: str = "t"
    ) -> Any:
        """The answer for one topic."""
        asked = PartitionLeaderEpochsForPartitionsRequestTopic(
            topic=topic, partitions=list(partitions), first_layout=first_layout
        )
        (answered,) = self.answer(asked, cuts=cuts, epochs=epochs).topics
        return answered

    def answer(
        self, *topics: PartitionLeaderEpochsForPartitionsRequestTopic, cuts: bool = True, epochs: bool = False
    ) -> PartitionLeaderEpochsForPartitionsResponse:
        request = PartitionLeaderEpochsForPartitionsRequest(topics=topics, cuts=cuts, epochs=epochs)
        return asyncio.run(handle_partition_leader_epochs(self.context, request, CALL))


def pairs(partition: Any) -> list[tuple[int, int]]:
    return list(zip(*decode_cuts(partition.cut_layouts, partition.cut_ends), strict=True))


def test_each_partition_is_answered_with_its_own_cuts_and_the_layout_they_belong_to() -> None:
    leader = Leader()
    leader.led[1].log.log_start = 12
    found = leader.ask(0, 1)
    assert (found.topic_id, found.layout, found.error_code) == (TOPIC_ID, 2, 0)
    assert [(it.partition, it.error_code, it.log_start, pairs(it)) for it in found.partitions] == [
        (0, 0, 0, [(0, 10), (1, 20)]),
        (1, 0, 12, [(1, 20)]),
    ]
    assert not any(it.leader_epoch_after_creation or it.ended_epochs for it in found.partitions)
    assert [pairs(it) for it in leader.ask(0, first_layout=1).partitions] == [[(1, 20)]]


def test_epochs_are_runs_of_ended_layouts() -> None:
    (found,) = Leader().ask(0, epochs=True).partitions
    assert [(it.layout, it.leader_epoch, it.count) for it in found.ended_epochs] == [(0, 0, 2)]


def test_what_cannot_be_answered_is_said_for_each() -> None:
    leader = Leader()
    leader.led[0].offline_reason = "damaged"
    leader.led[0].unavailable = lambda: ErrorCode.KAFKA_STORAGE_ERROR
    leader.led[1].leadership = SimpleNamespace(layout=1)
    assert [(it.partition, it.error_code) for it in leader.ask(0, 1, 2, 9).partitions] == [
        (0, ErrorCode.KAFKA_STORAGE_ERROR),
        (1, ErrorCode.NOT_LEADER_OR_FOLLOWER),
        (2, ErrorCode.NONE),
        (9, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    ]
    assert leader.ask(0, topic="nowhere").error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_an_answer_is_bounded_and_asking_for_the_rest_gives_the_rest() -> None:
    leader = Leader(partitions=6, cuts=[(layout, layout + 1) for layout in range(2)])
    many = Cuts.of((layout, layout + 1) for layout in range(20_000))
    for partition in leader.led.values():
        partition.cuts = KnownCuts(20_000, many)
        partition.leadership.layout = 20_000
    leader.published.view.topic("t").topic.__dict__["layouts"] = (  # type: ignore[union-attr]
        *leader.published.view.topic("t").topic.layouts[:-1],  # type: ignore[union-attr]
        leader.published.view.topic("t").topic.layouts[-1].__class__(20_000, 6),  # type: ignore[union-attr]
    )
    left = list(range(6))
    answers = []
    while left:
        answered = [it.partition for it in leader.ask(*left).partitions]
        assert answered == left[: len(answered)]
        left = left[len(answered) :]
        answers.append(len(answered))
    assert answers == [3, 3]


def test_a_partition_that_is_named_a_thousand_times_is_answered_once_and_a_million_of_them_not_at_all() -> None:
    leader = Leader()
    assert [it.partition for it in leader.ask(*[2, 1] * 1_000).partitions] == [2, 1]
    refused = leader.ask(*range(PARTITIONS_PER_TOPIC_MAX + 1))
    assert (refused.error_code, len(refused.partitions)) == (ErrorCode.INVALID_REQUEST, 0)


def test_a_topic_that_is_named_again_and_again_does_not_make_an_answer_larger() -> None:
    asked = [PartitionLeaderEpochsForPartitionsRequestTopic(topic="t", partitions=[0])] * 20_000
    found = Leader().answer(*asked)
    assert len(found.topics) < 5_000


@pytest.mark.parametrize("cuts", [True, False])
def test_other_work_has_its_turn_meanwhile(monkeypatch: pytest.MonkeyPatch, cuts: bool) -> None:
    monkeypatch.setattr(partition_leader_epochs, "CUTS_AT_A_TIME", 20)
    leader = Leader(partitions=50)
    turns = 0

    async def story() -> None:
        nonlocal turns
        asked = PartitionLeaderEpochsForPartitionsRequestTopic(topic="t", partitions=list(range(50)))
        request = PartitionLeaderEpochsForPartitionsRequest(topics=[asked], cuts=cuts)
        answer = asyncio.ensure_future(handle_partition_leader_epochs(leader.context, request, CALL))
        while not answer.done():
            await asyncio.sleep(0)
            turns += 1
        assert len(answer.result().topics[0].partitions) == 50

    asyncio.run(story())
    assert turns >= 20


def test_the_maps_of_the_proposal_are_answered_as_far_as_an_answer_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    leader = Leader()
    (whole,) = leader.ask(4, cuts=False).partitions
    assert [(it.layout, it.partition) for it in whole.leader_epoch_after_creation] == [(1, 0)]
    assert [(it.layout, it.partition) for it in whole.leader_epoch_before_deletion] == [(2, p) for p in range(5)]
    monkeypatch.setattr(partition_leader_epochs, "EPOCHS_PER_ANSWER_MAX", 12)
    answered = leader.ask(4, 3, 2, cuts=False).partitions
    assert [it.error_code for it in answered] == [0, ErrorCode.NONE, ErrorCode.NONE]
    monkeypatch.setattr(partition_leader_epochs, "EPOCHS_PER_ANSWER_MAX", 5)
    assert [it.error_code for it in leader.ask(4, cuts=False).partitions] == [ErrorCode.INVALID_REQUEST]

"""PartitionLeaderEpochsForPartitions (API 10000): how a topic's partitions are cut into layouts (KIP-253; ADR 0032).

The rule: an answer is bounded by what it holds, and other work has its turn while it is made. Our clients ask for cuts,
and again for the partitions that an answer leaves out.
"""

from __future__ import annotations

import asyncio

from anabranch.base.errors import ErrorCode
from anabranch.base.limits import PARTITIONS_PER_TOPIC_MAX
from anabranch.machines.controller.layouts import below as below_layout
from anabranch.machines.controller.nodes import Topic
from anabranch.machines.controller.views import leader_epochs
from anabranch.machines.cuts import encode_cuts, since
from anabranch.protocol.messages.partition_leader_epochs_for_partitions import (
    LayoutLeaderEpoch,
    LayoutLeaderEpochs,
    PartitionLeaderEpochsForPartitionsRequest,
    PartitionLeaderEpochsForPartitionsRequestTopic,
    PartitionLeaderEpochsForPartitionsResponse,
    PartitionLeaderEpochsForPartitionsResponsePartition,
    PartitionLeaderEpochsForPartitionsResponseTopic,
)
from anabranch.server.context import BrokerContext, RequestContext
from anabranch.server.partitions.cutting import CUTS_AT_A_TIME, cuts_of

CUTS_PER_ANSWER_MAX = 50_000
"""Cuts and partitions of one answer, about 0.8 MB; it holds all cuts of its last partition."""
EPOCHS_PER_ANSWER_MAX = 5_000
"""Epochs of one answer by the proposal's maps; a partition with more than are left is refused."""
COST_PER_PARTITION = 10
"""What a partition without a cut costs, in cuts."""


async def handle_partition_leader_epochs(
    broker: BrokerContext, request: PartitionLeaderEpochsForPartitionsRequest, call: RequestContext
) -> PartitionLeaderEpochsForPartitionsResponse:
    """Answer for each partition: its cuts, or the epochs of the proposal's maps."""
    answer = _Answer(broker, cuts=request.cuts, epochs=request.epochs)
    for topic in request.topics:
        if answer.full:
            break
        await answer.add(topic)
    return PartitionLeaderEpochsForPartitionsResponse(topics=answer.topics)


class _Answer:
    """One answer in the making."""

    def __init__(self, broker: BrokerContext, *, cuts: bool, epochs: bool) -> None:
        self.topics: list[PartitionLeaderEpochsForPartitionsResponseTopic] = []
        self._broker = broker
        self._cuts, self._epochs = cuts, epochs
        self._left = CUTS_PER_ANSWER_MAX
        self._epochs_left = EPOCHS_PER_ANSWER_MAX
        self._until_yield = CUTS_AT_A_TIME

    @property
    def full(self) -> bool:
        """Whether the next partition is left to the next request."""
        return self._left <= 0

    async def add(self, asked: PartitionLeaderEpochsForPartitionsRequestTopic) -> None:
        """Answer for partitions of one topic, each once, as far as the answer has room."""
        found = self._broker.view.topic(asked.topic)
        topic = None if found is None else found.topic
        answered = PartitionLeaderEpochsForPartitionsResponseTopic(
            topic=asked.topic, error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if topic is None else ErrorCode.NONE
        )
        self.topics.append(answered)
        self._spend(COST_PER_PARTITION)
        if len(asked.partitions) > PARTITIONS_PER_TOPIC_MAX:
            answered.error_code = ErrorCode.INVALID_REQUEST
        if answered.error_code or topic is None:
            return
        answered.topic_id, answered.layout = topic.topic_id, topic.newest
        self._until_yield -= len(asked.partitions) // COST_PER_PARTITION
        partitions: list[PartitionLeaderEpochsForPartitionsResponsePartition] = []
        for partition in dict.fromkeys(asked.partitions):
            if self.full:
                break
            if self._until_yield <= 0:
                self._until_yield = CUTS_AT_A_TIME
                await asyncio.sleep(0)
            if self._cuts:
                partitions.append(self._cuts_of(topic, partition, asked.first_layout))
            else:
                partitions.append(self._epochs_of(topic, partition))
        answered.partitions = partitions

    def _spend(self, cost: int) -> None:
        self._left -= cost
        self._until_yield -= cost

    def _cuts_of(
        self, topic: Topic, number: int, first_layout: int
    ) -> PartitionLeaderEpochsForPartitionsResponsePartition:
        partition = self._broker.replicas.get(topic.name, number)
        known = 0 if partition is None else partition.cuts.newest
        cuts = cuts_of(partition, topic)
        if partition is None or cuts is None:
            self._spend(COST_PER_PARTITION)
            missing = self._broker.replicas.missing(topic.name, number)
            error = missing if partition is None else partition.unavailable()
            return PartitionLeaderEpochsForPartitionsResponsePartition(
                partition=number, error_code=error or ErrorCode.NOT_LEADER_OR_FOLLOWER
            )
        if known < topic.newest:
            self._until_yield -= len(cuts.ends)
        cuts = since(cuts, first_layout)
        self._left -= COST_PER_PARTITION + len(cuts.ends)
        self._until_yield -= COST_PER_PARTITION
        layouts, ends = encode_cuts(cuts)
        runs = topic.ended.get(number, ()) if self._epochs else ()
        self._spend(COST_PER_PARTITION * len(runs))
        return PartitionLeaderEpochsForPartitionsResponsePartition(
            partition=number,
            cut_layouts=layouts,
            cut_ends=ends,
            log_start=partition.log.log_start,
            ended_epochs=[
                LayoutLeaderEpochs(layout=run.layout, leader_epoch=run.epoch, count=run.length)
                for run in below_layout(runs, topic.newest)
            ],
        )

    def _epochs_of(self, topic: Topic, number: int) -> PartitionLeaderEpochsForPartitionsResponsePartition:
        self._spend(COST_PER_PARTITION + len(topic.layouts))
        found = leader_epochs(topic, number, self._epochs_left)
        if found is None:
            return PartitionLeaderEpochsForPartitionsResponsePartition(
                partition=number, error_code=ErrorCode.INVALID_REQUEST
            )
        entries = len(found.creation) + len(found.deletion)
        self._epochs_left -= entries
        self._until_yield -= entries
        return PartitionLeaderEpochsForPartitionsResponsePartition(
            partition=number,
            leader_epoch_after_creation=[
                LayoutLeaderEpoch(layout=v, partition=q, leader_epoch=e) for v, q, e in found.creation
            ],
            leader_epoch_before_deletion=[
                LayoutLeaderEpoch(layout=v, partition=q, leader_epoch=e) for v, q, e in found.deletion
            ],
        )

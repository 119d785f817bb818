"""PartitionLeaderEpochsForPartitions (API 10000): the epochs that cut a topic's partitions into layouts (KIP-253)."""

from __future__ import annotations

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.partition_leader_epochs_for_partitions import (
    LayoutLeaderEpoch,
    PartitionLeaderEpochsForPartitionsRequest,
    PartitionLeaderEpochsForPartitionsResponse,
    PartitionLeaderEpochsForPartitionsResponsePartition,
    PartitionLeaderEpochsForPartitionsResponseTopic,
)
from anabranch.server.context import BrokerContext, RequestContext


def handle_partition_leader_epochs(
    broker: BrokerContext, request: PartitionLeaderEpochsForPartitionsRequest, call: RequestContext
) -> PartitionLeaderEpochsForPartitionsResponse:
    """Answer for each partition, those that were removed included: the layouts outlive them."""
    return PartitionLeaderEpochsForPartitionsResponse(
        topics=[
            PartitionLeaderEpochsForPartitionsResponseTopic(
                topic=topic.topic,
                partitions=[_answer(broker, topic.topic, partition) for partition in topic.partitions],
            )
            for topic in request.topics
        ]
    )


def _answer(broker: BrokerContext, name: str, partition: int) -> PartitionLeaderEpochsForPartitionsResponsePartition:
    topic = broker.view.topic(name)
    if topic is None:
        return PartitionLeaderEpochsForPartitionsResponsePartition(
            partition=partition, error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        )
    found = topic.leader_epochs(partition)
    return PartitionLeaderEpochsForPartitionsResponsePartition(
        partition=partition,
        leader_epoch_after_creation=[
            LayoutLeaderEpoch(layout=v, partition=q, leader_epoch=e) for v, q, e in found.creation
        ],
        leader_epoch_before_deletion=[
            LayoutLeaderEpoch(layout=v, partition=q, leader_epoch=e) for v, q, e in found.deletion
        ],
    )

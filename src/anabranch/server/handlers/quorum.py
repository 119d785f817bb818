"""DescribeQuorum (55) and UpdateFeatures (57), answered as by a controller that is a quorum of its own.

The metadata are one store, whose version takes the place of offsets of `__cluster_metadata`. No feature of this
cluster has versions, as ApiVersions says.
"""

from __future__ import annotations

from anabranch.base.errors import ErrorCode, shortened
from anabranch.protocol.messages.describe_quorum import (
    DescribeQuorumRequest,
    DescribeQuorumResponse,
    Listener,
    Node,
    PartitionDataResult,
    ReplicaState,
    TopicDataResult,
)
from anabranch.protocol.messages.update_features import (
    UpdatableFeatureResult,
    UpdateFeaturesRequest,
    UpdateFeaturesResponse,
)
from anabranch.server.context import BrokerContext, RequestContext

METADATA_TOPIC, METADATA_PARTITION = "__cluster_metadata", 0
LISTENER = "PLAINTEXT"
RESULTS_UNTIL = 1
"""The last version of UpdateFeatures that has a result for each feature; from then on the first refusal is all."""


def handle_describe_quorum(
    broker: BrokerContext, request: DescribeQuorumRequest, call: RequestContext
) -> DescribeQuorumResponse:
    """Describe the controller as leader and only voter of the metadata (KIP-595, KIP-836)."""
    return DescribeQuorumResponse(
        topics=[
            TopicDataResult(
                topic_name=topic.topic_name,
                partitions=[
                    _quorum(broker, topic.topic_name, partition.partition_index) for partition in topic.partitions
                ],
            )
            for topic in request.topics
        ],
        nodes=[
            Node(node_id=node_id, listeners=[Listener(name=LISTENER, host=host, port=port)])
            for node_id, host, port, _ in broker.view.brokers.values()
        ],
    )


def _quorum(broker: BrokerContext, topic: str, partition: int) -> PartitionDataResult:
    if (topic, partition) != (METADATA_TOPIC, METADATA_PARTITION):
        return PartitionDataResult(
            partition_index=partition,
            error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            error_message=f"Only {METADATA_TOPIC}-{METADATA_PARTITION} has a quorum.",
        )
    leader, end, now_ms = broker.view.controller_id, broker.view.version, broker.clock.now_ms()
    return PartitionDataResult(
        partition_index=partition,
        leader_id=leader,
        leader_epoch=broker.commands.controller_epoch,
        high_watermark=end,
        current_voters=[
            ReplicaState(
                replica_id=leader, log_end_offset=end, last_fetch_timestamp=now_ms, last_caught_up_timestamp=now_ms
            )
        ],
    )


def handle_update_features(
    broker: BrokerContext, request: UpdateFeaturesRequest, call: RequestContext
) -> UpdateFeaturesResponse:
    """Refuse every feature: none has versions here (KIP-584)."""
    names = list(dict.fromkeys(update.feature for update in request.feature_updates))
    if not names:
        return UpdateFeaturesResponse()
    if call.api_version > RESULTS_UNTIL:
        return UpdateFeaturesResponse(error_code=ErrorCode.INVALID_UPDATE_VERSION, error_message=_unknown(names[0]))
    return UpdateFeaturesResponse(
        results=[
            UpdatableFeatureResult(
                feature=name, error_code=ErrorCode.INVALID_UPDATE_VERSION, error_message=_unknown(name)
            )
            for name in names
        ]
    )


def _unknown(feature: str) -> str:
    return shortened(f"This cluster has no feature {feature!r}: none of its features has versions.")

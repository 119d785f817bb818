"""UpdateMetadata (API 6), spoken between controller and brokers only; a client that sends it is refused.

Kafka's v8, the one flexible version that is kept. Ours, from KIP-253, per topic: `initial_partition_count`,
`undeleted_partition_count` and `layouts`; per partition: `retiring`. Brokers answer Metadata from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, boolean, int8, int16, int32, int64, message, string, struct, uuid


@struct()
class UpdateMetadataTopicLayout:
    """One layout of a topic's lineage, in the order in which they ruled (ours)."""

    count: int = int32()


@struct()
class UpdateMetadataPartitionState:
    """Leader and replicas of a partition; ours: whether it is retiring."""

    partition_index: int = int32()
    controller_epoch: int = int32()
    leader: int = int32()
    leader_epoch: int = int32()
    isr: Sequence[int] = array(int32)
    zk_version: int = int32()
    replicas: Sequence[int] = array(int32)
    offline_replicas: Sequence[int] = array(int32)
    retiring: bool = boolean(tag=10000)


@struct()
class UpdateMetadataTopicState:
    """A topic and its partitions; ours: its counts and the layouts of its lineage."""

    topic_name: str = string()
    topic_id: UUID = uuid()
    partition_states: Sequence[UpdateMetadataPartitionState] = array(UpdateMetadataPartitionState)
    initial_partition_count: int = int32(tag=10000, default=-1)
    undeleted_partition_count: int = int32(tag=10001, default=-1)
    layouts: Sequence[UpdateMetadataTopicLayout] = array(UpdateMetadataTopicLayout, tag=10002)


@struct()
class UpdateMetadataEndpoint:
    """One listener of a broker."""

    port: int = int32()
    host: str = string()
    listener: str = string()
    security_protocol: int = int16()


@struct()
class UpdateMetadataBroker:
    """A broker and where it listens."""

    id: int = int32()
    endpoints: Sequence[UpdateMetadataEndpoint] = array(UpdateMetadataEndpoint)
    rack: str | None = string(nullable=True)


@message(api_key=6, versions="8", flexible="8+")
class UpdateMetadataRequest:
    """Send a broker the metadata of the cluster."""

    controller_id: int = int32()
    is_k_raft_controller: bool = boolean()
    type: int = int8(tag=0)
    controller_epoch: int = int32()
    broker_epoch: int = int64(default=-1)
    topic_states: Sequence[UpdateMetadataTopicState] = array(UpdateMetadataTopicState)
    live_brokers: Sequence[UpdateMetadataBroker] = array(UpdateMetadataBroker)


@message(api_key=6, versions="8", flexible="8+")
class UpdateMetadataResponse:
    """Whether the broker took it over."""

    error_code: int = int16()

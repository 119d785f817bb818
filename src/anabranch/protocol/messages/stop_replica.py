"""StopReplica (API 5), spoken between controller and brokers only; a client that sends it is refused.

Kafka's v4, the one flexible version that is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, boolean, int16, int32, int64, message, string, struct


@struct()
class StopReplicaPartitionState:
    """A partition to stop, and whether its log goes too."""

    partition_index: int = int32()
    leader_epoch: int = int32(default=-1)
    delete_partition: bool = boolean()


@struct()
class StopReplicaTopicState:
    """Partitions of one topic."""

    topic_name: str = string()
    partition_states: Sequence[StopReplicaPartitionState] = array(StopReplicaPartitionState)


@message(api_key=5, versions="4", flexible="4+")
class StopReplicaRequest:
    """Order a broker to stop, or delete, replicas."""

    controller_id: int = int32()
    is_k_raft_controller: bool = boolean()
    controller_epoch: int = int32()
    broker_epoch: int = int64(default=-1)
    topic_states: Sequence[StopReplicaTopicState] = array(StopReplicaTopicState)


@struct()
class StopReplicaPartitionError:
    """The result for one partition."""

    topic_name: str = string()
    partition_index: int = int32()
    error_code: int = int16()


@message(api_key=5, versions="4", flexible="4+")
class StopReplicaResponse:
    """The results for the partitions."""

    error_code: int = int16()
    partition_errors: Sequence[StopReplicaPartitionError] = array(StopReplicaPartitionError)

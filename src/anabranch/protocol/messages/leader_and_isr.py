"""LeaderAndIsr (API 4), spoken between controller and brokers only; a client that sends it is refused.

Kafka's v7, the one flexible version that is kept. Ours, from KIP-253, per topic: `undeleted_partition_count`, which
the leader adopts together with the new leader epoch, and `initial_partition_count`.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, boolean, int8, int16, int32, int64, message, string, struct, uuid


@struct()
class LeaderAndIsrPartitionState:
    """The leader of a partition, its epoch and its replicas."""

    partition_index: int = int32()
    controller_epoch: int = int32()
    leader: int = int32()
    leader_epoch: int = int32()
    isr: Sequence[int] = array(int32)
    partition_epoch: int = int32()
    replicas: Sequence[int] = array(int32)
    adding_replicas: Sequence[int] = array(int32)
    removing_replicas: Sequence[int] = array(int32)
    is_new: bool = boolean()
    leader_recovery_state: int = int8()


@struct()
class LeaderAndIsrTopicState:
    """Partitions of one topic; ours: the counts by which its records are placed."""

    topic_name: str = string()
    topic_id: UUID = uuid()
    partition_states: Sequence[LeaderAndIsrPartitionState] = array(LeaderAndIsrPartitionState)
    undeleted_partition_count: int = int32(tag=10000, default=-1)
    initial_partition_count: int = int32(tag=10001, default=-1)


@struct()
class LeaderAndIsrLiveLeader:
    """Where a leader listens."""

    broker_id: int = int32()
    host_name: str = string()
    port: int = int32()


@message(api_key=4, versions="7", flexible="7+")
class LeaderAndIsrRequest:
    """Order a broker to lead or follow partitions."""

    controller_id: int = int32()
    is_k_raft_controller: bool = boolean()
    controller_epoch: int = int32()
    broker_epoch: int = int64(default=-1)
    type: int = int8()
    topic_states: Sequence[LeaderAndIsrTopicState] = array(LeaderAndIsrTopicState)
    live_leaders: Sequence[LeaderAndIsrLiveLeader] = array(LeaderAndIsrLiveLeader)


@struct()
class LeaderAndIsrPartitionError:
    """The result for one partition; ours: the end offset of its former epoch."""

    partition_index: int = int32()
    error_code: int = int16()
    ended_leader_epoch: int = int32(tag=10000, default=-1)
    end_offset: int = int64(tag=10001, default=-1)


@struct()
class LeaderAndIsrTopicError:
    """The answers for one topic."""

    topic_id: UUID = uuid()
    partition_errors: Sequence[LeaderAndIsrPartitionError] = array(LeaderAndIsrPartitionError)


@message(api_key=4, versions="7", flexible="7+")
class LeaderAndIsrResponse:
    """The results for the partitions."""

    error_code: int = int16()
    topics: Sequence[LeaderAndIsrTopicError] = array(LeaderAndIsrTopicError)

"""APIs of replicas, answered as by the one broker of its cluster: every partition is on it, and led by it.

AlterReplicaLogDirs (34), ElectLeaders (43), AlterPartitionReassignments (45), ListPartitionReassignments (46).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.alter_partition_reassignments import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ReassignablePartition,
    ReassignablePartitionResponse,
    ReassignableTopicResponse,
)
from anabranch.protocol.messages.alter_replica_log_dirs import (
    AlterReplicaLogDirPartitionResult,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirsResponse,
    AlterReplicaLogDirTopicResult,
)
from anabranch.protocol.messages.elect_leaders import (
    ElectLeadersRequest,
    ElectLeadersResponse,
    PartitionResult,
    ReplicaElectionResult,
)
from anabranch.protocol.messages.list_partition_reassignments import (
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
)
from anabranch.server.cluster.view import TopicSnapshot
from anabranch.server.context import PARTITIONS_AT_A_TIME, BrokerContext, Large, RequestContext

PATH_LENGTH_MAX = 4096
"""Characters of a path, as in Linux."""
PARTITIONS_PER_PATH = 20
"""Partitions that take as long as the longest path."""
PREFERRED, UNCLEAN = 0, 1
"""Types of election; version 0 of ElectLeaders knows the preferred one only."""
NO_PARTITION = "There is no such partition."
"""Sentences about partitions do not name them: the answer does, and a topic may have a long name, and many of them."""
NOT_ELECTED = {
    PREFERRED: ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE,
    UNCLEAN: ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE,
}


def handle_elect_leaders(
    broker: BrokerContext, request: ElectLeadersRequest, call: RequestContext
) -> ElectLeadersResponse | Awaitable[Large]:
    """Say of each partition that its leader needs no election, or that its only replica is offline.

    Where all partitions are asked for, those that need no election are left out (KIP-183, KIP-460).
    """
    not_elected = NOT_ELECTED.get(request.election_type)
    if request.topic_partitions is None:
        return _all_elections(broker, not_elected)
    found = [
        (topic.topic, [_election(broker, topic.topic, it, not_elected) for it in dict.fromkeys(topic.partitions)])
        for topic in request.topic_partitions
    ]
    return _elected(found, not_elected)


async def _all_elections(broker: BrokerContext, not_elected: ErrorCode | None) -> Large:
    """Look at every partition of the broker; other work has its turn in between."""
    found: dict[str, list[PartitionResult]] = {}
    looked = 0
    for topic in broker.view.topics():
        for partition in await _visible(topic):
            result = _election(broker, topic.name, partition, not_elected)
            if result.error_code != ErrorCode.ELECTION_NOT_NEEDED:
                found.setdefault(topic.name, []).append(result)
            looked += 1
            if looked % PARTITIONS_AT_A_TIME == 0:
                await asyncio.sleep(0)
    return Large(lambda: _elected(found.items(), not_elected))


async def _visible(topic: TopicSnapshot) -> Sequence[int]:
    """The published partitions of a topic; of many they are found in a thread."""
    if len(topic.nodes) < PARTITIONS_AT_A_TIME:
        return topic.visible_partitions
    return await asyncio.get_running_loop().run_in_executor(None, lambda: topic.visible_partitions)


def _elected(found: Iterable[tuple[str, list[PartitionResult]]], not_elected: ErrorCode | None) -> ElectLeadersResponse:
    return ElectLeadersResponse(
        error_code=ErrorCode.INVALID_REQUEST if not_elected is None else ErrorCode.NONE,
        replica_election_results=[
            ReplicaElectionResult(topic=name, partition_result=results) for name, results in found if results
        ],
    )


def _election(broker: BrokerContext, name: str, partition: int, not_elected: ErrorCode | None) -> PartitionResult:
    if not_elected is None:
        error, message = ErrorCode.INVALID_REQUEST, "There are elections of preferred leaders (0) and unclean ones (1)."
    elif not _exists(broker, name, partition):
        error, message = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, NO_PARTITION
    else:
        replica = broker.replicas.get(name, partition)
        if replica is not None and replica.offline_reason is None:
            error, message = ErrorCode.ELECTION_NOT_NEEDED, "The leader is the preferred one, and alive."
        else:
            error, message = not_elected, "The only replica is offline."
    return PartitionResult(partition_id=partition, error_code=error, error_message=message)


def handle_alter_partition_reassignments(
    broker: BrokerContext, request: AlterPartitionReassignmentsRequest, call: RequestContext
) -> AlterPartitionReassignmentsResponse:
    """Accept where partitions are already; refuse to place them elsewhere, or to cancel what is not done (KIP-455)."""
    return AlterPartitionReassignmentsResponse(
        responses=[
            ReassignableTopicResponse(
                name=topic.name, partitions=[_reassigned(broker, topic.name, it) for it in topic.partitions]
            )
            for topic in request.topics
        ]
    )


def _reassigned(broker: BrokerContext, name: str, asked: ReassignablePartition) -> ReassignablePartitionResponse:
    here = broker.settings.node_id
    error, message = ErrorCode.NONE, None
    if not _exists(broker, name, asked.partition_index):
        error, message = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, NO_PARTITION
    elif asked.replicas is None:
        error, message = ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, "No reassignment is in progress."
    elif list(asked.replicas) != [here]:
        error = ErrorCode.INVALID_REPLICA_ASSIGNMENT
        message = f"Broker {here} is the only one of this cluster: replicas can be on [{here}] only."
    return ReassignablePartitionResponse(partition_index=asked.partition_index, error_code=error, error_message=message)


def handle_list_partition_reassignments(
    broker: BrokerContext, request: ListPartitionReassignmentsRequest, call: RequestContext
) -> ListPartitionReassignmentsResponse:
    """List no reassignments: a cluster of one broker has none (KIP-455)."""
    return ListPartitionReassignmentsResponse()


async def handle_alter_replica_log_dirs(
    broker: BrokerContext, request: AlterReplicaLogDirsRequest, call: RequestContext
) -> Large:
    """Accept that replicas stay in the one data directory, and refuse every other one (KIP-113)."""
    is_ours = _is_path(broker.settings.log_dirs)
    results: dict[str, list[AlterReplicaLogDirPartitionResult]] = {}
    effort = 0

    async def spend(cost: int) -> None:
        nonlocal effort
        effort += cost
        if effort >= PARTITIONS_AT_A_TIME:
            effort = 0
            await asyncio.sleep(0)

    for directory in request.dirs:
        here = is_ours(directory.path)
        await spend(PARTITIONS_PER_PATH)
        for topic in directory.topics:
            await spend(1)
            for partition in topic.partitions:
                error = ErrorCode.NONE
                if not _exists(broker, topic.name, partition):
                    error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                elif not here:
                    error = ErrorCode.LOG_DIR_NOT_FOUND
                result = AlterReplicaLogDirPartitionResult(partition_index=partition, error_code=error)
                results.setdefault(topic.name, []).append(result)
                await spend(1)
    return Large(
        lambda: AlterReplicaLogDirsResponse(
            results=[AlterReplicaLogDirTopicResult(topic_name=it, partitions=found) for it, found in results.items()]
        )
    )


def _is_path(path: Path) -> Callable[[str], bool]:
    """Return the test whether another path, which need not be normal, is this one."""
    ours = os.path.abspath(path)
    return lambda other: len(other) <= PATH_LENGTH_MAX and os.path.normpath(other) == ours


def _exists(broker: BrokerContext, name: str, partition: int) -> bool:
    topic = broker.view.topic(name)
    return topic is not None and topic.exists(partition)

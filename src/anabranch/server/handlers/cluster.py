"""DescribeCluster (60), DescribeLogDirs (35), InitProducerId (22), FindCoordinator (10), and the brokers' own APIs."""

from __future__ import annotations

import os
from typing import Any

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.describe_cluster import (
    DescribeClusterBroker,
    DescribeClusterRequest,
    DescribeClusterResponse,
)
from anabranch.protocol.messages.find_coordinator import (
    Coordinator,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from anabranch.protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from anabranch.protocol.messages.leader_and_isr import LeaderAndIsrResponse
from anabranch.protocol.messages.stop_replica import StopReplicaResponse
from anabranch.protocol.messages.update_metadata import UpdateMetadataResponse
from anabranch.server.logs import Say
from anabranch.server.node import Call, Node

say = Say("cluster")
BROKERS = 1
UNKNOWN_OPERATIONS = -(2**31)
NO_GROUPS = "This broker coordinates no groups and no transactions yet."


def handle_describe_cluster(node: Node, request: DescribeClusterRequest, call: Call) -> DescribeClusterResponse:
    """Who is there."""
    settings = node.settings
    if request.endpoint_type != BROKERS:
        return DescribeClusterResponse(
            error_code=ErrorCode.MISMATCHED_ENDPOINT_TYPE,
            error_message="This is a broker's endpoint; controllers have none of their own.",
            cluster_id=node.cluster_id,
        )
    broker = DescribeClusterBroker(
        broker_id=settings.node_id, host=node.address.host, port=node.address.port, rack=settings.broker_rack or None
    )
    return DescribeClusterResponse(
        endpoint_type=BROKERS,
        cluster_id=node.cluster_id,
        controller_id=settings.node_id,
        brokers=[broker],
        cluster_authorized_operations=UNKNOWN_OPERATIONS,
    )


def handle_init_producer_id(node: Node, request: InitProducerIdRequest, call: Call) -> InitProducerIdResponse:
    """Give an idempotent producer its id; one that has an id already gets another, with epoch 0."""
    if request.transactional_id is not None:
        return InitProducerIdResponse(error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE, producer_id=-1, producer_epoch=-1)
    try:
        return InitProducerIdResponse(producer_id=node.producer_ids.take(), producer_epoch=0)
    except OSError as error:
        say.error("no producer id given", peer=call.peer, reason=error)
        return InitProducerIdResponse(error_code=ErrorCode.KAFKA_STORAGE_ERROR, producer_id=-1, producer_epoch=-1)


def handle_find_coordinator(node: Node, request: FindCoordinatorRequest, call: Call) -> FindCoordinatorResponse:
    """Nobody coordinates anything yet."""
    code = ErrorCode.COORDINATOR_NOT_AVAILABLE
    if call.api_version < 4:
        return FindCoordinatorResponse(error_code=code, error_message=NO_GROUPS, node_id=-1, host="", port=-1)
    return FindCoordinatorResponse(
        coordinators=[
            Coordinator(key=key, node_id=-1, host="", port=-1, error_code=code, error_message=NO_GROUPS)
            for key in request.coordinator_keys
        ]
    )


def handle_leader_and_isr(node: Node, request: Any, call: Call) -> LeaderAndIsrResponse:
    """Only the controller may say so, and it does not come this way."""
    say.warning("a client sent LeaderAndIsr", peer=call.peer)
    return LeaderAndIsrResponse(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED)


def handle_stop_replica(node: Node, request: Any, call: Call) -> StopReplicaResponse:
    """Only the controller may say so, and it does not come this way."""
    say.warning("a client sent StopReplica", peer=call.peer)
    return StopReplicaResponse(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED)


def handle_update_metadata(node: Node, request: Any, call: Call) -> UpdateMetadataResponse:
    """Only the controller may say so, and it does not come this way."""
    say.warning("a client sent UpdateMetadata", peer=call.peer)
    return UpdateMetadataResponse(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED)


def disk_space(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Total and usable bytes of the disk that holds `path`; (-1, -1) where that is not known."""
    try:
        found = os.statvfs(path)
    except OSError:
        return -1, -1
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

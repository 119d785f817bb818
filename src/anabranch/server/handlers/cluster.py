"""DescribeCluster (60), DescribeLogDirs (35), FindCoordinator (10)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from typing import Any

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.protocol.messages.describe_cluster import (
    DescribeClusterBroker,
    DescribeClusterRequest,
    DescribeClusterResponse,
)
from anabranch.protocol.messages.describe_log_dirs import (
    DescribeLogDirsPartition,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
    DescribeLogDirsTopic,
)
from anabranch.protocol.messages.find_coordinator import (
    Coordinator,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from anabranch.runtime.events import EventLogger
from anabranch.server.context import PARTITIONS_AT_A_TIME, BrokerContext, Large, RequestContext
from anabranch.server.coordinators.shard_set import ShardSet
from anabranch.server.handlers.authorized import NOT_SAID, ON_CLUSTER
from anabranch.server.handlers.in_parts import split

events = EventLogger("cluster")
BROKERS = 1
COORDINATED = {0: "groups", 1: "transactions"}
"""By `key_type`; share groups (2) are not coordinated."""


def handle_describe_cluster(
    broker: BrokerContext, request: DescribeClusterRequest, call: RequestContext
) -> DescribeClusterResponse:
    """Describe the live brokers and the controller."""
    view = broker.view
    if request.endpoint_type != BROKERS:
        return DescribeClusterResponse(
            error_code=ErrorCode.MISMATCHED_ENDPOINT_TYPE,
            error_message="This is a broker's endpoint; controllers have none of their own.",
            cluster_id=broker.cluster_id,
        )
    return DescribeClusterResponse(
        endpoint_type=BROKERS,
        cluster_id=broker.cluster_id,
        controller_id=view.controller_id,
        brokers=[
            DescribeClusterBroker(broker_id=node_id, host=host, port=port, rack=rack)
            for node_id, host, port, rack in view.brokers.values()
        ],
        cluster_authorized_operations=ON_CLUSTER if request.include_cluster_authorized_operations else NOT_SAID,
    )


def handle_find_coordinator(
    broker: BrokerContext, request: FindCoordinatorRequest, call: RequestContext
) -> FindCoordinatorResponse | Awaitable[FindCoordinatorResponse]:
    """Name the coordinator of each key, which is this broker; the first request creates the internal topic."""
    coordinators = broker.coordinators.get(request.key_type)
    if coordinators is None:
        code, message = ErrorCode.INVALID_REQUEST, f"Nothing with keys of type {request.key_type} is coordinated here."
        if request.key_type in COORDINATED:
            code = ErrorCode.COORDINATOR_NOT_AVAILABLE
        return _coordinators(broker, request, call, code, message)
    if coordinators is broker.groups:
        broker.groups.warm()
    if coordinators.is_loaded:
        return _coordinators(broker, request, call)
    return _ensure_and_answer(broker, coordinators, request, call)


async def _ensure_and_answer(
    broker: BrokerContext, coordinators: ShardSet[Any, Any], request: FindCoordinatorRequest, call: RequestContext
) -> FindCoordinatorResponse:
    try:
        await coordinators.ensure()
    except ApiError as error:
        return _coordinators(broker, request, call, error.code, error.message)
    return _coordinators(broker, request, call)


def _coordinators(
    broker: BrokerContext,
    request: FindCoordinatorRequest,
    call: RequestContext,
    code: ErrorCode = ErrorCode.NONE,
    message: str = "",
) -> FindCoordinatorResponse:
    node_id, host, port = (-1, "", -1) if code else (broker.settings.node_id, broker.address.host, broker.address.port)
    if call.api_version < 4:
        return FindCoordinatorResponse(
            error_code=code, error_message=message or None, node_id=node_id, host=host, port=port
        )
    return FindCoordinatorResponse(
        coordinators=[
            Coordinator(key=key, node_id=node_id, host=host, port=port, error_code=code, error_message=message or None)
            for key in request.coordinator_keys
        ]
    )


async def handle_describe_log_dirs(
    broker: BrokerContext, request: DescribeLogDirsRequest, call: RequestContext
) -> Large:
    """The one data directory, with the sizes of the logs that are asked for, or of all."""
    asked: dict[str, set[int]] | None = None
    if request.topics is not None:
        asked = {}
        for _, topics in split(request.topics, "partitions"):
            for named in topics:  # A table of names that nobody has would grow, for up to 20 ms at once.
                if broker.view.topic(named.topic) is not None:
                    asked.setdefault(named.topic, set()).update(named.partitions)
            await asyncio.sleep(0)
    if len(broker.replicas) >= PARTITIONS_AT_A_TIME:  # Have the turn of a long answer before they are listed.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    sizes: dict[str, list[DescribeLogDirsPartition]] = {}
    for place, partition in enumerate(broker.replicas, 1):
        if place % PARTITIONS_AT_A_TIME == 0:
            await asyncio.sleep(0)
        topic, number = partition.name
        if partition.offline_reason is None and (asked is None or number in asked.get(topic, ())):
            size = DescribeLogDirsPartition(partition_index=number, partition_size=partition.log.size)
            sizes.setdefault(topic, []).append(size)
    total, usable = disk_space(broker.settings.log_dirs)
    path = str(broker.settings.log_dirs.absolute())
    spent = asked or {}

    def make() -> DescribeLogDirsResponse:
        spent.clear()  # Here, in a thread: to free 100,000 names takes the loop 15 ms.
        topics = [DescribeLogDirsTopic(name=name, partitions=found) for name, found in sizes.items()]
        one = DescribeLogDirsResult(log_dir=path, topics=topics, total_bytes=total, usable_bytes=usable)
        return DescribeLogDirsResponse(results=[one])

    return Large(make)


def disk_space(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Total and usable bytes of the disk that holds `path`; (-1, -1) where that is not known."""
    try:
        found = os.statvfs(path)
    except OSError:
        return -1, -1
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

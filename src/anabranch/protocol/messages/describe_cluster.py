"""DescribeCluster (API 60). v1 adds `endpoint_type`; v2 adds `include_fenced_brokers`, `is_fenced`."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, boolean, int8, int16, int32, message, string, struct


@message(api_key=60, versions="0-2", flexible="0+")
class DescribeClusterRequest:
    """Ask for the brokers, or for the controllers."""

    include_cluster_authorized_operations: bool = boolean()
    endpoint_type: int = int8(since=1, default=1)
    include_fenced_brokers: bool = boolean(since=2)


@struct()
class DescribeClusterBroker:
    """Where a broker listens."""

    broker_id: int = int32()
    host: str = string()
    port: int = int32()
    rack: str | None = string(nullable=True, default=None)
    is_fenced: bool = boolean(since=2)


@message(api_key=60, versions="0-2", flexible="0+")
class DescribeClusterResponse:
    """The cluster and its nodes."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    endpoint_type: int = int8(since=1, default=1)
    cluster_id: str = string()
    controller_id: int = int32(default=-1)
    brokers: Sequence[DescribeClusterBroker] = array(DescribeClusterBroker)
    cluster_authorized_operations: int = int32(default=-2147483648)

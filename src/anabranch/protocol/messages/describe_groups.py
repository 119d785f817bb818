"""DescribeGroups (API 15). v1 adds `throttle_time_ms`; v3 adds `include_authorized_operations`,
`authorized_operations`; v4 adds `group_instance_id`; v5 is flexible; v6 adds `error_message`. Ours, from v5 on: the
partitions that wait at gates.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import Blob, array, boolean, bytes_, int16, int32, message, string, struct
from anabranch.protocol.messages.consumer_group_describe import WaitingPartition


@message(api_key=15, versions="0-6", flexible="5+")
class DescribeGroupsRequest:
    """Ask about classic groups."""

    groups: Sequence[str] = array(string)
    include_authorized_operations: bool = boolean(since=3)


@struct()
class DescribedGroupMember:
    """A member, its subscription and its assignment."""

    member_id: str = string()
    group_instance_id: str | None = string(since=4, nullable=True, default=None)
    client_id: str = string()
    client_host: str = string()
    member_metadata: Blob = bytes_()
    member_assignment: Blob = bytes_()


@struct()
class DescribedGroup:
    """A classic group and its members."""

    error_code: int = int16()
    error_message: str | None = string(since=6, nullable=True, default=None)
    group_id: str = string()
    group_state: str = string()
    protocol_type: str = string()
    protocol_data: str = string()
    members: Sequence[DescribedGroupMember] = array(DescribedGroupMember)
    authorized_operations: int = int32(since=3, default=-2147483648)
    waiting_partitions: Sequence[WaitingPartition] = array(WaitingPartition, tag=10000)
    waiting_partitions_omitted: int = int32(tag=10001)
    """How many more partitions wait than are listed."""


@message(api_key=15, versions="0-6", flexible="5+")
class DescribeGroupsResponse:
    """The groups asked about."""

    throttle_time_ms: int = int32(since=1)
    groups: Sequence[DescribedGroup] = array(DescribedGroup)

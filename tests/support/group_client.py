"""Requests that tests of groups make, over one connection."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import NO_TOPIC_ID
from anabranch.protocol.messages.consumer_group_describe import ConsumerGroupDescribeRequest
from anabranch.protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest, TopicPartitions
from anabranch.protocol.messages.describe_groups import DescribeGroupsRequest
from anabranch.protocol.messages.find_coordinator import FindCoordinatorRequest
from anabranch.protocol.messages.heartbeat import HeartbeatRequest
from anabranch.protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from anabranch.protocol.messages.list_groups import ListGroupsRequest
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from anabranch.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopic,
    OffsetFetchRequestTopics,
)
from anabranch.protocol.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment
from tests.support.wire import WireClient

RETRIABLE = (
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
)


class GroupClient(WireClient):
    """A connection with the group APIs; one call is one request, except for documented waits."""

    def find(self, *groups: str, version: int = 6) -> Any:
        """Find the coordinators of groups, which makes `__consumer_offsets` when it is not there."""
        if version < 4:
            return self.call(FindCoordinatorRequest(key=groups[0]), version)
        return self.call(FindCoordinatorRequest(coordinator_keys=list(groups)), version)

    def ready(self, group: str = "g") -> None:
        """Find a group's coordinator, and wait until it is loaded."""
        self.find(group)
        deadline = time.monotonic() + 10
        while (error := ErrorCode(self.fetched(group).error_code)) in RETRIABLE:
            assert time.monotonic() < deadline, error
            time.sleep(0.02)

    # -- the consumer protocol ---------------------------------------------------------------------------------------

    def beat(
        self,
        group: str,
        member: str,
        epoch: int,
        *,
        topics: Sequence[str] | None = None,
        owned: Mapping[UUID, Sequence[int]] | None = None,
        version: int = 1,
        **fields: Any,
    ) -> Any:
        """Send a ConsumerGroupHeartbeat; with all required fields when joining."""
        if epoch == 0:
            fields = {"rebalance_timeout_ms": 60_000, "subscribed_topic_names": [], **fields}
            owned = owned or {}
        if topics is not None:
            fields["subscribed_topic_names"] = list(topics)
        if owned is not None:
            fields["topic_partitions"] = [TopicPartitions(topic_id=it, partitions=list(owned[it])) for it in owned]
        request = ConsumerGroupHeartbeatRequest(group_id=group, member_id=member, member_epoch=epoch, **fields)
        return self.call(request, version)

    def described(self, group: str) -> Any:
        """ConsumerGroupDescribe of one group."""
        return self.call(ConsumerGroupDescribeRequest(group_ids=[group])).groups[0]

    # -- the classic protocol ----------------------------------------------------------------------------------------

    def join_request(self, group: str, member: str = "", metadata: bytes = b"m", **fields: Any) -> JoinGroupRequest:
        """A JoinGroup request for one protocol, `range`."""
        protocols = [JoinGroupRequestProtocol(name="range", metadata=metadata)]
        fields = {"session_timeout_ms": 10_000, "rebalance_timeout_ms": 10_000, "protocol_type": "consumer", **fields}
        return JoinGroupRequest(group_id=group, member_id=member, protocols=protocols, **fields)

    def join(self, group: str, member: str = "", version: int = 9, **fields: Any) -> Any:
        """JoinGroup, with the member id that the coordinator gives when it wants one."""
        answer = self.call(self.join_request(group, member, **fields), version)
        if answer.error_code == ErrorCode.MEMBER_ID_REQUIRED:
            answer = self.call(self.join_request(group, answer.member_id, **fields), version)
        return answer

    def sync_request(self, group: str, joined: Any, assignments: Mapping[str, bytes] | None = None) -> SyncGroupRequest:
        """A SyncGroup request of the member that `joined`."""
        given = [SyncGroupRequestAssignment(member_id=it, assignment=data) for it, data in (assignments or {}).items()]
        return SyncGroupRequest(
            group_id=group,
            generation_id=joined.generation_id,
            member_id=joined.member_id,
            protocol_type="consumer",
            protocol_name="range",
            assignments=given,
        )

    def heartbeat(self, group: str, joined: Any, version: int = 4) -> ErrorCode:
        """A Heartbeat of the member that `joined`."""
        request = HeartbeatRequest(group_id=group, generation_id=joined.generation_id, member_id=joined.member_id)
        return ErrorCode(self.call(request, version).error_code)

    def described_classic(self, group: str) -> Any:
        """DescribeGroups of one group."""
        return self.call(DescribeGroupsRequest(groups=[group])).groups[0]

    # -- offsets -----------------------------------------------------------------------------------------------------

    def commit(
        self,
        group: str,
        offsets: Mapping[tuple[str, int], int],
        *,
        member: str = "",
        epoch: int = -1,
        version: int = 9,
        topic_ids: Mapping[str, UUID] | None = None,
        metadata: str | None = "",
    ) -> list[ErrorCode]:
        """OffsetCommit; the error of each partition, in the order of `offsets`."""
        topics = [
            OffsetCommitRequestTopic(
                name=topic,
                topic_id=(topic_ids or {}).get(topic, NO_TOPIC_ID),
                partitions=[
                    OffsetCommitRequestPartition(
                        partition_index=partition, committed_offset=offset, committed_metadata=metadata
                    )
                ],
            )
            for (topic, partition), offset in offsets.items()
        ]
        request = OffsetCommitRequest(
            group_id=group, generation_id_or_member_epoch=epoch, member_id=member, topics=topics
        )
        answer = self.call(request, version)
        return [ErrorCode(part.error_code) for topic in answer.topics for part in topic.partitions]

    def fetched(
        self, group: str, topics: Mapping[str | UUID, Sequence[int]] | None = None, *, version: int = 9, **fields: Any
    ) -> Any:
        """OffsetFetch of one group, of all it has committed where no topics are given; the group's answer."""
        if version < 8:
            asked = None
            if topics is not None:
                asked = [OffsetFetchRequestTopic(name=str(it), partition_indexes=list(topics[it])) for it in topics]
            return self.call(OffsetFetchRequest(group_id=group, topics=asked), version)
        named = None
        if topics is not None:
            named = [
                OffsetFetchRequestTopics(
                    name=it if isinstance(it, str) else "",
                    topic_id=it if isinstance(it, UUID) else NO_TOPIC_ID,
                    partition_indexes=list(topics[it]),
                )
                for it in topics
            ]
        return self.call(
            OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id=group, topics=named, **fields)]), version
        ).groups[0]

    def committed(self, group: str) -> dict[tuple[str, int], int]:
        """Everything that a group has committed."""
        answer = self.fetched(group)
        assert answer.error_code == ErrorCode.NONE, ErrorCode(answer.error_code)
        return {
            (topic.name, part.partition_index): part.committed_offset
            for topic in answer.topics
            for part in topic.partitions
        }

    def listed(self, states: Sequence[str] = (), types: Sequence[str] = (), version: int = 5) -> dict[str, str]:
        """ListGroups: the state of each group."""
        answer = self.call(ListGroupsRequest(states_filter=list(states), types_filter=list(types)), version)
        assert answer.error_code == ErrorCode.NONE, ErrorCode(answer.error_code)
        return {group.group_id: group.group_state for group in answer.groups}


def owned(answer: Any) -> dict[UUID, list[int]]:
    """The assignment in a heartbeat's answer."""
    return {topic.topic_id: list(topic.partitions) for topic in answer.assignment.topic_partitions}

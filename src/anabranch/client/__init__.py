"""Producer, Consumer and Admin, as asyncio classes; `anabranch.client.sync` has them as plain synchronous ones."""

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.admin import Admin, ConfigEntry, OffsetSpan, PartitionDescription, TopicDescription
from anabranch.client.connection import ConnectError, DisconnectedError
from anabranch.client.consumer import Consumer, Record
from anabranch.client.group import GroupMetadata, RebalanceListener, SubscriptionPattern
from anabranch.client.group_admin import GroupDescription, GroupListing, MemberDescription
from anabranch.client.membership.assignors import (
    AssignmentSpec,
    AssignorMetadata,
    GroupAssignment,
    MemberAssignment,
    MemberSpec,
    PartitionAssignor,
    TopicIdPartition,
    TopicSpec,
)
from anabranch.client.metadata import ClusterInfo, Node, OffsetAndTimestamp, PartitionInfo, TopicInfo
from anabranch.client.offsets import OffsetAndMetadata
from anabranch.client.producer import ColumnsMetadata, DeliveryError, Producer
from anabranch.client.rows import RecordMetadata

__all__ = [
    "Admin",
    "AnabranchError",
    "ApiError",
    "AssignmentSpec",
    "AssignorMetadata",
    "ClusterInfo",
    "ColumnsMetadata",
    "ConfigEntry",
    "ConnectError",
    "Consumer",
    "DeliveryError",
    "DisconnectedError",
    "ErrorCode",
    "GroupAssignment",
    "GroupDescription",
    "GroupListing",
    "GroupMetadata",
    "MemberAssignment",
    "MemberDescription",
    "MemberSpec",
    "Node",
    "OffsetAndMetadata",
    "OffsetAndTimestamp",
    "OffsetSpan",
    "PartitionAssignor",
    "PartitionDescription",
    "PartitionInfo",
    "Producer",
    "RebalanceListener",
    "Record",
    "RecordMetadata",
    "SubscriptionPattern",
    "TopicDescription",
    "TopicIdPartition",
    "TopicInfo",
    "TopicPartition",
    "TopicSpec",
]

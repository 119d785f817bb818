"""Producer, Consumer and Admin as asyncio classes; `anabranch.client.sync` has them as synchronous classes."""

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.admin.admin import (
    Admin,
    ConfigEntry,
    OffsetSpan,
    PartitionDescription,
    ResizeDescription,
    ResizeWait,
    TopicDescription,
)
from anabranch.client.admin.groups import GroupDescription, GroupListing, MemberDescription, WaitedOn, WaitingPartition
from anabranch.client.admin.slices import HeldSlices
from anabranch.client.admin.transactions import TransactionDescription
from anabranch.client.cluster.connection import ConnectError, DisconnectedError
from anabranch.client.cluster.metadata import ClusterInfo, Node, OffsetAndTimestamp, PartitionInfo, TopicInfo
from anabranch.client.consumer.consumer import Consumer
from anabranch.client.consumer.listeners import (
    GroupMetadata,
    KeyRange,
    PartitionKeyRebalanceListener,
    RebalanceListener,
    SubscriptionPattern,
)
from anabranch.client.consumer.offsets import Gap, OffsetAndMetadata
from anabranch.client.consumer.pool import RejectError
from anabranch.client.consumer.record import Record
from anabranch.client.producer.delivery import ColumnsMetadata, DeliveryError
from anabranch.client.producer.producer import Producer
from anabranch.client.producer.rows import RecordMetadata
from anabranch.client.producer.transactions import PreparedTransaction
from anabranch.client.table.keyed_table import KeyedTable
from anabranch.client.table.owners import Owner
from anabranch.machines.clients.fetching import RecordFilter
from anabranch.machines.clients.membership.assignors import (
    AssignmentSpec,
    AssignorMetadata,
    GroupAssignment,
    MemberAssignment,
    MemberSpec,
    PartitionAssignor,
    TopicIdPartition,
    TopicSpec,
)
from anabranch.machines.clients.processing import Retry
from anabranch.machines.clients.table import KeyLoadingError, KeyNotOwnedError
from anabranch.machines.key_history import KeyHistory, Stay
from anabranch.machines.partition.load import PartitionLoad

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
    "Gap",
    "GroupAssignment",
    "GroupDescription",
    "GroupListing",
    "GroupMetadata",
    "HeldSlices",
    "KeyHistory",
    "KeyLoadingError",
    "KeyNotOwnedError",
    "KeyRange",
    "KeyedTable",
    "MemberAssignment",
    "MemberDescription",
    "MemberSpec",
    "Node",
    "OffsetAndMetadata",
    "OffsetAndTimestamp",
    "OffsetSpan",
    "Owner",
    "PartitionAssignor",
    "PartitionDescription",
    "PartitionInfo",
    "PartitionKeyRebalanceListener",
    "PartitionLoad",
    "PreparedTransaction",
    "Producer",
    "RebalanceListener",
    "Record",
    "RecordFilter",
    "RecordMetadata",
    "RejectError",
    "ResizeDescription",
    "ResizeWait",
    "Retry",
    "Stay",
    "SubscriptionPattern",
    "TopicDescription",
    "TopicIdPartition",
    "TopicInfo",
    "TopicPartition",
    "TopicSpec",
    "TransactionDescription",
    "WaitedOn",
    "WaitingPartition",
]

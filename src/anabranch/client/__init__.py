"""Producer, Consumer and Admin, as asyncio classes; `anabranch.client.sync` has them as plain synchronous ones."""

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.admin import Admin, ConfigEntry, OffsetSpan, PartitionDescription, TopicDescription
from anabranch.client.connection import ConnectError, DisconnectedError
from anabranch.client.consumer import Consumer, Record
from anabranch.client.metadata import ClusterInfo, Node, OffsetAndTimestamp, PartitionInfo, TopicInfo
from anabranch.client.producer import ColumnsMetadata, DeliveryError, Producer
from anabranch.client.rows import RecordMetadata

__all__ = [
    "Admin",
    "AnabranchError",
    "ApiError",
    "ClusterInfo",
    "ColumnsMetadata",
    "ConfigEntry",
    "ConnectError",
    "Consumer",
    "DeliveryError",
    "DisconnectedError",
    "ErrorCode",
    "Node",
    "OffsetAndTimestamp",
    "OffsetSpan",
    "PartitionDescription",
    "PartitionInfo",
    "Producer",
    "Record",
    "RecordMetadata",
    "TopicDescription",
    "TopicInfo",
    "TopicPartition",
]

"""WriteTxnMarkers (API 27). v2 adds `transaction_version`."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, boolean, int8, int16, int32, int64, message, string, struct


@struct()
class WritableTxnMarkerTopic:
    """Partitions of one topic."""

    name: str = string()
    partition_indexes: Sequence[int] = array(int32)


@struct()
class WritableTxnMarker:
    """The end of one transaction."""

    producer_id: int = int64()
    producer_epoch: int = int16()
    transaction_result: bool = boolean()
    topics: Sequence[WritableTxnMarkerTopic] = array(WritableTxnMarkerTopic)
    coordinator_epoch: int = int32()
    transaction_version: int = int8(since=2)


@message(api_key=27, versions="1-2", flexible="1+")
class WriteTxnMarkersRequest:
    """Sent by a transaction's coordinator to the leaders of its partitions."""

    markers: Sequence[WritableTxnMarker] = array(WritableTxnMarker)


@struct()
class WritableTxnMarkerPartitionResult:
    """The result for one marker."""

    partition_index: int = int32()
    error_code: int = int16()


@struct()
class WritableTxnMarkerTopicResult:
    """The answers for one topic."""

    name: str = string()
    partitions: Sequence[WritableTxnMarkerPartitionResult] = array(WritableTxnMarkerPartitionResult)


@struct()
class WritableTxnMarkerResult:
    """The answers for one transaction."""

    producer_id: int = int64()
    topics: Sequence[WritableTxnMarkerTopicResult] = array(WritableTxnMarkerTopicResult)


@message(api_key=27, versions="1-2", flexible="1+")
class WriteTxnMarkersResponse:
    """The results for the markers."""

    markers: Sequence[WritableTxnMarkerResult] = array(WritableTxnMarkerResult)

"""Every API by its key: name, messages, the versions that are declared, and those the broker serves (wire.md 1).

The message modules are imported when an API is first used, so that a broker starts without reading all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, cast

from anabranch.codec import schema_of

NOT_SERVED = range(0)


@dataclass(frozen=True)
class Api:
    """One request and its response."""

    key: int
    name: str
    versions: range
    """Versions the codec can read and write."""
    flexible_since: int
    served: range
    """Versions that the broker serves and lists in ApiVersions; empty where it refuses all requests."""

    @property
    def read(self) -> range:
        """Versions whose requests the broker reads: to serve them, or to refuse them in their own form."""
        return self.served or self.versions

    @cached_property
    def request(self) -> type[Any]:
        """The class of its requests."""
        return self._message("Request")

    @cached_property
    def response(self) -> type[Any]:
        """The class of its responses."""
        return self._message("Response")

    def flexible(self, version: int) -> bool:
        """Whether the version has compact lengths, tagged fields, and headers with tags."""
        return version >= self.flexible_since

    def _message(self, kind: str) -> type[Any]:
        module = import_module(f"anabranch.protocol.messages.{_module_name(self.name)}")
        return cast(type[Any], getattr(module, self.name + kind))


def _module_name(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).removeprefix("_")


def _api(key: int, name: str, declared: str, flexible_since: int, served: str | None = None) -> Api:
    return Api(key, name, _range(declared), flexible_since, _range(declared) if served is None else _range(served))


def _range(text: str) -> range:
    if not text:
        return NOT_SERVED
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


NEVER_FLEXIBLE = 1 << 15

API: dict[int, Api] = {
    api.key: api
    for api in (
        _api(0, "Produce", "3-13", 9),
        _api(1, "Fetch", "4-18", 12, "4-17"),
        _api(2, "ListOffsets", "1-11", 6, "1-10"),
        _api(3, "Metadata", "0-13", 9),
        _api(4, "LeaderAndIsr", "7", 7, ""),
        _api(5, "StopReplica", "4", 4, ""),
        _api(6, "UpdateMetadata", "8", 8, ""),
        _api(7, "ControlledShutdown", "1-3", 3, ""),
        _api(8, "OffsetCommit", "2-10", 8),
        _api(9, "OffsetFetch", "1-10", 6),
        _api(10, "FindCoordinator", "0-6", 3),
        _api(11, "JoinGroup", "0-9", 6),
        _api(12, "Heartbeat", "0-4", 4),
        _api(13, "LeaveGroup", "0-5", 4),
        _api(14, "SyncGroup", "0-5", 4),
        _api(15, "DescribeGroups", "0-6", 5),
        _api(16, "ListGroups", "0-5", 3),
        _api(17, "SaslHandshake", "0-1", NEVER_FLEXIBLE, ""),
        _api(18, "ApiVersions", "0-4", 3),
        _api(19, "CreateTopics", "2-7", 5),
        _api(20, "DeleteTopics", "1-6", 4),
        _api(21, "DeleteRecords", "0-2", 2),
        _api(22, "InitProducerId", "0-6", 2, "0-5"),
        _api(23, "OffsetForLeaderEpoch", "2-4", 4),
        _api(24, "AddPartitionsToTxn", "0-5", 3, "0-3"),
        _api(25, "AddOffsetsToTxn", "0-4", 3),
        _api(26, "EndTxn", "0-5", 3, "0-4"),
        _api(27, "WriteTxnMarkers", "1-2", 1, "1"),
        _api(28, "TxnOffsetCommit", "0-5", 3, "0-4"),
        _api(29, "DescribeAcls", "1-3", 2),
        _api(30, "CreateAcls", "1-3", 2),
        _api(31, "DeleteAcls", "1-3", 2),
        _api(32, "DescribeConfigs", "1-4", 4),
        _api(33, "AlterConfigs", "0-2", 2),
        _api(34, "AlterReplicaLogDirs", "1-2", 2),
        _api(35, "DescribeLogDirs", "1-5", 2, "1-4"),
        _api(36, "SaslAuthenticate", "0-2", 2, ""),
        _api(37, "CreatePartitions", "0-3", 2),
        _api(38, "CreateDelegationToken", "1-3", 2),
        _api(39, "RenewDelegationToken", "1-2", 2),
        _api(40, "ExpireDelegationToken", "1-2", 2),
        _api(41, "DescribeDelegationToken", "1-3", 2),
        _api(42, "DeleteGroups", "0-2", 2),
        _api(43, "ElectLeaders", "0-2", 2),
        _api(44, "IncrementalAlterConfigs", "0-1", 1),
        _api(45, "AlterPartitionReassignments", "0-1", 0),
        _api(46, "ListPartitionReassignments", "0", 0),
        _api(47, "OffsetDelete", "0", NEVER_FLEXIBLE),
        _api(48, "DescribeClientQuotas", "0-1", 1),
        _api(49, "AlterClientQuotas", "0-1", 1),
        _api(50, "DescribeUserScramCredentials", "0", 0),
        _api(51, "AlterUserScramCredentials", "0", 0),
        _api(52, "Vote", "0-2", 0, ""),
        _api(53, "BeginQuorumEpoch", "0-1", 1, ""),
        _api(54, "EndQuorumEpoch", "0-1", 1, ""),
        _api(55, "DescribeQuorum", "0-2", 0),
        _api(56, "AlterPartition", "2-3", 2, ""),
        _api(57, "UpdateFeatures", "0-2", 0),
        _api(58, "Envelope", "0", 0, ""),
        _api(59, "FetchSnapshot", "0-1", 0, ""),
        _api(60, "DescribeCluster", "0-2", 0),
        _api(61, "DescribeProducers", "0", 0),
        _api(62, "BrokerRegistration", "0-4", 0, ""),
        _api(63, "BrokerHeartbeat", "0-2", 0, ""),
        _api(64, "UnregisterBroker", "0", 0, ""),
        _api(65, "DescribeTransactions", "0", 0),
        _api(66, "ListTransactions", "0-2", 0),
        _api(67, "AllocateProducerIds", "0", 0, ""),
        _api(68, "ConsumerGroupHeartbeat", "0-1", 0),
        _api(69, "ConsumerGroupDescribe", "0-1", 0),
        _api(70, "ControllerRegistration", "0", 0, ""),
        _api(71, "GetTelemetrySubscriptions", "0", 0, ""),
        _api(72, "PushTelemetry", "0", 0, ""),
        _api(73, "AssignReplicasToDirs", "0", 0, ""),
        _api(74, "ListConfigResources", "0-1", 0),
        _api(75, "DescribeTopicPartitions", "0", 0),
        _api(76, "ShareGroupHeartbeat", "1", 1, ""),
        _api(77, "ShareGroupDescribe", "1", 1, ""),
        _api(78, "ShareFetch", "1-2", 1, ""),
        _api(79, "ShareAcknowledge", "1-2", 1, ""),
        _api(80, "AddRaftVoter", "0-1", 0, ""),
        _api(81, "RemoveRaftVoter", "0", 0, ""),
        _api(82, "UpdateRaftVoter", "0", 0, ""),
        _api(83, "InitializeShareGroupState", "0", 0, ""),
        _api(84, "ReadShareGroupState", "0", 0, ""),
        _api(85, "WriteShareGroupState", "0-1", 0, ""),
        _api(86, "DeleteShareGroupState", "0", 0, ""),
        _api(87, "ReadShareGroupStateSummary", "0-1", 0, ""),
        _api(88, "StreamsGroupHeartbeat", "0", 0, ""),
        _api(89, "StreamsGroupDescribe", "0", 0, ""),
        _api(90, "DescribeShareGroupOffsets", "0-1", 0, ""),
        _api(91, "AlterShareGroupOffsets", "0", 0, ""),
        _api(92, "DeleteShareGroupOffsets", "0", 0, ""),
        _api(10000, "PartitionLeaderEpochsForPartitions", "0", 0),
        _api(10001, "ConsumerGroupPosition", "0", 0),
        _api(10002, "ConsumerGroupPrepareAssignment", "0", 0),
        _api(10003, "ConsumerGroupInstallAssignment", "0", 0),
        _api(10004, "ListTopicResizes", "0", 0),
        _api(10005, "CancelTopicResizes", "0", 0),
        _api(10006, "DescribeLoad", "0", 0),
        _api(10007, "DescribeSlices", "0", 0),
    )
}


def api_of(message: type) -> Api:
    """The API of a request or response class."""
    key = schema_of(message).api_key
    assert key is not None, message
    return API[key]

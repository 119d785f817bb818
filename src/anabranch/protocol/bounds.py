"""The elements of a request: one table of the most that each API takes.

The elements of all arrays of a request are counted together, tagged fields that are not declared among them. The reader
counts them before it makes objects of them, so that a frame of 100 MiB does not become 1.5 GB of objects. A request
above its bound ends its connection with one sentence. A bound is what the largest honest client sends: one that reads
and commits every partition of a topic (PARTITIONS_PER_TOPIC_MAX), an administrator's tool that names every topic.
"""

from __future__ import annotations

from anabranch.base.limits import PARTITIONS_PER_TOPIC_MAX, PARTITIONS_PER_TRANSACTION_MAX, RANGES_PER_COMMIT_MAX

EVERY_PARTITION = 2 * PARTITIONS_PER_TOPIC_MAX + 1_000
"""Each partition, each in a topic of its own, and what comes with them."""
EVERY_COMMIT = EVERY_PARTITION + 2 * RANGES_PER_COMMIT_MAX
"""Ranges beyond those that a commit may have are read, so that it is answered with an error."""
EVERY_GROUP = 20_000
FEW = 1_000

ELEMENTS_MAX: dict[int, int] = {
    0: EVERY_GROUP,  # Produce: batches, each of 61 bytes at least
    1: 2 * EVERY_PARTITION,  # Fetch: partitions to read, and partitions of the session to forget
    2: EVERY_PARTITION,  # ListOffsets
    3: PARTITIONS_PER_TOPIC_MAX,  # Metadata: topics
    8: EVERY_COMMIT,  # OffsetCommit: partitions, and ranges
    9: EVERY_PARTITION,  # OffsetFetch
    10: EVERY_GROUP,  # FindCoordinator
    11: FEW,  # JoinGroup: protocols
    12: FEW,  # Heartbeat
    13: EVERY_GROUP,  # LeaveGroup: members
    14: EVERY_GROUP,  # SyncGroup: members
    15: EVERY_GROUP,  # DescribeGroups
    16: FEW,  # ListGroups: filters
    18: FEW,  # ApiVersions
    19: EVERY_PARTITION,  # CreateTopics: assignments of partitions
    20: EVERY_GROUP,  # DeleteTopics
    21: EVERY_PARTITION,  # DeleteRecords
    22: FEW,  # InitProducerId
    23: EVERY_PARTITION,  # OffsetForLeaderEpoch
    24: 2 * PARTITIONS_PER_TRANSACTION_MAX,  # AddPartitionsToTxn
    25: FEW,  # AddOffsetsToTxn
    26: FEW,  # EndTxn
    27: 2 * PARTITIONS_PER_TRANSACTION_MAX,  # WriteTxnMarkers
    28: EVERY_COMMIT,  # TxnOffsetCommit: partitions, and ranges
    29: FEW,  # DescribeAcls
    30: EVERY_GROUP,  # CreateAcls
    31: EVERY_GROUP,  # DeleteAcls
    32: EVERY_GROUP,  # DescribeConfigs
    33: EVERY_GROUP,  # AlterConfigs
    34: EVERY_PARTITION,  # AlterReplicaLogDirs
    35: EVERY_PARTITION,  # DescribeLogDirs
    37: EVERY_PARTITION,  # CreatePartitions: assignments of partitions
    38: FEW,  # CreateDelegationToken: principals that may renew it
    39: FEW,  # RenewDelegationToken
    40: FEW,  # ExpireDelegationToken
    41: FEW,  # DescribeDelegationToken: owners
    42: EVERY_GROUP,  # DeleteGroups
    43: EVERY_PARTITION,  # ElectLeaders
    44: EVERY_GROUP,  # IncrementalAlterConfigs
    45: EVERY_PARTITION + PARTITIONS_PER_TOPIC_MAX,  # AlterPartitionReassignments: replicas, too
    46: EVERY_PARTITION,  # ListPartitionReassignments
    47: EVERY_PARTITION,  # OffsetDelete
    48: FEW,  # DescribeClientQuotas
    49: EVERY_GROUP,  # AlterClientQuotas
    50: EVERY_GROUP,  # DescribeUserScramCredentials
    51: EVERY_GROUP,  # AlterUserScramCredentials
    55: FEW,  # DescribeQuorum
    57: FEW,  # UpdateFeatures
    60: FEW,  # DescribeCluster
    61: EVERY_PARTITION,  # DescribeProducers
    65: EVERY_GROUP,  # DescribeTransactions
    66: FEW,  # ListTransactions: filters
    68: 2 * EVERY_PARTITION,  # ConsumerGroupHeartbeat: owned partitions, and ranges of keys
    69: EVERY_GROUP,  # ConsumerGroupDescribe
    74: FEW,  # ListConfigResources
    75: PARTITIONS_PER_TOPIC_MAX,  # DescribeTopicPartitions: topics
    10000: EVERY_PARTITION,  # PartitionLeaderEpochsForPartitions
    10001: EVERY_PARTITION,  # ConsumerGroupPosition
    10002: FEW,  # ConsumerGroupPrepareAssignment
    10003: 2 * EVERY_PARTITION,  # ConsumerGroupInstallAssignment: partitions, and members
    10004: EVERY_GROUP,  # ListTopicResizes: topics
    10005: FEW,  # CancelTopicResizes: topics, of which more than a hundred are refused
    10006: EVERY_PARTITION,  # DescribeLoad: partitions, of which more than a thousand are refused
    10007: EVERY_PARTITION,  # DescribeSlices: partitions, of which more than a thousand are refused
    # Those that are refused, whatever they hold:
    **dict.fromkeys((4, 5, 6, 7, 17, 36, 52, 53, 54, 56, 58, 59, 62, 63, 64, 67, 70, 71, 72, 73, *range(76, 93)), FEW),
}
"""By API key; every API has its bound."""

TOPICS_MAX: dict[int, int] = {19: EVERY_GROUP, 37: EVERY_GROUP}
"""By API key, the topics of a request of which most elements may be the assignments of partitions: an answer tells all
configs of each topic that is created, a kilobyte, which takes a millisecond."""

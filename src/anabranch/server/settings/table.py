"""Settings of a broker, by Kafka's names. A setting is a value: parsed and checked once, then handed around.

They come, later ones winning, from the defaults below, a properties file (`--config`), the environment
(`ANABRANCH_LOG_DIRS` is `log.dirs`), and the command line (`--set name=value`). A name that does not exist is refused
with the nearest one that does. The table is also the documentation: `--settings` and docs/settings.md are made from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from anabranch.base import limits
from anabranch.base.errors import AnabranchError
from anabranch.machines.controller.broker_configs import OLDER
from anabranch.server.settings.values import (
    INT32_MAX,
    INT64_MAX,
    Address,
    Between,
    Choice,
    Words,
    as_text,
    parse_address,
    parse_bool,
    parse_names,
    parse_optional_address,
    parse_path,
    parse_ratio,
    setting,
)

ENVIRONMENT_PREFIX = "ANABRANCH_"


class SettingsError(AnabranchError):
    """A setting that does not exist, or a value that it cannot have."""


DEFAULT_METRICS_LISTENER = Address("127.0.0.1", 9464)
"""The default metrics listener, recognized by identity: a configured one is another object, even if equal."""
COMPRESSION = Choice(("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"))
CLEANUP = Words(("delete", "compact"))
TIMESTAMP_TYPE = Choice(("CreateTime", "LogAppendTime"))
LONG_OR_UNLIMITED = Between(-1, INT64_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting of a broker."""

    node_id: int = setting("node.id", Between(0, INT32_MAX), 1, "The id of this broker in its cluster.")
    listeners: Address = setting(
        "listeners", parse_address, Address("localhost", 9092), "Where clients connect; port 0 takes a free one."
    )
    advertised_listeners: Address | None = setting(
        "advertised.listeners",
        parse_optional_address,
        None,
        "The address that Metadata gives to clients, if not `listeners`; port 0 is the port listened on.",
    )
    log_dirs: Path = setting(
        "log.dirs", parse_path, Path("anabranch-data"), "The directory that holds everything this broker keeps."
    )
    log_dirs_free_bytes_min: int = setting(
        "log.dirs.free.bytes.min",
        Between(0, INT64_MAX),
        limits.DISK_FREE_SIZE_MIN,
        "Free bytes of the disk below which records are refused, so that offsets, transactions and topics can still be "
        "changed, and records deleted.",
    )
    durability: Literal["fsync", "os"] = setting(
        "durability",
        Choice(("fsync", "os")),
        "fsync",
        "When a produce is answered: after the records are on disk (fsync, shared by concurrent produces), or after "
        "they were written to the operating system (os, as Apache Kafka does by default).",
    )
    broker_rack: str = setting("broker.rack", str.strip, "", "The rack of this broker, in Metadata.")

    num_partitions: int = setting(
        "num.partitions",
        Between(1, limits.PARTITIONS_PER_TOPIC_MAX),
        1,
        "Partitions of a topic that is created without a count.",
    )
    auto_create_topics_enable: bool = setting(
        "auto.create.topics.enable", parse_bool, True, "Create a topic when a client asks for it by name."
    )
    default_replication_factor: int = setting(
        "default.replication.factor", Between(1, 1), 1, "Accepted; a partition has one replica."
    )
    delete_topic_enable: bool = setting("delete.topic.enable", parse_bool, True, "Whether topics can be deleted.")

    log_retention_ms: int = setting(
        "log.retention.ms", LONG_OR_UNLIMITED, 7 * 24 * 3600 * 1000, "How long records are kept; -1 is for ever."
    )
    log_retention_bytes: int = setting(
        "log.retention.bytes", LONG_OR_UNLIMITED, -1, "Bytes kept per partition; -1 is no limit."
    )
    log_segment_bytes: int = setting("log.segment.bytes", Between(14, INT32_MAX), 1 << 30, "Size of a log segment.")
    log_segment_min_bytes: int = setting(
        "log.segment.min.bytes",
        Between(14, INT32_MAX),
        limits.SEGMENT_SIZE_MIN,
        "The least segment.bytes of a topic, and the least log.segment.bytes; every segment is a file.",
    )
    log_roll_ms: int = setting(
        "log.roll.ms", Between(1, INT64_MAX), 7 * 24 * 3600 * 1000, "Age at which a new log segment is begun."
    )
    log_roll_min_ms: int = setting(
        "log.roll.min.ms",
        Between(1, INT64_MAX),
        limits.SEGMENT_AGE_MIN_MS,
        "The least segment.ms of a topic, and the least log.roll.ms; every segment is a file.",
    )
    log_roll_small_ms: int = setting(
        "log.roll.small.ms",
        Between(0, INT32_MAX),
        limits.SMALL_SEGMENT_AGE_MS,
        "A segment of fewer than log.segment.min.bytes is finished by time only when it is this old for each segment "
        "that its log has.",
    )
    log_index_interval_bytes: int = setting(
        "log.index.interval.bytes", Between(0, INT32_MAX), 4096, "Bytes of log between two entries of its index."
    )
    log_index_size_max_bytes: int = setting(
        "log.index.size.max.bytes",
        Between(4, INT32_MAX),
        10 * 1024 * 1024,
        "Accepted; an index is as large as its segment needs.",
    )
    log_cleanup_policy: str = setting(
        "log.cleanup.policy", CLEANUP, "delete", "How old segments are cleaned up: deleted, or compacted by key."
    )
    log_cleaner_delete_retention_ms: int = setting(
        "log.cleaner.delete.retention.ms",
        Between(0, INT64_MAX),
        24 * 3600 * 1000,
        "How long tombstones stay in a compacted log.",
    )
    log_retention_check_interval_ms: int = setting(
        "log.retention.check.interval.ms",
        Between(1, INT64_MAX),
        300_000,
        "The interval between searches for old segments.",
    )
    log_flush_offset_checkpoint_interval_ms: int = setting(
        "log.flush.offset.checkpoint.interval.ms",
        Between(10, INT32_MAX),
        3_000,
        "The interval at which the offsets are saved up to which logs are synced: a start after a crash misses "
        "whatever is gone below them.",
    )
    log_cleaner_min_cleanable_ratio: float = setting(
        "log.cleaner.min.cleanable.ratio",
        parse_ratio,
        0.5,
        "How much of a compacted log must be dirty for a cleaning.",
    )
    log_cleaner_min_compaction_lag_ms: int = setting(
        "log.cleaner.min.compaction.lag.ms", Between(0, INT64_MAX), 0, "How long a record stays uncompacted at least."
    )
    log_cleaner_max_compaction_lag_ms: int = setting(
        "log.cleaner.max.compaction.lag.ms",
        Between(1, INT64_MAX),
        INT64_MAX,
        "How long a record of a compacted topic waits for compaction at most, however little of its log is dirty.",
    )
    log_cleaner_backoff_ms: int = setting(
        "log.cleaner.backoff.ms",
        Between(10, INT64_MAX),
        15_000,
        "The interval between searches for logs to be compacted.",
    )
    log_scrub_interval_ms: int = setting(
        "log.scrub.interval.ms",
        LONG_OR_UNLIMITED,
        7 * 24 * 3600 * 1000,
        "The interval at which the checksums of all batches are compared in the background; -1 is never.",
    )
    log_scrub_max_bytes_per_second: int = setting(
        "log.scrub.max.bytes.per.second",
        Between(1 << 10, INT64_MAX),
        20 << 20,
        "The rate at which logs are read to compare checksums; a batch counts as 4 KiB at least.",
    )
    log_message_timestamp_type: str = setting(
        "log.message.timestamp.type",
        TIMESTAMP_TYPE,
        "CreateTime",
        "The clock of a record's timestamp: the producer's, or the broker's.",
    )
    log_message_timestamp_before_max_ms: int = setting(
        "log.message.timestamp.before.max.ms",
        Between(0, INT64_MAX),
        INT64_MAX,
        "How far a producer's timestamp may lie behind the broker's clock.",
    )
    log_message_timestamp_after_max_ms: int = setting(
        "log.message.timestamp.after.max.ms",
        Between(0, INT64_MAX),
        3_600_000,
        "How far a producer's timestamp may lie ahead of the broker's clock.",
    )
    compression_type: str = setting(
        "compression.type", COMPRESSION, "producer", "Compression of stored batches; producer keeps what was sent."
    )
    message_max_bytes: int = setting(
        "message.max.bytes", Between(0, INT32_MAX), limits.MESSAGE_SIZE_MAX, "The largest record batch."
    )
    min_insync_replicas: int = setting(
        "min.insync.replicas", Between(1, INT32_MAX), 1, "Accepted; with one replica per partition it changes nothing."
    )
    transaction_max_timeout_ms: int = setting(
        "transaction.max.timeout.ms",
        Between(1, INT32_MAX),
        900_000,
        "The longest transaction.timeout.ms that a producer may ask for.",
    )
    transaction_metadata_max_bytes: int = setting(
        "transaction.metadata.max.bytes",
        Between(1024, INT64_MAX),
        limits.TRANSACTIONS_SIZE_MAX,
        "Memory for transactional ids and the partitions that their transactions hold; more is refused.",
    )
    transactional_id_expiration_ms: int = setting(
        "transactional.id.expiration.ms",
        Between(1, INT64_MAX),
        7 * 24 * 3600 * 1000,
        "How long an unused transactional id is kept.",
    )
    transaction_timed_out_interval_ms: int = setting(
        "transaction.abort.timed.out.transaction.cleanup.interval.ms",
        Between(1, INT32_MAX),
        10_000,
        "The interval between searches for transactions past their timeout, which are aborted.",
    )
    transaction_expired_interval_ms: int = setting(
        "transaction.remove.expired.transaction.cleanup.interval.ms",
        Between(1, INT32_MAX),
        3_600_000,
        "The interval between searches for unused transactional ids, which are deleted.",
    )
    producer_id_expiration_ms: int = setting(
        "producer.id.expiration.ms",
        Between(1, INT32_MAX),
        24 * 3600 * 1000,
        "How long the sequence numbers of an idempotent producer are kept after its last batch.",
    )
    producer_state_max_bytes: int = setting(
        "producer.state.max.bytes",
        Between(1_300, INT64_MAX),
        limits.PRODUCERS_SIZE_MAX,
        "Memory for the sequence numbers of idempotent producers. Above it those that have been idle for five minutes "
        "are forgotten, and further ones refused.",
    )
    reaper_interval_ms: int = setting(
        "reaper.interval.ms",
        Between(10, INT32_MAX),
        5_000,
        "The interval between searches for empty retiring partitions.",
    )

    group_coordinator_threads: int = setting(
        "group.coordinator.threads",
        Between(1, 1_000),
        1,
        "Accepted; the coordinators of a broker share its one loop, and a second core is used by a second broker.",
    )
    group_coordinator_rebalance_protocols: str = setting(
        "group.coordinator.rebalance.protocols",
        Words(("classic", "consumer")),
        "classic,consumer",
        "The rebalance protocols that groups may use; without consumer, ConsumerGroupHeartbeat is refused.",
    )
    group_consumer_session_timeout_ms: int = setting(
        "group.consumer.session.timeout.ms",
        Between(1, INT32_MAX),
        45_000,
        "How long after its last heartbeat a member of a consumer group is removed, if its group has no config.",
    )
    group_consumer_min_session_timeout_ms: int = setting(
        "group.consumer.min.session.timeout.ms",
        Between(1, INT32_MAX),
        45_000,
        "The least value of a group's consumer.session.timeout.ms.",
    )
    group_consumer_max_session_timeout_ms: int = setting(
        "group.consumer.max.session.timeout.ms",
        Between(1, INT32_MAX),
        60_000,
        "The largest value of a group's consumer.session.timeout.ms.",
    )
    group_consumer_heartbeat_interval_ms: int = setting(
        "group.consumer.heartbeat.interval.ms",
        Between(1, INT32_MAX),
        5_000,
        "The interval between heartbeats of a consumer group's members, if its group has no config.",
    )
    group_consumer_min_heartbeat_interval_ms: int = setting(
        "group.consumer.min.heartbeat.interval.ms",
        Between(1, INT32_MAX),
        5_000,
        "The least value of a group's consumer.heartbeat.interval.ms.",
    )
    group_consumer_max_heartbeat_interval_ms: int = setting(
        "group.consumer.max.heartbeat.interval.ms",
        Between(1, INT32_MAX),
        15_000,
        "The largest value of a group's consumer.heartbeat.interval.ms.",
    )
    group_consumer_max_size: int = setting(
        "group.consumer.max.size", Between(1, INT32_MAX), INT32_MAX, "The most members of a consumer group."
    )
    group_consumer_max_subscribed_names: int = setting(
        "group.consumer.max.subscribed.names",
        Between(1, INT32_MAX),
        10_000,
        "The most names of topics in the different subscriptions of a consumer group's members; patterns do not count.",
    )
    group_consumer_assignors: str = setting(
        "group.consumer.assignors",
        parse_names,
        "uniform,range",
        "The server-side assignors that members may choose, the default one first: `uniform`, `range`, plug-ins.",
        kind="list",
    )
    group_consumer_migration_policy: str = setting(
        "group.consumer.migration.policy",
        Choice(("bidirectional", "upgrade", "downgrade", "disabled")),
        "bidirectional",
        "The directions in which a running group may change between the classic and the consumer protocol.",
    )
    group_consumer_regex_refresh_interval_ms: int = setting(
        "group.consumer.regex.refresh.interval.ms",
        Between(10_000, INT32_MAX),
        600_000,
        "Accepted; subscribed patterns are evaluated whenever topics are created or deleted.",
    )
    group_initial_rebalance_delay_ms: int = setting(
        "group.initial.rebalance.delay.ms",
        Between(0, INT32_MAX),
        3_000,
        "How long the first rebalance of an empty classic group waits for more members.",
    )
    group_min_session_timeout_ms: int = setting(
        "group.min.session.timeout.ms",
        Between(0, INT32_MAX),
        6_000,
        "The least session timeout that a member of a classic group may ask for.",
    )
    group_max_session_timeout_ms: int = setting(
        "group.max.session.timeout.ms",
        Between(0, INT32_MAX),
        1_800_000,
        "The largest session timeout that a member of a classic group may ask for.",
    )
    group_max_size: int = setting(
        "group.max.size", Between(1, INT32_MAX), INT32_MAX, "The most members of a classic group."
    )
    group_member_metadata_max_bytes: int = setting(
        "group.member.metadata.max.bytes",
        Between(1024, INT32_MAX),
        4 << 20,
        "The most metadata in one JoinGroup or ConsumerGroupHeartbeat, and the most assignments in one SyncGroup.",
    )
    group_metadata_max_bytes: int = setting(
        "group.metadata.max.bytes",
        Between(1024, INT64_MAX),
        128 << 20,
        "Memory for all groups, their members, and their metadata and assignments; more is refused.",
    )
    group_regex_matches_max_bytes: int = setting(
        "group.regex.matches.max.bytes",
        Between(1024, INT64_MAX),
        64 << 20,
        "Memory for the names of topics that subscribed patterns match; those of patterns used least are found again.",
    )
    offset_metadata_max_bytes: int = setting(
        "offset.metadata.max.bytes",
        Between(0, INT32_MAX),
        4_096,
        "The largest metadata of a committed offset, in bytes.",
    )
    offsets_max_bytes: int = setting(
        "offsets.max.bytes",
        Between(1024, INT64_MAX),
        limits.OFFSETS_SIZE_MAX,
        "Memory for the committed offsets of all groups; further ones, and longer metadata, are refused.",
    )
    offsets_retention_minutes: int = setting(
        "offsets.retention.minutes",
        Between(1, INT32_MAX),
        7 * 24 * 60,
        "How long offsets are kept after the group's last member left, or its last subscription to their topic ended.",
    )
    offsets_retention_check_interval_ms: int = setting(
        "offsets.retention.check.interval.ms",
        Between(1, INT64_MAX),
        600_000,
        "The interval between searches for offsets past their retention.",
    )
    offsets_topic_num_partitions: int = setting(
        "offsets.topic.num.partitions",
        Between(1, limits.PARTITIONS_PER_TOPIC_MAX),
        50,
        "Partitions of __consumer_offsets, when it is made; each coordinates the groups whose ids hash to it.",
    )
    offsets_topic_segment_bytes: int = setting(
        "offsets.topic.segment.bytes",
        Between(14, INT32_MAX),
        100 * 1024 * 1024,
        "Size of a log segment of __consumer_offsets, when it is made.",
    )
    offsets_topic_replication_factor: int = setting(
        "offsets.topic.replication.factor", Between(1, INT32_MAX), 1, "Accepted; a partition has one replica."
    )
    accept_individual_commit: bool = setting(
        "accept.individual.commit",
        parse_bool,
        True,
        "Whether groups may commit ranges of offsets and of keys above their committed offsets.",
    )
    gaps_are_waited_for: bool = setting(
        "individual.commit.wait.for.gaps",
        parse_bool,
        False,
        "Whether a commit of ranges of offsets in a transaction waits until what lies below them is committed, too.",
    )
    max_shares_per_partition: int = setting(
        "max.shares.per.partition",
        Between(1, 100),
        16,
        "How many members of a group may share one partition of a topic with accept.range.fetch.",
    )
    key_range_balance_interval_ms: int = setting(
        "key.range.balance.interval.ms",
        Between(0, INT32_MAX),
        60_000,
        "How often it is looked whether members that share a partition should have other keys of it; 0 for never.",
    )
    individual_commit_log_segment_bytes: int = setting(
        "individual.commit.log.segment.bytes",
        Between(14, INT32_MAX),
        10 * 1024 * 1024,
        "Size of a log segment of __individual_commit_offsets, when it is made.",
    )
    individual_commit_max_ranges_per_partition: int = setting(
        "individual.commit.max.ranges.per.partition",
        Between(1, INT32_MAX),
        100_000,
        "Ranges of offsets that a group may have committed above its committed offset in one partition.",
    )
    individual_commit_max_ranges: int = setting(
        "individual.commit.max.ranges",
        Between(1, INT32_MAX),
        1_000_000,
        "Such ranges of all groups together; each takes about 200 bytes of memory.",
    )
    transaction_state_log_num_partitions: int = setting(
        "transaction.state.log.num.partitions",
        Between(1, limits.PARTITIONS_PER_TOPIC_MAX),
        50,
        "Partitions of __transaction_state, when it is made; each coordinates the ids that hash to it.",
    )
    transaction_state_log_segment_bytes: int = setting(
        "transaction.state.log.segment.bytes",
        Between(14, INT32_MAX),
        100 * 1024 * 1024,
        "Size of a log segment of __transaction_state, when it is made.",
    )
    transaction_state_log_replication_factor: int = setting(
        "transaction.state.log.replication.factor", Between(1, INT32_MAX), 1, "Accepted; a partition has one replica."
    )
    transaction_state_log_min_isr: int = setting(
        "transaction.state.log.min.isr", Between(1, INT32_MAX), 1, "Accepted; a partition has one replica."
    )

    socket_request_max_bytes: int = setting(
        "socket.request.max.bytes", Between(1024, 1 << 30), limits.REQUEST_SIZE_MAX, "The largest request."
    )
    queued_max_request_bytes: int = setting(
        "queued.max.request.bytes",
        Between(1 << 20, INT64_MAX),
        limits.QUEUED_REQUEST_SIZE_MAX,
        "Memory for requests that are being received, over all connections; passed by at most one request.",
    )
    queued_max_response_bytes: int = setting(
        "queued.max.response.bytes",
        Between(1 << 20, INT64_MAX),
        limits.QUEUED_RESPONSE_SIZE_MAX,
        "Memory for answers that clients have not read, over all connections. Above it, those that have held more than "
        "a share for stalled.request.timeout.ms are closed; above twice that, those with most at once.",
    )
    queued_max_decoded_bytes: int = setting(
        "queued.max.decoded.bytes",
        Between(1 << 20, INT64_MAX),
        limits.QUEUED_DECODED_SIZE_MAX,
        "Memory for large requests that are decoded, over all connections, at 32 times their bytes. Further ones wait; "
        "one alone always has room.",
    )
    queued_max_fetch_bytes: int = setting(
        "queued.max.fetch.bytes",
        Between(1 << 20, INT64_MAX),
        limits.QUEUED_FETCH_SIZE_MAX,
        "Memory for the partitions that fetches read and watch, over all connections, 1,000 bytes each. Further large "
        "fetches wait; the largest that wait for records are answered early.",
    )
    max_connections: int = setting(
        "max.connections",
        Between(1, 1_000_000),
        limits.CONNECTIONS_MAX,
        "Connections served at a time. The last tenth is for addresses that have no more than a hundredth of them.",
    )
    max_connections_per_ip: int = setting(
        "max.connections.per.ip",
        Between(1, INT32_MAX),
        INT32_MAX,
        "Connections served at a time of one address. What outlives a connection has no share of it "
        "(reliability.md, Bounds).",
    )
    max_partitions_per_broker: int = setting(
        "max.partitions.per.broker",
        Between(1, INT32_MAX),
        limits.PARTITIONS_PER_BROKER_MAX,
        "The most partitions of all topics; those that more would be are refused with POLICY_VIOLATION. The topics of "
        "the broker itself are always made.",
    )
    max_open_files: int = setting(
        "max.open.files",
        Between(16, INT32_MAX),
        limits.OPEN_FILES_MAX,
        "Files of logs held open at a time; those used least recently are closed. Where the system's limit of "
        "descriptors is below this and max.connections together, each has the half of it, or what the other leaves.",
    )
    connections_max_idle_ms: int = setting(
        "connections.max.idle.ms", Between(100, INT64_MAX), 600_000, "A connection that is silent this long is closed."
    )
    stalled_request_timeout_ms: int = setting(
        "stalled.request.timeout.ms",
        Between(100, INT32_MAX),
        10_000,
        "While others wait for request memory, a connection that has held some this long without progress is closed.",
    )
    socket_send_buffer_bytes: int = setting(
        "socket.send.buffer.bytes",
        Between(-1, INT32_MAX),
        -1,
        "SO_SNDBUF of client sockets; -1 leaves it to the system.",
    )
    socket_receive_buffer_bytes: int = setting(
        "socket.receive.buffer.bytes",
        Between(-1, INT32_MAX),
        -1,
        "SO_RCVBUF of client sockets; -1 leaves it to the system.",
    )
    fetch_max_bytes: int = setting(
        "fetch.max.bytes",
        Between(1024, INT32_MAX),
        55 * 1024 * 1024,
        "The most bytes of records in one fetch response.",
    )
    fetch_sessions_max: int = setting(
        "max.incremental.fetch.session.cache.slots",
        Between(0, 1_000_000),
        limits.FETCH_SESSIONS_MAX,
        "Fetch sessions remembered at a time (KIP-227).",
    )
    fetch_sessions_size_max: int = setting(
        "max.incremental.fetch.session.cache.bytes",
        Between(0, INT64_MAX),
        limits.FETCH_SESSIONS_SIZE_MAX,
        "Memory for fetch sessions; the largest is forgotten first, and its reader names its partitions anew.",
    )

    filtering_size_max: int = setting(
        "max.bytes.fetcher.filtering",
        Between(1 << 20, INT64_MAX),
        limits.FILTERING_SIZE_MAX,
        "Memory for filtering records that fetches ask for by key; a batch that expands to more is filtered alone.",
    )
    key_range_cache_size_max: int = setting(
        "max.bytes.key.range.cache",
        Between(0, INT64_MAX),
        limits.KEY_RANGE_CACHE_SIZE_MAX,
        "Memory for records that were found for other readers of a partition than the one that was just answered.",
    )
    slices_size_max: int = setting(
        "cooperative.fetch.max.bytes",
        Between(1 << 16, INT64_MAX),
        limits.SLICES_SIZE_MAX,
        "Memory for the slices that members of all groups hold; without room, none is handed out until some are done.",
    )
    slice_hold_ms: int = setting(
        "cooperative.fetch.hold.ms",
        Between(100, INT64_MAX),
        300_000,
        "After this long a slice of a partition is offered to other members of its group, though its member lives.",
    )

    metrics_listener: Address | None = setting(
        "metrics.listener",
        parse_optional_address,
        DEFAULT_METRICS_LISTENER,
        "Where metrics are served over HTTP in the Prometheus format; empty turns them off, port 0 takes a free one. "
        "When the default is taken, the broker serves without metrics.",
    )
    log_format: str = setting("log.format", Choice(("logfmt", "json")), "logfmt", "The form of the broker's own log.")
    log_level: str = setting(
        "log.level",
        Choice(("debug", "info", "warning", "error")),
        "info",
        "The lowest level of lines in the broker's own log.",
    )
    controlled_shutdown_timeout_ms: int = setting(
        "shutdown.timeout.ms",
        Between(0, INT32_MAX),
        10_000,
        "How long a clean stop waits for requests in progress.",
    )

    @classmethod
    def of(cls, properties: Mapping[str, str]) -> Settings:
        """Parse settings by their names. Raises `SettingsError`, with the reason, for the first invalid one."""
        by_name = {item.metadata["name"]: item for item in fields(cls)}
        values: dict[str, object] = {}
        for name, text in sorted(properties.items(), key=lambda given: (-_unit(given[0]), given[0] not in OLDER)):
            item = by_name.get(_setting(name))
            if item is None:
                raise SettingsError(_unknown(name, by_name))
            try:
                parse = item.metadata["parse"]
                value = parse(text)
                values[item.name] = parse(str(value * _unit(name))) if _unit(name) > 1 and value > 0 else value
            except ValueError as error:
                raise SettingsError(f"{name} cannot be {text.strip()!r}: {error}.") from None
        settings = cls(**values)  # type: ignore[arg-type]
        settings.check()
        return settings

    def check(self) -> None:
        """Compare settings with each other; SettingsError names those that do not fit."""
        names = {item.name: item.metadata["name"] for item in fields(self)}
        for small, large in _ASCENDING:
            least, most = getattr(self, small), getattr(self, large)
            if least > most:
                raise SettingsError(
                    f"{names[small]} ({least}) must not be above {names[large]} ({most}): set both, or neither."
                )


_ASCENDING = (
    ("message_max_bytes", "socket_request_max_bytes"),
    ("log_segment_min_bytes", "log_segment_bytes"),
    ("log_roll_min_ms", "log_roll_ms"),
    ("log_segment_min_bytes", "offsets_topic_segment_bytes"),
    ("log_segment_min_bytes", "transaction_state_log_segment_bytes"),
    ("log_segment_min_bytes", "individual_commit_log_segment_bytes"),
    ("log_cleaner_min_compaction_lag_ms", "log_cleaner_max_compaction_lag_ms"),
    ("group_consumer_min_session_timeout_ms", "group_consumer_session_timeout_ms"),
    ("group_consumer_session_timeout_ms", "group_consumer_max_session_timeout_ms"),
    ("group_consumer_min_heartbeat_interval_ms", "group_consumer_heartbeat_interval_ms"),
    ("group_consumer_heartbeat_interval_ms", "group_consumer_max_heartbeat_interval_ms"),
    ("group_consumer_heartbeat_interval_ms", "group_consumer_session_timeout_ms"),
    ("group_min_session_timeout_ms", "group_max_session_timeout_ms"),
)
"""Settings of which the first must not be above the second."""


def _unit(name: str) -> int:
    return OLDER[name].unit if name in OLDER else 1


def _unknown(name: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches  # only needed to explain a mistake

    near = get_close_matches(name, list(known), n=1, cutoff=0.5)
    meant = f" Did you mean {near[0]}?" if near else " `anabranch serve --settings` lists all of them."
    return f"There is no setting {name}.{meant}"


def read_properties(text: str) -> dict[str, str]:
    """Read a properties file: `name=value` lines, `#` and `!` comments, a backslash at the end joins lines."""
    properties: dict[str, str] = {}
    pending = ""
    for number, raw in enumerate(text.splitlines(), start=1):
        line = pending + raw.strip()
        pending = ""
        if not line or line[0] in "#!":
            continue
        if line.endswith("\\"):
            pending = line[:-1]
            continue
        name, separator, value = line.partition("=")
        if not separator:
            raise SettingsError(f"Line {number} is not name=value: {raw.strip()!r}.")
        properties[name.strip()] = value.strip()
    return properties


def from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Pick the settings out of the environment: `ANABRANCH_LOG_DIRS` is `log.dirs`. Other variables are left alone."""
    names = {_variable(name): name for name in (*OLDER, *(item.metadata["name"] for item in fields(Settings)))}
    return {names[variable]: value for variable, value in environment.items() if variable in names}


def layered(*sources: Mapping[str, str]) -> dict[str, str]:
    """Merge settings by their names: a later source replaces a setting of an earlier one, whatever its name there."""
    merged: dict[str, str] = {}
    for source in sources:
        given = {_setting(name) for name in source}
        merged = {name: text for name, text in merged.items() if _setting(name) not in given} | dict(source)
    return merged


def _setting(name: str) -> str:
    return OLDER[name].setting if name in OLDER else name


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper().replace(".", "_")


@dataclass(frozen=True, slots=True)
class Described:
    """One setting, for people and for DescribeConfigs."""

    name: str
    kind: str
    value: str
    default: str
    doc: str


def described(settings: Settings | None = None) -> list[Described]:
    """List every setting with its value and default as text."""
    defaults = settings or Settings()
    return [_described(item, getattr(defaults, item.name)) for item in fields(Settings)]


def _described(item: Field[Any], value: object) -> Described:
    assert item.default is not MISSING
    metadata = item.metadata
    return Described(metadata["name"], metadata["kind"], as_text(value), as_text(item.default), metadata["doc"])


def explicit(settings: Settings) -> dict[str, str]:
    """The settings that differ from their defaults, as text by name."""
    return {item.name: item.value for item in described(settings) if item.value != item.default}

"""The coordinator's settings, by Kafka's names: the broker's own, and the overrides of a group's configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from anabranch.base.limits import PATTERN_LENGTH_MAX
from anabranch.machines.groups.assignors.registry import Assignors


class ConsumerGroupSettings(NamedTuple):
    """The settings of one group of the consumer protocol."""

    session_timeout_ms: int
    heartbeat_interval_ms: int


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """`group.*` and `offsets.*` settings of a broker."""

    consumer_session_timeout_ms: int = 45_000
    consumer_heartbeat_interval_ms: int = 5_000
    consumer_max_size: int = 1 << 31
    consumer_names_max: int = 10_000
    """Names of topics in the different subscriptions of a group's members."""
    consumer_assignors: tuple[str, ...] = ("uniform", "range")
    consumer_shares_max: int = 16
    balance_interval_ms: int = 60_000
    """How often it is looked whether the cuts of shared partitions should be others; 0 for never."""
    consumer_migration_policy: str = "bidirectional"
    """bidirectional, upgrade, downgrade or disabled."""
    consumer_regex_length_max: int = PATTERN_LENGTH_MAX
    min_session_timeout_ms: int = 6_000
    max_session_timeout_ms: int = 1_800_000
    max_size: int = 1 << 31
    initial_rebalance_delay_ms: int = 3_000
    offset_metadata_max_bytes: int = 4_096
    offsets_size_max: int = 1 << 62
    """Bytes of memory for the committed offsets of the broker."""
    offsets_size: Callable[[], int] = field(default=lambda: 0)
    """The bytes of memory that the broker's committed offsets take."""
    offsets_retention_ms: int = 7 * 24 * 60 * 60 * 1_000
    offsets_retention_check_interval_ms: int = 600_000
    individual_commits: bool = True
    """Whether commits by ranges are accepted."""
    gaps_are_waited_for: bool = False
    """Whether a commit of ranges of offsets in a transaction waits until what lies below them is committed, too."""
    ranges_per_partition_max: int = 100_000
    """Ranges of offsets that are held of one group and partition."""
    ranges_max: int = 1_000_000
    """Ranges of offsets that the broker holds."""
    ranges_held: Callable[[], int] = field(default=lambda: 0)
    """How many ranges of offsets the broker holds."""
    assignors: Assignors = Assignors()
    """The server-side assignors, by name."""
    group_configs: Callable[[str], Mapping[str, str]] = field(default=lambda _: {})
    """The configs of a group: `consumer.session.timeout.ms` and so on."""

    @property
    def upgrades(self) -> bool:
        """Whether a classic group may become one of the consumer protocol."""
        return self.consumer_migration_policy in ("bidirectional", "upgrade")

    @property
    def downgrades(self) -> bool:
        """Whether a group of the consumer protocol may become a classic one."""
        return self.consumer_migration_policy in ("bidirectional", "downgrade")

    def of(self, group_id: str) -> ConsumerGroupSettings:
        """The settings of a group: its configs over the broker's."""
        configs = self.group_configs(group_id)
        if not configs:
            return ConsumerGroupSettings(self.consumer_session_timeout_ms, self.consumer_heartbeat_interval_ms)
        return ConsumerGroupSettings(
            int(configs.get("consumer.session.timeout.ms", self.consumer_session_timeout_ms)),
            int(configs.get("consumer.heartbeat.interval.ms", self.consumer_heartbeat_interval_ms)),
        )

    def shares_max(self, group_id: str) -> int:
        """How many members of a group may share a partition; 0 where none may."""
        if not self.individual_commits:
            return 0
        return int(self.group_configs(group_id).get("max.shares.per.partition", self.consumer_shares_max))

"""The settings of classic groups, by Kafka's names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClassicSettings:
    """`group.initial.rebalance.delay.ms`, `group.min.session.timeout.ms`, `group.max.session.timeout.ms`, ..."""

    initial_rebalance_delay_ms: int = 3_000
    session_timeout_min_ms: int = 6_000
    session_timeout_max_ms: int = 1_800_000
    size_max: int = 2**31 - 1
    """`group.max.size`."""
    new_member_join_timeout_ms: int = 300_000
    """How long the first JoinGroup of a member is parked: it has no session yet, and may have gone away."""

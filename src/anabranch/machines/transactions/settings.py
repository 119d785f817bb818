"""The transaction settings of a broker, by Kafka's names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransactionSettings:
    """Times in milliseconds."""

    timeout_max_ms: int = 900_000
    """`transaction.max.timeout.ms`: the longest timeout that a producer may ask for."""
    id_expiration_ms: int = 7 * 24 * 3600 * 1000
    """`transactional.id.expiration.ms`: the time after which an unused id is forgotten."""
    timed_out_interval_ms: int = 10_000
    """`transaction.abort.timed.out.transaction.cleanup.interval.ms`: how often transactions past it are looked for."""
    expired_interval_ms: int = 3_600_000
    """`transaction.remove.expired.transaction.cleanup.interval.ms`: how often ids past it are looked for."""

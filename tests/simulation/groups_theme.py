"""The theme of a run of groups, drawn from its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

NAMES = ("a", "b", "ab", "c")
PATTERNS = ("a.*", ".*b", "[a-c]", ".*")
PARTITIONS_MAX = 8
STOCK_FROM = 1_252_000
"""From this seed on, lives without sharers may have groups of stock consumers, and topics that give up their order."""
COMPACTED = range(1_430_000, 2_000_000)
COMPACTED_FROM = 4_000_000
"""These seeds, and all from this one on, may have topics that are compacted, in lives without sharers."""
SHARERS_FROM = 2_000_000
"""From this seed on, three of four lives have members that share partitions; lives before are what they were."""
TRANSACTIONS_FROM = 3_000_000
"""From this seed on, lives without sharers may have applications that commit in transactions."""


@dataclass(frozen=True, slots=True)
class Theme:
    """The theme of a run; every seed has another one."""

    groups: int
    classic: float
    """The share of clients with the classic protocol."""
    strategies: tuple[tuple[str, ...], ...]
    static: float
    patterns: float
    local_assignors: float
    clients: int
    """The largest number of members in each group."""
    slow: float
    """The share of applications that take their time."""
    length_ms: int
    pace_ms: int
    """Between two things that happen."""
    session_timeout_ms: int
    heartbeat_interval_ms: int
    poll_interval_ms: int
    initial_delay_ms: int
    faults: float
    """How bad the network is."""
    slow_syncs: float
    """The share of syncs that take long."""
    crashes: int
    topics: int
    """Weights of the incidents."""
    ordered: float
    """The share of topics that keep keys in order when they are resized: some of their partitions wait for others."""
    keys: int
    """How many keys a topic has: the fewer, the more partitions without records."""
    records_ms: int
    """Between two moments at which records are produced."""
    markers: float
    """The share of markers among what producers append."""
    commits: tuple[str, ...]
    """How applications commit: `auto`, at `each` poll, after so many records, or `never`."""
    latest: float
    """The share of groups that begin at the end."""
    metadata_age_ms: int
    """The largest age of the clients' metadata."""
    retention_ms: int
    """The retention of offsets of groups without members."""
    stock_groups: float = 0.0
    """The share of groups whose members are stock consumers."""
    disorder: int = 0
    """Weight of the incident that a topic's order is no longer kept."""
    compacted: float = 0.0
    """The share of topics that are compacted."""
    transactional: float = 0.0
    """Of members that take no parts, those that commit in transactions."""
    sharing: float = 0.0
    """The share of members of the consumer protocol that take parts of partitions."""
    explicit: float = 0.0
    """Of all members in such lives, those that finish records one by one, in any order."""
    stock: float = 0.0
    """Of members that take no parts, those that know committed offsets only, and neither ranges nor keys."""
    by_load: float = 0.0
    """The share of topics whose leaders tell their load."""
    ranges_max: int = 100_000
    """Ranges of offsets that are held of a group in a partition."""

    @property
    def makes_topics_again(self) -> bool:
        """Whether topics are deleted, and made again under their names.

        By name, classic members cannot tell one topic from the next: what they are handed of it shows nothing. So that
        something is seen of classic groups in long lives, too, their topics stay where all members are classic.
        """
        return self.classic < 1.0

    @classmethod
    def of_seed(cls, seed: int, chance: random.Random) -> Theme:
        """The theme of a seed; what concerns sharers is drawn apart, so that it changes nothing else."""
        theme = cls.of(chance)
        if seed >= SHARERS_FROM and seed % 4 < 3:
            return theme.with_sharers(random.Random(f"sharers {seed}"))
        if seed >= STOCK_FROM:
            theme = theme.with_stock(random.Random(f"stock {seed}"))
        if seed in COMPACTED or seed >= COMPACTED_FROM:
            theme = replace(theme, compacted=random.Random(f"compacted {seed}").choice((0.0, 0.5, 1.0)))
        return theme.with_transactions(random.Random(f"transactions {seed}")) if seed >= TRANSACTIONS_FROM else theme

    def with_transactions(self, chance: random.Random) -> Theme:
        """The theme with applications that commit in transactions."""
        return replace(self, transactional=chance.choice((0.0, 0.5, 1.0, 1.0)))

    def with_stock(self, chance: random.Random) -> Theme:
        """The theme with groups of stock consumers, and topics whose order is kept for some time only."""
        return replace(
            self,
            stock_groups=chance.choice((0.0, 0.0, 0.5, 1.0)),
            disorder=chance.choice((0, 0, 0, 2)),
        )

    def with_sharers(self, chance: random.Random) -> Theme:
        """The theme with members that share partitions.

        They are many, and all of them commit: what is left before a gate on a shared partition is not waited out.
        """
        return replace(
            self,
            sharing=chance.choice((1.0, 1.0, 0.7, 0.5)),
            explicit=chance.choice((0.0, 0.5, 1.0)),
            stock=chance.choice((0.0, 0.5)),
            by_load=chance.choice((0.0, 0.5)),
            ranges_max=chance.choice((100_000, 100_000, 3)),
            groups=chance.choice((1, 1, 2)),
            classic=chance.choice((0.0, 0.0, 0.0, 0.3, 0.5)),
            local_assignors=chance.choice((0.0, 0.0, 0.0, 0.7)),
            clients=chance.choice((3, 4, 6)),
            keys=chance.choice((4, 12, 30)),
            commits=chance.choice((("auto",), ("each",), ("auto", "each"))),
            latest=0.0,
        )

    @classmethod
    def of(cls, chance: random.Random) -> Theme:
        heartbeat_ms = chance.choice((1_000, 2_000))
        return cls(
            groups=chance.choice((1, 1, 2, 3)),
            classic=chance.choice((0.0, 0.0, 0.0, 0.5, 0.5, 0.3, 1.0)),
            strategies=chance.choice(
                (
                    (("range",),),
                    (("cooperative-sticky",),),
                    (("range", "cooperative-sticky"), ("cooperative-sticky",)),
                    (("range",), ("range", "cooperative-sticky"), ("roundrobin", "range")),
                    (("sticky", "range"), ("range",)),
                    (("range",), ("cooperative-sticky",)),
                )
            ),
            static=chance.choice((0.0, 0.3, 0.8)),
            patterns=chance.choice((0.0, 0.3)),
            local_assignors=chance.choice((0.0, 0.0, 0.0, 1.0, 0.7)),
            clients=chance.choice((2, 3, 4, 6)),
            slow=0.3,
            length_ms=chance.choice((15_000, 30_000, 50_000)),
            pace_ms=chance.choice((300, 800, 2_000)),
            session_timeout_ms=chance.choice((3, 5, 8)) * heartbeat_ms,
            heartbeat_interval_ms=heartbeat_ms,
            poll_interval_ms=chance.choice((4_000, 8_000, 20_000)),
            initial_delay_ms=chance.choice((0, 500, 3_000)),
            faults=chance.choice((0.0, 1.0, 1.0, 2.0)),
            slow_syncs=chance.choice((0.0, 0.02, 0.1)),
            crashes=chance.choice((0, 3, 8)),
            topics=chance.choice((0, 6, 15)),
            ordered=chance.choice((0.0, 0.6, 1.0)),
            keys=chance.choice((2, 4, 12)),
            records_ms=chance.choice((300, 1_000)),
            markers=chance.choice((0.0, 0.2)),
            commits=chance.choice((("auto",), ("auto", "each"), ("each",), ("each", "4"), ("auto", "never"))),
            latest=chance.choice((0.0, 0.0, 0.5)),
            metadata_age_ms=2_500,
            retention_ms=chance.choice((20_000, 7 * 24 * 3_600_000)),
        )

"""Settings of the clients, by Kafka's names: one table for Producer, Consumer and Admin.

A setting is a keyword argument of its client's constructor (`linger.ms` is `linger_ms`); `from_config` takes the dotted
names. A settings object is a value, checked once when it is made. The table is also the documentation:
docs/client-settings.md is made from it by `python -m anabranch.client.settings_table`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from anabranch.base.limits import RANGES_PER_COMMIT_MAX
from anabranch.client.cluster.connection import ConnectionSettings
from anabranch.machines.clients.membership.assignors import PartitionAssignor
from anabranch.machines.clients.membership.strategies import COOPERATIVE_STICKY, RANGE, strategies_of
from anabranch.records.compression import Compression
from anabranch.runtime.net.transport import connect

ACKS: Mapping[object, int] = {"all": -1, "-1": -1, -1: -1, "0": 0, 0: 0, "1": 1, 1: 1}
IN_FLIGHT_MAX = 5
"""The maximum number of requests in flight per connection with which brokers still detect duplicates (KIP-98)."""

OFFSETS_AHEAD_MAX = 2 * RANGES_PER_COMMIT_MAX
"""Between two ranges lies an offset: so many of them fit into one commit."""

P = ParamSpec("P")
S = TypeVar("S")


def setting(default: Any, doc: str, *, kind: str = "") -> Any:
    """Declare a setting: its default, its meaning in one sentence, and its allowed words, if few."""
    return field(default=default, metadata={"doc": doc, "kind": kind})


@dataclass(frozen=True)
class ClientSettings:
    """Settings of all clients: the connections to brokers."""

    bootstrap_servers: str | Iterable[str] = setting(
        "localhost:9092", "Brokers to ask first, `host:port`, separated by commas or as a list; any of them will do."
    )
    _: KW_ONLY
    client_id: str = setting("anabranch", "The name of this client in the brokers' logs and quotas.")
    request_timeout_ms: int = setting(30_000, "How long a request may take before its connection is given up.")
    socket_connection_setup_timeout_ms: int = setting(10_000, "How long it may take to connect to a broker.")
    reconnect_backoff_ms: int = setting(50, "How long to wait before connecting again; doubled with every failure.")
    reconnect_backoff_max_ms: int = setting(1_000, "The longest wait before connecting again.")

    def connection(self) -> ConnectionSettings:
        """The connection settings."""
        return taken(ConnectionSettings, self, connect=connect)


@dataclass(frozen=True, kw_only=True)
class RefreshingSettings(ClientSettings):
    """Settings of clients that refresh metadata and retry after failures."""

    metadata_max_age_ms: int = setting(300_000, "How old metadata may become before it is refreshed.")
    retry_backoff_ms: int = setting(100, "How long to wait before a request is sent again; doubled with every failure.")
    retry_backoff_max_ms: int = setting(1_000, "The longest wait before a request is sent again.")


@dataclass(frozen=True, kw_only=True)
class CallSettings(ClientSettings):
    """Settings of clients with a deadline for each call."""

    default_api_timeout_ms: int = setting(60_000, "How long a call is tried before it fails.")


@dataclass(frozen=True, kw_only=True)
class AdminSettings(CallSettings):
    """Settings of `Admin`."""

    client_id: str = setting("anabranch-admin", "The name of this client in the brokers' logs and quotas.")


@dataclass(frozen=True, kw_only=True)
class ProducerSettings(RefreshingSettings):
    """Settings of `Producer`. Raises `ValueError` for settings that contradict each other."""

    client_id: str = setting("anabranch-producer", "The name of this client in the brokers' logs and quotas.")
    acks: str | int = setting("all", "When a record counts as delivered.", kind="all, 1, 0")
    enable_idempotence: bool | None = setting(
        None, "Append every record once, whatever is lost on the way. By default on with `acks=all`."
    )
    transactional_id: str | None = setting(
        None, "Send in transactions; of two producers of one id the older is fenced."
    )
    transaction_timeout_ms: int = setting(60_000, "After this long the coordinator aborts an open transaction.")
    compression_type: str = setting("none", "How batches are compressed.", kind="none, gzip, snappy, lz4, zstd")
    batch_size: int = setting(1_000_000, "Bytes of records after which a batch does not wait for more.")
    linger_ms: int = setting(5, "How long records wait for others to share a batch with.")
    buffer_memory: int = setting(
        32 * 1024 * 1024, "Bytes of records without an outcome; `send` waits while there are more."
    )
    max_block_ms: int = setting(60_000, "How long `send` waits for room, and records for an unknown topic.")
    max_request_size: int = setting(1_048_576, "Bytes of the largest record that is sent.")
    max_in_flight_requests_per_connection: int = setting(
        IN_FLIGHT_MAX, f"Produce requests to a broker without a response; 1 to {IN_FLIGHT_MAX} with idempotence."
    )
    delivery_timeout_ms: int = setting(120_000, "How long a record may take from `send` to its outcome.")
    allow_auto_create_topics: bool = setting(True, "Let brokers create topics that do not exist, if they do.")

    def __post_init__(self) -> None:
        if self.acks not in ACKS:
            raise ValueError(f"acks is {self.acks!r}; it can be 'all', 1 or 0")
        if self.idempotent and self.acks_count != -1:
            raise ValueError("enable.idempotence needs acks='all'; leave one of them out")
        if self.transactional_id is not None and (not self.idempotent or not self.transactional_id):
            raise ValueError("transactional.id must not be empty, and needs acks='all' and enable.idempotence")
        if self.delivery_timeout_ms < self.linger_ms + self.request_timeout_ms:
            raise ValueError("delivery.timeout.ms must be at least linger.ms + request.timeout.ms")
        if self.compression_type.upper() not in Compression.__members__:
            text = f"compression.type is {self.compression_type!r}; it can be none, gzip, snappy, lz4 or zstd"
            raise ValueError(text)
        in_flight = self.max_in_flight_requests_per_connection
        if in_flight < 1 or (self.idempotent and in_flight > IN_FLIGHT_MAX):
            raise ValueError(f"max.in.flight.requests.per.connection must be 1 to {IN_FLIGHT_MAX}")

    @property
    def acks_count(self) -> int:
        """`acks` as in produce requests: -1, 0 or 1."""
        return ACKS[self.acks]

    @property
    def idempotent(self) -> bool:
        """Whether the broker deduplicates retried batches."""
        return self.acks_count == -1 if self.enable_idempotence is None else self.enable_idempotence

    @property
    def compression(self) -> Compression:
        """`compression_type`, parsed."""
        return Compression[self.compression_type.upper()]


@dataclass(frozen=True, kw_only=True)
class ConsumerSettings(RefreshingSettings, CallSettings):
    """Settings of `Consumer`. Raises `ValueError` for settings that contradict each other."""

    client_id: str = setting("anabranch-consumer", "The name of this client in the brokers' logs and quotas.")
    group_id: str | None = setting(None, "The group whose topics and offsets this consumer shares.")
    group_protocol: str = setting("consumer", "How the group is coordinated.", kind="consumer, classic")
    group_instance_id: str | None = setting(None, "Makes a static member: one that keeps its place while it restarts.")
    group_remote_assignor: str | None = setting(None, "The assignor of the coordinator to ask for.")
    group_local_assignors: Iterable[PartitionAssignor] = setting((), "Assignors that run in the group's members.")
    partition_assignment_strategy: str | Iterable[str] = setting(
        (RANGE, COOPERATIVE_STICKY), "Strategies of the classic protocol, in the order of preference."
    )
    session_timeout_ms: int = setting(45_000, "After this silence a classic member is out of its group.")
    heartbeat_interval_ms: int = setting(3_000, "How often a classic member sends a heartbeat.")
    client_rack: str | None = setting(None, "The rack of this consumer, for assignors that use it.")
    enable_auto_commit: bool = setting(True, "Commit the positions of records handed out by earlier polls.")
    auto_commit_interval_ms: int = setting(5_000, "How often positions are committed.")
    max_poll_interval_ms: int = setting(300_000, "A member that polls less often leaves its group.")
    auto_offset_reset: str = setting(
        "latest", "Where to begin without a committed offset, or when it is gone.", kind="earliest, latest, none"
    )
    ordering: str = setting("key", "`key` keeps the order of each key through resizes.", kind="key, none")
    isolation_level: str = setting(
        "read_uncommitted",
        "`read_committed` leaves out records of aborted transactions.",
        kind="read_uncommitted, read_committed",
    )
    fetch_min_bytes: int = setting(1, "Bytes that a broker waits for before it answers a fetch.")
    fetch_max_wait_ms: int = setting(500, "How long a broker waits for them.")
    fetch_max_bytes: int = setting(50 * 1024 * 1024, "Bytes of one fetch, and of one `poll_arrow`.")
    max_partition_fetch_bytes: int = setting(8 * 1024 * 1024, "Bytes fetched of one partition at a time.")
    max_poll_records: int = setting(500, "Records that one `poll` hands out.")
    check_crcs: bool = setting(True, "Check the checksums of batches.")
    acknowledgement_mode: str = setting(
        "implicit",
        "`implicit`: polled records are processed at the next poll; `explicit`: each when it is `done`.",
        kind="implicit, explicit",
    )
    share: str = setting(
        "none",
        "`any`: members of the group share partitions without keys, in no order: each gets what is next.",
        kind="none, any",
    )
    allow_individual_commit: bool = setting(
        True,
        "Commit ranges of offsets above the stable offset, for work that is finished out of order; `allow.key.share` "
        "needs it.",
    )
    allow_key_share: bool = setting(
        False, "Share partitions with other members of the group, by ranges of keys (topics with accept.range.fetch)."
    )
    max_num_ranges_to_commit: int = setting(10_000, "Commit as soon as there are so many ranges.")
    max_unfinished_records: int = setting(
        10_000,
        "Records taken and not done, of all partitions; for `explicit` and the parallel handler.",
    )
    max_unfinished_bytes: int = setting(64 * 1024 * 1024, "Bytes of their keys and values.")
    max_offsets_ahead: int = setting(
        100_000, "How far a partition goes on beyond its first record that is not done, in offsets; up to 120,000."
    )
    max_bytes_ahead: int = setting(256 * 1024 * 1024, "The same, in bytes of keys and values.")

    def __post_init__(self) -> None:
        _one_of("auto.offset.reset", self.auto_offset_reset, ("earliest", "latest", "none"))
        _one_of("ordering", self.ordering, ("key", "none"))
        _one_of("isolation.level", self.isolation_level, ("read_uncommitted", "read_committed"))
        _one_of("group.protocol", self.group_protocol, ("consumer", "classic"))
        _one_of("share", self.share, ("none", "any"))
        if self.share == "any" and self.group_id is None:
            raise ValueError("share 'any' is for members of a group: set group.id")
        _one_of("acknowledgement.mode", self.acknowledgement_mode, ("implicit", "explicit"))
        for name in ("max_num_ranges_to_commit", "max_unfinished_records", "max_unfinished_bytes", "max_bytes_ahead"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', '.')} must be at least 1")
        if not 1 <= self.max_offsets_ahead <= OFFSETS_AHEAD_MAX:
            raise ValueError(f"max.offsets.ahead must be 1 to {OFFSETS_AHEAD_MAX}: every other offset may be a range")
        if self.allow_key_share and self.group_protocol != "consumer":
            raise ValueError("allow.key.share needs group.protocol 'consumer': others assign whole partitions")
        if self.allow_key_share and not self.allow_individual_commit:
            text = "allow.key.share needs allow.individual.commit: sharers commit by ranges of keys"
            raise ValueError(f"{text}; leave one of them out")
        object.__setattr__(self, "partition_assignment_strategy", strategies_of(self.partition_assignment_strategy))
        object.__setattr__(self, "group_local_assignors", tuple(self.group_local_assignors))
        if self.group_local_assignors and (self.group_remote_assignor is not None or self.group_protocol != "consumer"):
            text = "group.local.assignors cannot be used together with group.remote.assignor, nor with group.protocol"
            raise ValueError(f"{text} 'classic': choose one")

    @property
    def local_assignors(self) -> tuple[PartitionAssignor, ...]:
        """`group_local_assignors`, as a tuple."""
        return cast("tuple[PartitionAssignor, ...]", self.group_local_assignors)

    @property
    def strategies(self) -> tuple[str, ...]:
        """`partition_assignment_strategy`, parsed."""
        return cast("tuple[str, ...]", self.partition_assignment_strategy)

    @property
    def read_committed(self) -> bool:
        """Whether records of open and aborted transactions are skipped."""
        return self.isolation_level == "read_committed"


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is '{value}'; it can be {' or '.join(allowed)}")


def configured_by(
    model: Callable[P, S],
) -> Callable[[Callable[[Any, S], None]], Callable[Concatenate[Any, P], None]]:
    """Let a constructor with a settings object accept the settings themselves, as typed keyword arguments."""

    def configured(constructor: Callable[[Any, S], None]) -> Callable[Concatenate[Any, P], None]:
        @wraps(constructor)
        def construct(self: Any, /, *args: P.args, **settings: P.kwargs) -> None:
            constructor(self, model(*args, **settings))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = inspect.signature(model)
        parameters = [own, *signature.parameters.values()]
        construct.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return construct

    return configured


def taken(model: Callable[..., S], settings: ClientSettings, **more: Any) -> S:
    """Build a machine's settings from the client's settings of the same names, and from `more`."""
    names = (item.name for item in fields(model))  # type: ignore[arg-type]
    return model(**{name: getattr(settings, name) for name in names if name not in more}, **more)


def as_keywords(client: type[Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `{"linger.ms": "5"}` to `{"linger_ms": 5}`, text to the types of the client's settings.

    Raises `TypeError` for an unknown name, `ValueError` for text of the wrong type.
    """
    known = dict(inspect.signature(client).parameters)
    keywords: dict[str, Any] = {}
    for name, value in config.items():
        keyword = name.replace(".", "_").replace("-", "_")
        if keyword not in known:
            names = ", ".join(sorted(parameter.replace("_", ".") for parameter in known))
            raise TypeError(f"{client.__name__} has no setting '{name}'; it has {names}")
        keywords[keyword] = _convert(name, value, str(known[keyword].annotation))
    return keywords


def _convert(name: str, value: Any, wanted: str) -> Any:
    if not isinstance(value, str):
        return value
    if wanted.startswith("bool"):
        if value.lower() not in ("true", "false"):
            raise ValueError(f"{name} is '{value}'; it can be true or false")
        return value.lower() == "true"
    if wanted == "int":
        try:
            return int(value)
        except ValueError:
            raise ValueError(f"{name} is '{value}'; it must be a whole number") from None
    return value

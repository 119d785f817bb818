"""The options of a query, parsed once: names and meanings are those of Spark's own Kafka source (docs/spark.md).

A query written for Spark's source thus moves over by changing `format`; `ordering`, `split` and `planLog` are added.
Option names are case-insensitive. An unknown, malformed or contradictory option raises `OptionError` before anything
is read.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from anabranch.base.errors import AnabranchError

EARLIEST, LATEST = -2, -1
"""The meaning of these offsets in the JSON of `startingOffsets` and `endingOffsets`."""

SERVERS = "kafka.bootstrap.servers"
SUBSCRIPTIONS = ("subscribe", "subscribePattern", "assign")
STARTS = ("startingOffsets", "startingOffsetsByTimestamp", "startingTimestamp")
ENDS = ("endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp")
OPTIONS = (
    "bootstrap.servers",
    *SUBSCRIPTIONS,
    *STARTS,
    *ENDS,
    "startingOffsetsByTimestampStrategy",
    "maxOffsetsPerTrigger",
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "includeHeaders",
    "groupIdPrefix",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "kafkaConsumer.pollTimeoutMs",
    "ordering",
    "split",
    "planLog",
)
ISOLATION = "kafka.isolation.level"
CLIENT_SETTINGS: dict[str, type | tuple[str, str]] = {
    "kafka.bootstrap.servers": str,
    "kafka.group.id": str,
    "kafka.client.id": str,
    "kafka.request.timeout.ms": int,
    "kafka.socket.connection.setup.timeout.ms": int,
    "kafka.reconnect.backoff.ms": int,
    "kafka.reconnect.backoff.max.ms": int,
    "kafka.fetch.max.bytes": int,
    "kafka.fetch.max.wait.ms": int,
    "kafka.max.partition.fetch.bytes": int,
    "kafka.check.crcs": bool,
    ISOLATION: ("read_committed", "read_uncommitted"),
}
"""What each is: a kind, or one of two words, the first by default."""
REFUSED = {
    "minOffsetsPerTrigger": "set a processing-time trigger instead, so that each micro-batch has more to read",
    "maxTriggerDelay": "set a processing-time trigger instead, so that each micro-batch has more to read",
    "path": "a topic has no path: use .load() without one, and the option subscribe",
    "kafka.auto.offset.reset": "set startingOffsets instead; where a running query goes on is in its checkpoint",
    "kafka.key.deserializer": "keys are binary columns: decode them with DataFrame functions",
    "kafka.value.deserializer": "values are binary columns: decode them with DataFrame functions",
    "kafka.enable.auto.commit": "the source does not commit offsets as a consumer does; progress is in the checkpoint",
    "kafka.interceptor.classes": "interceptors are Java classes, and no Java client is used",
}

SECURITY = ("kafka.security.", "kafka.sasl.", "kafka.ssl.")
"""How names of options begin that neither a read nor a write can follow."""


class OptionError(AnabranchError, ValueError):
    """An invalid option; the message names the valid alternative."""


class UnreachableError(AnabranchError, ConnectionError):
    """No broker answers; the message names the option and the address."""


def unreachable(servers: str, error: Exception) -> UnreachableError:
    """Say which option names the brokers that cannot be reached."""
    return UnreachableError(f"{SERVERS} is {servers}: {error}")


Wanted = Mapping[str, Mapping[int, int]]
"""Topic to partition to an offset or a timestamp in ms."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A start or an end: one of these fields, in this order of precedence; else `everywhere`."""

    everywhere: int = LATEST
    """EARLIEST or LATEST."""
    offsets: Wanted = field(default_factory=dict)
    timestamps: Wanted = field(default_factory=dict)
    timestamp: int | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """A query's options, parsed."""

    servers: str
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    assign: Mapping[str, frozenset[int]] | None = None
    start: Bound | None = None
    """None: earliest for a batch query, latest for a stream."""
    end: Bound | None = None
    latest_if_no_timestamp: bool = False
    """Begin at the end where no record has the starting timestamp or a later one, instead of failing."""
    offsets_per_trigger_max: int | None = None
    min_partitions: int = 0
    records_per_partition_max: int = 0
    fail_on_data_loss: bool = True
    headers: bool = False
    group_id: str | None = None
    group_id_prefix: str | None = None
    """How the group begins whose other part is the query's own; None if there is none, or `group_id` names it."""
    snapshot_retries: int = 100
    snapshot_retry_interval_ms: int = 100
    poll_timeout_ms: int = 120_000
    ordered: bool = True
    split_by_key: bool = True
    plan_log: str | None = None
    client: Mapping[str, str | int | bool] = field(default_factory=dict)
    """Client settings by Kafka's dotted names, converted."""

    @property
    def committed(self) -> bool:
        """Whether records of open and aborted transactions are left out."""
        return self.client.get(ISOLATION, "read_committed") == "read_committed"


def parse(given: Mapping[str, str]) -> Options:
    """Parse the options of a query. Raises `OptionError`."""
    options = named(given, (*OPTIONS, *CLIENT_SETTINGS), REFUSED)
    servers = servers_of(options.pop("bootstrap.servers", None), options.pop(SERVERS, None))
    client = {name: _client_setting(name, options[name]) for name in CLIENT_SETTINGS if name in options}
    chosen = _one_of(options, SUBSCRIPTIONS)
    if chosen is None:
        raise OptionError("Name the topics to read with one of the options subscribe, subscribePattern and assign.")
    group_id = client.pop("kafka.group.id", None)
    assign = _assigned(options["assign"]) if chosen == "assign" else None
    topics = _topic_names(options["subscribe"]) if chosen == "subscribe" else ()
    return Options(
        servers=servers,
        topics=tuple(sorted(assign)) if assign is not None else topics,
        pattern=options["subscribePattern"] if chosen == "subscribePattern" else None,
        assign=assign,
        start=_bound(options, STARTS),
        end=_bound(options, ENDS),
        latest_if_no_timestamp=word(options, "startingOffsetsByTimestampStrategy", ("error", "latest")) == "latest",
        offsets_per_trigger_max=_number(options, "maxOffsetsPerTrigger", 1) or None,
        min_partitions=_number(options, "minPartitions", 1),
        records_per_partition_max=_number(options, "maxRecordsPerPartition", 1),
        fail_on_data_loss=_flag(options, "failOnDataLoss", True),
        headers=_flag(options, "includeHeaders", False),
        group_id=str(group_id) if group_id else None,
        group_id_prefix=None if group_id else options.get("groupIdPrefix") or None,
        snapshot_retries=_number(options, "fetchOffset.numRetries", 0, 100),
        snapshot_retry_interval_ms=_number(options, "fetchOffset.retryIntervalMs", 0, 100),
        poll_timeout_ms=_number(options, "kafkaConsumer.pollTimeoutMs", 1, 120_000),
        ordered=word(options, "ordering", ("key", "none")) == "key",
        split_by_key=word(options, "split", ("key", "offset")) == "key",
        plan_log=options.get("planLog") or None,
        client=client,
    )


def for_stream(options: Options) -> Options:
    """Check the options for a streaming query."""
    if options.end is not None:
        raise OptionError(
            "A streaming query has no end: leave out endingOffsets, endingOffsetsByTimestamp and endingTimestamp, "
            "or use a batch query (spark.read)."
        )
    return options


def for_batch(options: Options) -> Options:
    """Check the options for a batch query."""
    start, end = options.start, options.end
    if start is not None and (start == Bound(LATEST) or _names(start.offsets, LATEST)):
        raise OptionError("startingOffsets cannot be latest in a batch query: there would be nothing to read.")
    if end is not None and (end == Bound(EARLIEST) or _names(end.offsets, EARLIEST)):
        raise OptionError("endingOffsets cannot be earliest: there would be nothing to read.")
    return options


def _names(wanted: Wanted, offset: int) -> bool:
    return any(offset in partitions.values() for partitions in wanted.values())


def named(given: Mapping[str, str], known: Collection[str], refused: Mapping[str, str]) -> dict[str, str]:
    """Return options by their names in `known`; `refused` says of others what to do instead. Raises `OptionError`."""
    proper = {name.lower(): name for name in known}
    wrong = {name.lower(): name for name in refused}
    options: dict[str, str] = {}
    for name, value in given.items():
        lower = name.lower()
        if lower in wrong:
            raise OptionError(f"The option {wrong[lower]} is not supported: {refused[wrong[lower]]}.")
        if lower.startswith(SECURITY):
            raise OptionError(
                f"The option {name} is not supported: connections to brokers are plain, without TLS and SASL. Leave it "
                "out, and name a PLAINTEXT listener, or the near end of a tunnel."
            )
        if lower not in proper:
            raise OptionError(f"There is no option '{name}'. {_alternative(lower, proper)}")
        options[proper[lower]] = value
    return options


def servers_of(short: str | None, qualified: str | None) -> str:
    """Return the brokers that either of two options names. Raises `OptionError`."""
    if short and qualified and short != qualified:
        raise OptionError(f"bootstrap.servers and {SERVERS} name different brokers; set one of them")
    servers = short or qualified
    if not servers:
        raise OptionError(f"The option {SERVERS} is missing: name a broker, for example localhost:9092.")
    return servers


def did_you_mean(name: str, others: Iterable[str]) -> str:
    """Return a question that names the closest of `others`; empty if none is close."""
    proper = {other.lower(): other for other in others}
    near = get_close_matches(name.lower(), proper, n=1, cutoff=0.6)
    return f"Did you mean {proper[near[0]]}?" if near else ""


def _alternative(name: str, proper: Mapping[str, str]) -> str:
    question = did_you_mean(name, proper.values())
    if question:
        return question
    kind = [each for each in proper.values() if each.startswith("kafka.") == name.startswith("kafka.")]
    return f"There are {', '.join(kind)}."


def _one_of(options: Mapping[str, str], names: Iterable[str]) -> str | None:
    chosen = [name for name in names if name in options]
    if len(chosen) > 1:
        raise OptionError(f"{' and '.join(chosen)} contradict each other; set one of them.")
    return chosen[0] if chosen else None


def _topic_names(text: str) -> tuple[str, ...]:
    names = tuple(sorted({name.strip() for name in text.split(",") if name.strip()}))
    if not names:
        raise OptionError("subscribe is empty; name a topic, or several with commas between them.")
    return names


def _assigned(text: str) -> dict[str, frozenset[int]]:
    example = '{"flights":[0,1]}'
    value = _json("assign", text, example)
    if not value or not all(isinstance(numbers, list) and numbers for numbers in value.values()):
        raise OptionError(f"assign must name partitions of topics, as in {example}; it is {text}")
    return {topic: frozenset(_whole("assign", number, example) for number in value[topic]) for topic in value}


def _bound(options: Mapping[str, str], names: tuple[str, str, str]) -> Bound | None:
    chosen = _one_of(options, names)
    if chosen is None:
        return None
    text = options[chosen].strip()
    by_offset, by_timestamp, _ = names
    if chosen == by_offset:
        if text.lower() in ("earliest", "latest"):
            return Bound(EARLIEST if text.lower() == "earliest" else LATEST)
        example = 'earliest, latest, or JSON as in {"flights":{"0":23,"1":-2}}'
        offsets = _per_partition(chosen, text, example)
        if any(offset < EARLIEST for partitions in offsets.values() for offset in partitions.values()):
            raise OptionError(f"{chosen} has a negative offset other than -2 (earliest) and -1 (latest): {text}")
        return Bound(offsets=offsets)
    if chosen == by_timestamp:
        timestamps = _per_partition(chosen, text, 'JSON as in {"flights":{"0":1357000000000}}')
        if any(at < 0 for partitions in timestamps.values() for at in partitions.values()):
            raise OptionError(f"{chosen} has a time below 0, which is before the first that a record may have: {text}")
        return Bound(timestamps=timestamps)
    return Bound(timestamp=_number(options, chosen, 0))


def _per_partition(name: str, text: str, example: str) -> dict[str, dict[int, int]]:
    value = _json(name, text, example)
    if not all(isinstance(partitions, dict) for partitions in value.values()):
        raise OptionError(f"{name} must be {example}; it is {text}")
    found = {
        topic: {
            _whole(name, partition, example): _whole(name, wanted, example)
            for partition, wanted in value[topic].items()
        }
        for topic in value
    }
    if not any(found.values()):
        raise OptionError(f"{name} names no partition; it must be {example}")
    return found


def _json(name: str, text: str, example: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise OptionError(f"{name} must be {example}; it is {text}")
    return value


def _whole(name: str, value: Any, example: str) -> int:
    try:
        if isinstance(value, bool | float):
            raise ValueError
        return int(value)
    except (TypeError, ValueError):
        raise OptionError(f"{name} must be {example}; {value!r} is not a whole number") from None


def _number(options: Mapping[str, str], name: str, least: int, otherwise: int = 0) -> int:
    text = options.get(name)
    if text is None:
        return otherwise
    try:
        number = int(text)
    except ValueError:
        raise OptionError(f"{name} must be a whole number; it is '{text}'.") from None
    if number < least:
        raise OptionError(f"{name} must be {least} or more; it is {number}.")
    return number


def _flag(options: Mapping[str, str], name: str, otherwise: bool) -> bool:
    text = options.get(name)
    if text is None:
        return otherwise
    if text.lower() not in ("true", "false"):
        raise OptionError(f"{name} must be true or false; it is '{text}'.")
    return text.lower() == "true"


def word(options: Mapping[str, str], name: str, words: tuple[str, str]) -> str:
    """Return an option that is one of two words, the first by default. Raises `OptionError`."""
    text = options.get(name, words[0]).lower()
    if text not in words:
        raise OptionError(f"{name} must be {words[0]} or {words[1]}; it is '{options[name]}'.")
    return text


def _client_setting(name: str, text: str) -> str | int | bool:
    kind = CLIENT_SETTINGS[name]
    if isinstance(kind, tuple):
        return word({name: text}, name, kind)
    if kind is int:
        return _number({name: text}, name, 0)
    if kind is bool:
        return _flag({name: text}, name, True)
    return text

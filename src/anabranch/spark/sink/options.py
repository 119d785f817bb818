"""The options of a write: those of Spark's Kafka sink, and the producer's settings with `kafka.` before them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anabranch.client.producer.producer import Producer
from anabranch.client.settings import ProducerSettings, as_keywords
from anabranch.spark.options import OptionError, named, servers_of, word

EXACTLY_ONCE, AT_LEAST_ONCE = "exactly-once", "at-least-once"
OPTIONS = ("bootstrap.servers", "topic", "delivery", "transactionalIdPrefix")
PREFIX = "kafka."
SETTINGS = (
    "client.id",
    "acks",
    "enable.idempotence",
    "compression.type",
    "batch.size",
    "linger.ms",
    "buffer.memory",
    "max.block.ms",
    "max.request.size",
    "max.in.flight.requests.per.connection",
    "delivery.timeout.ms",
    "request.timeout.ms",
    "transaction.timeout.ms",
    "metadata.max.age.ms",
    "retry.backoff.ms",
    "retry.backoff.max.ms",
    "socket.connection.setup.timeout.ms",
    "reconnect.backoff.ms",
    "reconnect.backoff.max.ms",
    "allow.auto.create.topics",
)
"""The producer's settings that a write can have."""
REFUSED = {
    "path": "a topic has no path: call .save() or .start() without one, and set the option topic",
    "kafka.transactional.id": "every task has its own; set transactionalIdPrefix instead",
    "kafka.key.serializer": "keys are binary or text columns: encode them with DataFrame functions",
    "kafka.retries": "a batch is sent again until kafka.delivery.timeout.ms is over; set that",
    "kafka.value.serializer": "values are binary or text columns: encode them with DataFrame functions",
}
CHECKPOINT = "checkpointLocation"
IGNORED = (CHECKPOINT, "queryName", "includeHeaders")
"""Options of Spark's own that it passes on, and that of a source: a column `headers` is always written."""
TRANSACTION_TIMEOUT_MS = 600_000
"""The default: a transaction is open for as long as its micro-batch lasts, and in a restart of the driver."""


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of a write, parsed."""

    servers: str
    topic: str | None = None
    """The topic of all rows; None: the column `topic` names it."""
    exactly_once: bool = True
    prefix: str = "spark-sink"
    """How transactional ids, and the groups that keep decisions, begin."""
    producer: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `Producer`."""
    checkpoint: str | None = None
    """Where Spark keeps the progress of a streaming query; None if it was not set as an option of the write."""


def parse(given: Mapping[str, str]) -> SinkOptions:
    """Parse the options of a write. Raises `OptionError`."""
    known = (*OPTIONS, PREFIX + "bootstrap.servers", *(PREFIX + name for name in SETTINGS))
    options = named({name: given[name] for name in given if name.lower() not in _ignored()}, known, REFUSED)
    servers = servers_of(options.pop("bootstrap.servers", None), options.pop(PREFIX + "bootstrap.servers", None))
    exactly_once = word(options, "delivery", (EXACTLY_ONCE, AT_LEAST_ONCE)) == EXACTLY_ONCE
    settings = {name.removeprefix(PREFIX): text for name, text in options.items() if name.startswith(PREFIX)}
    prefix = options.get("transactionalIdPrefix", "spark-sink")
    if not prefix:
        raise OptionError("transactionalIdPrefix is empty; leave it out, or name one.")
    if "topic" in options and not options["topic"].strip():
        raise OptionError("The option topic is empty; name a topic, or leave it out and have a column topic.")
    settings.setdefault("client.id", "anabranch-spark")
    if exactly_once:
        settings.setdefault("transaction.timeout.ms", str(TRANSACTION_TIMEOUT_MS))
    try:
        producer = as_keywords(Producer, settings)
        checked = {**producer, "transactional_id": "checked"} if exactly_once else producer
        ProducerSettings(servers, **checked)
    except (TypeError, ValueError) as error:
        raise OptionError(f"An option {PREFIX}* is wrong: {error}.") from None
    checkpoint = next((given[name] for name in given if name.lower() == CHECKPOINT.lower()), None)
    return SinkOptions(servers, options.get("topic"), exactly_once, prefix, producer, checkpoint)


def _ignored() -> frozenset[str]:
    return frozenset(name.lower() for name in IGNORED)

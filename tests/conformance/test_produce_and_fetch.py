"""What one client writes, every client reads byte for byte: in each compression, idempotent or not."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import pytest

from tests.conformance.clients import COMPRESSIONS, Fetched, Record
from tests.conformance.conftest import KINDS, Broker, Clients
from tests.conformance.corpus import corpus
from tests.support.oracle import stored_batches

Case = tuple[str, bool]


def cases(writer: str) -> list[Case]:
    return list(product(KINDS[writer].compressions, (False, True)))


@dataclass(slots=True)
class Written:
    """A topic of one writer, with a partition for each of its cases."""

    topic: str
    cases: list[Case]
    records: Sequence[Record]
    began_ms: int
    told: dict[int, Sequence[int]] = field(default_factory=dict)


class Topics:
    """What each writer wrote, written when it is first asked for."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._written: dict[str, Written] = {}

    def __getitem__(self, writer: str) -> Written:
        if writer not in self._written:
            client = self._clients[writer]
            written = Written(f"from-{writer}-{uuid.uuid4().hex[:8]}", cases(writer), corpus(client), _now_ms() - 1)
            self._clients["confluent-kafka"].create_topic(written.topic, len(written.cases), {"retention.ms": "-1"})
            for partition, (compression, idempotent) in enumerate(written.cases):
                written.told[partition] = client.produce(
                    written.topic, partition, written.records, compression=compression, idempotent=idempotent
                )
            self._written[writer] = written
        return self._written[writer]


@pytest.fixture(scope="session")
def topics(clients: Clients) -> Topics:
    return Topics(clients)


@pytest.mark.parametrize(
    ("writer", "case"), [pytest.param(w, c, id=f"{w}-{c[0]}{'-idempotent' * c[1]}") for w in KINDS for c in cases(w)]
)
def test_a_client_is_told_where_its_records_are_and_they_are_stored_as_it_sent_them(
    writer: str, case: Case, broker: Broker, topics: Topics
) -> None:
    written = topics[writer]
    partition = written.cases.index(case)
    compression, idempotent = case

    batches = stored_batches(broker.address, written.topic, partition)

    assert list(written.told[partition]) == list(range(len(written.records)))
    assert sum(batch.record_count for batch in batches) == len(written.records)
    largest = max(batches, key=lambda batch: batch.record_count)
    assert largest.compression == COMPRESSIONS.index(compression)
    assert {batch.producer_id >= 0 for batch in batches} == {idempotent}


@pytest.mark.parametrize("reader", KINDS)
@pytest.mark.parametrize("writer", KINDS)
def test_every_client_reads_what_every_client_wrote(writer: str, reader: str, clients: Clients, topics: Topics) -> None:
    written = topics[writer]

    found = clients[reader].fetch(written.topic, dict.fromkeys(range(len(written.cases)), len(written.records)))

    for partition, case in enumerate(written.cases):
        assert [each.offset for each in found[partition]] == list(range(len(written.records))), case
        for expected, each in zip(written.records, found[partition], strict=True):
            assert_same(expected, each, written.began_ms)


def assert_same(expected: Record, fetched: Fetched, began_ms: int) -> None:
    record = fetched.record
    assert (record.key, record.value, record.headers) == (expected.key, expected.value, expected.headers)
    if expected.timestamp is None:
        assert began_ms <= record.timestamp <= _now_ms()
    else:
        assert record.timestamp == expected.timestamp


def _now_ms() -> int:
    return time.time_ns() // 1_000_000

"""What one client writes, every client reads byte for byte: in each compression, idempotent or not."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import pytest

from tests.conformance.clients import COMPRESSIONS, Record
from tests.conformance.conftest import KINDS, Broker, Clients
from tests.conformance.corpus import corpus
from tests.support.oracle import stored_batches, wait_until_served

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

    def __init__(self, address: str, clients: Clients) -> None:
        self._address = address
        self._clients = clients
        self._written: dict[str, Written] = {}

    def __getitem__(self, writer: str) -> Written:
        if writer not in self._written:
            client = self._clients[writer]
            written = Written(f"from-{writer}-{uuid.uuid4().hex[:8]}", cases(writer), corpus(client), _now_ms() - 1)
            self._clients["confluent-kafka"].create_topic(written.topic, len(written.cases), {"retention.ms": "-1"})
            wait_until_served(self._address, written.topic, len(written.cases))
            for partition, (compression, idempotent) in enumerate(written.cases):
                written.told[partition] = client.produce(
                    written.topic, partition, written.records, compression=compression, idempotent=idempotent
                )
            self._written[writer] = written
        return self._written[writer]


@pytest.fixture(scope="session")
def topics(broker: Broker, clients: Clients) -> Topics:
    return Topics(broker.address, clients)


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
    # Clients leave a batch as it is if it would not get smaller, and on a busy machine batches may be small.
    asked = COMPRESSIONS.index(compression)
    assert asked in {batch.compression for batch in batches} <= {0, asked}
    assert {batch.producer_id >= 0 for batch in batches} == {idempotent}


@pytest.mark.parametrize("reader", KINDS)
@pytest.mark.parametrize("writer", KINDS)
def test_every_client_reads_what_every_client_wrote(writer: str, reader: str, clients: Clients, topics: Topics) -> None:
    written = topics[writer]
    readable = {at: case for at, case in enumerate(written.cases) if KINDS[reader].reads(KINDS[writer], case[0])}

    found = clients[reader].fetch(written.topic, dict.fromkeys(readable, len(written.records)))

    for partition, case in readable.items():
        assert [each.offset for each in found[partition]] == list(range(len(written.records))), case
        for expected, each in zip(written.records, found[partition], strict=True):
            headers = tuple((name, KINDS[reader].shows_header(value)) for name, value in expected.headers)
            got = each.record
            assert (got.key, got.value, got.headers) == (expected.key, expected.value, headers), case
            if expected.timestamp is None:
                assert got.timestamp is not None and written.began_ms <= got.timestamp <= _now_ms()
            else:
                assert got.timestamp == expected.timestamp, case


def _now_ms() -> int:
    return time.time_ns() // 1_000_000

"""Fetches that ask for records by key in bad faith: each is refused or served, and the loop goes on meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.keyspace import SPACE_END
from anabranch.machines.partition.sharing import KEYS_MAX, RANGES_MAX
from anabranch.protocol.messages.fetch import FetchRequest, KeyRange, RecordFilter
from tests.support import commands
from tests.support.broker import BrokerProcess, running
from tests.support.steps import in_short_steps
from tests.support.wire import WireClient, batch

TOPIC = "asked"
WIDE = 380
BY_NAME = 12
"""The version of a Fetch that names topics, and has tagged fields."""
OK, REFUSED = ErrorCode.NONE, ErrorCode.INVALID_REQUEST


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running(tmp_path_factory.mktemp("hostile")) as process:
        options = (
            "--partitions",
            WIDE,
            "-c",
            "accept.range.fetch=true",
            "-c",
            "reserve.message.value.range.fetch=true",
        )
        commands.run(f"127.0.0.1:{process.port}", "topic", "create", TOPIC, *options)
        with WireClient(process.port, 60) as client:
            for _ in range(20):
                client.produce(TOPIC, 0, batch([b"v" * 200] * 20))
        yield process


def pieces(count: int, first: int = 0, step: int = 1) -> list[KeyRange]:
    """Every `step`-th of many ranges that follow each other."""
    size = SPACE_END // (count * step + first + 1)
    begins = [(first + place * step) * size for place in range(count)]
    return [KeyRange(start=begin, end=begin + size - 1) for begin in begins]


def asking(
    client: WireClient,
    ranges: Sequence[KeyRange],
    filter: RecordFilter | None = None,
    partitions: int = 1,
    wait: int = 0,
) -> FetchRequest:
    """A fetch that asks the same of some partitions."""
    request = client.fetch_request(TOPIC, dict.fromkeys(range(partitions), 0), wait_ms=wait)
    for each in request.topics[0].partitions:
        each.key_ranges, each.filter = ranges, filter
    return request


BAD = {
    "inverted": ([KeyRange(start=5, end=4)], None),
    "overlapping": ([KeyRange(start=0, end=9), KeyRange(start=9, end=12)], None),
    "negative": ([KeyRange(start=-1, end=9)], None),
    "too many ranges": (pieces(RANGES_MAX + 1), None),
    "far too many ranges": (pieces(390_000), None),
    "too many keys": ([], RecordFilter(keys_wanted=[b"k"] * (KEYS_MAX + 1))),
    "far too many keys": ([], RecordFilter(keys_refused=[b"k"] * 390_000)),
    "large keys": ([], RecordFilter(keys_wanted=[b"k" * 70_000])),
    "sizes turned round": ([], RecordFilter(size_min=10, size_max=9)),
    "negative sizes": ([], RecordFilter(size_min=-9, size_max=-5)),
}


@pytest.mark.parametrize("name", BAD)
def test_what_makes_no_sense_is_refused_in_short_steps(broker: BrokerProcess, name: str) -> None:
    with WireClient(broker.port, 60) as client:
        answer = in_short_steps(broker, lambda: client.call(asking(client, *BAD[name]), BY_NAME))
        assert [it.error_code for it in answer.responses[0].partitions] == [REFUSED]
        assert client.fetch(TOPIC, 0, 0).error_code == OK


def test_many_partitions_with_as_many_ranges_as_there_may_be_are_read_in_short_steps(broker: BrokerProcess) -> None:
    with WireClient(broker.port, 60) as client:
        asked = asking(client, pieces(RANGES_MAX), partitions=WIDE)
        answer = in_short_steps(broker, lambda: client.call(asked, BY_NAME))
        assert {it.error_code for it in answer.responses[0].partitions} == {OK}
        assert len(answer.responses[0].partitions) == WIDE


def test_sharers_with_thousands_of_ranges_are_served_in_short_steps(broker: BrokerProcess) -> None:
    clients = [WireClient(broker.port, 60) for _ in range(8)]

    def all_of_them() -> int:
        sent = [
            client.send(asking(client, pieces(RANGES_MAX, place, len(clients)), wait=50), BY_NAME)
            for place, client in enumerate(clients)
        ]
        answers = [client.receive(each) for client, each in zip(clients, sent, strict=True)]
        return sum(len(answer.responses[0].partitions[0].records) for answer in answers)

    try:
        assert in_short_steps(broker, all_of_them) > 0
    finally:
        for client in clients:
            client.close()

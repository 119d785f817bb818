"""Fetches that wait for records of many partitions hold bounded memory, and every reader is answered."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from tests.support.broker import BrokerProcess, running
from tests.support.wire import WireClient, batch

MIB = 1 << 20
WIDE, READERS = 4_000, 24
NEVER_MS = 2**31 - 1
BUDGET = {"queued.max.fetch.bytes": 8 * MIB}


def waits_ended(broker: BrokerProcess) -> float:
    return broker.metrics()["anabranch_fetch_waits_ended"]


def until(holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_host_of_fetches_that_wait_for_all_partitions_is_answered_early(tmp_path: Path) -> None:
    """24 connections held 86 MB, and as much as they liked: nothing counted the partitions that they waited for."""
    with running(tmp_path, **BUDGET) as broker, ExitStack() as clients:
        wires = [clients.enter_context(WireClient(broker.port, 60)) for _ in range(READERS)]
        small, honest = (clients.enter_context(WireClient(broker.port, 60)) for _ in range(2))
        topic, quiet = wires[0].create("wide", WIDE), wires[0].create("quiet", 1)
        asked = wires[0].fetch_request(topic, dict.fromkeys(range(WIDE), 0), wait_ms=0)
        wires[0].call(asked, 17)
        asked.max_wait_ms = NEVER_MS
        before = broker.resident_bytes()
        broker.forget_peak()
        waiting = small.send(small.fetch_request(quiet, {0: 0}, wait_ms=NEVER_MS), 17)
        sent = [(wire, wire.send(asked, 17)) for wire in wires]
        until(lambda: waits_ended(broker) >= READERS - 2)
        # The messages of those that wait are freed: large requests of others have all of their memory.
        assert broker.metrics()["kafka_server_socketservermetrics_decoded_bytes"] == 0
        named = [MetadataRequestTopic(name=f"unknown-topic-{it}") for it in range(8_000)]
        assert len(honest.call(MetadataRequest(topics=named, allow_auto_topic_creation=False), 12).topics) == 8_000
        assert broker.metrics()["anabranch_fetch_bytes"] <= 8 * MIB
        assert broker.peak_bytes() - before < 45 * MIB
        honest.produce("quiet", 0, batch([b"x"]))
        (woken,) = small.receive(waiting).responses
        assert woken.partitions[0].records, "a small fetch waits for its records beside them"
        honest.produce("wide", WIDE - 1, batch([b"x"]))
        answers = [wire.receive(which) for wire, which in sent]
        assert {it.error_code for answer in answers for it in answer.responses[0].partitions} == {ErrorCode.NONE}
        assert {len(answer.responses[0].partitions) for answer in answers} == {WIDE}
        until(lambda: broker.metrics()["anabranch_fetch_bytes"] == 0)


def test_fetches_of_a_large_session_are_answered_early_however_small_they_are(tmp_path: Path) -> None:
    """A session of 4,000 partitions is kept in 700 kB; each fetch of it holds 4 MB while it waits, 16 a connection."""
    with running(tmp_path, **BUDGET) as broker, ExitStack() as clients:
        reader, producer = (clients.enter_context(WireClient(broker.port, 60)) for _ in range(2))
        topic = reader.create("wide", WIDE)
        made = reader.call(reader.fetch_request(topic, dict.fromkeys(range(WIDE), 0), session=(0, 0)), 17)
        assert made.session_id
        before = broker.resident_bytes()
        broker.forget_peak()
        sent = [
            reader.send(reader.fetch_request(topic, {}, wait_ms=NEVER_MS, session=(made.session_id, 1 + it)), 17)
            for it in range(14)
        ]
        until(lambda: waits_ended(broker) >= len(sent) - 2)
        assert broker.metrics()["anabranch_fetch_bytes"] <= 8 * MIB
        producer.produce("wide", 0, batch([b"x"]))
        answers = [reader.receive(which) for which in sent]
        assert [it.error_code for it in answers] == [ErrorCode.NONE] * len(sent)
        assert any(answer.responses for answer in answers[-2:]), "the last ones waited for the record"
        assert broker.peak_bytes() - before < 30 * MIB


def test_a_fetch_that_waits_keeps_no_memory_that_other_large_requests_need(tmp_path: Path) -> None:
    with running(tmp_path, **{"queued.max.decoded.bytes": MIB}) as broker, ExitStack() as clients:
        reader, producer = (clients.enter_context(WireClient(broker.port, 20)) for _ in range(2))
        asked = reader.fetch_request(reader.create("quiet", 1), {0: 0}, wait_ms=NEVER_MS)
        asked.unknown_tags = {99: bytes(100_000)}
        sent = reader.send(asked, 17)
        until(lambda: broker.metrics()["anabranch_fetch_bytes"] > 0)
        names = [MetadataRequestTopic(name=f"unknown-topic-{it}") for it in range(2_000)]
        producer.call(MetadataRequest(topics=names, allow_auto_topic_creation=False), 12)
        producer.produce("quiet", 0, batch([b"x"]))
        assert reader.receive(sent).responses[0].partitions[0].records

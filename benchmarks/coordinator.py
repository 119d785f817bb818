"""A coordinator's shard as a whole: how fast it is there after a start, how many heartbeats it answers.

Heartbeats are written once and sent again and again over plain sockets, so that the driver costs next to nothing. The
broker has one core, whichever broker it is, the driver the others.
"""

from __future__ import annotations

import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.records import CoordinatorRecord, OffsetCommitKey, OffsetCommitValue, encode_record
from anabranch.protocol.frames import decode_response, encode_request
from anabranch.protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from anabranch.protocol.messages.find_coordinator import FindCoordinatorRequest
from anabranch.protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestGroup
from anabranch.protocol.registry import api_of
from anabranch.records.key_values import Pair, encode_pairs
from anabranch.runtime.disk import Disk
from anabranch.storage.log.config import Durability, LogConfig
from anabranch.storage.log.log import LocalLog
from benchmarks.broker import both
from benchmarks.harness import Bar, Result, Round, Scale, compare
from benchmarks.peers.anabranch import Anabranch
from benchmarks.peers.process import HOST, ServerProcess

LOAD_S_MAX = 3.0
POLL_S = 0.005
ONE_SHARD = {"offsets.topic.num.partitions": "1"}
SETTLE_S = 2.0
"""Without a change of a group's epoch it has come to rest."""
NOT_YET = (
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
)
CONNECTIONS = 4
BURST = 16
"""Requests of a connection that wait for their answers."""


class Wire:
    """One connection, one request at a time."""

    def __init__(self, server: ServerProcess) -> None:
        self.sock = socket.create_connection((HOST, server.port), 30)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *exception: object) -> None:
        self.sock.close()

    def call(self, message: Any, version: int) -> Any:
        """Send a request and read its answer."""
        self.sock.sendall(frame(message, version))
        return decode_response(self.receive(), api_of(type(message)).key, version)[1]

    def receive(self) -> bytes:
        """Read one frame."""
        (size,) = struct.unpack(">i", self._read(4))
        return self._read(size)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.sock.recv(size - len(data))
            if not piece:
                raise EOFError("the server closed the connection")
            data += piece
        return data


def frame(message: Any, version: int) -> bytes:
    """A request as it is sent."""
    return b"".join(bytes(part) for part in encode_request(message, version, 1, "bench"))


# Loading.


def _write_positions(path: Path, records: int, per_batch: int) -> None:
    """Append the positions of many groups, each in a partition of its own, to a broker's log that is closed."""
    config = LogConfig(durability=Durability.OS, segment_bytes=100 << 20, compact=True)
    log = LocalLog.open(path, config, disk=Disk())
    epoch, pairs = log.epochs.latest, list[Pair]()
    for number in range(records):
        group, topic, partition = f"group-{number // 100:06}", f"topic-{number % 100 // 10:04}", number % 10
        key = OffsetCommitKey(group=group, topic=topic, partition=partition)
        value = OffsetCommitValue(offset=number, commit_timestamp=int(time.time() * 1_000))
        pairs.append(encode_record(CoordinatorRecord(key, value)))
        if len(pairs) == per_batch or number == records - 1:
            log.append(encode_pairs(pairs, 1_700_000_000_000), epoch, 0)
            pairs = []
    log.close()
    log.checkpoint()


def _ready(server: ServerProcess, group: str) -> Any:
    """Ask for a group's positions until the coordinator is there."""
    request = OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id=group, topics=None)])
    with Wire(server) as wire:
        while (answer := wire.call(request, 9).groups[0]).error_code in NOT_YET:
            if answer.error_code == ErrorCode.NOT_COORDINATOR:
                wire.call(FindCoordinatorRequest(coordinator_keys=[group]), 4)
            time.sleep(POLL_S)
    assert answer.error_code == ErrorCode.NONE, answer
    return answer


def _loaded(directory: Path, records: int) -> Mapping[str, float]:
    """Start a broker on the log; the time from when it serves to the first answer of its coordinator."""
    with Anabranch(directory=directory, settings={**ONE_SHARD, "durability": "os"}) as server:
        before, began = server.usage().cpu_s, time.monotonic()
        answer = _ready(server, "group-000000")
        taken, cpu_s = time.monotonic() - began, server.usage().cpu_s - before
        assert sum(len(topic.partitions) for topic in answer.topics) == min(100, records)
        resident = server.usage().resident_bytes
    return {"load_s": taken, "cpu_s": cpu_s, "start_s": server.started_in_s, "resident_bytes": float(resident)}


def load(scale: Scale) -> list[Result]:
    """A coordinator's log of 1,000,000 records, each of another key, loads."""
    records = scale.choose(1_000_000, 5_000)
    found: list[Result] = []
    for per_batch in (10, 1):
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch)
            with Anabranch(directory=directory, settings={**ONE_SHARD, "durability": "os"}) as server:
                _ready(server, "group-000000")
            _write_positions(server.data / "__consumer_offsets-0", records, per_batch)
            found += compare(
                f"coordinator.load_{per_batch}_per_batch",
                what=f"{records:,} committed offsets of different keys, {per_batch} per batch, in one partition of "
                "__consumer_offsets: from when a fresh broker process serves to the first OffsetFetch that its "
                "coordinator answers, in time and in CPU time; start_s is how long the process took to serve",
                sides={
                    "anabranch": partial(_loaded, directory, records),
                    "allowed": lambda: {
                        **dict.fromkeys(("load_s", "cpu_s", "start_s"), LOAD_S_MAX),
                        "resident_bytes": 1e9,
                    },
                },
                bars=[
                    Bar("load_s", "s", "less", 1.0),
                    Bar("cpu_s", "s", "less", 1.0),
                    Bar("start_s", "s", "less"),
                    Bar("resident_bytes", "B", "less"),
                ],
                scale=scale,
            )
    return found


# Heartbeats.


def _confine(server: ServerProcess) -> None:
    """Give all threads of a server one core, and this process the others."""
    first, *others = sorted(os.sched_getaffinity(0))
    if others:
        for thread in os.listdir(f"/proc/{server.pid}/task"):
            os.sched_setaffinity(int(thread), {first})
        os.sched_setaffinity(0, set(others))


def _release(cores: set[int]) -> None:
    os.sched_setaffinity(0, cores)


def _joined(wire: Wire, group: str, members: int) -> list[bytes]:
    """Let members join a group without a topic; the heartbeat that each will send from then on."""
    epochs = dict.fromkeys((str(UUID(int=number + 1)) for number in range(members)), 0)
    before: dict[str, int] = {}
    while before != epochs:
        before = dict(epochs)
        if 0 not in before.values():
            time.sleep(SETTLE_S)
        for member, epoch in before.items():
            beat = ConsumerGroupHeartbeatRequest(group_id=group, member_id=member, member_epoch=epoch)
            if not epoch:
                beat.rebalance_timeout_ms = 60_000
                beat.subscribed_topic_names, beat.topic_partitions = ["nothing"], []
            while (answer := wire.call(beat, 1)).error_code in NOT_YET:
                time.sleep(POLL_S)
            assert answer.error_code == ErrorCode.NONE, answer
            epochs[member] = answer.member_epoch
    return [
        frame(ConsumerGroupHeartbeatRequest(group_id=group, member_id=member, member_epoch=epoch), 1)
        for member, epoch in epochs.items()
    ]


def _beat(server: ServerProcess, beats: Sequence[bytes], count: int, failures: list[BaseException]) -> None:
    """Send heartbeats over one connection, `BURST` at a time."""
    try:
        with Wire(server) as wire:
            sent = 0
            while sent < count:
                burst = [beats[(sent + at) % len(beats)] for at in range(min(BURST, count - sent))]
                wire.sock.sendall(b"".join(burst))
                for _ in burst:
                    answer = wire.receive()
                    assert answer[9:11] == b"\0\0", answer  # Correlation id, tags, throttle time, then the error.
                sent += len(burst)
    except BaseException as error:
        failures.append(error)


def _beaten(server: ServerProcess, members: int, count: int) -> Round:
    beats: list[bytes] = []

    def once() -> Mapping[str, float]:
        cores = os.sched_getaffinity(0)
        if not beats:
            with Wire(server) as wire:
                wire.call(FindCoordinatorRequest(coordinator_keys=["bench"]), 4)
                beats.extend(_joined(wire, "bench", members))
        _confine(server)
        try:
            failures: list[BaseException] = []
            share = count // CONNECTIONS
            threads = [
                threading.Thread(target=_beat, args=(server, beats[number::CONNECTIONS], share, failures))
                for number in range(CONNECTIONS)
            ]
            before, began = server.usage().cpu_s, time.monotonic()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            taken = time.monotonic() - began
            if failures:
                raise failures[0]
            cpu_s = server.usage().cpu_s - before
        finally:
            _release(cores)
        return {"heartbeats_per_s": share * CONNECTIONS / taken, "cpu_us": cpu_s / (share * CONNECTIONS) * 1e6}

    return once


def heartbeats(scale: Scale, running: Mapping[str, ServerProcess] | None = None) -> list[Result]:
    """Heartbeats that one shard on one core answers in a second."""
    members, count = scale.choose((200, 200_000), (4, 400))
    settings = {**ONE_SHARD, "group.consumer.max.session.timeout.ms": "1800000"}
    settings |= {"group.consumer.session.timeout.ms": "1800000"}
    with ExitStack() as stack:
        servers = stack.enter_context(both({**settings, "durability": "os"}, settings, scale, running))
        return compare(
            "coordinator.heartbeats",
            what=f"{count:,} ConsumerGroupHeartbeats (v1) of {members} members of one stable group, over {CONNECTIONS} "
            f"connections with {BURST} requests in flight each; the broker's process has one core. cpu_us is what one "
            "costs the broker",
            sides={name: _beaten(server, members, count) for name, server in servers.items()},
            bars=[Bar("heartbeats_per_s", "1/s", "more", 0.5), Bar("cpu_us", "us", "less")],
            scale=scale,
        )


BENCHMARKS = {"load": load, "heartbeats": heartbeats}

"""Peers that send what is no request, or read nothing, or take for ever: they are closed, and nobody else notices.

Each scene ends with a well-behaved connection, open since before, being served, and with exactly one WARNING.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.protocol.frames import encode_request
from anabranch.protocol.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from anabranch.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from anabranch.protocol.messages.find_coordinator import FindCoordinatorRequest
from anabranch.protocol.messages.leader_and_isr import LeaderAndIsrRequest
from anabranch.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from anabranch.protocol.messages.stop_replica import StopReplicaRequest
from anabranch.protocol.messages.update_metadata import UpdateMetadataRequest
from tests.support.broker import BrokerProcess, running
from tests.support.steps import in_short_steps
from tests.support.wire import WireClient, batch

MIB = 1 << 20
SAID_MAX, SAID_INTERVAL_S = 100, 10.0
"""So many lines about bad connections in the interval."""
BAD_CONNECTIONS, RANDOM_FRAMES = 1_000, 400
UNSENT = "kafka_server_socketservermetrics_unsent_bytes"


def frame(content: bytes) -> bytes:
    return struct.pack(">i", len(content)) + content


def request(api_key: int, version: int, body: bytes = b"", client: bytes = b"hostile") -> bytes:
    return frame(struct.pack(">hhih", api_key, version, 7, len(client)) + client + body)


def metadata(version: int = 9) -> bytes:
    return b"".join(bytes(part) for part in encode_request(MetadataRequest(topics=[]), version, 1, "hostile"))


@contextlib.contextmanager
def scene(broker: BrokerProcess, warnings: int = 1) -> Iterator[socket.socket]:
    """A hostile socket, and a friend whose connection must live through it."""
    with WireClient(broker.port) as friend:
        friend.create(f"friends-{time.monotonic_ns()}")
        before = len(broker.said("warning"))
        closed_before = len(broker.said("warning", "connection closed"))
        hostile = socket.create_connection(("127.0.0.1", broker.port), 20)
        with hostile:
            yield hostile
        served_soon(friend)
        if warnings:
            broker.until_said("warning", "connection closed", closed_before + warnings)
        said = broker.said("warning")[before:]
        assert len(said) == warnings, said
        assert all("127.0.0.1:" in it["peer"] and it["reason"] for it in said)
        assert not broker.said("error"), broker.said("error")


def served_soon(friend: WireClient) -> None:
    """The friend is answered, and quickly."""
    began = time.monotonic()
    friend.call(MetadataRequest(topics=[]), 9)
    assert time.monotonic() - began < 2


def closed(hostile: socket.socket) -> bool:
    """Whether the broker hangs up, without an answer."""
    try:
        return hostile.recv(1) == b""
    except ConnectionResetError:
        return True


HOSTILE_BYTES: dict[str, bytes] = {
    "a web browser": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a TLS handshake": bytes.fromhex("16030100") + b"\xc8\x01\x00\x00\xc4\x03\x03" + bytes(200),
    "a negative length": struct.pack(">i", -1),
    "the most negative length": struct.pack(">i", -(2**31)),
    "a length above the limit": struct.pack(">i", 100 * MIB + 1),
    "the largest length": struct.pack(">i", 2**31 - 1),
    "an empty frame": frame(b""),
    "a header that is cut off": frame(b"\x00\x03\x00"),
    "a client id that is cut off": frame(struct.pack(">hhih", 3, 9, 1, 500) + b"abc"),
    "a negative client id length": frame(struct.pack(">hhih", 3, 9, 1, -2)),
    "an unknown API": request(9999, 0),
    "a negative API": request(-1, 0),
    "an API that is not served": request(24, 0),
    "a version that is too new": request(3, 99),
    "a version that is too old": request(1, 0),
    "a negative version": request(3, -1),
    "a body that is missing": request(3, 9),
    "an array that is longer than its bytes": request(3, 1, struct.pack(">i", 2**31 - 1)),
    "a compact array of 2^32 elements": request(3, 9, b"\x00\xff\xff\xff\xff\x0f"),
    "a varint without an end": request(3, 9, b"\x00" + b"\xff" * 20),
    "a string that is longer than its bytes": request(3, 1, struct.pack(">ih", 1, 32_000)),
    "a string that is not UTF-8": request(3, 1, struct.pack(">ih", 1, 2) + b"\xff\xfe"),
    "records that are longer than their bytes": request(
        0, 3, struct.pack(">hhi", -1, -1, 1000) + struct.pack(">ih", 1, 1) + b"t" + struct.pack(">iii", 1, 0, 2**31 - 1)
    ),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running(tmp_path_factory.mktemp("hostile")) as process:
        yield process


@pytest.mark.parametrize("name", HOSTILE_BYTES)
def test_what_is_no_request_closes_its_connection_with_one_warning(shared: BrokerProcess, name: str) -> None:
    with scene(shared) as hostile:
        hostile.sendall(HOSTILE_BYTES[name])
        assert closed(hostile)


def test_of_many_bad_connections_few_have_a_line_and_the_rest_are_counted(tmp_path: Path) -> None:
    with running(tmp_path) as broker, WireClient(broker.port) as friend:

        def end_one() -> None:
            with socket.create_connection(("127.0.0.1", broker.port), 20) as hostile:
                hostile.sendall(HOSTILE_BYTES["an unknown API"])
                assert closed(hostile)

        began = time.monotonic()
        for _ in range(BAD_CONNECTIONS):
            end_one()
        served_soon(friend)
        lines_max = SAID_MAX * (1 + int((time.monotonic() - began) // SAID_INTERVAL_S))
        assert lines_max < BAD_CONNECTIONS, "slower than the limit"
        assert len(broker.until_said("warning", "connection closed", SAID_MAX)) <= lines_max
        time.sleep(SAID_INTERVAL_S)
        before = len(broker.said("warning", "connection closed"))
        end_one()
        said = broker.until_said("warning", "connection closed", before + 1)
        assert len(said) + sum(it.get("suppressed", 0) for it in said) == BAD_CONNECTIONS + 1
        assert not broker.said("error"), broker.said("error")


def test_random_bytes_in_sound_frames_harm_nobody_and_few_of_them_are_written_about(tmp_path: Path) -> None:
    chance = random.Random(7)
    apis = [0, 1, 2, 3, 10, 18, 19, 20, 21, 22, 23, 32, 33, 37, 44, 60, 10000]
    with running(tmp_path) as broker, WireClient(broker.port) as friend:
        before = broker.resident_bytes()
        began = time.monotonic()
        for _ in range(RANDOM_FRAMES):
            with socket.create_connection(("127.0.0.1", broker.port), 20) as hostile:
                body = chance.randbytes(chance.choice([0, 1, 5, 30, 200]))
                hostile.sendall(request(chance.choice(apis), chance.randrange(14), body))
                hostile.shutdown(socket.SHUT_WR)
                while hostile.recv(65536):
                    pass
        served_soon(friend)
        assert broker.resident_bytes() - before < 64 * MIB
        assert not broker.said("error"), broker.said("error")
        lines_max = SAID_MAX * (1 + int((time.monotonic() - began) // SAID_INTERVAL_S))
        assert 1 <= len(broker.said("warning")) <= lines_max


def test_a_request_cut_off_anywhere_harms_nobody(shared: BrokerProcess) -> None:
    whole = metadata()
    with WireClient(shared.port) as friend:
        for end in range(len(whole)):
            with socket.create_connection(("127.0.0.1", shared.port), 20) as hostile:
                hostile.sendall(whole[:end])
        served_soon(friend)


def test_an_unknown_version_of_api_versions_is_answered_in_version_0(shared: BrokerProcess) -> None:
    with scene(shared, warnings=0) as hostile:
        hostile.sendall(request(18, 120, b"\x00whatever"))
        size, correlation = struct.unpack(">ii", hostile.recv(8))
        rest = b""
        while len(rest) < size - 4:
            rest += hostile.recv(65536)
        from anabranch.codec import decode

        answer = decode(ApiVersionsResponse, rest, 0)
        assert (correlation, answer.error_code) == (7, ErrorCode.UNSUPPORTED_VERSION)
        assert any(it.api_key == 18 for it in answer.api_keys)
        hostile.sendall(b"".join(bytes(p) for p in encode_request(ApiVersionsRequest(), 0, 9, "hostile")))
        assert struct.unpack(">ii", hostile.recv(8))[1] == 9


def test_bytes_behind_a_request_are_passed_over_because_librdkafka_sends_some(shared: BrokerProcess) -> None:
    with scene(shared, warnings=0) as hostile:
        hostile.sendall(frame(metadata()[4:] + b"more"))
        assert struct.unpack(">ii", hostile.recv(8))[1] == 1


def test_what_only_brokers_say_among_themselves_is_refused(shared: BrokerProcess) -> None:
    with WireClient(shared.port) as client:
        for message, version in ((LeaderAndIsrRequest(), 7), (StopReplicaRequest(), 4), (UpdateMetadataRequest(), 8)):
            assert client.call(message, version).error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    shared.until_said("warning", "request refused", 3)


def test_a_bad_checksum_is_told_and_the_connection_goes_on(shared: BrokerProcess) -> None:
    with WireClient(shared.port) as client:
        client.create("checksums")
        data = batch([b"value"])
        data[-1] ^= 1
        assert client.produce("checksums", 0, data).error_code == ErrorCode.CORRUPT_MESSAGE
        assert client.produce("checksums", 0, batch([b"value"])).base_offset == 0


def broken(change: Callable[[bytearray], object], producer: tuple[int, int, int] = (-1, -1, -1)) -> bytes:
    data = batch([b"one", b"two"], producer=producer)
    change(data)
    return bytes(data)


def patched(position: int, value: bytes) -> Callable[[bytearray], object]:
    def change(data: bytearray) -> None:
        data[position : position + len(value)] = value
        from anabranch.records.batch import stamp_crc

        with contextlib.suppress(Exception):
            stamp_crc(data)

    return change


BROKEN_BATCHES: dict[str, tuple[bytes, ErrorCode]] = {
    "cut off": (bytes(batch([b"one"]))[:-1], ErrorCode.CORRUPT_MESSAGE),
    "a header that is cut off": (bytes(batch([b"one"]))[:40], ErrorCode.CORRUPT_MESSAGE),
    "bytes after the batch": (bytes(batch([b"one"])) + b"abc", ErrorCode.CORRUPT_MESSAGE),
    "a negative size": (broken(patched(8, struct.pack(">i", -5))), ErrorCode.CORRUPT_MESSAGE),
    "a huge size": (broken(patched(8, struct.pack(">i", 2**31 - 1))), ErrorCode.CORRUPT_MESSAGE),
    "magic 1": (broken(patched(16, b"\x01")), ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT),
    "magic 3": (broken(patched(16, b"\x03")), ErrorCode.CORRUPT_MESSAGE),
    "an unknown codec": (broken(patched(21, b"\x00\x07")), ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
    "a control batch": (broken(patched(21, b"\x00\x30")), ErrorCode.INVALID_RECORD),
    "a transaction of nobody": (broken(patched(21, b"\x00\x10")), ErrorCode.INVALID_RECORD),
    "a transaction that was not begun": (broken(patched(21, b"\x00\x10"), (5, 0, 0)), ErrorCode.INVALID_TXN_STATE),
    "more offsets than records": (broken(patched(23, struct.pack(">i", 5))), ErrorCode.INVALID_RECORD),
    "no records": (broken(patched(57, struct.pack(">i", 0))), ErrorCode.INVALID_RECORD),
    "a timestamp far ahead": (bytes(batch([b"one"], timestamp=2**60)), ErrorCode.INVALID_TIMESTAMP),
    "an unknown producer": (bytes(batch([b"x"], producer=(1 << 41, 0, 0))), ErrorCode.INVALID_PRODUCER_ID_MAPPING),
    "an id that nobody was given": (bytes(batch([b"x"], producer=(1 << 39, 0, 0))), ErrorCode.UNKNOWN_PRODUCER_ID),
    "a producer without a sequence": (bytes(batch([b"x"], producer=(5, 0, -1))), ErrorCode.INVALID_RECORD),
    "too large": (bytes(batch([b"x" * 2 * MIB])), ErrorCode.MESSAGE_TOO_LARGE),
    "nothing": (b"", ErrorCode.INVALID_RECORD),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_BATCHES)
def test_a_broken_batch_gets_its_error_and_nothing_is_appended(shared: BrokerProcess, name: str) -> None:
    data, expected = BROKEN_BATCHES[name]
    with WireClient(shared.port) as client:
        topic = f"broken-{abs(hash(name))}"
        client.create(topic)
        client.producer_id()  # From now on the ids of the first block may be somebody's.
        assert ErrorCode(client.produce(topic, 0, data).error_code) is expected
        assert client.produce(topic, 0, batch([b"sound"])).base_offset == 0


def test_a_peer_that_trickles_is_closed_when_silent_too_long(tmp_path: Path) -> None:
    with running(tmp_path, connections_max_idle_ms=1500) as broker, scene_without_friend(broker) as hostile:
        hostile.sendall(metadata()[:6])
        assert closed(hostile)
        broker.until_said("warning", "connection closed")
        assert len(broker.said("warning")) == 1


@contextlib.contextmanager
def scene_without_friend(broker: BrokerProcess) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", broker.port), 20) as hostile:
        yield hostile


def test_an_idle_connection_is_closed_without_a_warning(tmp_path: Path) -> None:
    with running(tmp_path, connections_max_idle_ms=1500) as broker, WireClient(broker.port) as client:
        client.call(MetadataRequest(topics=[]), 9)
        assert closed(client.sock)
        assert not broker.said("warning")


def test_peers_that_sit_on_request_memory_are_closed_when_others_need_it_and_nobody_waits_for_them(
    tmp_path: Path,
) -> None:
    limits = {"queued_max_request_bytes": 8 * MIB, "stalled_request_timeout_ms": 1000}
    with running(tmp_path, **limits) as broker, contextlib.ExitStack() as sockets, WireClient(broker.port) as friend:
        friend.create("t")
        for _ in range(6):
            hostile = sockets.enter_context(socket.create_connection(("127.0.0.1", broker.port), 20))
            hostile.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                hostile.sendall(struct.pack(">i", 90 * MIB) + bytes(12 * MIB))
        assert friend.produce("t", 0, batch([b"x" * 400_000])).error_code == ErrorCode.NONE
        assert not broker.said("warning", "connection closed")
        broker.until_said("warning", "connection closed")
        served_soon(friend)
        assert broker.resident_bytes() < 200 * MIB


def test_frames_that_are_only_announced_hold_nobody_up(shared: BrokerProcess) -> None:
    with contextlib.ExitStack() as sockets, WireClient(shared.port) as friend:
        friend.create("announced")
        for _ in range(4):
            hostile = sockets.enter_context(socket.create_connection(("127.0.0.1", shared.port), 20))
            hostile.sendall(struct.pack(">i", 100 * MIB) + bytes(1000))
        began = time.monotonic()
        for size in (10, 900_000):
            assert friend.produce("announced", 0, batch([b"x" * size])).error_code == ErrorCode.NONE
        assert time.monotonic() - began < 5
        assert shared.metrics()["kafka_server_socketservermetrics_memorypoolused_bytes"] < MIB


def test_memory_stays_bounded_when_many_peers_begin_large_requests(tmp_path: Path) -> None:
    with running(tmp_path, queued_max_request_bytes=32 * MIB) as broker, contextlib.ExitStack() as sockets:
        before = broker.resident_bytes()
        size, left = 20 * MIB, {}
        for _ in range(20):
            hostile = sockets.enter_context(socket.create_connection(("127.0.0.1", broker.port), 20))
            hostile.sendall(struct.pack(">i", size))
            hostile.setblocking(False)
            left[hostile] = size - 1
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:  # As much of each as the broker takes, and never all of it.
            for hostile, more in left.items():
                with contextlib.suppress(BlockingIOError):
                    left[hostile] -= hostile.send(bytes(min(more, MIB)))
            time.sleep(0.01)
        assert broker.resident_bytes() - before < (32 + 20 + 40) * MIB


def test_a_peer_that_never_reads_is_not_read_either_and_costs_no_memory(shared: BrokerProcess) -> None:
    with WireClient(shared.port) as friend:
        friend.create("unread")
        for _ in range(20):
            friend.produce("unread", 0, batch([os.urandom(900_000)]))
        before = shared.resident_bytes()
        with WireClient(shared.port) as hostile:
            hostile.sock.settimeout(0.5)
            with contextlib.suppress(TimeoutError):
                for _ in range(20_000):
                    hostile.send(hostile.fetch_request("unread", {0: 0}), 12)
            served_soon(friend)
            assert shared.resident_bytes() - before < 64 * MIB
        served_soon(friend)


def test_thousands_of_small_requests_that_come_at_once_are_answered_in_short_steps(shared: BrokerProcess) -> None:
    count = 5_000
    metadata = MetadataRequest(topics=[])
    sent = b"".join(bytes(part) for it in range(count) for part in encode_request(metadata, 9, it, "many"))

    def ask() -> None:
        with WireClient(shared.port) as hostile:
            hostile.sock.sendall(sent)
            for number in range(count):
                assert hostile.receive_frame()[:4] == struct.pack(">i", number)

    in_short_steps(shared, ask)


def test_unread_answers_hold_bounded_memory_and_their_connections_are_closed(tmp_path: Path) -> None:
    limits = {"queued_max_response_bytes": MIB, "stalled_request_timeout_ms": 500, "socket_send_buffer_bytes": 4096}
    with (
        running(tmp_path, **limits) as broker,
        contextlib.ExitStack() as sockets,
        WireClient(broker.port, 60) as friend,
    ):
        friend.create("wide", 3_000)
        asked = MetadataRequest(topics=[MetadataRequestTopic(name="wide")])
        friend.call(asked, 9)
        hostile = [sockets.enter_context(WireClient(broker.port, 60)) for _ in range(30)]
        before = broker.resident_bytes()
        requests = b"".join(bytes(it) for number in range(20) for it in encode_request(asked, 9, number, "wire"))
        for client in hostile:
            client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            with contextlib.suppress(ConnectionError):
                # All at once: an answer at a time, of which most fits into the sockets, would not be too much.
                client.sock.sendall(requests)
        broker.until_said("warning", "connection closed")
        served_soon(friend)
        deadline = time.monotonic() + 20
        while (held := broker.metrics()[UNSENT]) > MIB:
            assert time.monotonic() < deadline, held
            time.sleep(0.05)
        assert broker.resident_bytes() - before < 64 * MIB
        assert "unread answers" in broker.said("warning", "connection closed")[0]["reason"]


def test_connections_above_the_limit_are_refused_and_the_others_served(tmp_path: Path) -> None:
    with running(tmp_path, max_connections=3) as broker, contextlib.ExitStack() as sockets:
        friends = [sockets.enter_context(WireClient(broker.port)) for _ in range(3)]
        for friend in friends:
            friend.call(MetadataRequest(topics=[]), 9)
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", broker.port), 20) as hostile:
                assert closed(hostile)
        for friend in friends:
            friend.call(MetadataRequest(topics=[]), 9)
        broker.until_said("warning", "connection refused")
        assert len(broker.said("warning")) == 1
        friends.pop().close()
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(ConnectionError), WireClient(broker.port) as late:
                late.call(MetadataRequest(topics=[]), 9)
                break
            assert time.monotonic() < deadline


def test_one_address_does_not_keep_the_others_from_connecting(tmp_path: Path) -> None:
    def connect(address: str) -> socket.socket:
        return socket.create_connection(("127.0.0.1", broker.port), 20, source_address=(address, 0))

    def refusals() -> list[str]:
        broker.until_said("warning", "connection refused")
        return [line["reason"] for line in broker.said("warning", "connection refused")]

    with running(tmp_path, max_connections=20) as broker, contextlib.ExitStack() as sockets:
        for _ in range(18):
            sockets.enter_context(connect("127.0.0.1"))
        with connect("127.0.0.1") as hostile:
            assert closed(hostile)
        assert refusals() == ["the last tenth of max.connections is for addresses that have few"]
        for address in ("127.0.0.2", "127.0.0.3"):
            sockets.enter_context(connect(address))
        assert broker.metrics()["kafka_server_socketservermetrics_connections"] == 20
        sockets.pop_all().close()
        with WireClient(broker.port) as late:
            late.call(MetadataRequest(topics=[]), 9)
    with running(tmp_path, max_connections_per_ip=2) as broker, contextlib.ExitStack() as sockets:
        for address in ("127.0.0.1", "127.0.0.1", "127.0.0.2"):
            sockets.enter_context(connect(address))
        with connect("127.0.0.1") as hostile:
            assert closed(hostile)
        assert refusals() == ["max.connections.per.ip are open from its address"]


def test_answers_keep_the_order_of_pipelined_requests(client: WireClient) -> None:
    client.create("pipelined")
    parked = client.send(client.fetch_request("pipelined", {0: 0}, wait_ms=400), 12)
    others = [client.send(MetadataRequest(topics=[]), 9) for _ in range(30)]
    began = time.monotonic()
    client.receive(parked)
    assert time.monotonic() - began > 0.3
    for sent in others:
        client.receive(sent)


def test_a_host_of_new_producers_leaves_the_memory_to_those_that_were_there(tmp_path: Path) -> None:
    def sent(client: WireClient, producer_id: int, number: int, sequence: int = 0) -> ErrorCode:
        data = batch([b"v"], producer=(producer_id, 0, sequence))
        return ErrorCode(client.produce("t", number, data).error_code)

    with running(tmp_path, **{"producer.state.max.bytes": 130_000}) as broker:
        with WireClient(broker.port) as client:
            client.create("t", 30)
            honest, *others = [client.producer_id() for _ in range(6)]
            assert sent(client, honest, 0) is ErrorCode.NONE
            codes = [sent(client, other, number) for other in others for number in range(30)]
            assert codes.count(ErrorCode.NONE) == 99
            assert codes.count(ErrorCode.POLICY_VIOLATION) == 51
            assert sent(client, honest, 0, 1) is ErrorCode.NONE
            assert broker.until_said("warning", "producer refused")
            assert broker.metrics()["kafka_server_replicamanager_producerstate_bytes"] == 130_000
        broker.kill()
        broker.start()
        with WireClient(broker.port) as client:
            client.until_partitions("t", 30)
            assert sent(client, honest, 0, 2) is ErrorCode.NONE
            assert sent(client, others[4], 29) is ErrorCode.POLICY_VIOLATION, "they are counted at a start, too"


def test_a_topic_of_the_broker_that_is_being_created_cannot_be_deleted(tmp_path: Path) -> None:
    """A deletion that was asked for before the topic was there came after its creation, and all groups were gone."""
    deletion = DeleteTopicsRequest(topics=[DeleteTopicState(name="__consumer_offsets")], timeout_ms=20_000)
    asked = FindCoordinatorRequest(key_type=0, coordinator_keys=["g"])
    with (
        running(tmp_path) as broker,
        contextlib.ExitStack() as sockets,
        WireClient(broker.port) as client,
    ):
        hostile = [sockets.enter_context(WireClient(broker.port)) for _ in range(20)]
        sent = []
        for number, each in enumerate(hostile):
            sent += [(each, each.send(deletion)) for _ in range(10)]
            if number == 5:
                creation = client.send(asked)
        found = client.receive(creation).coordinators[0]
        answers = [each.receive(it).responses[0] for each, it in sent]
        assert ErrorCode.NONE not in {it.error_code for it in answers}, "it was deleted"
        deadline = time.monotonic() + 20
        while found.error_code:
            assert time.monotonic() < deadline, found
            found = client.call(asked).coordinators[0]
        assert client.metadata("__consumer_offsets").error_code == ErrorCode.NONE
        assert not broker.said("error"), broker.said("error")

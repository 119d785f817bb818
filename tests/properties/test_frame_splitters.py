"""Any stream of bytes, cut anywhere, is split into the frames it holds or ends the connection: broker and client."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.client.cluster import connection as client
from anabranch.client.cluster.connection import Connection
from anabranch.codec import Part
from anabranch.protocol.frames import decode_request, encode_request
from anabranch.protocol.messages.metadata import MetadataRequest
from anabranch.runtime.net import channel as broker
from anabranch.runtime.net.channel import FRAMES_TURN_S, FrameChannel, FrameError
from anabranch.runtime.net.pool import BufferPool, Landing
from anabranch.runtime.net.transport import PlainTransport

LANDING_SIZE = 64
BROKER_SIZE_MAX = 200
CLIENT_SIZE_MAX = 1 << 20
"""Less than in production: an accepted size is allocated at once."""
BUFFER_SIZE_MIN = 4096
"""The smallest buffer of a pool."""
Split = tuple[list[bytes], bool]
"""The frames that were handed over, and whether the connection was ended for a length that none may have."""


def reference(stream: bytes, size_min: int, size_max: int) -> Split:
    """Split a whole stream, as simply as can be."""
    frames, position = [], 0
    while len(stream) - position >= 4:
        size = int.from_bytes(stream[position : position + 4], signed=True)
        if not size_min <= size <= size_max:
            return frames, True
        if len(stream) - position - 4 < size:
            break
        frames.append(stream[position + 4 : position + 4 + size])
        position += 4 + size
    return frames, False


class Received:
    """The handler of a channel: keeps what it is handed."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.errors: list[Exception | None] = []

    def on_frame(self, frame: memoryview) -> None:
        self.frames.append(bytes(frame))

    def on_drained(self) -> None:
        pass

    def on_closed(self, error: Exception | None) -> None:
        self.errors.append(error)


def split_by_the_broker(pieces: list[bytes], size_max: int = BROKER_SIZE_MAX) -> Split:
    """Send pieces to a channel through a real socket pair, each received before the next is sent."""

    async def run() -> Split:
        theirs, ours = socket.socketpair()
        received, pool = Received(), BufferPool(1 << 16)
        channel = FrameChannel(
            asyncio.get_running_loop(),
            PlainTransport(ours),
            received,
            pool=pool,
            landing=Landing(LANDING_SIZE),
            frame_size_max=size_max,
        )
        channel.start()
        sent = 0
        with theirs:
            for piece in pieces:
                theirs.sendall(piece)
                sent += len(piece)
                while (channel.received < sent or len(pool.turns)) and not channel.closed:
                    await asyncio.sleep(0)
                if channel.closed:
                    break
            assert pool.in_use <= BUFFER_SIZE_MIN, "memory for the frame in progress alone"
            channel.close()
        assert pool.in_use == 0
        return received.frames, any(isinstance(error, FrameError) for error in received.errors)

    return asyncio.run(run())


class Socket:
    """The client's transport: nothing is sent."""

    closed = False

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True


class Splitting(Connection):
    """A client's connection that keeps its frames instead of decoding them."""

    def __init__(self) -> None:
        super().__init__("broker:9092", "test")
        self.frames: list[bytes] = []

    def _receive(self, frame: memoryview) -> None:
        self.frames.append(bytes(frame))


def split_by_the_client(pieces: list[bytes]) -> Split:
    """Hand pieces to a client's connection as asyncio does."""

    async def run() -> Split:
        connection = Splitting()
        connection.connection_made(cast(asyncio.Transport, Socket()))
        for piece in pieces:
            while piece and connection.is_open:
                room = connection.get_buffer(-1)
                size = min(len(room), len(piece))
                room[:size] = piece[:size]
                connection.buffer_updated(size)
                piece = piece[size:]
        return connection.frames, not connection.is_open

    with mock.patch.object(client, "RESPONSE_SIZE_MAX", CLIENT_SIZE_MAX):
        return asyncio.run(run())


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place for place in places if 0 < place < len(stream)} | {len(stream)})
    return [stream[start:end] for start, end in zip([0, *ends], ends, strict=False) if end > start]


def whole(content: bytes) -> bytes:
    return len(content).to_bytes(4) + content


HOSTILE_SIZES = [b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\x80\0\0\0", b"\0\0\0\xc9", b"\0\0\0\0", b"\0\0\0\3"]
STREAMS = st.lists(
    st.binary(max_size=100).map(whole) | st.binary(max_size=6) | st.sampled_from(HOSTILE_SIZES), max_size=8
).map(b"".join)
CUTS = st.lists(st.integers(0, 400), max_size=30)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(stream=STREAMS, cuts=CUTS, turn_s=st.sampled_from([FRAMES_TURN_S, 0.0]))
def test_the_broker_splits_any_stream_as_the_reference_does(stream: bytes, cuts: list[int], turn_s: float) -> None:
    """Also where a turn ends behind every frame but the first of what was received together."""
    with mock.patch.object(broker, "FRAMES_TURN_S", turn_s):
        assert split_by_the_broker(cut(stream, cuts)) == reference(stream, 0, BROKER_SIZE_MAX)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(stream=STREAMS, cuts=CUTS)
def test_the_client_splits_any_stream_as_the_reference_does(stream: bytes, cuts: list[int]) -> None:
    assert split_by_the_client(cut(stream, cuts)) == reference(stream, 4, CLIENT_SIZE_MAX)


@pytest.mark.parametrize("split", [split_by_the_broker, split_by_the_client])
@pytest.mark.parametrize("size", [b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\x80\0\0\0"])
@pytest.mark.parametrize("step", [1, 3, 4])
def test_a_size_out_of_bounds_ends_the_connection_behind_whole_frames(
    split: Callable[[list[bytes]], Split], size: bytes, step: int
) -> None:
    stream = whole(b"first") + size + b"more"
    pieces = [stream[start : start + step] for start in range(0, len(stream), step)]
    assert split(pieces) == ([b"first"], True)


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 63, 64, 65, 1000])
def test_requests_in_pieces_of_any_size_are_read_as_they_were_sent(step: int) -> None:
    requests = [MetadataRequest(topics=[]), MetadataRequest(topics=None)]
    parts: list[Part] = [part for request in requests for part in encode_request(request, 12, 1, "c" * 90)]
    stream = b"".join(bytes(part) for part in parts)
    pieces = [stream[start : start + step] for start in range(0, len(stream), step)]
    frames, refused = split_by_the_broker(pieces)
    assert ([decode_request(frame)[1] for frame in frames], refused) == (requests, False)

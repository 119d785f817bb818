"""Frame channels over a real socket pair: reading in place, bounded memory, back-pressure, file slices."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import mmap
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from itertools import accumulate
from pathlib import Path
from random import Random
from unittest import mock

import pytest

from anabranch.runtime.gathered import Gathered
from anabranch.runtime.net.channel import (
    FRAMES_PER_TURN_MAX,
    FRAMES_TURN_S,
    FREED_APART_SIZE,
    READ_TURN_SIZE_MAX,
    FrameChannel,
    FrameError,
    Part,
)
from anabranch.runtime.net.pool import (
    FRAMES_ROUND_S,
    MAPPED_SIZE,
    POOL_IDLE_BUFFER_SIZE_MAX,
    SMALL_FRAME_SIZE,
    BufferPool,
    Landing,
)
from anabranch.runtime.net.transport import PlainTransport


class Slice:
    def __init__(self, fd: int, position: int, size: int) -> None:
        self.fd, self.position, self.size = fd, position, size


class Peer:
    """The other end, and what the channel has told."""

    def __init__(self, *, frame_size_max: int = 1 << 20, pool: BufferPool | None = None, landing: int = 4096) -> None:
        self.sock, ours = socket.socketpair()
        self.sock.setblocking(False)
        self.frames: list[bytes] = []
        self.closed: list[Exception | None] = []
        self.drained = 0
        self.pause_after = 0
        self.pool = pool or BufferPool(1 << 24)
        self.channel = FrameChannel(
            asyncio.get_running_loop(),
            PlainTransport(ours),
            self,
            pool=self.pool,
            landing=Landing(landing),
            frame_size_max=frame_size_max,
        )
        self.channel.start()

    def on_frame(self, frame: memoryview) -> None:
        self.frames.append(bytes(frame))
        if self.pause_after and len(self.frames) % self.pause_after == 0:
            self.channel.pause()

    def on_drained(self) -> None:
        self.drained += 1

    def on_closed(self, error: Exception | None) -> None:
        self.closed.append(error)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not true():
                await asyncio.sleep(0.001)


def frame(content: bytes) -> bytes:
    return struct.pack(">i", len(content)) + content


def _at(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def scene() -> None:
        await scenario()

    asyncio.run(scene())


def test_frames_of_every_size_arrive_whole_however_they_are_cut() -> None:
    async def scenario() -> None:
        peer = Peer()
        contents = [
            bytes([n % 251]) * size for n, size in enumerate([0, 1, 3, 4, 5, 4091, 4092, 4093, 70_000, 2, 200_000, 9])
        ]
        data = b"".join(map(frame, contents))
        for step in (1, 7, 4096, len(data)):
            peer.frames.clear()
            if step == 1:
                sent = b"".join(map(frame, contents[:6]))
                for byte in sent:
                    await peer.send(bytes([byte]))
                await peer.until(lambda: len(peer.frames) == 6)
                assert peer.frames == contents[:6]
                continue
            for start in range(0, len(data), step):
                await peer.send(data[start : start + step])
            await peer.until(lambda: len(peer.frames) == len(contents))
            assert peer.frames == contents
        assert peer.pool.in_use == 0
        peer.channel.close()
        peer.sock.close()

    run(scenario)


def test_channels_take_turns_however_many_frames_one_has() -> None:
    async def scenario() -> None:
        many, other = Peer(landing=1 << 20), Peer()
        await many.send(b"".join(frame(b"%d" % number) for number in range(1_000)))
        await other.send(frame(b"x"))
        while not other.frames:
            await asyncio.sleep(0)
        assert len(many.frames) <= 4 * FRAMES_PER_TURN_MAX
        await many.until(lambda: len(many.frames) == 1_000)
        assert many.frames == [b"%d" % number for number in range(1_000)]
        assert many.pool.in_use == 0
        for peer in (many, other):
            peer.channel.close()
            peer.sock.close()

    run(scenario)


class SlowPeer(Peer):
    def on_frame(self, frame: memoryview) -> None:
        super().on_frame(frame)
        time.sleep(2 * FRAMES_TURN_S)


def test_a_turn_is_over_after_a_frame_that_takes_long() -> None:
    async def scenario() -> None:
        many, other = SlowPeer(landing=1 << 20), Peer()
        await many.send(b"".join(map(frame, [b"slow"] * 20)))
        await other.send(frame(b"x"))
        while not other.frames:
            await asyncio.sleep(0)
        assert len(many.frames) <= 3
        await many.until(lambda: len(many.frames) == 20)
        for peer in (many, other):
            peer.channel.close()
            peer.sock.close()

    run(scenario)


class BusyPeer(Peer):
    def on_frame(self, frame: memoryview) -> None:
        super().on_frame(frame)
        time.sleep(FRAMES_TURN_S / 8)


def test_a_client_with_one_frame_waits_for_a_few_of_the_channels_that_have_many() -> None:
    async def scenario() -> None:
        pool = BufferPool(1 << 24)
        many = [SlowPeer(landing=1 << 20, pool=pool) for _ in range(100)]
        for peer in many:
            await peer.send(b"".join(map(frame, [b"busy"] * 4)))
        while len(pool.turns) < len(many):
            await asyncio.sleep(0)
        before = sum(len(peer.frames) for peer in many)
        other = Peer(pool=pool)
        await other.send(frame(b"x"))
        while not other.frames:
            await asyncio.sleep(0)
        rounds = 4
        per_round = FRAMES_ROUND_S / (2 * FRAMES_TURN_S) + 1
        assert sum(len(peer.frames) for peer in many) - before <= rounds * per_round
        for peer in many:
            await peer.until(lambda peer=peer: len(peer.frames) == 4)
        assert not pool.turns
        for each in (*many, other):
            each.channel.close()
            each.sock.close()

    run(scenario)


class _FailingPeer(Peer):
    def on_frame(self, frame: memoryview) -> None:
        super().on_frame(frame)
        if len(self.frames) > 20:
            raise ValueError("ours")


def test_large_memory_is_given_back_to_the_system_by_another_thread() -> None:
    async def scenario() -> None:
        pool = BufferPool(1 << 30)
        buffer = pool.take(POOL_IDLE_BUFFER_SIZE_MAX + 1)
        freed_by: list[int] = []
        weakref.finalize(buffer, lambda: freed_by.append(threading.get_ident()))
        pool.give(buffer)
        del buffer
        while pool.in_use:
            await asyncio.sleep(0)
        assert freed_by and freed_by != [threading.get_ident()], "it counts until the system has it"

    run(scenario)


def test_a_turn_takes_no_more_of_what_has_arrived_than_its_share() -> None:
    async def scenario() -> None:
        peer = Peer(frame_size_max=8 * READ_TURN_SIZE_MAX, pool=BufferPool(1 << 30))
        rooms: list[int] = []
        receive = peer.channel._transport.receive_into

        def received(room: memoryview) -> int:
            rooms.append(len(room))
            return receive(room)

        peer.channel._transport.receive_into = received
        await peer.send(frame(bytes(4 * READ_TURN_SIZE_MAX)))
        await peer.until(lambda: bool(peer.frames))
        assert max(rooms) == READ_TURN_SIZE_MAX
        peer.channel.close()
        peer.sock.close()

    run(scenario)


def test_a_turn_that_fails_takes_no_turn_from_others() -> None:
    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        pool = BufferPool(1 << 24)
        failing, many = _FailingPeer(landing=1 << 20, pool=pool), Peer(landing=1 << 20, pool=pool)
        for peer in (failing, many):
            await peer.send(b"".join(map(frame, [b"x"] * 60)))
        await many.until(lambda: len(many.frames) == 60)
        assert failing.closed == [None]
        assert len(failing.frames) == 21
        for each in (failing, many):
            each.channel.close()
            each.sock.close()

    run(scenario)


def test_the_turns_of_many_channels_are_shorter_than_those_of_few() -> None:
    async def scenario() -> None:
        pool = BufferPool(1 << 24)
        many = [BusyPeer(landing=1 << 20, pool=pool) for _ in range(60)]
        for peer in many:
            await peer.send(b"".join(map(frame, [b"busy"] * 60)))
        await asyncio.sleep(0.01)
        assert len(pool.turns) == len(many), "all of them have more"
        before = sum(len(peer.frames) for peer in many)
        other = Peer(pool=pool)
        await other.send(frame(b"x"))
        while not other.frames:
            await asyncio.sleep(0)
        rounds = 3
        assert sum(len(peer.frames) for peer in many) - before <= rounds * 2 * len(many)
        for peer in many:
            await peer.until(lambda peer=peer: len(peer.frames) == 60)
        assert not pool.turns
        for each in (*many, other):
            each.channel.close()
            each.sock.close()

    run(scenario)


def test_a_channel_that_is_paused_or_closed_between_its_turns_hands_over_no_more() -> None:
    async def scenario() -> None:
        sent = b"".join(frame(b"%d" % number) for number in range(200)) + b"\0\0"
        peer = Peer(landing=1 << 20)
        await peer.send(sent)
        while not peer.frames:
            await asyncio.sleep(0)
        peer.channel.pause()
        seen = len(peer.frames)
        assert seen < 200
        await asyncio.sleep(0.02)
        assert len(peer.frames) == seen
        peer.channel.resume()
        await peer.until(lambda: len(peer.frames) == 200)
        await peer.send(b"\0\1x" + sent)
        while len(peer.frames) < 202:
            await asyncio.sleep(0)
        assert peer.frames[200] == b"x"
        peer.channel.close()
        seen = len(peer.frames)
        await asyncio.sleep(0.02)
        assert len(peer.frames) == seen
        assert peer.pool.in_use == 0
        peer.sock.close()

    run(scenario)


def test_a_channel_that_is_given_no_memory_in_its_turn_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        peer = Peer(landing=1 << 20)
        await peer.send(b"".join(map(frame, [b"x"] * 60)) + struct.pack(">i", 1 << 20) + b"begun")
        while not peer.frames:
            await asyncio.sleep(0)
        refusal = OSError(errno.ENOMEM, "no memory")
        monkeypatch.setattr(peer.pool, "begin", lambda *_: (_ for _ in ()).throw(refusal))
        await peer.until(lambda: bool(peer.closed))
        assert peer.closed == [refusal]
        assert len(peer.frames) == 60
        assert peer.pool.in_use == 0
        peer.sock.close()

    run(scenario)


def test_a_channel_has_one_place_in_the_line_however_often_it_is_paused() -> None:
    async def scenario() -> None:
        peer = Peer(landing=1 << 20)
        await peer.send(b"".join(map(frame, [b"x"] * 200)))
        while not peer.frames:
            await asyncio.sleep(0)
        for _ in range(5):
            peer.channel.pause()
            peer.channel.resume()
        assert len(peer.pool.turns) == 1
        await peer.until(lambda: len(peer.frames) == 200)
        assert not peer.pool.turns
        close(peer)

    run(scenario)


@pytest.mark.parametrize("size", [-1, (1 << 20) + 1, 2**31 - 1])
def test_a_length_that_no_frame_may_have_closes_the_channel_before_memory_is_taken(size: int) -> None:
    async def scenario() -> None:
        peer = Peer()
        await peer.send(struct.pack(">i", size))
        await peer.until(lambda: bool(peer.closed))
        assert isinstance(peer.closed[0], FrameError)
        assert peer.pool.in_use == 0
        peer.sock.close()

    run(scenario)


def test_the_peer_hanging_up_in_the_middle_of_a_frame_gives_the_memory_back() -> None:
    async def scenario() -> None:
        peer = Peer()
        await peer.send(frame(b"x" * 100_000)[:50_000])
        await peer.until(lambda: peer.pool.in_use > 0)
        peer.sock.close()
        await peer.until(lambda: bool(peer.closed))
        assert peer.closed == [None]
        assert peer.pool.in_use == 0

    run(scenario)


def test_a_paused_channel_keeps_what_came_and_hands_it_over_in_order_later() -> None:
    async def scenario() -> None:
        peer = Peer()
        peer.pause_after = 1
        contents = [b"%d" % n for n in range(20)]
        await peer.send(b"".join(map(frame, contents)))
        for count in range(1, 21):
            await peer.until(lambda count=count: len(peer.frames) == count)  # type: ignore[misc]
            await asyncio.sleep(0.002)
            assert len(peer.frames) == count
            peer.channel.resume()
        assert peer.frames == contents
        peer.channel.close()
        assert peer.pool.in_use == 0
        peer.sock.close()

    run(scenario)


def close(*peers: Peer) -> None:
    for peer in peers:
        peer.channel.close()
        peer.sock.close()


def test_frames_that_are_announced_cost_nothing_and_small_ones_never_wait() -> None:
    async def scenario() -> None:
        pool = BufferPool(1 << 20)
        hostile = [Peer(pool=pool, frame_size_max=1 << 30) for _ in range(40)]
        for peer in hostile:
            await peer.send(struct.pack(">i", 1 << 30) + b"x" * 10)
            await peer.until(lambda peer=peer: peer.channel.holds_memory)  # type: ignore[misc]
        assert pool.in_use <= 40 * SMALL_FRAME_SIZE
        friend = Peer(pool=pool)
        for size in (5, SMALL_FRAME_SIZE):
            await friend.send(frame(b"s" * size))
            await friend.until(lambda size=size: friend.frames[-1:] == [b"s" * size])  # type: ignore[misc]
        close(friend, *hostile)
        assert (pool.in_use, pool.waiting) == (0, 0)

    run(scenario)


def test_few_channels_cannot_take_all_memory_and_the_first_one_always_goes_on() -> None:
    async def scenario() -> None:
        pool = BufferPool(1 << 20)
        size = 900_000
        holders = [Peer(pool=pool) for _ in range(3)]
        sending = []
        for number, peer in enumerate(holders):
            sending.append(asyncio.ensure_future(peer.send(frame(b"a" * size)[:-1])))
            await peer.until(lambda number=number: pool.waiting == number and pool.in_use > number)  # type: ignore[misc]
        await holders[0].until(sending[0].done)
        first, second, third = holders
        assert pool.waiting == 2
        friend = Peer(pool=pool)
        await friend.send(frame(b"f" * 60_000))
        await friend.until(lambda: friend.frames == [b"f" * 60_000])
        assert not first.frames
        await first.send(b"a")
        await first.until(lambda: first.frames == [b"a" * size])
        for peer in (second, third):
            await peer.until(lambda peer=peer: peer.channel.received == size + 3)  # type: ignore[misc]
            await peer.send(b"a")
            await peer.until(lambda peer=peer: peer.frames == [b"a" * size])  # type: ignore[misc]
        close(friend, *holders)
        assert (pool.in_use, pool.waiting) == (0, 0)

    run(scenario)


def test_the_first_one_waits_while_whole_frames_hold_more_than_half_of_all_memory() -> None:
    async def scenario() -> None:
        pool = BufferPool(1 << 20)
        handled = pool.take(1 << 19), pool.take(1 << 12)
        peer = Peer(pool=pool)
        sending = asyncio.create_task(peer.send(frame(b"a" * (1 << 20 - 1))))
        await peer.until(lambda: pool.waiting == 1)
        assert pool.in_use < pool.size_max
        pool.give(handled[1])
        await sending
        await peer.until(lambda: bool(peer.frames))
        pool.give(handled[0])
        close(peer)
        assert (pool.in_use, pool.waiting) == (0, 0)

    run(scenario)


def test_parts_and_file_slices_arrive_in_order_though_the_socket_is_small(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "log"
        path.write_bytes(os.urandom(3_000_000))
        content = path.read_bytes()
        fd = os.open(path, os.O_RDONLY)
        peer = Peer()
        parts = [b"head", Slice(fd, 10, 2_000_000), b"", bytearray(b"middle"), memoryview(b"m" * 100_000)]
        peer.channel.write([*parts, Slice(fd, 2_999_000, 1_000), b"tail"])
        assert peer.channel.unsent > 0
        expected = b"head" + content[10:2_000_010] + b"middle" + b"m" * 100_000 + content[2_999_000:] + b"tail"
        got = bytearray()
        while len(got) < len(expected):
            got += await asyncio.get_running_loop().sock_recv(peer.sock, 65536)
        assert bytes(got) == expected
        await peer.until(lambda: peer.drained == 1)
        assert peer.channel.unsent == 0
        peer.channel.close()
        peer.sock.close()
        os.close(fd)

    run(scenario)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_part_that_is_sent_alone_arrives_whole_though_the_socket_is_small(kind: Callable[[bytes], Part]) -> None:
    async def scenario() -> None:
        content = os.urandom(3_000_000)
        peer = Peer()
        for drained in (1, 2):
            peer.channel.write([kind(content)])
            assert 0 < peer.channel.unsent == peer.channel.unsent_memory < len(content)
            got = bytearray()
            async with asyncio.timeout(10):
                while len(got) < len(content):
                    got += await asyncio.get_running_loop().sock_recv(peer.sock, 65_536)
            assert bytes(got) == content
            await peer.until(lambda drained=drained: peer.drained == drained)  # type: ignore[misc]
            assert peer.channel.unsent == 0
        close(peer)

    run(scenario)


def test_gathered_pieces_arrive_in_order_though_the_socket_is_small() -> None:
    """More of them than one call takes, of all sizes: calls end within pieces and between them."""

    async def scenario() -> None:
        content = os.urandom(1_200_000)
        chance = Random(7)
        starts = [chance.randrange(len(content) - 2_000) for _ in range(3_000)]
        pieces = [(start, chance.choice([1, 61, 1_000, 2_000])) for start in starts]
        source = (ctypes.c_char * len(content)).from_buffer_copy(content)
        at = ctypes.addressof(source)
        numbers = [number for start, size in pieces for number in (at + start, size)]
        ends = list(accumulate(size for _, size in pieces))
        memory = memoryview(bytearray(struct.pack(f"={3 * len(pieces)}q", *numbers, *ends)))
        whole = Gathered(memory, _at(memory), len(pieces), 16 * len(pieces), ends[-1], source)
        wanted = b"".join(content[start : start + size] for start, size in pieces)
        assert len(whole) == len(wanted)
        assert whole.joined() == wanted
        peer = Peer()
        peer.channel.write([b"head", whole, b"tail"])
        assert 0 < peer.channel.unsent == peer.channel.unsent_memory < len(wanted)
        assert whole.joined() == wanted[-len(whole) :]
        expected = b"head" + wanted + b"tail"
        got = bytearray()
        while len(got) < len(expected):
            got += await asyncio.get_running_loop().sock_recv(peer.sock, 33_333)
        assert bytes(got) == expected
        await peer.until(lambda: peer.drained == 1)
        assert not whole and whole.joined() == b""
        peer.channel.close()
        peer.sock.close()

    run(scenario)


def test_pieces_of_a_file_that_is_cut_while_they_wait_end_the_connection_and_nothing_else(tmp_path: Path) -> None:
    """To send what the file does not have any more is an error, and no signal that ends the process."""

    async def scenario() -> None:
        path, size, count = tmp_path / "log", 16_384, 100
        path.write_bytes(os.urandom(size * count))
        with path.open("r+b") as file:
            mapping = mmap.mmap(file.fileno(), size * count)
            at = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
            numbers = [number for place in range(count) for number in (at + size * place, size)]
            ends = list(accumulate([size] * count))
            memory = memoryview(bytearray(struct.pack(f"={3 * count}q", *numbers, *ends)))
            peer, other = Peer(), Peer()
            peer.channel.write([Gathered(memory, _at(memory), count, 16 * count, ends[-1], mapping), b"tail"])
            assert peer.channel.unsent > 2 * size
            file.truncate(size)
            got = bytearray()
            with contextlib.suppress(ConnectionError):
                while data := await asyncio.get_running_loop().sock_recv(peer.sock, 33_333):
                    got += data
            await peer.until(lambda: len(peer.closed) == 1)
            assert isinstance(peer.closed[0], OSError)
            assert size <= len(got) < size * count
            other.channel.write([b"answer"])
            assert await asyncio.get_running_loop().sock_recv(other.sock, 100) == b"answer"
            for each in (peer, other):
                each.channel.close()
                each.sock.close()

    run(scenario)


def test_many_small_parts_go_out_in_few_calls_and_whole() -> None:
    async def scenario() -> None:
        peer = Peer()
        peer.channel.write([b"%05d" % n for n in range(3_000)])
        got = bytearray()
        while len(got) < 15_000:
            got += await asyncio.get_running_loop().sock_recv(peer.sock, 65536)
        assert bytes(got) == b"".join(b"%05d" % n for n in range(3_000))
        peer.channel.close()
        peer.sock.close()

    run(scenario)


def test_buffers_are_used_again() -> None:
    pool = BufferPool(1 << 20)
    buffer = pool.take(5_000)
    pool.give(buffer)
    assert pool.take(8_000) is buffer


def test_a_large_frame_arrives_in_a_buffer_that_lies_idle_and_not_in_new_memory() -> None:
    pool = BufferPool(1 << 26)
    used = pool.take(5 * MAPPED_SIZE)
    pool.give(used)
    assert pool.begin("a", 4 * MAPPED_SIZE + 1, 0) is used and pool.in_use == 5 * MAPPED_SIZE
    second = pool.begin("b", 3 * MAPPED_SIZE, 0)
    assert len(second) == SMALL_FRAME_SIZE, "for none that is announced new memory is taken"
    pool.give(used)
    grown = pool.grow("b", 3 * MAPPED_SIZE, second)
    assert grown is used, "it becomes idle while the frame arrives; it is not twice as large"
    pool.give(used)
    assert len(pool.begin("c", 2 * MAPPED_SIZE, 0)) == SMALL_FRAME_SIZE, "it is more than twice as large"


def test_announced_frames_take_idle_memory_up_to_a_quarter_of_the_limit() -> None:
    pool = BufferPool(16 * MAPPED_SIZE)
    buffers = [pool.take(2 * MAPPED_SIZE) for _ in range(4)]
    for buffer in buffers:
        pool.give(buffer)
    begun = [len(pool.begin(number, 2 * MAPPED_SIZE, 0)) for number in range(4)]
    assert begun == [2 * MAPPED_SIZE] * 2 + [SMALL_FRAME_SIZE] * 2


def test_buffers_that_lie_idle_give_way_to_those_of_another_size() -> None:
    pool = BufferPool(1 << 30)
    large = [pool.take(8 * MAPPED_SIZE) for _ in range(5)]
    small = [pool.take(3 * MAPPED_SIZE) for _ in range(3)]
    for buffer in (*large, *small):
        pool.give(buffer)
    taken = [pool.take(3 * MAPPED_SIZE) for _ in range(3)]
    assert {id(buffer) for buffer in taken} == {id(buffer) for buffer in small}
    again = [pool.take(8 * MAPPED_SIZE) for _ in range(3)]
    assert sum(any(one is other for other in large) for one in again) == 2, "32 MiB lie idle, and no more"


def test_a_buffer_that_an_earlier_request_still_looks_into_grows_elsewhere() -> None:
    """Objects of a large request, with views of the buffer that it came in, are freed after it is answered."""

    async def scenario() -> None:
        pool = BufferPool(1 << 26)
        first = pool.take(4 * MAPPED_SIZE)
        views = [memoryview(first)[:9]]
        pool.give(first)
        peer = Peer(frame_size_max=1 << 25, pool=pool)
        content = bytes(range(256)) * (5 * MAPPED_SIZE // 256)
        sent = asyncio.create_task(peer.send(frame(content)))
        await peer.until(lambda: bool(peer.frames or peer.closed))
        assert peer.frames == [content]
        assert pool.in_use == 0
        await sent
        close(peer)
        views.clear()

    run(scenario)


def test_an_error_of_ours_while_a_frame_arrives_ends_its_channel_and_is_told_once() -> None:
    async def scenario() -> None:
        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
        peer = Peer(pool=BufferPool(1 << 17))
        with mock.patch.object(peer.pool, "grow", side_effect=BufferError("a fault")):
            await peer.send(frame(b"x" * 100_000)[:50_000])
            await peer.until(lambda: bool(peer.closed))
            await asyncio.sleep(0.01)
        assert [str(error) for error in told] == ["a fault"]
        assert peer.pool.in_use == 0
        peer.sock.close()

    run(scenario)


FREED_IN: list[threading.Thread] = []


class Freed(bytes):
    """Tells in which thread it is freed."""

    def __del__(self) -> None:
        FREED_IN.append(threading.current_thread())


@pytest.mark.parametrize("read", [True, False])
def test_a_large_part_is_freed_in_a_thread_when_it_is_sent_or_never_will_be(read: bool) -> None:
    size = FREED_APART_SIZE + 1

    async def scenario() -> None:
        peer, loop = Peer(), asyncio.get_running_loop()
        FREED_IN.clear()
        peer.channel.write([b"before", Freed(size), b"after"])
        left = size + len(b"beforeafter") if read else 100_000
        while left > 0:
            left -= len(await loop.sock_recv(peer.sock, 1 << 20))
        if not read:
            peer.channel.close()
        await peer.until(lambda: bool(FREED_IN))
        assert [threading.main_thread()] != FREED_IN
        peer.channel.close()
        peer.sock.close()

    run(scenario)


def test_small_parts_are_freed_at_once() -> None:
    async def scenario() -> None:
        peer = Peer()
        FREED_IN.clear()
        peer.channel.write([Freed(10_000)])
        assert [threading.main_thread()] == FREED_IN
        peer.channel.close()
        peer.sock.close()

    run(scenario)

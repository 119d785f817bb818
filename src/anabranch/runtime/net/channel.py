"""Channels: length-prefixed frames in, scattered parts out, without a copy where the kernel allows it.

A `FrameChannel` owns one transport. Bytes land in one buffer shared by all channels of a loop; frames that are whole
there are handed over in place. A frame that is not goes into a buffer of its own from a bounded pool, which grows as
its bytes arrive, and the rest of it is received straight into that buffer. The rule: a frame's memory belongs to its
handler only until the handler returns, unless the handler keeps it (`keep_frame`). Parts are sent together, file slices
by the kernel where the transport can; a
writer is registered only while the transport is full, and a peer that does not read its answers is not read either
(the handler pauses it).
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Protocol

from anabranch.runtime.gathered import Gathered
from anabranch.runtime.loop_steps import timed
from anabranch.runtime.net.pool import FRAMES_ROUND_S, SMALL_FRAME_SIZE, Buffer, BufferPool, Landing
from anabranch.runtime.net.transport import Transport

READ_TURN_SIZE_MAX = 1024 * 1024
"""The bytes one channel may receive before the other channels have their turn."""
FRAMES_PER_TURN_MAX = 16
"""The frames one channel may hand over before the other channels have their turn, however small they are."""
FRAMES_TURN_S = 0.001
"""After so long it is the others' turn, too."""
WRITE_TURN_SIZE_MAX = 4 * 1024 * 1024
"""The bytes one channel may send before the other channels have their turn."""
FREED_APART_SIZE = 16 * 1024 * 1024
"""A larger part is freed in a thread when it is sent: to give back its pages takes 0.08 ms for each MB."""
PARTS_PER_CALL_MAX = 512
GATHERED_PARTS_MAX = 64
"""Answers to frames that came in one piece are sent together, up to so many parts."""
LARGE_FRAME_SIZE = 64 * 1024
"""After a frame of this size the next length is read alone, so that the next frame lands in its own buffer."""

_LENGTH = struct.Struct(">i")


class FileSlice(Protocol):
    """A stretch of an open file that can be sent without being read."""

    @property
    def fd(self) -> int: ...

    @property
    def position(self) -> int: ...

    @property
    def size(self) -> int: ...


Part = bytes | bytearray | memoryview | Gathered | FileSlice
_IN_ONE_PIECE = (bytes, bytearray, memoryview)
_IN_MEMORY = (*_IN_ONE_PIECE, Gathered)


def memory_size(parts: Iterable[Part]) -> int:
    """The bytes of memory of parts: a slice of a file has none."""
    return sum(len(part) for part in parts if isinstance(part, _IN_MEMORY))


def _is_freed_apart(part: Part) -> bool:
    """Whether a part, or what it is the rest of, takes long to be freed."""
    whole = part.obj if isinstance(part, memoryview) else part
    return isinstance(whole, (bytes, bytearray)) and len(whole) > FREED_APART_SIZE


class FrameError(ValueError):
    """A length that no frame may have."""


class FrameHandler(Protocol):
    """The callbacks of a channel's owner, all called from the loop."""

    def on_frame(self, frame: memoryview) -> None:
        """Handle one frame, without its length. The memory is only valid during the call."""

    def on_drained(self) -> None:
        """Everything written has been taken by the transport, after some of it had to wait."""

    def on_closed(self, error: Exception | None) -> None:
        """The channel is closed: by the peer (None), by a `FrameError`, by an `OSError`."""


class _Nobody:
    """The owner of a closed channel."""

    def on_frame(self, frame: memoryview) -> None:
        """There are no more frames."""

    def on_drained(self) -> None:
        """There are no more answers."""

    def on_closed(self, error: Exception | None) -> None:
        """It is closed already."""


_NOBODY = _Nobody()


class FrameChannel:
    """One connected transport that carries frames of `int32 length, bytes`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: Transport,
        handler: FrameHandler,
        *,
        pool: BufferPool,
        landing: Landing,
        frame_size_max: int,
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._fd = transport.fd
        self._handler = handler
        self._pool = pool
        self._landing = landing
        self._frame_size_max = frame_size_max
        self._head = b""
        """The first bytes of a length."""
        self._kept: Buffer | None = None
        self._kept_range = (0, 0)
        self._waits = False
        """Whether it waits for its turn."""
        self._buffer: Buffer | None = None
        self._handed: Buffer | None = None
        """The buffer of the frame that is being handled, where it has one of its own."""
        self._frame: memoryview | None = None
        self._frame_size = 0
        self._filled = 0
        self._large = False
        self._out: deque[Part] = deque()
        self._unsent = 0
        self._reading = False
        self.writing = False
        """Whether bytes wait for the transport to take them."""
        self._paused = False
        self._consuming = False
        self._gathering = False
        """Whether answers to frames that came together wait to be sent together."""
        self._awaits_memory = False
        self.closed = False
        self.received = 0
        self.sent = 0
        self.progress_at = 0.0
        """When bytes last moved in either direction, on the loop's clock."""
        self.held_since = 0.0
        """Since when a buffer has been held, if one is."""

    @property
    def unsent(self) -> int:
        """Bytes written that the transport has not taken."""
        return self._unsent if self.writing else 0

    @property
    def unsent_memory(self) -> int:
        """Those of them that are in memory, not in files."""
        return memory_size(self._out) if self.writing else 0

    @property
    def holds_memory(self) -> bool:
        """Whether a frame that is not whole yet, or one that could not be handled yet, occupies a buffer."""
        return self._buffer is not None or self._kept is not None

    def start(self) -> None:
        """Begin to read."""
        self.progress_at = self._loop.time()
        self._read_on()

    # -- reading ---------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Hand over no further frame until `resume`."""
        self._paused = True
        self._read_off()

    def resume(self) -> None:
        """Continue after `pause`, first with the bytes already received."""
        if not self._paused:
            return
        self._paused = False
        if self._kept is not None and not self._consuming:
            self._consume_soon()
        else:
            self._read_on()

    def _read_on(self) -> None:
        if not (self._reading or self._paused or self._awaits_memory or self.closed):
            self._reading = True
            self._loop.add_reader(self._fd, timed(self._loop, "network", self._on_readable))

    def _read_off(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def _memory_is_back(self) -> None:
        self._awaits_memory = False
        self._read_on()

    def _on_readable(self) -> None:
        turn = READ_TURN_SIZE_MAX
        try:
            # With frames that wait for their turn nothing is received: to stop reading for that takes system calls.
            while turn > 0 and self._reading and self._kept is None:
                if self._frame is not None:
                    if self._filled == len(self._frame) and not self._grown():
                        break
                    got = self._transport.receive_into(self._frame[self._filled : self._filled + turn])
                    if got == 0:
                        self.close()
                        return
                    self._filled += got
                    self.received += got
                    turn -= got
                    if self._filled == self._frame_size:
                        self._finish_frame()
                    continue
                view = self._landing.view
                head, end = len(self._head), len(view)
                if head:
                    view[:head] = self._head
                if self._large:
                    end = 4
                elif self._pool.scarce:
                    end = min(SMALL_FRAME_SIZE, end)
                asked = end - head
                got = self._transport.receive_into(view if asked == len(view) else view[head:end])
                if got == 0:
                    self.close()
                    return
                self.received += got
                turn -= got
                self._head = b""
                end = head + got
                taken = self._consume(view[:end])
                if self._keeps(end - taken):
                    kept = self._pool.take(end - taken)
                    with memoryview(kept) as room:  # A bytearray would take a copy of a copy.
                        room[: end - taken] = view[taken:end]
                    self._keep(kept, 0, end - taken)
                elif taken < end:
                    self._head = bytes(view[taken:end])
                if got < asked:
                    break
        except (BlockingIOError, InterruptedError):
            pass
        except FrameError as error:
            self.close(error)
            return
        except OSError as error:
            self.close(error)
            return
        except Exception:  # ours: without an end of the channel it would be raised again and again
            self.close()
            raise
        self.progress_at = self._loop.time()

    def _consume(self, data: memoryview) -> int:
        """Hand over whole frames in `data`, as many as one turn may; return the bytes that are done with."""
        position = 0
        end = len(data)
        turn, turn_end = FRAMES_PER_TURN_MAX, 0.0
        self._consuming = self._gathering = True
        try:
            while turn and end - position >= 4 and not self._paused and not self.closed:
                turn -= 1
                (size,) = _LENGTH.unpack_from(data, position)
                if size < 0 or size > self._frame_size_max:
                    raise FrameError(f"a frame of {size} bytes, where at most {self._frame_size_max} are allowed")
                position += 4
                self._large = size >= LARGE_FRAME_SIZE
                if end - position < size:
                    self._begin_frame(size, data[position:])
                    return end
                following = position + size
                if turn_end == 0.0 and end - following >= 4:  # Most often a frame comes alone.
                    turn_s = min(FRAMES_TURN_S, FRAMES_ROUND_S / (1 + len(self._pool.turns)))
                    turn_end = perf_counter() + turn_s
                with data[position:following] as frame:
                    self._handler.on_frame(frame)
                position = following
                if end - position >= 4 and perf_counter() > turn_end:
                    break
        finally:
            self._consuming = self._gathering = False
            if self._out and not self.writing:
                self._send()
        if 0 < end - position < 4:
            self._large = False
        return position

    def _keeps(self, left: int) -> bool:
        """Whether bytes are left that wait for `resume` or for the channel's next turn."""
        return not self.closed and left > 0 and (self._paused or left >= 4)

    def _keep(self, buffer: Buffer, start: int, end: int) -> None:
        self.held_since = self._loop.time()
        self._kept, self._kept_range = buffer, (start, end)
        if not self._paused:
            self._consume_soon()

    def _consume_soon(self) -> None:
        if not self._waits:
            self._waits = True
            self._pool.turns.wait(self._loop, self._consume_kept)

    def _consume_kept(self) -> None:
        self._waits = False
        if self.closed or self._paused or self._kept is None:
            return
        buffer, (start, end) = self._kept, self._kept_range
        self._kept = None
        kept = False
        try:
            with memoryview(buffer) as view, view[start:end] as data:
                start += self._consume(data)
                if not self._keeps(end - start) and start < end:
                    self._head = bytes(view[start:end])
            kept = self._keeps(end - start)
        except (FrameError, OSError) as error:
            self.close(error)
        except Exception:  # ours: what has been handed over of it, and what has not, is not known any more
            self.close()
            raise
        finally:
            if not kept:
                self._pool.give(buffer)
        self.progress_at = self._loop.time()
        if kept:
            self._keep(buffer, start, end)
        elif not self._paused:
            self._read_on()

    def _give_kept(self) -> None:
        if self._kept is not None:
            self._pool.give(self._kept)
            self._kept = None

    def _begin_frame(self, size: int, start: memoryview) -> None:
        self.held_since = self._loop.time()
        self._frame_size = size
        self._hold(self._pool.begin(self, size, len(start)))
        assert self._frame is not None
        self._filled = len(start)
        self._frame[: self._filled] = start

    def _hold(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._frame = memoryview(buffer)[: self._frame_size]

    def _grown(self) -> bool:
        """Receive the rest of the frame into a larger buffer; False where it must wait for one."""
        frame, buffer = self._frame, self._buffer
        assert frame is not None and buffer is not None
        frame.release()
        larger = self._pool.grow(self, self._frame_size, buffer)
        self._hold(larger or buffer)
        if larger is None:
            self._awaits_memory = True
            self._read_off()
            self._pool.wait(self, self._memory_is_back)
            return False
        return True

    def _finish_frame(self) -> None:
        frame, buffer = self._frame, self._buffer
        assert frame is not None and buffer is not None
        self._frame = self._buffer = None
        self._consuming = True
        try:
            self.hand_over(buffer, frame)
        finally:
            self._consuming = False
            self._pool.end(self)

    def keep_frame(self, frame: memoryview) -> tuple[Buffer, memoryview]:
        """Leave the frame that is being handled to its handler: its buffer and the frame in it.

        The buffer is to be given back to the pool. A frame that shares one with others is copied.
        """
        size, buffer = len(frame), self._handed
        self._handed = None
        if buffer is None:
            buffer = self._pool.take(size)
            buffer[:size] = frame
        return buffer, memoryview(buffer)[:size]

    def hand_over(self, buffer: Buffer, frame: memoryview) -> None:
        """Have a frame handled that has a buffer of its own, which is given back unless its handler keeps it."""
        self._handed = buffer
        try:
            self._handler.on_frame(frame)
        finally:
            frame.release()
            if self._handed is not None:
                self._pool.give(buffer)
                self._handed = None

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, parts: Sequence[Part]) -> None:
        """Send `parts` in order, now as far as the socket takes them, and the rest as it drains."""
        if self.closed:
            return
        for part in parts:
            size = len(part) if isinstance(part, _IN_MEMORY) else part.size
            if size:
                self._out.append(part)
                self._unsent += size
        if not self.writing and (not self._gathering or len(self._out) >= GATHERED_PARTS_MAX):
            self._send()

    def _send(self) -> None:
        out = self._out
        turn = WRITE_TURN_SIZE_MAX
        try:
            while out and turn > 0:
                first = out[0]
                if isinstance(first, Gathered):
                    sent = self._transport.send_pieces(*first.unsent)
                    first.advance(sent)
                    if not first:
                        out.popleft()
                elif not isinstance(first, _IN_ONE_PIECE):
                    sent = self._transport.send_file(first.fd, first.position, min(first.size, turn))
                    if sent == 0:
                        raise OSError("a file ends before the slice of it that was to be sent")
                    if sent == first.size:
                        out.popleft()
                    else:
                        out[0] = _RestOfFile(first, sent)
                else:
                    del first  # It would keep what is sent.
                    sent = self._send_bytes()
                self._unsent -= sent
                self.sent += sent
                turn -= sent
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.close(error)
            return
        self.progress_at = self._loop.time()
        if out:
            if not self.writing:
                self.writing = True
                self._loop.add_writer(self._fd, timed(self._loop, "network", self._send))
        elif self.writing:
            self.writing = False
            self._loop.remove_writer(self._fd)
            self._handler.on_drained()

    def _send_bytes(self) -> int:
        out = self._out
        if len(out) == 1 and not _is_freed_apart(out[0]):  # Most answers are one part, and are sent alone.
            alone = out[0]
            assert isinstance(alone, _IN_ONE_PIECE)
            sent = self._transport.send(alone)
            if sent == len(alone):
                out.clear()
            elif sent:
                out[0] = memoryview(alone)[sent:]
            return sent
        batch: list[bytes | bytearray | memoryview] = []
        more = 0
        for part in out:
            if not isinstance(part, _IN_ONE_PIECE):
                more = socket.MSG_MORE
                break
            if len(batch) == PARTS_PER_CALL_MAX:
                break
            batch.append(part)
        transport = self._transport
        sent = left = transport.send(batch[0], more) if len(batch) == 1 else transport.send_parts(batch, more)
        spent: list[Part] = []
        for part in batch:
            if left < len(part):
                if left:
                    out[0] = memoryview(part)[left:]
                break
            left -= len(part)
            out.popleft()
            if _is_freed_apart(part):
                spent.append(part)
        if spent:
            batch.clear()
            del part
            self._loop.run_in_executor(None, spent.clear)
        return sent

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self, error: Exception | None = None) -> None:
        """Close the transport at once; unsent bytes are lost."""
        if self.closed:
            return
        self.closed = True
        self._read_off()
        if self.writing:
            self.writing = False
            self._loop.remove_writer(self._fd)
        if self._awaits_memory:
            self._pool.forget(self)
        if any(map(_is_freed_apart, self._out)):
            spent, self._out = self._out, deque()
            self._loop.run_in_executor(None, spent.clear)
        self._out.clear()
        self._unsent = 0
        if self._buffer is not None and self._frame is not None:
            self._frame.release()
            self._pool.give(self._buffer)
            self._frame = self._buffer = None
            self._pool.end(self)
        self._give_kept()
        self._transport.close()
        handler, self._handler = self._handler, _NOBODY  # The two hold each other.
        handler.on_closed(error)


class _RestOfFile:
    """The unsent rest of a file slice; keeps the slice, and so the file, alive."""

    __slots__ = ("_slice", "fd", "position", "size")

    def __init__(self, whole: FileSlice, sent: int) -> None:
        self._slice = whole
        self.fd = whole.fd
        self.position = whole.position + sent
        self.size = whole.size - sent

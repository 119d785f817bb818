"""Transports: bytes in, bytes out, whether plain or encrypted.

A `FrameChannel` speaks to its peer through a `Transport` alone; `connect` opens a client's stream. What encrypts has
the same methods. A method that cannot go on now raises BlockingIOError, and is called again when the descriptor is
readable (`receive_into`) or writable (the others).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

ProtocolT = TypeVar("ProtocolT", bound=asyncio.BaseProtocol)

_writev = ctypes.CDLL(None, use_errno=True).writev
_writev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_writev.restype = ctypes.c_ssize_t


class Transport(Protocol):
    """One connected, non-blocking stream. Every method may raise OSError: then the stream is of no more use."""

    fd: int
    """The descriptor whose readiness ends the wait."""

    def receive_into(self, buffer: memoryview, /) -> int:
        """Receive up to `len(buffer)` bytes into `buffer`; 0 when the peer has ended the stream."""

    def send(self, data: bytes | bytearray | memoryview, flags: int = 0, /) -> int:
        """Send as much of `data` as is taken now, and return its size. `flags` is 0 or MSG_MORE."""

    def send_parts(self, parts: Sequence[bytes | bytearray | memoryview], flags: int = 0, /) -> int:
        """As `send`, of several parts one after the other."""

    def send_pieces(self, at: int, count: int, /) -> int:
        """As `send`, of `count` pieces of memory whose addresses and sizes are at `at` (struct iovec)."""

    def send_file(self, fd: int, position: int, size: int, /) -> int:
        """As `send`, of a stretch of a file; 0 when the file ends before `position`."""

    def close(self) -> None:
        """End the stream at once."""


class PlainTransport:
    """A TCP stream. Receiving and sending are the socket's own methods: nothing is between them and the channel."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.fd = sock.fileno()
        self.receive_into: Callable[[memoryview], int] = sock.recv_into
        self.send = sock.send
        self._sock = sock

    def send_parts(self, parts: Sequence[bytes | bytearray | memoryview], flags: int = 0, /) -> int:
        """As `Transport.send_parts`: one system call."""
        return self._sock.sendmsg(parts, (), flags)

    def send_pieces(self, at: int, count: int, /) -> int:
        """As `Transport.send_pieces`: one system call."""
        sent: int = _writev(self.fd, at, count)
        if sent < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return sent

    def send_file(self, fd: int, position: int, size: int, /) -> int:
        """As `Transport.send_file`: the kernel copies."""
        return os.sendfile(self.fd, fd, position, size)

    def close(self) -> None:
        """As `Transport.close`."""
        self._sock.close()


async def connect(make_protocol: Callable[[], ProtocolT], host: str, port: int) -> ProtocolT:
    """Open a client's stream and give it to a protocol. OSError where nothing answers."""
    _, protocol = await asyncio.get_running_loop().create_connection(make_protocol, host, port)
    return protocol

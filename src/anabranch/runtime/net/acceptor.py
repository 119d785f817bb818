"""A listening socket, and the numbers of the connections that it hands over."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from anabranch.runtime.loop_steps import timed

ACCEPTS_PER_TURN_MAX = 64


class ConnectionNumbers:
    """Numbers connections in the order in which they are accepted, from 1 on."""

    def __init__(self) -> None:
        self.newest = 0
        """The number of the connection that was accepted last; 0 before the first."""

    def take(self) -> int:
        """Give the number of a connection that is accepted now."""
        self.newest += 1
        return self.newest


class Acceptor:
    """A listening socket: hands over every connection that arrives."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        host: str,
        port: int,
        on_connected: Callable[[socket.socket, tuple[str, int]], None],
        on_error: Callable[[OSError], None],
    ) -> None:
        """Bind and listen. OSError where the address cannot be had."""
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._loop = loop
        self._on_connected = on_connected
        self._on_error = on_error
        self._sock = socket.socket(family, kind, protocol)
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.setblocking(False)
            self._sock.bind(address)
            self._sock.listen(1024)
        except OSError:
            self._sock.close()
            raise
        self.port: int = self._sock.getsockname()[1]

    def start(self) -> None:
        """Begin to hand over connections."""
        self._loop.add_reader(self._sock.fileno(), timed(self._loop, "accept", self._on_readable))

    def _on_readable(self) -> None:
        for _ in range(ACCEPTS_PER_TURN_MAX):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors: the connection stays in the backlog, so rest a moment instead of spinning.
                self._loop.remove_reader(self._sock.fileno())
                self._loop.call_later(0.1, self._again)
                self._on_error(error)
                return
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._on_connected(sock, (str(address[0]), int(address[1])))

    def _again(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock.fileno(), timed(self._loop, "accept", self._on_readable))

    def close(self) -> None:
        """Stop listening."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()

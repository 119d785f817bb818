"""Peers that hang up while nobody reads their stream.

A stream that is not read does not show its end, which lies behind bytes that were not received. The kernel knows of it
apart from these (EPOLLRDHUP). So one epoll has the descriptors for which an end matters, and the loop watches that
epoll as it watches a socket. A peer that only shuts its side down looks the same. Each end is told once.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

from anabranch.runtime.loop_steps import timed

TOLD_AT_A_TIME = 64
"""Ends that are told before other work of the loop has its turn."""


class HangUps:
    """The descriptors whose peers' ends are awaited."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll: select.epoll | None = None
        self._tell: dict[int, Callable[[], None]] = {}

    def watch(self, fd: int, tell: Callable[[], None]) -> None:
        """Call `tell` once when the peer has ended its stream, or has already; a second call for `fd` does nothing."""
        if fd in self._tell:
            return
        if self._epoll is None:
            self._epoll = select.epoll()
            self._loop.add_reader(self._epoll.fileno(), timed(self._loop, "network", self._on_ends))
        self._epoll.register(fd, select.EPOLLRDHUP | select.EPOLLONESHOT)
        self._tell[fd] = tell

    def forget(self, fd: int) -> None:
        """Tell nothing more of a descriptor that is closed: the kernel has dropped it."""
        self._tell.pop(fd, None)

    def close(self) -> None:
        """Watch nothing more."""
        self._tell.clear()
        if self._epoll is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None

    def _on_ends(self) -> None:
        assert self._epoll is not None
        for fd, _ in self._epoll.poll(0, TOLD_AT_A_TIME):
            if (tell := self._tell.get(fd)) is not None:
                tell()

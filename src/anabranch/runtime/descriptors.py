"""The descriptors of the process: how many there are, and how connections and files of logs share them.

The system counts sockets and files together. If either could take all of them, nobody could connect, or no log be
written. So each has a share of its own, and a rest is kept for everything else (`OWN`): the metadata store, listeners,
files that threads open for a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import time
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeVar

from anabranch.base.errors import AnabranchError

OWN = 128
LEAST = 32
"""The least share of either."""
UNLIMITED = 1 << 30
SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))
"""The errors of too few descriptors, or too little memory, for a moment."""
PAUSES_S = (0.01, 0.05, 0.2, 0.5, 1.0)
"""Between attempts to open a file nevertheless."""
T = TypeVar("T")


class Shares(NamedTuple):
    """How many descriptors each may use."""

    connections: int
    files: int


def raise_limit() -> int:
    """Raise the limit of descriptors as far as the process may; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def share(limit: int, *, connections: int, files: int) -> Shares:
    """Share the descriptors below `limit`: each gets what it asks for, or a half, or what the other leaves.

    AnabranchError where there are too few to run.
    """
    left = limit - OWN
    if left < 2 * LEAST:
        raise AnabranchError(
            f"The process may open {limit} descriptors; a broker needs {OWN + 2 * LEAST} at least. Raise the limit "
            "(ulimit -n, LimitNOFILE)."
        )
    if connections + files <= left:
        return Shares(connections, files)
    half = left // 2
    if connections <= half:
        return Shares(connections, left - connections)
    if files <= half:
        return Shares(left - files, files)
    return Shares(half, left - half)


def attempts(work: Callable[[], T]) -> Generator[float, None, T]:
    """Do work that opens files, again while there are too few descriptors: that is over soon, and no damage.

    Yields the seconds to wait before the next attempt; the result is that of the work, or its error.
    """
    for pause_s in PAUSES_S:
        try:
            return work()
        except OSError as error:
            if error.errno not in SHORTAGES:
                raise
        yield pause_s
    return work()


def patiently(work: Callable[[], T]) -> T:
    """Take all `attempts`. Blocks."""
    trying = attempts(work)
    while True:
        try:
            time.sleep(next(trying))
        except StopIteration as end:
            found: T = end.value
            return found


async def patiently_in_loop(work: Callable[[], T]) -> T:
    """Take all `attempts`, in the event loop."""
    trying = attempts(work)
    while True:
        try:
            pause_s = next(trying)
        except StopIteration as end:
            found: T = end.value
            return found
        await asyncio.sleep(pause_s)

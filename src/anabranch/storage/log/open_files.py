"""The files that logs hold open: at most so many, the least recently used logs closed first.

A log opens a segment's file when it is first used, and keeps it. Before one more is opened, logs that were not used
lately let theirs go, until there is room. The rules:

- A file is closed by dropping the reference to it: whoever reads, sends or syncs it holds one of his own, and what is
  sent keeps counting until it is sent.
- A file with unsynced bytes stays open: the kernel tells of a write that failed to those who had the file open then,
  and to them alone once the inode is forgotten. Such a log is synced first; that begins before the last quarter of the
  room is used, so that logs which nobody syncs (durability=os) are closed in time.
- Where nothing can be closed, an append is refused (EMFILE) until syncs have ended, and a read opens the file for
  itself alone. Connections never wait for files: their share of the descriptors is another one.

Everything is called in the event loop.
"""

from __future__ import annotations

import errno
import os
import time
from typing import Protocol

from anabranch.base.limits import OPEN_FILES_MAX
from anabranch.runtime.disk import File
from anabranch.runtime.events import EventLimit, EventLogger

events = EventLogger("open files")

LOOKED_AT_MAX = 64
"""Logs that are looked at for room, in one go."""
WARNING_INTERVAL_S = 10.0
SYNCED_AHEAD = 4
"""Logs that are looked at, and synced if need be, for each file that is opened in the last quarter of the room."""


class FileHolder(Protocol):
    """A log."""

    lately_used: bool
    """Set by the log with every use, cleared here: a file was used lately if it was used since it was opened."""

    def let_go(self) -> bool:
        """Close all files that hold no unsynced bytes; sync the others, to be closed then. Whether all are closed."""


class OpenFiles:
    """The open files of all logs of a broker."""

    def __init__(self, most: int = OPEN_FILES_MAX) -> None:
        self.most = most
        self.closed = 0
        """Logs whose files were closed to make room, so far."""
        self.refused = 0
        """Files that were not opened for want of room, so far."""
        self._warnings = EventLimit(WARNING_INTERVAL_S)
        self._open: set[int] = set()
        self._holders: dict[FileHolder, None] = {}
        """Logs with open files, those that have had them for longest first."""

    def __len__(self) -> int:
        """Count the open files, those included that are kept open only because they are being sent."""
        return len(self._open)

    def make_room(self) -> bool:
        """Close files until one more may be opened; whether it may."""
        if len(self._open) >= self.most - self.most // 4:
            self._look(SYNCED_AHEAD, room=False)
        if len(self._open) >= self.most:
            self._look(LOOKED_AT_MAX, room=True)
        if len(self._open) < self.most:
            return True
        self.refused += 1
        suppressed = self._warnings.admit(time.monotonic())
        if suppressed is not None:
            events.warning(
                "file of a log not opened: max.open.files are open, and none can be closed now",
                open_files=len(self._open),
                suppressed=suppressed,
            )
        return False

    def opened(self, holder: FileHolder, file: File) -> None:
        """Note a file that was opened after `make_room`."""
        file.count_in(self._open)
        self._holders[holder] = None
        holder.lately_used = False

    def forget(self, holder: FileHolder) -> None:
        """Forget a log that closes."""
        self._holders.pop(holder, None)

    def refusal(self) -> OSError:
        """The error of an append without room."""
        return OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)}: max.open.files is {self.most}, none can be closed")

    def _look(self, count: int, *, room: bool) -> None:
        """Look at the oldest logs: close those not used since the last look, or any where room is needed."""
        used: list[FileHolder] = []
        for _ in range(min(count, len(self._holders))):
            if room and len(self._open) < self.most:
                return
            holder = next(iter(self._holders))
            del self._holders[holder]
            self._holders[holder] = None
            if holder.lately_used:
                holder.lately_used = False
                used.append(holder)
            else:
                self._close(holder)
        for holder in used if room else ():
            if len(self._open) < self.most:
                return
            self._close(holder)

    def _close(self, holder: FileHolder) -> None:
        if holder.let_go():
            self._holders.pop(holder, None)
            self.closed += 1

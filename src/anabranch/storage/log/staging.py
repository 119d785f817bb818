"""Large batches, which a thread writes beside the log before they are appended: the append only gives them a name.

To write a megabyte takes the processor 0.3 to 2.4 ms, which the loop cannot spend on a batch of 60. So, for each batch:

    a thread writes S.tmp, in the log's directory     nothing is promised, and a start removes what it finds of S
    the append writes the header into S, finishes the active segment unless that is empty, and renames S to <base>.log

The header is all that an append changes in a batch (its offset, its epoch, and perhaps its time and its producer). An
error leaves the log as it was, with a finished segment perhaps. From then on S is the active segment: smaller batches
follow in it. A batch is taken from the disk of the log that it was staged for alone; where a resize has come between,
that staging ends unused, and it is staged again (ADR 0069).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from anabranch.records.batch import HEADER_SIZE
from anabranch.runtime.disk import Disk, File
from anabranch.runtime.thread_work import to_the_end
from anabranch.storage.log.epochs import LeaderEpochs
from anabranch.storage.log.home import LogHome

STAGED_SUFFIX = ".staged.tmp"
"""A start removes all that ends with `.tmp`."""
_numbers = itertools.count()
_thread = ThreadPoolExecutor(1, thread_name_prefix="stage")


class StagedBatch:
    """One batch, and the file that it is written to."""

    __slots__ = ("_data", "_disk", "_error", "_file", "path")

    def __init__(self, disk: Disk, path: Path, data: memoryview) -> None:
        self.path = path
        """Where it is until it is appended."""
        self._disk = disk
        self._data = data
        self._file: File | None = None
        self._error: OSError | None = None

    @property
    def is_appended(self) -> bool:
        """Whether the file has the name of a segment."""
        return self._file is not None and self._file.path != self.path

    def write(self) -> None:
        """Write the batch; an error is raised when it is appended. Blocks."""
        try:
            self._file = self._disk.open(self.path, create=True)
            self._file.write(self._data, 0)
        except OSError as error:
            self._error = error

    def drop(self) -> None:
        """Close and remove the file, which gives back its blocks: 20 ms for 85 MB. Blocks."""
        self._file = None
        with contextlib.suppress(OSError):  # The next start removes it.
            self._disk.unlink(self.path)

    def stamped(self) -> File:
        """Write the header as it is now, and return the file. OSError: also what the disk refused before."""
        if self._error is not None:
            raise self._error
        assert self._file is not None
        self._file.write(self._data[:HEADER_SIZE], 0)
        return self._file


class Staging:
    """The staged batches of one log. Everything is called in the thread of the log."""

    def __init__(self, disk: Disk, home: LogHome) -> None:
        self._disk = disk
        self._home = home
        self.ready: dict[int, StagedBatch] = {}
        """By the identity of their data; an append takes its own out."""

    def __contains__(self, data: object) -> bool:
        """As `StagedBatches.__contains__`."""
        return id(data) in self.ready

    @contextlib.asynccontextmanager
    async def hold(self, data: memoryview, epochs: LeaderEpochs) -> AsyncIterator[None]:
        """As `StagedBatches.hold`."""
        staged = StagedBatch(self._disk, self._home.directory / f"{next(_numbers)}{STAGED_SUFFIX}", data)
        try:
            with contextlib.suppress(OSError):  # Then the file cannot be made, either.
                self._home.make(epochs)
            await to_the_end(_thread, staged.write)
            self.ready[id(data)] = staged
            yield
        finally:
            self.ready.pop(id(data), None)
            if not staged.is_appended:
                await to_the_end(_thread, staged.drop)

"""The interfaces of the two stores; the server uses nothing else of them (storage.md).

`PartitionLog` holds one partition's records. Appending gives offsets at once and durability later, in order; near
records are read at once, others are handed back as an awaitable, which never blocks the event loop.

`MetadataStore` is a tree of small versioned nodes, as ZooKeeper has it. A node has bytes, a version that starts at 0
and grows by one with every `set`, and children. A change may be made conditional on the version that was read. An
ephemeral node has no children, and goes when the session that made it ends. A watch is called once, after a change is
durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol, TypeVar

from anabranch.base.errors import AnabranchError
from anabranch.machines.progress import Rewritten
from anabranch.records.batch import BatchHeader
from anabranch.runtime.net.channel import FileSlice
from anabranch.runtime.syncs import Told
from anabranch.storage.log.config import LogConfig
from anabranch.storage.log.epochs import LeaderEpochs
from anabranch.storage.log.errors import OfflineLogError, OffsetOutOfRangeError

__all__ = ["OfflineLogError", "OffsetOutOfRangeError"]

T = TypeVar("T")


class Appended(NamedTuple):
    """The offsets that an append was given."""

    base_offset: int
    last_offset: int


IsVoid = Callable[[int, int], bool]
"""Says, in the event loop, whether a producer's transactional record at an offset is of an aborted transaction."""


def nothing_is_void(producer_id: int, offset: int) -> bool:
    """The `IsVoid` of a log without aborted transactions."""
    del producer_id, offset
    return False


class Slice:
    """Whole record batches of a log; they stay as they are, whatever becomes of the log, while the slice lives."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size
        """Bytes."""

    def __len__(self) -> int:
        return self.size

    def view(self) -> memoryview:
        """Give the bytes."""
        raise NotImplementedError

    @property
    def wire(self) -> memoryview | FileSlice:
        """The records for a response: bytes, or a range of an open file."""
        return self.view()

    def next_offset(self) -> int | None:
        """Read where the log goes on behind the slice; None where all of it would have to be looked at. OSError."""
        return None


class FetchedSlice(Slice):
    """Batches that were fetched into memory."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes | memoryview) -> None:
        super().__init__(len(data))
        self._data = memoryview(data)

    def view(self) -> memoryview:
        """Give the bytes."""
        return self._data


class LogObserver(Protocol):
    """Called by a log about changes of its records; in the caller's thread, without awaiting."""

    def log_cut(self, end: int) -> None:
        """The log ends at `end` now: unsynced records had to be cut after a failed sync."""

    def before_delete(self, start: int) -> None:
        """The records below `start` are about to be deleted. May block; an OSError keeps the records."""

    def high_watermark_moved(self) -> None:
        """A sync that `commit` or `commit_then` asked for has moved the high watermark."""


class Unobserved:
    """The observer of a log that has no other; nothing happens."""

    def log_cut(self, end: int) -> None:
        """Do nothing."""

    def before_delete(self, start: int) -> None:
        """Do nothing."""

    def high_watermark_moved(self) -> None:
        """Do nothing."""


class StagedBatches(Protocol):
    """Batches of which an append has nothing large left to write, as that was done beside the loop."""

    def __contains__(self, data: object) -> bool:
        """Whether this very batch, not one that is equal to it, is staged."""

    def hold(self, data: memoryview, epochs: LeaderEpochs) -> AbstractAsyncContextManager[None]:
        """Have one batch staged meanwhile; it may be appended once. An OSError is one of the append.

        `epochs`: those of the log, which may have nothing on the disk yet.
        """


class PartitionLog(Protocol):
    """The records of one partition, in batches as they came from the wire.

        log start <= flushed <= high watermark <= end

    Everything is called in the event loop, and nothing there waits for a disk or a network, but for what says that it
    blocks. OfflineLogError where the log is damaged.
    """

    epochs: LeaderEpochs
    """Which leader epoch began at which offset; to be read."""

    @property
    def staging(self) -> StagedBatches:
        """The large batches that are about to be appended."""

    @property
    def log_start(self) -> int:
        """The offset of the first record that may be read."""

    @property
    def rewritten(self) -> Rewritten:
        """Which records compaction may have dropped."""

    @property
    def end(self) -> int:
        """The offset that the next record is given."""

    @property
    def flushed(self) -> int:
        """The offset below which records survive a power loss."""

    @property
    def high_watermark(self) -> int:
        """The offset below which records may be read: `flushed`, or `end` where durability is left to the system."""

    @property
    def size(self) -> int:
        """Bytes of all batches."""

    @property
    def flush_due(self) -> bool:
        """Whether it is time for a `commit` although no request waits for one."""

    def opens_file(self, size: int, now_ms: int) -> bool:
        """Whether an append of so many bytes has to open its file, or to make it: that takes as long as ten appends."""

    def observe(self, observer: LogObserver) -> None:
        """Set the observer of the log's changes; a log has one."""

    def configure(self, config: LogConfig) -> None:
        """Go on with other settings."""

    # Appending.

    def resume(self, now_ms: int) -> None:
        """Take appends again after a failed sync: cut the uncertain tail. OSError while the log takes none."""

    def append(
        self, data: bytearray | memoryview, leader_epoch: int, now_ms: int, header: BatchHeader | None = None
    ) -> Appended:
        """Append whole, checked batches; offsets and the epoch are stamped into `data`.

        `header` is that of a single batch, if the caller has read it. OSError, with the log unchanged, where the log
        takes no appends.
        """

    def commit_then(self, done: Told) -> None:
        """Make all that was appended durable, and call `done` with the OSError that prevents it, or None."""

    def commit(self) -> asyncio.Future[None]:
        """As `commit_then`, as a future of the caller's own."""

    def start_epoch(self, epoch: int) -> None:
        """End the current leader epoch at the log's end and begin `epoch` there. OSError; then nothing has changed."""

    # Reading.

    def read(self, offset: int, size_max: int, *, end: int | None = None) -> Slice | Awaitable[Slice | None] | None:
        """Find the batches from the one that holds `offset` on, at least one, and otherwise not more than `size_max`.

        Nothing at or above `end` (default: the high watermark), which is a batch boundary, is given; None when there
        is nothing. OffsetOutOfRangeError.
        """

    def slices(self) -> Sequence[Slice] | Awaitable[Sequence[Slice]]:
        """Find everything from the log's start to its end, in order."""

    def batch_for_timestamp(self, timestamp: int) -> Slice | Awaitable[Slice | None] | None:
        """Find the first batch, below the high watermark, that has a record of `timestamp` or later."""

    def batch_of_max_timestamp(self) -> Slice | Awaitable[Slice | None] | None:
        """Find the first batch that has the largest timestamp in the log."""

    def end_offset_for_epoch(self, epoch: int) -> tuple[int, int]:
        """Answer OffsetForLeaderEpoch: the largest epoch not above `epoch`, and its end; (-1, -1) where unknown."""

    def next_record(self, offset: int, is_void: IsVoid = nothing_is_void) -> int | Awaitable[int]:
        """Find the first offset not below `offset` of a record that a reader can still be given; the end without one.

        Not given are control records, transactional records that `is_void` names, and records that were deleted or
        compacted away. The work is bounded: after `storage.next_record.SCAN_MAX` bytes the answer is the offset up to
        which there is no such record, which is asked about next. OSError, OfflineLogError, DecodeError.
        """

    # Deleting.

    def delete_before(self, offset: int) -> Awaitable[None] | None:
        """Move the log start to `offset`, durably; None when that is done. OSError, OffsetOutOfRangeError."""

    async def remove_dropped(self) -> None:
        """Give back the room of what was deleted, beside the loop; without it the next start does."""

    def retain(self, now_ms: int, before: int | None = None) -> int:
        """Delete records past their retention, none from `before` on; return the bytes deleted. Blocks; OSError."""

    def retained_from(self, now_ms: int, before: int | None = None) -> int:
        """The offset at which the log would start after `retain`."""

    # Kept beside the records: the state of their producers.

    def headers_from(self, offset: int) -> Iterator[BatchHeader]:
        """Read the headers of all batches that end at or behind `offset`, in order. Blocks; OSError."""

    def newest_snapshot(self, restore: Callable[[bytes], T]) -> tuple[int, T] | None:
        """Restore the newest snapshot that fits the log; return it with the end it was taken at, None without one.

        One that `restore` refuses with a DecodeError is damaged: it is put out of the way. OfflineLogError, with
        everything as it was, where it told of deleted records that no other one tells of. Blocks; OSError.
        """

    def write_snapshot(self, data: bytes, *, only: bool = False) -> None:
        """Keep a snapshot of state derived from the log up to its end; with `only`, no other. Blocks; OSError."""

    async def write_snapshot_beside(self, make: Callable[[], bytes], *, replace: bool = False) -> bool:
        """Keep the snapshot that `make` returns, in a thread. OSError.

        False if one as new is there, or the log was cut. With `replace` one that was taken at the same end is replaced.
        """

    async def forget_snapshots_below(self, offset: int) -> None:
        """Remove the snapshots taken below `offset`, if one taken there or later is left. OSError."""

    def has_snapshot_from(self, offset: int) -> bool:
        """Whether a snapshot covers every record below `offset`, also after a power loss. Blocks."""

    def flush(self) -> None:
        """Make all that was appended durable. Blocks; OSError."""

    def checkpoint(self) -> None:
        """Note durably how far a recovery need not check the log again. Blocks; OSError."""

    def note_points(self, start: int | None = None) -> None:
        """Note what `checkpoint_beside` makes durable; it holds when the checkpoints are saved. OSError."""

    async def checkpoint_beside(self, start: int | None = None) -> None:
        """As `checkpoint`, without blocking, of a log that is about to start at `start`. OSError.

        `retain` and `delete_before` up to `start` then hardly block. After a crash the log starts at `start`.
        """

    def close(self) -> None:
        """Make all that was appended durable and let the log go. Blocks; OSError."""


async def fetched(found: T | Awaitable[T]) -> T:
    """Await the answer of a log if it is an awaitable."""
    return await found if isinstance(found, Awaitable) else found


ANY_VERSION = -1


class MetadataError(AnabranchError):
    """A change or a read that the tree does not allow; the path is in the text."""


class DamagedMetadataError(MetadataError, OSError):
    """What is stored is not what was written; to a broker that runs it is a refusal of the disk."""


class NoNodeError(MetadataError):
    """No node has that path, or none has the path above the one to create."""


class NodeExistsError(MetadataError):
    """A node has that path already."""


class BadVersionError(MetadataError):
    """The node has another version than was expected: it changed since it was read."""


class NotEmptyError(MetadataError):
    """The node has children and cannot be deleted."""


class Change(Enum):
    """The event of a watch."""

    CREATED = "created"
    CHANGED = "changed"
    DELETED = "deleted"
    CHILDREN = "children"


@dataclass(frozen=True, slots=True)
class Create:
    """Make a node; its parent must exist."""

    path: str
    data: bytes = b""
    ephemeral: bool = False


@dataclass(frozen=True, slots=True)
class Set:
    """Give a node new bytes."""

    path: str
    data: bytes
    version: int = ANY_VERSION


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a node without children."""

    path: str
    version: int = ANY_VERSION


@dataclass(frozen=True, slots=True)
class Check:
    """Change nothing, but require that a node exists, at `version` where one is given."""

    path: str
    version: int = ANY_VERSION


class StoredNode(NamedTuple):
    """One node of a tree that was read."""

    path: str
    data: bytes
    version: int


Operation = Create | Set | Delete | Check
Watch = Callable[[str, Change], None]
"""Called in the event loop with the path and what happened to its node; it must not await nor raise."""


class MetadataStore(Protocol):
    """One session on the tree, used within one event loop. What the version of the root counts is the store's affair.

    Operations take effect in the order in which they were called. Every one of them may raise OSError: then nothing has
    changed. A caller that is cancelled while it awaits a change does not know whether the change is made.
    """

    session: int
    """The session's number, which no other session ever has."""

    async def get(self, path: str) -> tuple[bytes, int]:
        """Read a node's bytes and version; NoNodeError."""

    async def exists(self, path: str) -> bool:
        """Return whether a node has this path."""

    async def existing(self, paths: Collection[str]) -> frozenset[str]:
        """Choose the paths that have a node: one answer about many paths."""

    async def owner(self, path: str) -> int | None:
        """Read the session that an ephemeral node belongs to, None for a lasting node; NoNodeError."""

    async def children(self, path: str) -> Sequence[str]:
        """Read the names of a node's children, sorted; NoNodeError."""

    async def subtree(self, path: str) -> Sequence[StoredNode]:
        """Read a node and all nodes below it, parents before their children; nothing where no node has this path."""

    async def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False) -> None:
        """Make a node, durably; NodeExistsError, or NoNodeError where its parent is missing."""

    async def ensure(self, path: str) -> None:
        """Make a node, and those above it, where they are missing."""

    async def set(self, path: str, data: bytes, expected_version: int = ANY_VERSION) -> int:
        """Give a node new bytes, durably, and return its new version; NoNodeError, BadVersionError."""

    async def delete(self, path: str, expected_version: int = ANY_VERSION) -> None:
        """Remove a node, durably; NoNodeError, BadVersionError, NotEmptyError."""

    async def multi(self, operations: Sequence[Operation]) -> None:
        """Make all of these changes, in order, or none; the first that cannot be made raises its error."""

    def watch(self, path: str, watch: Watch) -> None:
        """Call `watch` once when the node is created, changed or deleted, or its children come or go.

        A change whose operation was called before `watch` was may be reported, too.
        """

    async def close(self) -> None:
        """End the session after the operations that were called before; its ephemeral nodes go."""


def check_path(path: str) -> None:
    """MetadataError where `path` is not a path."""
    if not path.startswith("/") or path.endswith("/") or "//" in path:
        raise MetadataError(f"{path!r} is not a path: expected /name/name, without a slash at the end.")


def parent_of(path: str) -> str:
    """Name the node above the one at `path`."""
    return path.rpartition("/")[0] or "/"

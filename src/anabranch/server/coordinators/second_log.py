"""The second log of a shard, beside its first one: there as soon as its topic is.

What goes into it is appended before anything goes into the first log. Its topic may be missing, made, deleted and made
anew at any time. Tombstones need no log: what they delete is gone with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.records.batch import parse_header
from anabranch.records.key_values import encode_pairs
from anabranch.runtime.clock import Clock
from anabranch.server.coordinators.durable_replies import AppendedLog, DurableReplies
from anabranch.server.partitions.partition import Partition


class SecondLog:
    """The second log of one shard; `DurableReplies.beside` is what was appended to it."""

    def __init__(
        self,
        find: Callable[[], Partition | None],
        want: Callable[[], None],
        durable: DurableReplies,
        clock: Clock,
        on_changed: Callable[[], None],
    ) -> None:
        """`find` finds its partition, `want` has its topic made soon; `on_changed` watches the partition."""
        self.find = find
        self._want = want
        self._durable = durable
        self._clock = clock
        self._on_changed = on_changed

    def open(self) -> AppendedLog | None:
        """The log, as it is now: its topic may have been made, or made anew."""
        partition, known = self.find(), self._durable.beside
        if partition is None or (known is not None and known.partition is partition):
            return None if partition is None else known
        self.close()
        if known is not None:
            known.is_replaced = True
        self._durable.beside = opened = AppendedLog(partition)
        opened.written = partition.log.end
        partition.watch(self._on_changed)
        return opened

    def close(self) -> None:
        """Watch the partition no longer."""
        if self._durable.beside is not None:
            self._durable.beside.partition.unwatch(self._on_changed)

    def append(self, pairs: Sequence[tuple[bytes, bytes | None]], now_ms: int) -> None:
        """Append records. ApiError COORDINATOR_NOT_AVAILABLE where the log takes none, or is missing."""
        log = self.open()
        if log is None:
            if any(value is not None for _, value in pairs):
                self._want()
                raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE, "The log beside the coordinator's is missing.")
            return
        partition = log.partition
        try:
            partition.log.resume(self._clock.now_ms())
            error = partition.unavailable()
            if error is not ErrorCode.NONE:
                raise OSError(0, error.name)
            batch = encode_pairs(pairs, self._clock.now_ms())
            log.written = partition.append(batch, parse_header(batch), now_ms).last_offset + 1
        except OSError as failure:
            partition.storage_failed(failure)
            raise ApiError(
                ErrorCode.COORDINATOR_NOT_AVAILABLE, f"{partition.name} takes no records: {failure}"
            ) from failure
        if partition.settings.fsync or partition.log.flush_due:
            self._durable.hasten(log)

"""Leader epochs of a partition log: which epoch began at which offset (KIP-101, KIP-279).

The rule: epochs and their start offsets both grow strictly. An epoch that ends without a record is replaced by the
next one, which starts where it did; asking for its end gives the same answer either way. The file is synced when the
recovery point moves; above that point every epoch that has records is in their batches' headers, and one that has none
is begun again at the same log end by the leader.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

from anabranch.records.checksum import crc32c
from anabranch.runtime.disk import Disk
from anabranch.storage.log.damage import keep_damaged

logger = logging.getLogger("anabranch.storage.log")

FILE = "leader-epoch-checkpoint"
NO_EPOCH = (-1, -1)
_CHECKSUM_SIZE = 9


class LeaderEpochs:
    """The epochs of one log, oldest first."""

    def __init__(self, entries: Iterable[tuple[int, int]] = ()) -> None:
        self._epochs: list[int] = []
        self._starts: list[int] = []
        for epoch, start in entries:
            self.start(epoch, start)

    @property
    def latest(self) -> int:
        """The epoch that appends belong to; -1 before the first."""
        return self._epochs[-1] if self._epochs else -1

    @property
    def entries(self) -> list[tuple[int, int]]:
        """All (epoch, start offset), oldest first."""
        return list(zip(self._epochs, self._starts, strict=True))

    def since(self, offset: int) -> list[tuple[int, int]]:
        """The epochs that have records at or behind `offset`, oldest first, each with the offset it began at."""
        first = max(bisect_right(self._starts, offset) - 1, 0)
        return list(zip(self._epochs[first:], self._starts[first:], strict=True))

    def start(self, epoch: int, offset: int) -> bool:
        """Begin `epoch` at `offset`; an epoch not above the latest changes nothing. Return whether it began."""
        if epoch <= self.latest:
            return False
        while self._starts and self._starts[-1] >= offset:
            self._starts.pop()
            self._epochs.pop()
        self._epochs.append(epoch)
        self._starts.append(offset)
        return True

    def end_of(self, epoch: int, log_end: int) -> tuple[int, int]:
        """Answer the largest epoch not above `epoch` and the offset at which it ended; (-1, -1) where unknown.

        An epoch from before everything that is known ended where the first known one starts (KIP-279).
        """
        if epoch < 0 or epoch > self.latest:
            return NO_EPOCH
        index = bisect_right(self._epochs, epoch)
        if index == 0:
            return epoch, self._starts[0]
        end = self._starts[index] if index < len(self._starts) else log_end
        return self._epochs[index - 1], end

    def epoch_at(self, offset: int) -> int:
        """The epoch that the record at `offset` was appended under; -1 where unknown."""
        index = bisect_right(self._starts, offset)
        return self._epochs[index - 1] if index else -1

    def truncate_from(self, offset: int) -> None:
        """Forget epochs that began at or after `offset`, where the log's tail is cut."""
        while self._starts and self._starts[-1] >= offset:
            self._starts.pop()
            self._epochs.pop()

    def truncate_before(self, offset: int) -> None:
        """Forget epochs that ended before `offset`, where the head is cut; the epoch of `offset` now starts there."""
        index = bisect_right(self._starts, offset) - 1
        if index >= 0:
            del self._epochs[:index], self._starts[:index]
            self._starts[0] = max(self._starts[0], offset)

    def to_bytes(self) -> bytes:
        """Write Kafka's `leader-epoch-checkpoint` (version, number of entries, one entry a line) and its CRC-32C."""
        lines = ["1", str(len(self._epochs)), *(f"{epoch} {start}" for epoch, start in self.entries)]
        data = ("\n".join(lines) + "\n").encode()
        return data + b"%08x\n" % crc32c(data)

    @classmethod
    def from_bytes(cls, data: bytes) -> LeaderEpochs:
        """Read the form of `to_bytes`, or version 0, which has no checksum; ValueError for a damaged file."""
        if data.startswith(b"1\n"):
            data, crc = data[:-_CHECKSUM_SIZE], data[-_CHECKSUM_SIZE:]
            if crc != b"%08x\n" % crc32c(data):
                raise ValueError("the content does not fit its checksum")
        version, count, *lines = data.decode("ascii").split("\n")
        if version not in ("0", "1") or len(lines) != int(count) + 1 or lines[-1]:
            raise ValueError(f"expected version 0 or 1 and {count} entries, found {version} and {len(lines) - 1}")
        entries = []
        for line in lines[:-1]:
            epoch, start = line.split(" ")
            entries.append((int(epoch), int(start)))
        return cls(entries)


class EpochsFile:
    """The file that holds a log's epochs, and how much of them it holds safely. Blocks; OSError."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        self.written = False
        """Whether the file has the epochs: then they survive the process."""
        self.durable = False
        """Whether the file with them is synced: then they survive a power loss."""
        self._disk = disk
        self._directory = directory
        self._damaged = False

    @property
    def _path(self) -> Path:
        return self._directory / FILE

    def load(self) -> LeaderEpochs | None:
        """Read the file; None where it is missing or torn."""
        if not self._disk.exists(self._path):
            return None
        try:
            return LeaderEpochs.from_bytes(self._disk.read(self._path))
        except ValueError as error:
            logger.warning("%s: %s; read from the batches instead", self._path, error)
            self._damaged = True
            return None

    def outdated(self) -> None:
        """Note that the epochs have changed."""
        self.durable = self.written = False

    def write(self, epochs: LeaderEpochs) -> None:
        """Write the epochs so that a crash of the process loses neither them nor those before."""
        self.durable = False
        self._keep_damaged()
        temporary = self._path.with_name(FILE + ".tmp")
        file = self._disk.open(temporary, create=True)
        file.truncate(0)
        file.write(epochs.to_bytes(), 0)
        self._disk.rename(temporary, self._path)
        self.written = True

    def sync(self, epochs: LeaderEpochs) -> None:
        """Write the epochs so that a power loss loses neither them nor those before, if that is not done yet."""
        if not self.durable:
            self._keep_damaged()
            self._disk.replace(self._path, epochs.to_bytes())
            self.durable = self.written = True

    def _keep_damaged(self) -> None:
        if self._damaged:
            logger.warning("%s: damaged, kept as %s", self._path, keep_damaged(self._disk, self._path).name)
            self._damaged = False

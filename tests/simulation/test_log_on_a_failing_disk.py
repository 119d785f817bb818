"""A partition log where any call of the disk may fail, also several in a row, and a kill may come between any two.

Errors are those of a real disk on real files: of writes that stop half-way, of cuts, names and removals. Whatever they
were, the next start opens the log, with all that was synced: nothing of this is damage.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from anabranch.records.batch import headers
from anabranch.runtime.disk import Disk, File
from anabranch.storage.checkpoints import Checkpoints
from anabranch.storage.log.config import Durability, LogConfig
from anabranch.storage.log.log import LocalLog
from tests.support.batches import make_batch
from tests.support.thorough import thorough

KINDS = ("open", "read", "write", "truncate", "sync", "rename", "unlink", "replace", "sync_directory")
LIVES = thorough(4_000, 120)
STEPS_MAX = 40
ATTEMPTS = 6
NAME = "t-0"


class Chance:
    """What fails, while `kinds` of calls may."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.part = self.random.choice((0.02, 0.1, 0.3))
        self.may_fail = self.random.sample(KINDS, self.random.randint(1, len(KINDS)))
        self.is_on = False
        self.told: list[str] = []

    def strikes(self, kind: str) -> bool:
        """Whether a call is to fail."""
        return self.is_on and kind in self.may_fail and self.random.random() < self.part

    def meet(self, kind: str, name: str) -> None:
        """Let a call fail, perhaps. OSError."""
        if self.strikes(kind):
            self.told.append(f"  {kind} {name} fails")
            raise OSError(errno.EIO, kind, name)


class FailingFile(File):
    """A file that fails by chance; what was not synced is not lost, for no power is."""

    __slots__ = ("chance",)

    def __init__(self, path: Path, fd: int, chance: Chance) -> None:
        super().__init__(path, fd)
        self.chance = chance

    def read(self, size: int, position: int) -> bytes:
        """Read, or fail."""
        self.chance.meet("read", self.path.name)
        return super().read(size, position)

    def write(self, data: bytes | bytearray | memoryview, position: int) -> None:
        """Write all, or a part."""
        if self.chance.strikes("write"):
            size = self.chance.random.randrange(len(data))
            super().write(memoryview(data)[:size], position)
            self.chance.told.append(f"  write {self.path.name} fails at {size} of {len(data)}, from {position}")
            raise OSError(errno.ENOSPC, "write")
        super().write(data, position)

    def truncate(self, size: int) -> None:
        """Cut the file, or fail."""
        self.chance.meet("truncate", self.path.name)
        super().truncate(size)

    def sync(self) -> None:
        """Succeed or fail: the power stays."""
        self.chance.meet("sync", self.path.name)


class FailingDisk(Disk):
    """A disk that fails by chance."""

    def __init__(self, chance: Chance) -> None:
        super().__init__()
        self.chance = chance

    def open(self, path: Path, *, create: bool = False) -> File:
        """Open a file, or fail."""
        self.chance.meet("open", path.name)
        file = super().open(path, create=create)
        fd, file.fd = file.fd, -1
        return FailingFile(path, fd, self.chance)

    def rename(self, path: Path, new: Path) -> None:
        """Rename, or fail."""
        self.chance.meet("rename", path.name)
        super().rename(path, new)

    def unlink(self, path: Path) -> None:
        """Remove, or fail."""
        self.chance.meet("unlink", path.name)
        super().unlink(path)

    def replace(self, path: Path, data: bytes) -> None:
        """Replace, or fail."""
        self.chance.meet("replace", path.name)
        super().replace(path, data)

    def sync_directory(self, path: Path) -> None:
        """Succeed or fail."""
        self.chance.meet("sync_directory", path.name)


class Life:
    """A log through failures and kills."""

    def __init__(self, seed: int, path: Path) -> None:
        self.path = path
        self.chance = Chance(seed)
        self.disk = FailingDisk(self.chance)
        random = self.chance.random
        self.config = LogConfig(
            durability=random.choice((Durability.FSYNC, Durability.OS)),
            segment_bytes=random.choice((300, 700, 100_000)),
            index_interval_bytes=random.choice((1, 4096)),
        )
        self.synced = self.now_ms = 0
        self.batches: dict[int, bytes] = {}
        """Those that were appended, by their base offset."""
        self.open()

    def open(self) -> None:
        """Start; where the disk refuses, again."""
        self.checkpoints = Checkpoints(self.disk, self.path)
        for attempt in itertools.count():
            try:
                self.log = LocalLog.open(self.path / NAME, self.config, disk=self.disk, checkpoints=self.checkpoints)
            except OSError:
                self.chance.is_on &= attempt < ATTEMPTS
            else:
                break
        self.chance.is_on = False
        assert self.log.end >= self.synced
        there = self.there()
        for offset, batch in sorted(self.batches.items()):
            if self.log.log_start <= offset < self.synced:
                assert there.get(offset) == batch, f"the batch at offset {offset} is another one"
            elif offset >= self.synced:
                del self.batches[offset]
        self.batches |= there  # Also what was not synced, or whose append failed, may be there.

    def there(self) -> dict[int, bytes]:
        """Read all batches."""
        found, offset = dict[int, bytes](), self.log.log_start
        while part := self.log.read(offset, 1 << 20, end=self.log.end):
            view = part.view()
            for position, header in headers(view):
                found[header.base_offset] = bytes(view[position : position + header.size])
                offset = header.next_offset
        return found

    def live(self) -> None:
        """Take some steps, each of which may fail."""
        random = self.chance.random
        steps: list[Callable[[], None]] = [self.append] * 4 + [self.flush] * 3
        steps += [self.resume, self.note, self.save, self.delete, self.kill]
        for _ in range(random.randint(5, STEPS_MAX)):
            self.now_ms += 1_500
            step = random.choice(steps)
            self.chance.told.append(f"{step.__name__}: {self.log.flushed} of {self.log.end}")
            self.chance.is_on = True
            try:
                step()
            except OSError as error:
                self.chance.told.append(f"  {error}")
            self.chance.is_on = False
        self.kill()

    def append(self) -> None:
        """Append some batches in one call."""
        random = self.chance.random
        batches = [make_batch(1, bytes(random.choice((10, 100, 250)))) for _ in range(random.choice((1, 3)))]
        data = memoryview(bytearray(b"".join(batches)))
        if len(batches) == 1 and random.random() < 0.3:
            asyncio.run(self.append_staged(data))
        else:
            self.log.append(data, 0, self.now_ms)
        for position, header in headers(data):
            self.batches[header.base_offset] = bytes(data[position : position + header.size])

    async def append_staged(self, data: memoryview) -> None:
        """Append what was written beside the log before; a kill may come between."""
        random = self.chance.random
        async with self.log.staging.hold(data, self.log.epochs):
            if random.random() < 0.3:
                raise OSError(errno.EIO, "nothing is appended after all")
            self.log.append(data, 0, self.now_ms)

    def flush(self) -> None:
        """Sync; what is synced must be there from now on."""
        self.log.flush()
        self.synced = max(self.synced, self.log.flushed)

    def resume(self) -> None:
        """Go on after a failed sync."""
        self.log.resume(self.now_ms)

    def note(self) -> None:
        """Note how far the log need not be checked."""
        self.log.note_recovery_point()

    def save(self) -> None:
        """Save what was noted."""
        self.checkpoints.save()

    def delete(self) -> None:
        """Delete records, and perhaps their files at once."""
        self.log.delete_before(self.chance.random.randint(self.log.log_start, self.log.high_watermark))
        if self.chance.random.random() < 0.5:
            self.log.dropped.remove_at_once()

    def kill(self) -> None:
        """Kill the broker and start it; the disk may fail meanwhile."""
        self.chance.is_on = self.chance.random.random() < 0.5
        self.open()


@pytest.mark.parametrize("first", range(4))
def test_whatever_fails_the_next_start_opens_the_log_with_all_that_was_synced(first: int, tmp_path: Path) -> None:
    for seed in range(first, LIVES, 4):
        path = tmp_path / str(seed)
        path.mkdir()
        life = Life(seed, path)
        try:
            life.live()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}\n" + "\n".join(life.chance.told)) from error

"""The data directory: one broker's home, locked while it runs, with its identity in `meta.properties`.

.lock  meta.properties  metadata.sqlite  clean-stop  boot-id  <topic>-<partition>/  <topic>-<partition>.producers
recovery-point-offset-checkpoint  log-start-offset-checkpoint  synced-offset-checkpoint
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from anabranch.base.errors import AnabranchError
from anabranch.base.ids import TopicPartition
from anabranch.records.batch import BatchHeader
from anabranch.runtime.disk import Disk
from anabranch.storage.checkpoints import Checkpoints
from anabranch.storage.log.config import LogConfig
from anabranch.storage.log.damage import DAMAGED_SUFFIX, aside, keep_damaged
from anabranch.storage.log.errors import OfflineLogError
from anabranch.storage.log.group_commit import GroupCommit
from anabranch.storage.log.log import LocalLog
from anabranch.storage.log.scrub import check_all, check_finding
from anabranch.storage.log.survey import LogSurvey, survey

META_FILE = "meta.properties"
LOCK_FILE = ".lock"
METADATA_FILE = "metadata.sqlite"
METADATA_COPY_FILE = "metadata-copy.sqlite"
"""A copy of the metadata, seconds old, which `anabranch repair` restores."""
METADATA_REPAIRED_FILE = "metadata.sqlite.repaired"
"""The metadata as a repair has made it, until it takes its place: whole, where it is there."""
RESERVE_FILE = "reserve"
RESERVE_SIZE = 4 << 20
"""Bytes that a start or a deletion on a full disk may write: it removes the file, which is made again later."""
TERM_FILE = "controller-epoch"
"""The epoch of the last controller's term: metadata of an earlier one is older than the logs."""
CLEAN_STOP_FILE = "clean-stop"
BOOT_FILE = "boot-id"
VERSION = 1
DELETED_SUFFIX = ".deleted"
"""Of a log that is being deleted, as earlier versions named it."""
DELETED_DIRECTORY = ".deleted"
"""Holds the logs that are being deleted, by number: a suffix to a topic's name may make it too long."""
UNKNOWN_DIRECTORY = "unknown"
"""Holds logs of partitions that the metadata did not have, when it was repaired."""


class DirectoryInUseError(AnabranchError):
    """Another broker runs on this data directory."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The cluster and the node that own the data."""

    cluster_id: str
    node_id: int


class DataDirectory:
    """A locked data directory. `release` it, or end the process."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = path
        self._disk = disk
        self._doomed = itertools.count()
        boot = disk.boot_id()
        self._boot = None if boot is None else boot.strip()
        self._unread: set[str] = set()
        """Logs that were not opened since a power loss: what it did to them is not known yet."""
        self._noting = threading.Lock()
        self._read: set[str] | None = set()
        """Those that were opened since this start; None once all others are known, or if nothing was lost before it."""
        self._seen: set[str] | None = None
        """While the logs are opened at a start: what is in the directory, and what was opened since. Most partitions
        may have no log yet, and to ask the disk for each takes as long as all else about it."""
        self._linked: dict[Path, Path] = {}
        """The logs that are elsewhere, by the directory that a link leads to."""
        self._spent = False
        """Whether the reserve was given up since this start."""
        self._reserving = threading.Lock()
        try:
            disk.make_directory(path)
            self._lock = disk.lock(path / LOCK_FILE, self.make_room)
        except BlockingIOError as error:
            raise DirectoryInUseError(
                f"The data directory {path} is in use by {self._holder()}. "
                "Stop that broker, or give this one a directory of its own with --data."
            ) from error
        except OSError as error:
            raise AnabranchError(f"The data directory {path} cannot be used: {error.strerror}.") from error
        self.stopped_cleanly = disk.exists(path / CLEAN_STOP_FILE)
        """Whether the last broker closed its logs, so that none needs checks."""
        try:
            self._boot_before = None
            if disk.exists(path / BOOT_FILE):
                self._boot_before, *unread = disk.read(path / BOOT_FILE).strip().split(b"\n")
                self._unread = set(map(os.fsdecode, unread))
            if self._boot is not None and self._boot == self._boot_before:
                self._read = None
            self.checkpoints = Checkpoints(disk, path)
        except OSError:
            self.release()
            raise

    @property
    def is_full(self) -> bool:
        """Whether so little of the disk is free that the reserve is for use. OSError."""
        return self._disk.free(self.path) < RESERVE_SIZE

    def make_room(self) -> None:
        """Give the reserve up, where the disk is full. Blocks; OSError."""
        path = self.path / RESERVE_FILE
        with self._reserving:
            if self._disk.exists(path) and self.is_full:
                self._disk.unlink(path)
                self._spent = True

    def keep_reserve(self) -> None:
        """Reserve space for a start on a full disk, while there is much more. Blocks; OSError.

        After a start or a deletion that has taken the reserve most of what is free is kept for the next one, which may
        come before there is space.
        """
        path = self.path / RESERVE_FILE
        with self._reserving:
            free = self._disk.free(self.path)
            size = self._disk.size(path) if self._disk.exists(path) else 0
            if free >= 4 * RESERVE_SIZE and size < RESERVE_SIZE:
                self._disk.reserve(path, RESERVE_SIZE)
            elif self._spent and not size:
                self._disk.reserve(path, min(free - free // 8, RESERVE_SIZE))

    @property
    def machine_restarted(self) -> bool:
        """Whether the machine is known to have been restarted since the logs were written, or cannot be known."""
        return self._boot is None or self._boot_before not in (None, self._boot)

    def _has_lost_power(self, name: str) -> bool:
        """Whether unsynced bytes of the log `name` may be missing in any order."""
        return self._boot is None or self._read is not None or name in self._unread

    def recovered(self) -> None:
        """Note that the logs were recovered: a crash from now on loses no bytes, unless the machine is restarted.

        Those that were not opened, or could not be, are noted, too. Blocks; OSError.
        """
        self._seen = None
        if self._boot is not None and self._read is not None:
            self._unread = {name for log in self.logs() if "\n" not in (name := str(log))} - self._read
            self._note_boot(self._boot)
            self._read, self._boot_before = None, self._boot

    def _note_boot(self, boot: bytes) -> None:
        names = map(os.fsencode, sorted(self._unread))
        self._disk.replace(self.path / BOOT_FILE, b"\n".join([boot, *names]) + b"\n")

    def _are_read(self, names: Collection[str]) -> None:
        """Note that logs were opened, or are gone: what a power loss did to them is known. Blocks."""
        with self._noting:
            if self._read is not None:
                self._read.update(names)
            elif not self._unread.isdisjoint(names):
                self._unread.difference_update(names)
                if self._boot is not None:
                    with contextlib.suppress(OSError):  # Then the next start takes the power for lost there once more.
                        self._note_boot(self._boot)

    def identity(self, new: Identity) -> Identity:
        """Read the owner of the data; a new directory gets `new`. Data of another node or format is refused."""
        path = self.path / META_FILE
        if not self._disk.exists(path):
            lines = (f"version={VERSION}", f"cluster.id={new.cluster_id}", f"node.id={new.node_id}")
            self._disk.replace(path, ("\n".join(lines) + "\n").encode())
            return new
        try:
            pairs = (line.partition("=") for line in self._disk.read(path).decode().splitlines() if "=" in line)
            values = {name.strip(): value.strip() for name, _, value in pairs}
            version, found = int(values["version"]), Identity(values["cluster.id"], int(values["node.id"]))
        except (KeyError, ValueError) as error:
            raise AnabranchError(
                f"{path} is damaged: expected version, cluster.id and node.id in it. Restore it from a copy, or remove "
                "it: the broker then makes one, with a new cluster.id."
            ) from error
        if version != VERSION:
            raise AnabranchError(
                f"{path} is of version {version}; this broker reads version {VERSION}. Start a broker of that version, "
                "or restore the file from a copy, if it is damaged."
            )
        if found.node_id != new.node_id:
            raise AnabranchError(
                f"{self.path} holds the data of node {found.node_id}, as {META_FILE} says, but this broker is node "
                f"{new.node_id}. Set node.id as it was, or use another data directory."
            )
        return found

    @property
    def term(self) -> int:
        """The epoch of the last controller's term here; 0 before the first. AnabranchError if its file is damaged."""
        path = self.path / TERM_FILE
        text = self._disk.read(path).decode("latin-1").strip() if self._disk.exists(path) else "0"
        if not text.isdecimal():
            raise AnabranchError(
                f"{path} is damaged: expected the epoch of the last controller. Remove it, if metadata.sqlite is "
                "known to be the newest."
            )
        return int(text)

    def begin_term(self, epoch: int) -> None:
        """Note the epoch of the controller's term, durably. Blocks; OSError."""
        self._disk.replace(self.path / TERM_FILE, b"%d\n" % epoch)

    def log_path(self, partition: TopicPartition) -> Path:
        """The directory of a partition's log."""
        return self.path / str(partition)

    def logs(self) -> Sequence[TopicPartition]:
        """The partitions that have a log here."""
        named = map(TopicPartition.named, self._disk.names(self.path))
        return [partition for partition in named if partition is not None]

    def left_over(self) -> list[Path]:
        """List the logs whose deletion was interrupted; to be removed by `remove_trees`. Blocks; OSError."""
        found = {name for name in self._disk.names(self.path) if name.endswith(DELETED_SUFFIX)}
        parent = self.path / DELETED_DIRECTORY
        within = self._disk.names(parent) if DELETED_DIRECTORY in found else ()
        return [*(self.path / name for name in found - {DELETED_DIRECTORY}), *(parent / name for name in within)]

    def survey(self, partition: TopicPartition) -> LogSurvey:
        """Read what the files of a closed log show. Blocks; OSError."""
        return survey(self._disk, self.log_path(partition))

    def start_log_at(self, partition: TopicPartition, offset: int) -> None:
        """Record durably that a closed log starts at `offset`, and that all before it was synced. Blocks; OSError."""
        name = str(partition)
        synced = self.checkpoints.synced(name)
        self.checkpoints.record(name, log_start=offset, synced=None if synced is None else max(synced, offset))
        self.checkpoints.save()

    def keep_damaged(self, path: Path) -> None:
        """Rename a damaged file of a closed log, durably. Blocks; OSError."""
        keep_damaged(self._disk, path)

    def move_away(self, partition: TopicPartition) -> None:
        """Move a closed log out of the way, with all its files. Blocks; OSError."""
        self.checkpoints.forget(str(partition))
        self.checkpoints.save()  # First: a log that is made again must not find what was noted of this one.
        parent = self.path / UNKNOWN_DIRECTORY
        self._disk.make_directory(parent)
        self._disk.rename(self.log_path(partition), aside(self._disk, parent / str(partition), ""))
        self._disk.sync_directory(parent)
        self._disk.sync_directory(self.path)

    def restore_metadata(self, write: Callable[[Path], None]) -> None:
        """Put the metadata in place that `write` writes durably; what was there is renamed. Blocks; OSError.

        An interruption leaves the old metadata, or `METADATA_REPAIRED_FILE`, which is whole: `finish_restoring`.
        """
        made = self.path / METADATA_REPAIRED_FILE
        unfinished = made.with_name(made.name + ".tmp")
        write(unfinished)
        self._disk.rename(unfinished, made)
        self._disk.sync_directory(self.path)
        self.finish_restoring()

    def finish_restoring(self) -> None:
        """Put repaired metadata in place, after what is there, with all that belongs to it. Blocks; OSError."""
        path = self.path / METADATA_FILE
        for suffix in ("", "-wal", "-shm", "-journal"):
            old = path.with_name(path.name + suffix)
            if self._disk.exists(old):
                self._disk.rename(old, aside(self._disk, old, DAMAGED_SUFFIX))
        self._disk.sync_directory(self.path)
        self._disk.rename(self.path / METADATA_REPAIRED_FILE, path)
        self._disk.sync_directory(self.path)

    def open_log(
        self,
        partition: TopicPartition,
        config: LogConfig,
        *,
        start_offset: int = 0,
        visit: Callable[[BatchHeader], None] | None = None,
        commits: GroupCommit | None = None,
    ) -> LocalLog:
        """Open a partition's log, as `LocalLog.open`; its checkpoints are kept here, with everyone's."""
        name = str(partition)
        path = self.log_path(partition)
        is_there = self._may_be_there(name) and self._disk.exists(path)
        if is_there:
            self._check_alone(path)
        note_is_damaged = is_there and check_finding(self._disk, path)
        log = LocalLog.open(
            path,
            config,
            disk=self._disk,
            start_offset=start_offset,
            visit=visit,
            checkpoints=self.checkpoints,
            commits=commits,
            power_lost=self._has_lost_power(name),
            exists=is_there,
        )
        if note_is_damaged:
            check_all(log)
        self._are_read([name])
        return log

    def _check_alone(self, path: Path) -> None:
        """Refuse a link to where another partition's log is: each would write over the other. OfflineLogError."""
        target = self._disk.linked(path)
        if target is not None and (
            target.parent == Path(os.path.realpath(self.path)) or self._linked.setdefault(target, path) != path
        ):
            raise OfflineLogError(
                f"{path} is a link to {target}, where another partition has its log. Put its own in its place."
            )

    def _may_be_there(self, name: str) -> bool:
        seen = self._seen
        if seen is None or name in seen:
            return True
        seen.add(name)
        return False

    def has_log(self, partition: TopicPartition) -> bool:
        """Whether a partition has a log here."""
        return self._disk.exists(self.log_path(partition))

    def remove_log(self, partition: TopicPartition) -> None:
        """Delete a log; after a crash it is either whole or gone. Blocks; OSError."""
        for error in self.remove_logs([partition]).values():
            raise error

    def remove_logs(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, OSError]:
        """Delete logs, as `remove_log`; return the errors of those that are not deleted. Blocks."""
        try:
            there = self.forget_logs(partitions)
        except OSError as error:
            return dict.fromkeys(partitions, error)
        doomed, failed = self.take_away(there)
        try:
            self.remove_trees([*doomed.values()])
        except OSError as error:
            failed.update(dict.fromkeys(doomed, error))
        return failed

    def forget_logs(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        """Forget, durably, the checkpoints of logs to be deleted; return those that have files. Blocks; OSError."""
        there = set(self._disk.names(self.path))
        names = {str(partition): partition for partition in partitions}
        for name in names:
            self.checkpoints.forget(name)
        self.checkpoints.save()
        self._are_read(names)
        return [partition for name, partition in names.items() if name in there]

    def take_away(
        self, partitions: Iterable[TopicPartition], go_on: Callable[[], bool] = lambda: True
    ) -> tuple[dict[TopicPartition, Path], dict[TopicPartition, OSError]]:
        """Rename forgotten logs, durably, into the directory of deleted ones, for as long as `go_on` says. Blocks.

        Return the new paths, and the errors of logs that stay where they are; those not reached are in neither.
        """
        failed: dict[TopicPartition, OSError] = {}
        doomed: dict[TopicPartition, Path] = {}
        parent = self.path / DELETED_DIRECTORY
        for partition in partitions:
            if not go_on():
                break
            try:
                if not doomed:
                    self._disk.make_directory(parent)
                away = aside(self._disk, parent / f"{next(self._doomed)}", "")
                self._disk.rename(self.log_path(partition), away)
                doomed[partition] = away
            except OSError as error:
                failed[partition] = error
        try:
            if doomed:
                self._disk.sync_directory(parent)
                self._disk.sync_directory(self.path)
        except OSError as error:
            return {}, {**failed, **dict.fromkeys(doomed, error)}
        return doomed, failed

    def remove_trees(self, paths: Sequence[Path], go_on: Callable[[], bool] = lambda: True) -> None:
        """Remove directories of deleted logs, for as long as `go_on` says. Blocks; OSError."""
        for path in paths:
            if not go_on():
                return
            self._disk.remove_tree(path)

    def began(self) -> None:
        """Take the mark of a clean stop away, before the first append; the logs are opened from now on."""
        self._disk.unlink(self.path / CLEAN_STOP_FILE)
        self._seen = set(self._disk.names(self.path))

    def stopped(self) -> None:
        """Save the checkpoints and, as all logs are closed, leave the mark of a clean stop. Blocks; OSError."""
        self.checkpoints.save()
        self._disk.replace(self.path / CLEAN_STOP_FILE, b"")

    def release(self) -> None:
        """Unlock the directory."""
        self._lock.release()

    def _holder(self) -> str:
        """Name the broker that has the directory; its lock file may have been removed."""
        try:
            process_id = self._disk.read(self.path / LOCK_FILE).decode().strip()
        except OSError:
            process_id = ""
        return f"the broker with process id {process_id}" if process_id else "another broker"

"""The data directory: one broker's home, locked while it runs, with its identity in `meta.properties`.

.lock  meta.properties  metadata.sqlite  clean-stop  boot-id  <topic>-<partition>/  <topic>-<partition>.producers
recovery-point-offset-checkpoint  log-start-offset-checkpoint  synced-offset-checkpoint
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from anabranch.base.errors import AnabranchError
from anabranch.base.ids import TopicPartition
from anabranch.records.batch import BatchHeader
from anabranch.runtime.disk import Disk
from anabranch.storage.checkpoints import Checkpoints
from anabranch.storage.log.config import LogConfig
from anabranch.storage.log.group_commit import GroupCommit
from anabranch.storage.log.log import LocalLog

META_FILE = "meta.properties"
LOCK_FILE = ".lock"
METADATA_FILE = "metadata.sqlite"
CLEAN_STOP_FILE = "clean-stop"
BOOT_FILE = "boot-id"
VERSION = 1
DELETED_SUFFIX = ".deleted"


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
        try:
            disk.make_directory(path)
            self._lock = disk.lock(path / LOCK_FILE)
        except BlockingIOError as error:
            raise DirectoryInUseError(
                f"The data directory {path} is in use by the broker with process id {self._holder()}. "
                "Stop that broker, or give this one a directory of its own with --data."
            ) from error
        except OSError as error:
            raise AnabranchError(f"The data directory {path} cannot be used: {error.strerror}.") from error
        self.stopped_cleanly = disk.exists(path / CLEAN_STOP_FILE)
        """Whether the last broker closed its logs, so that none needs checks."""
        try:
            self._boot_before = disk.read(path / BOOT_FILE) if disk.exists(path / BOOT_FILE) else None
            self.checkpoints = Checkpoints(disk, path)
        except OSError:
            self.release()
            raise

    @property
    def machine_restarted(self) -> bool:
        """Whether the machine is known to have been restarted since the logs were written, or cannot be known."""
        now = self._disk.boot_id()
        return now is None or self._boot_before not in (None, now)

    @property
    def _power_lost(self) -> bool:
        """Whether unsynced bytes of the logs may be missing in any order."""
        now = self._disk.boot_id()
        return now is None or self._boot_before != now

    def recovered(self) -> None:
        """Note that all logs were recovered: a crash from now on loses no bytes, unless the machine is restarted."""
        now = self._disk.boot_id()
        if now is not None and now != self._boot_before:
            self._disk.replace(self.path / BOOT_FILE, now)
            self._boot_before = now

    def identity(self, new: Identity) -> Identity:
        """Read the owner of the data; a new directory gets `new`. Data of another node or format is refused."""
        path = self.path / META_FILE
        if not self._disk.exists(path):
            lines = (f"version={VERSION}", f"cluster.id={new.cluster_id}", f"node.id={new.node_id}")
            self._disk.replace(path, ("\n".join(lines) + "\n").encode())
            return new
        pairs = (line.partition("=") for line in self._disk.read(path).decode().splitlines() if "=" in line)
        values = {name.strip(): value.strip() for name, _, value in pairs}
        try:
            version, found = int(values["version"]), Identity(values["cluster.id"], int(values["node.id"]))
        except (KeyError, ValueError) as error:
            raise AnabranchError(f"{path} is damaged: expected version, cluster.id and node.id in it.") from error
        if version != VERSION:
            raise AnabranchError(f"{path} is of version {version}; this broker reads version {VERSION}.")
        if found.node_id != new.node_id:
            raise AnabranchError(
                f"{self.path} holds the data of node {found.node_id}, but this broker is node {new.node_id}. "
                "Set node.id as it was, or use another data directory."
            )
        return found

    def log_path(self, partition: TopicPartition) -> Path:
        """The directory of a partition's log."""
        return self.path / str(partition)

    def logs(self) -> Sequence[TopicPartition]:
        """The partitions that have a log here; the rests of an interrupted deletion are removed."""
        found = []
        for name in self._disk.names(self.path):
            if name.endswith(DELETED_SUFFIX):
                self._disk.remove_tree(self.path / name)
                continue
            topic, dash, partition = name.rpartition("-")
            if dash and partition.isdigit():
                found.append(TopicPartition(topic, int(partition)))
        return found

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
        return LocalLog.open(
            self.log_path(partition),
            config,
            disk=self._disk,
            start_offset=start_offset,
            visit=visit,
            checkpoints=self.checkpoints,
            commits=commits,
            power_lost=self._power_lost,
        )

    def has_log(self, partition: TopicPartition) -> bool:
        """Whether a partition has a log here."""
        return self._disk.exists(self.log_path(partition))

    def remove_log(self, partition: TopicPartition) -> None:
        """Delete a log; after a crash it is either whole or gone. Blocks; OSError."""
        path = self.log_path(partition)
        self.checkpoints.forget(path.name)
        self.checkpoints.save()
        if not self._disk.exists(path):
            return
        doomed = path.with_name(path.name + DELETED_SUFFIX)
        self._disk.remove_tree(doomed)
        self._disk.rename(path, doomed)
        self._disk.sync_directory(self.path)
        self._disk.remove_tree(doomed)

    def began(self) -> None:
        """Take the mark of a clean stop away, before the first append."""
        self._disk.unlink(self.path / CLEAN_STOP_FILE)

    def stopped(self) -> None:
        """Save the checkpoints and, as all logs are closed, leave the mark of a clean stop. Blocks; OSError."""
        self.checkpoints.save()
        self._disk.replace(self.path / CLEAN_STOP_FILE, b"")

    def release(self) -> None:
        """Unlock the directory."""
        self._lock.release()

    def _holder(self) -> str:
        try:
            return self._disk.read(self.path / LOCK_FILE).decode().strip() or "(unknown)"
        except OSError:
            return "(unknown)"

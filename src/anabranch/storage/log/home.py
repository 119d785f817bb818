"""The directory of one log: made when something is first written to it; partitions without records have none."""

from __future__ import annotations

from pathlib import Path

from anabranch.runtime.disk import Disk
from anabranch.storage.log.epochs import EpochsFile, LeaderEpochs


class LogHome:
    """The directory of one log, and the file of its leader epochs, which comes with it. Blocks; OSError."""

    __slots__ = ("_disk", "abandoned", "directory", "durable", "epochs_file", "exists")

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk = disk
        self.directory = directory
        self.epochs_file = EpochsFile(disk, directory)
        self.exists = False
        """Whether the directory is there."""
        self.durable = False
        """Whether its name is synced."""
        self.abandoned = False
        """Whether it is about to be deleted, so that nothing may be noted of it any more."""

    def make(self, epochs: LeaderEpochs) -> None:
        """Make the directory if it is not there."""
        if not self.exists:
            self._disk.make_directory(self.directory)
            if epochs.latest >= 0:
                self.epochs_file.write(epochs)
            self.exists = True

    def make_durable(self, epochs: LeaderEpochs) -> None:
        """Make the directory if it is not there, and sync its name."""
        self.make(epochs)
        if not self.durable:
            self._disk.sync_directory(self.directory.parent)
            self.durable = True

    def write_epochs(self, epochs: LeaderEpochs) -> None:
        """Write the epochs, as `EpochsFile.write`; without records every epoch begins where the log does."""
        if self.exists:
            self.epochs_file.write(epochs)

    def close(self, epochs: LeaderEpochs) -> None:
        """Write the epochs if the file does not have them."""
        if self.exists and not self.epochs_file.written:
            self.epochs_file.write(epochs)

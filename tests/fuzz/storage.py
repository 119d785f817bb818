"""Damage to any file of a data directory, and what a start makes of it: nothing synced is missing without a word.

Each case is the life of two logs, ended by a kill or a clean stop; then one file is truncated, flipped in a bit,
emptied, removed, or replaced by an older copy of itself. After the next start every synced record is there, or its log
is offline with a sentence, and every byte of the log files is still in the directory. A bit that flipped in records
below the recovery point is found by a scrub; the log is offline then, also after the next start, until the file is
restored. Run: `python -m tests.fuzz.storage 2000`.
"""

from __future__ import annotations

import logging
import random
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

from anabranch.base.errors import AnabranchError, DecodeError
from anabranch.base.ids import TopicPartition
from anabranch.records.batch import check, headers
from anabranch.runtime.disk import Disk
from anabranch.storage.directory import DataDirectory
from anabranch.storage.log import scrub
from anabranch.storage.log.batch_files import Source
from anabranch.storage.log.config import Durability, LogConfig
from anabranch.storage.log.errors import OfflineLogError
from anabranch.storage.log.log import LocalLog
from anabranch.storage.log.recovery import FINDING_FILE
from tests.fuzz.cases import run_cases, show
from tests.support.batches import make_batch

LOGS = tuple(TopicPartition("t", number) for number in range(2))
DAMAGES = ("truncate", "flip", "empty", "remove", "older")


class Case:
    """One case; `run` returns what became of it."""

    def __init__(self, seed: int, path: Path) -> None:
        self.chance = random.Random(seed)
        self.path = path
        self.config = LogConfig(
            durability=self.chance.choice(tuple(Durability)),
            segment_bytes=self.chance.choice((400, 2_000, 100_000)),
            index_interval_bytes=self.chance.choice((1, 500)),
        )
        self.synced: dict[TopicPartition, dict[int, bytes]] = {name: {} for name in LOGS}
        self.starts: dict[TopicPartition, int] = {}
        self.found: dict[TopicPartition, Path] = {}
        """The files in which a scrub found damage."""
        self.undamaged = b""
        """What was in the damaged file."""

    def run(self) -> list[str]:
        self.live()
        damaged, damage = self.damage()
        before = self.log_files()
        outcome = self.start_again()
        self.check_bytes(before, damaged)
        return [f"{damage} {outcome}"]

    def live(self) -> None:
        """Write the logs."""
        directory = DataDirectory(self.path, Disk())
        directory.recovered()
        logs = {name: directory.open_log(name, self.config) for name in LOGS}
        copied_at = self.chance.randrange(30)
        for step in range(30):
            name = self.chance.choice(LOGS)
            self.step(logs[name], name)
            if step == copied_at:
                directory.checkpoints.save()
                shutil.copytree(self.path, self.path.with_name("older"))
        for name, log in logs.items():
            log.flush()
            self.note(log, name)
            self.starts[name] = log.log_start
        directory.checkpoints.save()
        if self.chance.random() < 0.4:
            for log in logs.values():
                log.close()
            directory.stopped()
        directory.release()

    def step(self, log: LocalLog, name: TopicPartition) -> None:
        kind = self.chance.random()
        if kind < 0.8:
            epoch = log.epochs.latest + (self.chance.random() < 0.1) if log.end else 0
            data = make_batch(self.chance.randint(1, 4), self.chance.randbytes(self.chance.randint(1, 300)))
            log.append(data, epoch, 0)
        elif kind < 0.85 and log.high_watermark > log.log_start:
            log.delete_before(self.chance.randint(log.log_start, log.high_watermark))
        elif kind < 0.95:
            log.flush()
        else:
            log.checkpoint()

    def note(self, log: LocalLog, name: TopicPartition) -> None:
        for base, batch in batches(log).items():
            self.synced[name][base] = batch

    def damage(self) -> tuple[Path, str]:
        """Damage one file; return it."""
        files = [file for file in sorted(self.path.rglob("*")) if file.is_file() and file.name != ".lock"]
        file, damage = self.chance.choice(files), self.chance.choice(DAMAGES)
        older = self.path.with_name("older") / file.relative_to(self.path)
        self.undamaged = file.read_bytes()
        data = bytearray(self.undamaged)
        if damage == "older" and older.exists():
            shutil.copy(older, file)
        elif damage == "flip" and data:
            data[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
            file.write_bytes(data)
        elif damage == "truncate":
            file.write_bytes(data[: self.chance.randint(0, len(data))])
        elif damage == "empty":
            file.write_bytes(b"")
        else:
            file.unlink()
        return file, f"{damage} {file.name if file.parent == self.path else file.suffix or file.name}"

    def start_again(self) -> str:
        try:
            directory = DataDirectory(self.path, Disk())
        except AnabranchError:
            return "refused"
        outcomes, sentences = set(), list[str]()
        for name in LOGS:
            try:
                log = directory.open_log(name, self.config)
                outcomes.add(self.compare(log, name))
            except OfflineLogError as error:
                sentences.append(str(error))
                outcomes.add("offline")
        assert all(str(self.path) in sentence and "estore" in sentence for sentence in sentences), sentences
        for name, path in self.found.items():
            self.restore(directory, name, path)
        directory.release()
        return "+".join(sorted(outcomes))

    def restore(self, directory: DataDirectory, name: TopicPartition, path: Path) -> None:
        """A log in which a scrub found damage stays offline until its file is restored."""
        damaged = path.read_bytes()
        note = path.with_name(FINDING_FILE)
        for _ in range(2):
            with pytest.raises(OfflineLogError, match=re.escape(str(path))):
                directory.open_log(name, self.config)
            data = bytearray(note.read_bytes())
            data[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
            note.write_bytes(data)
        path.write_bytes(self.undamaged)
        log = directory.open_log(name, self.config)
        assert batches(log)
        assert scrubbed(log)[0] is None
        path.write_bytes(damaged)

    def compare(self, log: LocalLog, name: TopicPartition) -> str:
        finding, source = scrubbed(log)
        try:
            found = batches(log)
        except DecodeError:
            assert finding is not None, f"{name}: a batch that readers find unsound was not reported"
            assert str(self.path) in str(finding)
            scrub.note(log.disk, log.directory, finding, source)
            log.close()
            self.found[name] = finding.path
            return "scrubbed"
        if finding is not None:
            return "scrubbed"
        for base, batch in self.synced[name].items():
            assert base < self.starts[name] or base < log.log_start <= self.starts[name] or found[base] == batch, (
                f"{name}: the batch at {base} is gone without a word"
            )
        assert log.log_start <= self.starts[name]
        return "there"

    def log_files(self) -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in self.path.rglob("*.log")}

    def check_bytes(self, before: dict[Path, bytes], damaged: Path) -> None:
        for file, data in before.items():
            following = (int(other.stem) for other in before if other.parent == file.parent and other > file)
            name = TopicPartition("t", int(file.parent.name.rpartition("-")[2]))
            if min(following, default=self.starts[name] + 1) <= self.starts[name]:
                continue  # All its records are deleted.
            kept = [file, *file.parent.glob("*.torn*")]
            contents = [each.read_bytes() for each in kept if each.exists()]
            assert any(data == one for one in contents) or any(data == contents[0] + other for other in contents[1:]), (
                f"bytes of {file} are gone, after damage to {damaged}"
            )


def scrubbed(log: LocalLog) -> tuple[scrub.Finding | None, Source]:
    """The first finding of a scrub, and the segment that it is in."""
    source = Source(0, 0, 0)
    for _, source in scrub.settled(log):
        finding = scrub.scrub(log.disk, log.directory, source, lambda size: None)
        if finding is not None:
            return finding, source
    return None, source


def batches(log: LocalLog) -> dict[int, bytes]:
    """Every batch of a log, its checksum compared. DecodeError."""
    found: dict[int, bytes] = {}
    offset = log.log_start
    while part := log.read(offset, 1 << 20, end=log.end):
        view = part.view()
        for position, header in headers(view):
            check(view, position, header)
            found[header.base_offset] = bytes(view[position + 16 : position + header.size])
            offset = header.next_offset
    return found


def run(first: int, count: int) -> Counter[str]:
    """Run cases; how many ended how."""
    return run_cases(Case, first, count)


if __name__ == "__main__":
    logging.getLogger("anabranch").setLevel(logging.CRITICAL)
    show(run(0, int(sys.argv[1])))

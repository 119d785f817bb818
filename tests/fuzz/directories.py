"""Damage to any file of a real broker's data directory, before or after a kill, and what its next start makes of it.

Each case is the life of a broker process with partitioned, compacted, emptied and deleted topics, idempotent producers
and retention. One file is truncated, flipped in a bit, emptied, removed, or replaced by an older copy of itself, and
the broker is killed. After the next start every acknowledged record is read by a client, or its checksum tells the
client of the flipped bit, or its partition is offline with a sentence, or the broker refuses to start with a sentence
that names the file and how to go on. Where the sentence names `anabranch repair`, that is run, and the broker starts.
Run: `python -m tests.fuzz.directories 100`.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from anabranch.base.errors import DecodeError, ErrorCode
from anabranch.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from anabranch.records.batch import check, headers
from tests.fuzz.cases import run_cases, show
from tests.support.broker import BrokerProcess
from tests.support.commands import run as run_command
from tests.support.wire import WireClient, batch, values_of

DAMAGES = ("truncate", "flip", "empty", "remove", "older")
METADATA = "metadata.sqlite"
COPY = "metadata-copy.sqlite"
KINDS = (
    METADATA,
    f"{METADATA}-wal",
    COPY,
    ".log",
    ".index",
    ".timeindex",
    ".snapshot",
    ".producers",
    "cleaner-checkpoint",
    "leader-epoch-checkpoint",
    "log-start-offset-checkpoint",
    "recovery-point-offset-checkpoint",
    "synced-offset-checkpoint",
    "meta.properties",
    "controller-epoch",
    "boot-id",
    "reserve",
)
SETTINGS: dict[str, object] = {
    "log_flush_offset_checkpoint_interval_ms": 20,
    "log_retention_check_interval_ms": 50,
    "log_cleaner_backoff_ms": 50,
    "log_segment_bytes": 1_000,
}
TOPICS = {"wide": 3, "compact": 1, "kept": 1, "emptied": 1, "removed": 1}
KEYS = 4
REMEDIES = ("estore", "repair", "emove", "Move", "Set ")
"""One of these words tells how to go on."""


class Case:
    """One case; `run` returns what became of it."""

    def __init__(self, seed: int, path: Path) -> None:
        self.chance = random.Random(seed)
        self.kind = KINDS[seed % len(KINDS)]
        self.path = path
        self.older = path.with_name("older")
        self.broker = BrokerProcess(path, durability="fsync", **SETTINGS)
        self.acknowledged: dict[tuple[str, int], list[tuple[int, bytes, bytes]]] = {}
        """Offset, key and value of the records of each partition."""
        self.sequences: Counter[tuple[str, int]] = Counter()
        self.producer = 0

    def run(self) -> str:
        try:
            damage = self.live()
            return f"{damage} {self.start_again(damage)}"
        finally:
            if self.broker.alive:
                self.broker.kill()

    # -- the life that ends with damage --------------------------------------------------------------------------------

    def live(self) -> str:
        self.broker.start()
        with WireClient(self.broker.port) as client:
            for topic, partitions in TOPICS.items():
                configs = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01"}
                client.create(topic, partitions, **(configs if topic == "compact" else {"retention.bytes": "1500"}))
            for topic in ("wide", "kept"):
                self.keep_all(client, topic)
            self.producer = client.producer_id()
            self.produce_some(client, 25)
            self.acknowledged.pop(("emptied", 0), None)
            client.delete_everything("emptied", 0)
            client.delete("removed")  # Its producers outlive it.
            del self.acknowledged["removed", 0]
            self.copy_files()
            self.produce_some(client, 25, topics=("wide", "compact", "kept"))
            self.settle()
            before = self.chance.random() < 0.5
            if before:
                damage = self.damage()
                with contextlib.suppress(OSError, AssertionError):  # Also a connection that ends is an answer.
                    self.produce_some(client, 5, topics=("wide", "compact", "kept"))
                time.sleep(
                    0.2
                )  # What is synced is noted every 20 ms; the end of a file that was not noted shows nowhere.
        self.broker.kill()
        return damage if before else self.damage()

    def keep_all(self, client: WireClient, topic: str) -> None:
        """Have retention delete nothing of a topic; if this is forgotten, it deletes."""
        config = AlterableConfig(name="retention.bytes", config_operation=0, value="-1")
        resource = AlterConfigsResource(resource_type=2, resource_name=topic, configs=[config])
        (answer,) = client.call(IncrementalAlterConfigsRequest(resources=[resource])).responses
        assert answer.error_code == ErrorCode.NONE, answer

    def produce_some(self, client: WireClient, count: int, topics: tuple[str, ...] = tuple(TOPICS)) -> None:
        for _ in range(count):
            topic = self.chance.choice(topics)
            partition = self.chance.randrange(TOPICS[topic])
            key, value = b"%d" % self.chance.randrange(KEYS), self.chance.randbytes(self.chance.randint(1, 200)).hex()
            sequence = self.sequences[topic, partition]
            data = batch(
                [value.encode()],
                key=key,
                timestamp=int(time.time() * 1000),
                producer=(self.producer, 0, sequence),
            )
            answer = client.produce(topic, partition, data)
            if answer.error_code == ErrorCode.NONE:
                self.sequences[topic, partition] += 1
                records = self.acknowledged.setdefault((topic, partition), [])
                records.append((answer.base_offset, key, value.encode()))

    def settle(self) -> None:
        """Wait until the copy of the metadata, and the files that the broker makes beside it, are there."""
        deadline = time.monotonic() + 10
        while not ((copy := self.path / COPY).exists() and b'"retention.bytes":"-1"' in copy.read_bytes()):
            assert time.monotonic() < deadline, "no copy of the metadata"
            time.sleep(0.01)
        time.sleep(0.2)

    def files(self) -> Iterator[Path]:
        return (file for file in sorted(self.path.rglob("*")) if file.is_file() and file.name != ".lock")

    def copy_files(self) -> None:
        for file in self.files():
            copy = self.older / file.relative_to(self.path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                shutil.copy(file, copy)

    def damage(self) -> str:
        """Damage one file."""
        by_kind: dict[str, list[Path]] = {}
        for file in self.files():
            for kind in KINDS:
                if (file.suffix if kind.startswith(".") else file.name) == kind:
                    by_kind.setdefault(kind, []).append(file)
        if self.kind not in by_kind:
            self.kind = self.chance.choice(sorted(by_kind))
        file, damage = self.chance.choice(by_kind[self.kind]), self.chance.choice(DAMAGES)
        older = self.older / file.relative_to(self.path)
        data = bytearray(file.read_bytes())
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
        return f"{self.kind} {damage}"

    # -- the life after it ---------------------------------------------------------------------------------------------

    def start_again(self, damage: str) -> str:
        outcome = ""
        self.broker.start(expect_ready=False)
        if not self.is_ready():
            outcome = "refused "
            (said,) = self.broker.said("error", "the broker cannot start")
            reason = said["reason"]
            named = METADATA if self.kind.startswith(METADATA) else self.kind.lstrip(".")
            assert str(self.path) in reason, (damage, reason)
            assert named in reason, (damage, reason)
            assert any(word in reason for word in REMEDIES), (damage, reason)
            if "anabranch repair" not in reason:
                return f"{outcome}for good"
            run_command("", "repair", "--data", self.path, "--apply")
            outcome = "repaired "
            self.broker.start()
        with WireClient(self.broker.port) as client:
            outcome += "+".join(sorted({self.compare(client, damage, *name) for name in self.acknowledged}))
        return outcome

    def is_ready(self) -> bool:
        while self.broker.alive and not self.broker.said("info", "ready"):
            time.sleep(0.01)
        if not self.broker.alive:
            assert self.broker.wait() == 1, self.broker.lines
        return self.broker.alive

    def compare(self, client: WireClient, damage: str, topic: str, partition: int) -> str:
        answer = client.fetch(topic, partition, 0)
        if answer.error_code == ErrorCode.KAFKA_STORAGE_ERROR:
            reasons = [line["reason"] for line in self.broker.said("error", "partition offline")]
            name = str(self.path / f"{topic}-{partition}")
            assert any(name in it or f"{topic}-{partition}" in it for it in reasons), (topic, partition, reasons)
            assert all(any(word in it for word in REMEDIES) for it in reasons), reasons
            return "offline"
        time.sleep(0.12)  # Retention has had its turn.
        start = client.offset_at(topic, partition, -2).offset
        try:
            found = dict(self.read_all(client, topic, partition, start))
        except DecodeError:
            assert damage == ".log flip", damage
            return "unsound to readers"  # Below the recovery point; a scrub finds it, too, minutes later.
        expected = {offset: value for offset, _, value in self.acknowledged[topic, partition]}
        if topic == "compact":
            expected = dict({key: (offset, value) for offset, key, value in self.acknowledged["compact", 0]}.values())
        missing = [offset for offset, value in expected.items() if found.get(offset) != value]
        assert not missing, f"{topic}-{partition}: the records at {missing[:5]} are gone without a word"
        return "there"

    def read_all(self, client: WireClient, topic: str, partition: int, start: int) -> Iterator[tuple[int, bytes]]:
        """Every record up to the high watermark, checksums compared, as a consumer reads. DecodeError."""
        while True:
            answer = client.fetch(topic, partition, start)
            assert answer.error_code == ErrorCode.NONE, answer
            view = memoryview(bytes(answer.records or b""))
            for position, header in headers(view):
                check(view, position, header)
            fresh = [it for it in values_of(answer.records) if it[0] >= start]
            yield from fresh
            if not fresh or fresh[-1][0] + 1 >= answer.high_watermark:
                return
            start = fresh[-1][0] + 1


def run(first: int, count: int) -> Counter[str]:
    """Run cases; how many ended how."""
    return run_cases(Case, range(first, first + count))


if __name__ == "__main__":
    show(run(0, int(sys.argv[1])))

"""Damage to any file of a real broker's data directory, before or after its end, and what its next start makes of it.

A life is that of a broker process with partitioned, compacted, emptied and deleted topics, idempotent producers and
retention, ended by a kill or a clean stop. Each damaged file is a case: truncated, flipped in a bit, emptied, removed,
or replaced by an older copy of itself. The files of one log do not concern another: some lives damage one file of each
of many logs, and each log is judged for itself; others damage one file that all logs share. After the next start every
acknowledged record is read by a client, or its checksum tells the client of the flipped bit, or its partition is
offline with a sentence, or the broker refuses to start with a sentence that names the file and how to go on. Where the
sentence names `anabranch repair`, that is run, and the broker starts. A log without damage is there as a whole.
Run: `python -m tests.fuzz.directories 2000`, or from life 500 on: `python -m tests.fuzz.directories 2000 500`.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from anabranch.base.errors import DecodeError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from anabranch.records.batch import check, headers
from anabranch.server.coordinators.shard_set import coordinator_partition
from tests.fuzz.cases import run_cases, show
from tests.support.broker import BrokerProcess
from tests.support.commands import run as run_command
from tests.support.group_client import RETRIABLE, GroupClient
from tests.support.wire import batch, values_of

DAMAGES = ("truncate", "flip", "empty", "remove", "older")
METADATA = "metadata.sqlite"
SHARED_MEMORY = f"{METADATA}-shm"
COPY = "metadata-copy.sqlite"
CLEAN_STOP = "clean-stop"
FINDING = "scrub-finding"
PRODUCERS = ".producers"
SHARED = (
    METADATA,
    f"{METADATA}-wal",
    COPY,
    "log-start-offset-checkpoint",
    "recovery-point-offset-checkpoint",
    "synced-offset-checkpoint",
    "meta.properties",
    "controller-epoch",
    "boot-id",
    "reserve",
    CLEAN_STOP,
    SHARED_MEMORY,
)
"""The files that all logs share."""
OF_A_LOG = (
    ".log",
    ".index",
    ".timeindex",
    ".snapshot",
    "leader-epoch-checkpoint",
    "cleaner-checkpoint",
    FINDING,
    PRODUCERS,
)
PASSING = (".lock", ".tmp", "-journal", ".deleted", ".cleaned", ".swap", ".torn", ".damaged")
"""Ends of the names of files that are locks, that the broker is about to rename or remove, or that it never reads."""
SETTINGS: dict[str, object] = {
    "log_flush_offset_checkpoint_interval_ms": 20,
    "log_retention_check_interval_ms": 50,
    "log_cleaner_backoff_ms": 50,
    "log_segment_bytes": 1_000,
    "offsets_topic_num_partitions": 2,
    "offsets_topic_segment_bytes": 1_000,
}
TOPICS = {"kept": 3, "compact": 1, "rolled": 1, "emptied": 1, "removed": 1}
MANY_LOGS = {"kept": 14, "compact": 8, "rolled": 8, "emptied": 4, "removed": 4}
WITNESSES = 5
"""Logs of which no file is damaged, in a life with many logs."""
ROUNDS = 10
"""Batches to each partition before the copy, and as many after it."""
KEYS = 4
KEPT = b'"retention.bytes":"-1"'
GROUPS = ("a", "b", "c")
OFFSETS = "__consumer_offsets"
NOT_LOADED = "coordinator stopped: log not read"
REMEDIES = ("estore", "repair", "emove", "Move", "Set ")
"""One of these words tells how to go on."""


class Life:
    """One life; `run` returns what became of each damaged file."""

    def __init__(self, seed: int, path: Path) -> None:
        self.chance = random.Random(seed)
        of_logs = seed % 5 in {0, 3}
        number = seed // 5 * 3 + seed % 5 // 2  # Of the lives in which a shared file is damaged.
        self.shared = None if of_logs else SHARED[number % len(SHARED)]
        self.topics = MANY_LOGS if of_logs else TOPICS
        self.scrubs = of_logs and seed // 5 % 2 == seed % 5 // 3
        self.notes_late = of_logs and self.chance.random() < 0.3
        """Whether what is synced is not noted before a kill: then damage shows by what lies behind it."""
        clean_share = {METADATA: 0.6, CLEAN_STOP: 1}.get(self.shared or "", 0.3)
        self.ends_cleanly = self.chance.random() < clean_share and not self.notes_late
        self.restarts = self.chance.random() < 0.2
        self.path = path
        self.older = path.with_name("older")
        self.broker = BrokerProcess(path, durability="fsync", **SETTINGS)
        self.acknowledged: dict[TopicPartition, list[tuple[int, bytes, bytes]]] = {}
        """Offset, key and value of the records of each partition."""
        self.last: dict[TopicPartition, tuple[int, bytearray]] = {}
        """Offset and bytes of the last batch of each partition that was acknowledged."""
        self.committed: Counter[str] = Counter()
        """The offset that each group has committed."""
        self.starts: dict[TopicPartition, int] = {}
        self.sequences: Counter[TopicPartition] = Counter()
        self.producer = 0
        self.damages: dict[str, str] = {}
        """Kind and damage, by the name of the log or of the shared file."""
        self.damaged_first: list[str] = []
        """The names of those that were damaged before the end of the life."""

    def run(self) -> list[str]:
        try:
            self.live()
            return self.start_again()
        except BaseException:
            print(f"damaged: {self.damages}; ended cleanly: {self.ends_cleanly}")
            raise
        finally:
            if self.broker.alive:
                self.broker.kill()

    # -- the life that ends with damage --------------------------------------------------------------------------------

    def live(self) -> None:
        if self.scrubs:
            self.broker.settings["log.scrub.interval.ms"] = 50
        if self.notes_late:
            # A compaction and a deletion by retention note all, too.
            names = "log.flush.offset.checkpoint.interval.ms", "log.cleaner.backoff.ms"
            self.broker.settings |= dict.fromkeys(names, 60_000)
        self.broker.start()
        with GroupClient(self.broker.port) as client:
            self.begin(client)
        self.copy_files()
        if self.restarts:
            self.end()
            self.broker.start()
        with GroupClient(self.broker.port) as client:
            for group in GROUPS:
                client.ready(group)
            self.produce(client, ROUNDS)
            self.keep_all(client, "rolled")
            self.settle()
            self.starts = {name: client.offset_at(*name, -2).offset for name in self.acknowledged}
            later = self.damage_some()
            with contextlib.suppress(OSError, AssertionError):  # Also a connection that ends is an answer.
                self.produce(client, 3)
        time.sleep(0.2)  # What is synced is noted every 20 ms; the end of a file that was not noted shows nowhere.
        assert self.broker.alive or self.shared == SHARED_MEMORY, self.broker.lines
        self.end()
        for name in later:
            self.damage(name)

    def begin(self, client: GroupClient) -> None:
        for topic, partitions in self.topics.items():
            configs = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01"}
            client.create(topic, partitions, **(configs if topic == "compact" else {"retention.bytes": "1500"}))
            self.acknowledged |= {TopicPartition(topic, partition): [] for partition in range(partitions)}
        for topic in ("kept", "emptied", *(["rolled"] if self.notes_late else [])):
            self.keep_all(client, topic)
        self.producer = client.producer_id()
        for group in GROUPS:
            client.ready(group)
        self.produce(client, ROUNDS)
        for partition in range(self.topics["emptied"]):
            client.delete_everything("emptied", partition)
        client.delete("removed")  # Its producers outlive it.
        for partition in range(self.topics["removed"]):
            del self.acknowledged[TopicPartition("removed", partition)]

    def end(self) -> None:
        if self.ends_cleanly:
            self.broker.stop()
        else:
            self.broker.kill()

    def keep_all(self, client: GroupClient, topic: str) -> None:
        """Have retention delete nothing of a topic; if this is forgotten, it deletes."""
        config = AlterableConfig(name="retention.bytes", config_operation=0, value="-1")
        resource = AlterConfigsResource(resource_type=2, resource_name=topic, configs=[config])
        (answer,) = client.call(IncrementalAlterConfigsRequest(resources=[resource])).responses
        assert answer.error_code == ErrorCode.NONE, answer

    def produce(self, client: GroupClient, rounds: int) -> None:
        """Produce a batch to most partitions, so many times."""
        for _ in range(rounds):
            sent = []
            for name in self.acknowledged:
                if self.chance.random() < 0.2:
                    continue
                key = b"%d" % self.chance.randrange(KEYS)
                value = key + b":" + self.chance.randbytes(self.chance.randint(1, 200)).hex().encode()
                producer = self.producer, 0, self.sequences[name]
                data = batch([value], key=key, timestamp=int(time.time() * 1000), producer=producer)
                sent.append((name, key, value, data, client.send(client.produce_request(*name, data), 12)))
            for name, key, value, data, awaited in sent:
                answer = client.receive(awaited).responses[0].partition_responses[0]
                if answer.error_code == ErrorCode.NONE:
                    self.sequences[name] += 1
                    self.acknowledged[name].append((answer.base_offset, key, value))
                    self.last[name] = answer.base_offset, data
            for group in GROUPS:
                offset = self.committed[group] + 1
                if client.commit(group, {("kept", 0): offset}) == [ErrorCode.NONE]:
                    self.committed[group] = offset

    def settle(self) -> None:
        """Wait until the copy of the metadata, and the files that the broker makes beside it, are there."""
        copy, deadline = self.path / COPY, time.monotonic() + 10
        while not self.notes_late and not (copy.exists() and copy.read_bytes().count(KEPT) >= 3):
            assert time.monotonic() < deadline, "no copy of the metadata"
            time.sleep(0.01)
        time.sleep(0.2)

    def copy_files(self) -> None:
        for file in files(self.path):
            copy = self.older / file.relative_to(self.path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                shutil.copy(file, copy)
        if self.ends_cleanly:  # Then the metadata has no write-ahead log: a copy is what SQLite makes.
            live, copied = sqlite3.connect(self.path / METADATA), sqlite3.connect(self.older / f"{METADATA}.whole")
            with contextlib.closing(live), contextlib.closing(copied):
                live.backup(copied)
            (self.older / f"{METADATA}.whole").replace(self.older / METADATA)

    # -- damage --------------------------------------------------------------------------------------------------------

    def damage_some(self) -> list[str]:
        """Damage a part of what is to be damaged; return the names of the rest."""
        if self.shared is not None:
            names = [self.shared]
        else:
            logs = [*map(str, self.acknowledged), *(f"{OFFSETS}-{it}" for it in range(2))]
            names = self.chance.sample(logs, len(logs) - WITNESSES)
            names += [f"removed-{partition}" for partition in range(self.topics["removed"] - 1)]
        if self.scrubs:
            self.have_found([name for name in names if name.startswith(("kept", "rolled"))][:2])  # Not compacted.
        self.damaged_first = [name for name in names if name != CLEAN_STOP and self.chance.random() < 0.5]
        for name in self.damaged_first:
            self.damage(name)
        return [name for name in names if name not in self.damaged_first]

    def have_found(self, names: list[str]) -> None:
        """Change records so that a scrub finds them and notes its findings."""
        for name in names:
            first = min((self.path / name).glob("*.log"))
            flip(first, first.stat().st_size * 8 - 1)
        deadline = time.monotonic() + 10
        while not all((self.path / name / FINDING).exists() for name in names):
            assert time.monotonic() < deadline, f"the scrub has found nothing in {names}"
            time.sleep(0.01)

    def damage(self, name: str) -> None:
        """Damage a file of a log, or a shared one; another one if a clean stop has removed that."""
        if self.shared is not None:
            there = [file for file in files(self.path) if kind_of(file) in SHARED and file.parent == self.path]
            chosen = [file for file in there if file.name == name] or there
        else:
            root = self.path / name if (self.path / name).is_dir() else self.path / f"{name}{PRODUCERS}"
            there = list(files(root)) if root.is_dir() else [root]
            by_kind: dict[str, list[Path]] = {}
            for file in there:
                by_kind.setdefault(kind_of(file), []).append(file)
            if self.notes_late and ".log" in by_kind and not by_kind[".log"][1:]:
                del by_kind[".log"]
            elif self.notes_late and ".log" in by_kind:
                by_kind[".log"].pop()  # Its end shows nowhere.
            kinds = [FINDING] if FINDING in by_kind else sorted(by_kind.keys() & {*OF_A_LOG})
            chosen = by_kind[self.chance.choice(kinds)]
        file, damage = self.chance.choice(chosen), self.chance.choice(DAMAGES)
        older = self.older / file.relative_to(self.path)
        size = file.stat().st_size
        if damage == "older" and older.exists():
            shutil.copy(older, file)
        elif damage == "flip" and size:
            flip(file, self.chance.randrange(size * 8))
        elif damage in {"truncate", "empty"}:
            with file.open("r+b") as opened:
                opened.truncate(self.chance.randint(0, size) if damage == "truncate" else 0)
        else:
            file.unlink()
            damage = "remove"
        self.damages[name] = f"{kind_of(file)} {damage}"

    # -- the life after it ---------------------------------------------------------------------------------------------

    def start_again(self) -> list[str]:
        self.broker.settings.pop("log.scrub.interval.ms", None)
        self.broker.start(expect_ready=False)
        how = ""
        if not self.is_ready():
            if not self.may_go_on(*self.damages.values()):
                return [f"{damage} refused for good" for damage in self.damages.values()]
            how = "repaired "
            self.broker.start()
        time.sleep(0.15)  # Retention has had its turn.
        with GroupClient(self.broker.port) as client:
            became = {str(name): self.compare(client, name) for name in self.acknowledged}
            for group in GROUPS:
                name = TopicPartition(OFFSETS, coordinator_partition(group, 2))
                became[str(name)] = self.compare_commits(client, group, name)
        if self.shared is not None:
            return [f"{damage} {how}{'+'.join(sorted({*became.values()}))}" for damage in self.damages.values()]
        return [f"{damage} {became.get(name, 'there')}" for name, damage in self.damages.items()]

    def is_ready(self) -> bool:
        while self.broker.alive and not self.broker.said("info", "ready"):
            time.sleep(0.01)
        if not self.broker.alive:
            assert self.broker.wait() == 1, self.broker.lines
        return self.broker.alive

    def may_go_on(self, damage: str, *others: str) -> bool:
        """Repair what the refusal of the start says can be repaired; False if something else is to be done."""
        (said,) = self.broker.said("error", "the broker cannot start")
        reason = said["reason"]
        assert not others, reason  # What concerns one log keeps no other from its work.
        assert str(self.path) in reason, (damage, reason)
        assert damage.split()[0].removesuffix("-wal").removesuffix("-shm") in reason, (damage, reason)
        assert any(word in reason for word in REMEDIES), (damage, reason)
        if "anabranch repair" not in reason:
            return False
        run_command("", "repair", "--data", self.path, "--apply")
        return True

    def compare(self, client: GroupClient, name: TopicPartition) -> str:
        """Read a partition, and say how it is."""
        answer = client.fetch(*name, 0)
        if answer.error_code == ErrorCode.KAFKA_STORAGE_ERROR:
            self.check_offline(name)
            return "offline"
        start = client.offset_at(*name, -2).offset
        try:
            found = dict(self.read_all(client, name, start))
        except DecodeError:
            assert self.may_be_unsound(name), f"{name}: unsound records"
            return "unsound to readers"  # Below the recovery point; a scrub finds it, too, minutes later.
        was = self.starts[name]
        assert start == was or (start < was and self.shared), f"{name} started at {was}, now it starts at {start}"
        self.compare_records(name, found)
        self.repeat(client, name)
        return "there"

    def repeat(self, client: GroupClient, name: TopicPartition) -> None:
        """Send the last acknowledged batch again, as a producer does that has not heard: it is not appended twice."""
        offset, data = self.last[name]
        answer = client.produce(*name, data)
        assert answer.error_code != ErrorCode.NONE or answer.base_offset == offset, f"{name} has a batch twice"

    def compare_commits(self, client: GroupClient, group: str, name: TopicPartition) -> str:
        """Compare what a group has committed, and say how the partition is that has it."""
        deadline = time.monotonic() + 10
        while (answer := client.fetched(group)).error_code in RETRIABLE:
            if self.is_said("partition offline", name):
                self.check_offline(name)
                return "offline"
            for line in self.broker.said("error", NOT_LOADED):
                if line["partition"] == str(name):
                    assert str(name) in line["reason"], line
                    assert any(word in line["reason"] for word in REMEDIES), line
                    assert self.may_be_unsound(name), line
                    return "unsound to readers"
            assert time.monotonic() < deadline, f"the offsets in {name} are not loaded without a sentence"
            time.sleep(0.01)
        assert answer.error_code == ErrorCode.NONE, ErrorCode(answer.error_code)
        found = [part.committed_offset for topic in answer.topics for part in topic.partitions]
        assert found, f"{name}: the offset of group {group} is gone without a word"
        assert found[0] >= self.committed[group], f"{name}: the offset of group {group} is gone without a word"
        return "there"

    def is_said(self, event: str, name: TopicPartition) -> bool:
        return any(line["partition"] == str(name) for line in self.broker.said("error", event))

    def check_offline(self, name: TopicPartition) -> None:
        """Check what the broker says of a partition that is offline."""
        said = self.broker.said("error", "partition offline")
        reasons = [line["reason"] for line in said if line["partition"] == str(name)]
        assert reasons, f"{name} is offline without a sentence"
        assert all(str(name) in reason for reason in reasons), (name, reasons)
        assert all(any(word in reason for word in REMEDIES) for reason in reasons), reasons
        assert self.is_concerned(name), f"{name} is offline, of which no file is damaged: {reasons}"

    def may_be_unsound(self, name: TopicPartition) -> bool:
        """Whether records may have changed within a log: by a flip, or as a file was cut while it was appended to."""
        kind, _, damage = self.damages.get(str(name), "").partition(" ")
        return kind == FINDING or (kind == ".log" and (damage == "flip" or str(name) in self.damaged_first))

    def is_concerned(self, name: TopicPartition) -> bool:
        return self.shared is not None or str(name) in self.damages

    def compare_records(self, name: TopicPartition, found: dict[int, bytes]) -> None:
        expected = {offset: value for offset, _, value in self.acknowledged[name] if offset >= self.starts[name]}
        if name.topic == "compact":
            last = {key: (offset, value) for offset, key, value in self.acknowledged[name]}
            # A record that was not acknowledged may be there, too, and replace an earlier one of its key.
            later = {value.partition(b":")[0]: offset for offset, value in sorted(found.items())}
            expected = {offset: value for key, (offset, value) in last.items() if later.get(key, -1) <= offset}
        missing = [offset for offset, value in expected.items() if found.get(offset) != value]
        assert not missing, f"{name}: the records at {missing[:5]} are gone without a word"

    def read_all(self, client: GroupClient, name: TopicPartition, start: int) -> Iterator[tuple[int, bytes]]:
        """Every record up to the high watermark, checksums compared, as a consumer reads. DecodeError."""
        while True:
            answer = client.fetch(*name, start)
            assert answer.error_code == ErrorCode.NONE, answer
            view = memoryview(bytes(answer.records or b""))
            for position, header in headers(view):
                check(view, position, header)
            fresh = [it for it in values_of(answer.records) if it[0] >= start]
            yield from fresh
            if not fresh or fresh[-1][0] + 1 >= answer.high_watermark:
                return
            start = fresh[-1][0] + 1


def kind_of(file: Path) -> str:
    """Return the kind of a file in a data directory; AssertionError for one that no kind is known of."""
    for kind in (*SHARED, *OF_A_LOG, *PASSING):
        if file.name.endswith(kind) if kind[0] in ".-" else file.name == kind:
            return kind
    raise AssertionError(f"{file} is of no kind that is known: say what is to become of the broker if it is damaged")


def files(root: Path) -> Iterator[Path]:
    """The files that may be damaged, and others that are of a kind that is known."""
    for file in sorted(root.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            if file.is_file() and kind_of(file) not in PASSING:
                yield file


def flip(file: Path, bit: int) -> None:
    """Change one bit of a file."""
    with file.open("r+b") as opened:
        opened.seek(bit // 8)
        (byte,) = opened.read(1)
        opened.seek(bit // 8)
        opened.write(bytes((byte ^ 1 << bit % 8,)))


def run(first: int, count: int) -> Counter[str]:
    """Run lives, from that of the seed `first`, until so many files were damaged; how many cases ended how."""
    return run_cases(Life, first, count)


def main(count: str, first: str = "0") -> None:
    """Print how the cases ended."""
    show(run(int(first), int(count)))


if __name__ == "__main__":
    main(*sys.argv[1:])

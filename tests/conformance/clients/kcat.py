"""kcat, librdkafka as a command. It reads records from standard input and prints what it consumes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from tests.conformance.clients import Client, Fetched, Record, RefusedError, Waiting
from tests.support.kcat import kcat

TIMEOUT_S = 30
KEY_END = "<key-end>"
RECORD_END = "<record-end>"


class KcatCommand(Client):
    name = "kcat"
    chooses_timestamps = False
    sends_binary = False  # it splits its input at marks, and takes headers from its command line
    sends_empty_bytes = False  # it makes nulls of them
    shows_header = staticmethod(lambda value: value and value.partition(b"\0")[0])  # it prints them as C strings

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._kcat = kcat()

    def _run(self, arguments: Sequence[str], data: bytes = b"") -> bytes:
        done = subprocess.run(
            [self._kcat.path, "-b", self._bootstrap, *arguments],
            input=data,
            capture_output=True,
            timeout=TIMEOUT_S,
            env={**os.environ, **self._kcat.environment},
        )
        if done.returncode:
            raise RefusedError(done.stderr.decode(errors="replace").strip())
        return done.stdout

    def produce(
        self, topic: str, partition: int, records: Sequence[Record], *, compression: str, idempotent: bool
    ) -> Sequence[int]:
        """Run kcat once for each run of records with the same headers, which are its options. It tells no offsets."""
        common = ["-P", "-t", topic, "-p", str(partition), "-X", f"compression.codec={compression}", "-X", "acks=all"]
        common += ["-X", f"enable.idempotence={str(idempotent).lower()}", "-K", KEY_END, "-D", RECORD_END, "-Z"]
        common += ["-X", f"message.max.bytes={16 << 20}", "-X", "linger.ms=100", "-X", "message.timeout.ms=20000"]
        for headers, group in groupby(records, key=lambda record: record.headers):
            options: list[str] = []
            for name, value in headers:
                options += ["-H", name if value is None else f"{name}={os.fsdecode(value)}"]
            self._run([*common, *options], b"".join(map(_line, group)))
        return range(len(records))

    def fetch(
        self, topic: str, ends: Mapping[int, int], *, starts: Mapping[int, int] | None = None
    ) -> dict[int, list[Fetched]]:
        waiting = Waiting(self.name, ends, starts)
        print_as = f"%p %o %T %K %S\n%k%s%h{RECORD_END}"
        while missing := waiting.missing:
            partition, start = next(iter(missing.items()))
            count = ends[partition] - start
            arguments = [
                "-C",
                "-q",
                "-t",
                topic,
                "-p",
                str(partition),
                "-o",
                str(start),
                "-c",
                str(count),
                "-f",
                print_as,
            ]
            printed = self._run(
                [*arguments, "-X", "fetch.wait.max.ms=100", "-X", "receive.message.max.bytes=100000000"]
            )
            for at, offset, record in _records(printed):
                waiting.add(at, offset, record)
        return waiting.found

    def close(self) -> None:
        """Nothing stays open between two commands."""

    def listing(self) -> str:
        """Return what `kcat -L` prints."""
        return self._run(["-L"]).decode()

    def offset_at(self, topic: str, partition: int, timestamp: int) -> int:
        """Return what `kcat -Q` finds."""
        printed = self._run(["-Q", "-t", f"{topic}:{partition}:{timestamp}"]).decode()
        return int(printed.rsplit(maxsplit=1)[-1])


def _line(record: Record) -> bytes:
    key = b"" if record.key is None else record.key + KEY_END.encode()
    return key + (record.value or b"") + RECORD_END.encode()


def _records(printed: bytes) -> Iterator[tuple[int, int, Record]]:
    """Read records off what kcat printed: a line of numbers, key and value by length, headers up to the mark."""
    position = 0
    while position < len(printed):
        end = printed.index(b"\n", position)
        partition, offset, timestamp, key_size, value_size = map(int, printed[position:end].split())
        position = end + 1
        key = None if key_size < 0 else printed[position : position + key_size]
        position += max(key_size, 0)
        value = None if value_size < 0 else printed[position : position + value_size]
        position += max(value_size, 0)
        end = printed.index(RECORD_END.encode(), position)
        headers = _headers(printed[position:end])
        position = end + len(RECORD_END)
        yield partition, offset, Record(key, value, timestamp, headers)


def _headers(printed: bytes) -> tuple[tuple[str, bytes | None], ...]:
    """Read `name=value,name=value`; a header without a value is printed as NULL."""
    if not printed:
        return ()
    pairs = (pair.partition(b"=") for pair in printed.split(b","))
    return tuple((name.decode(), None if value == b"NULL" else value) for name, _, value in pairs)

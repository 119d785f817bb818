"""The partition log against the bare system calls that it cannot do without: write, sendfile, read.

The peer writes or reads the same bytes, in pieces of the same size, with nothing around it: what is above 1.0x (below,
where more is better) is what the log costs. Files are warm: the page cache is measured, not the disk.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from anabranch.records.batch import HEADER_SIZE, build
from anabranch.runtime.disk import Disk
from anabranch.storage.log.config import Durability, LogConfig
from anabranch.storage.log.log import LocalLog
from anabranch.storage.log.log_slice import LogSlice
from anabranch.storage.log.recovery import scan
from benchmarks.harness import Bar, Result, Scale, compare

KIB, MIB = 1 << 10, 1 << 20
CONFIG = LogConfig(durability=Durability.OS)


def append(scale: Scale) -> Iterable[Result]:
    """Append batches of 1 MiB and 16 KiB against pwrite of the same bytes to a file."""
    for size, bound in ((MIB, 1.25), (16 * KIB, None)):
        count = scale.choose(512 * MIB, 4 * MIB) // size
        with _directory() as directory:
            yield from compare(
                f"storage.append_{size // KIB}k",
                what=f"{count} batches of {size} bytes into a new log; the peer pwrites them to a new file",
                sides={
                    "log": _timed(count, size, partial(_append, directory, size, count)),
                    "pwrite": _timed(count, size, partial(_write, directory, size, count)),
                },
                bars=[
                    Bar("seconds_per_batch", "s", "less", bound),
                    Bar("bytes_per_second", "bytes/s", "more"),
                ],
                scale=scale,
            )


def read(scale: Scale) -> Iterable[Result]:
    """Find slices of 1 MiB and send them to a socket against sendfile of the same bytes."""
    size = scale.choose(256 * MIB, 4 * MIB)
    with _directory() as directory:
        log = _filled(directory / "t-0", size, 16 * KIB)
        path = next((directory / "t-0").glob("*.log"))
        yield from compare(
            "storage.read",
            what=f"{size} bytes of 16 KiB batches to a local socket, 1 MiB a time; the peer knows the positions",
            sides={
                "log": _timed(size // MIB, MIB, lambda: _drained(lambda to: _send_slices(log, to))),
                "sendfile": _timed(size // MIB, MIB, lambda: _drained(lambda to: _send_file(path, to))),
            },
            bars=[Bar("bytes_per_second", "bytes/s", "more", 0.7)],
            scale=scale,
        )


def recovery(scale: Scale) -> Iterable[Result]:
    """Check every batch of a segment, as after a crash, against reading the file."""
    size = scale.choose(512 * MIB, 4 * MIB)
    for batch in (MIB, 16 * KIB):
        with _directory() as directory:
            _filled(directory / "t-0", size, batch)
            path = next((directory / "t-0").glob("*.log"))
            yield from compare(
                f"storage.recovery_{batch // KIB}k",
                what=f"header, CRC and offsets of {batch}-byte batches, {size} bytes; the peer reads 4 MiB at once",
                sides={
                    "scan": _timed(size // batch, batch, partial(_scan, path)),
                    "read": _timed(size // batch, batch, partial(_read, path)),
                },
                bars=[Bar("bytes_per_second", "bytes/s", "more", 0.25)],
                scale=scale,
            )


def create(scale: Scale) -> Iterable[Result]:
    """Open new logs and begin their first epoch, against making as many directories."""
    count = scale.choose(1024, 16)

    def logs() -> float:
        with _directory() as directory:
            began = time.perf_counter()
            for number in range(count):
                LocalLog.open(directory / f"t-{number}", CONFIG, disk=Disk()).start_epoch(0)
            return time.perf_counter() - began

    def directories() -> float:
        with _directory() as directory:
            began = time.perf_counter()
            for number in range(count):
                (directory / f"t-{number}").mkdir()
            return time.perf_counter() - began

    yield from compare(
        "storage.create",
        what=f"{count} new partition logs with a leader epoch each; the peer makes {count} directories",
        sides={"log": _timed(count, 0, logs), "mkdir": _timed(count, 0, directories)},
        bars=[Bar("seconds_per_batch", "s", "less")],
        scale=scale,
    )


BENCHMARKS = {"append": append, "read": read, "recovery": recovery, "create": create}


def _timed(count: int, size: int, run: Callable[[], float]) -> Callable[[], Mapping[str, float]]:
    def measure() -> Mapping[str, float]:
        seconds = run()
        return {"seconds_per_batch": seconds / count, "bytes_per_second": count * size / seconds}

    return measure


def _batch(size: int) -> bytearray:
    return build(os.urandom(size - HEADER_SIZE), record_count=100, base_timestamp=1_000, max_timestamp=1_000)


def _append(directory: Path, size: int, count: int) -> float:
    batch = _batch(size)
    log = LocalLog.open(directory / "t-0", CONFIG, disk=Disk())
    began = time.perf_counter()
    for _ in range(count):
        log.append(batch, 0, 0)
    seconds = time.perf_counter() - began
    shutil.rmtree(directory / "t-0")
    return seconds


def _write(directory: Path, size: int, count: int) -> float:
    batch = _batch(size)
    path = directory / "plain"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        began = time.perf_counter()
        for number in range(count):
            os.pwrite(fd, batch, number * size)
        return time.perf_counter() - began
    finally:
        os.close(fd)
        path.unlink()


def _filled(path: Path, size: int, batch_size: int) -> LocalLog:
    log = LocalLog.open(path, CONFIG, disk=Disk())
    batch = _batch(batch_size)
    for _ in range(size // batch_size):
        log.append(batch, 0, 0)
    return log


def _drained(send: Callable[[socket.socket], None]) -> float:
    """Time `send` to a socket whose other end, in another process, takes everything and looks at nothing."""
    ours, theirs = socket.socketpair()
    with subprocess.Popen(["cat"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL) as reader, ours:
        theirs.close()
        began = time.perf_counter()
        send(ours)
        ours.shutdown(socket.SHUT_WR)
        reader.wait()
        return time.perf_counter() - began


def _send_slices(log: LocalLog, to: socket.socket) -> None:
    offset = log.log_start
    while (part := log.read(offset, MIB)) is not None:
        assert isinstance(part, LogSlice)
        _send(to, part.fd, part.position, part.size)
        offset += part.size // (16 * KIB) * 100


def _send_file(path: Path, to: socket.socket) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        for position in range(0, size, MIB):
            _send(to, fd, position, min(MIB, size - position))
    finally:
        os.close(fd)


def _send(to: socket.socket, fd: int, position: int, size: int) -> None:
    while size:
        sent = os.sendfile(to.fileno(), fd, position, size)
        position, size = position + sent, size - sent


def _scan(path: Path) -> float:
    file = Disk().open(path)
    began = time.perf_counter()
    tail = scan(file, 0, file.size(), 0, lambda position, header: None)
    seconds = time.perf_counter() - began
    assert tail.reason is None, tail
    return seconds


def _read(path: Path) -> float:
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        began = time.perf_counter()
        for position in range(0, size, 4 * MIB):
            os.pread(fd, 4 * MIB, position)
        return time.perf_counter() - began
    finally:
        os.close(fd)


@contextmanager
def _directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="anabranch-storage-", dir=os.environ.get("ANABRANCH_BENCHMARK_DIRECTORY")))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)

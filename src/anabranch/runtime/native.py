"""Compiled kernels in a process that loads neither Numba nor LLVM: machine code from a file.

What brokers do inside batches (`records.kernels.examine`, `search` and `scatter`) is compiled ahead of time. The code
is kept beside Numba's own files, in a directory named by the digest of its sources (`records.kernels.sources`). `load`
maps it, a matter of microseconds; `python -m anabranch.runtime.native` makes it, a matter of seconds. A file that is
damaged is not used. See docs/adr/0042-brokers-look-into-batches.md.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, flock
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from anabranch.base.errors import DecodeError
from anabranch.records.batch import BatchHeader
from anabranch.records.compression import Bytes
from anabranch.records.examination import (
    REFUSED_RECORDS_REPORTED_MAX,
    Accepted,
    Examine,
    Examined,
    Flaw,
    Malformed,
)
from anabranch.records.filtering import Scatter
from anabranch.records.kernels.sources import directories, make_only
from anabranch.records.timestamps import Search
from anabranch.runtime.native_scatter import NativeScatter

_DIGEST_SIZE = 16
# As in `records.kernels.examine` and `records.kernels.search`, which need Numba: what a sheet has room for, where the
# answer is, and results.
_QUESTION = struct.Struct("=8q")
_ANSWER, _ANSWER_END, _SOUND = 8, 13, -1
_SEARCH_QUESTION = struct.Struct("=7q")
_SEARCH_ANSWER, _SEARCH_ANSWER_END, _FOUND, _MALFORMED = 7, 9, 1, -1
_LARGE = 64 * 1024
"""Bytes from which on other threads may run meanwhile."""
_Number = ctypes.c_int64
_byte_of, _address_of = ctypes.c_char.from_buffer, ctypes.addressof
_Sheet = _Number * (_ANSWER_END + REFUSED_RECORDS_REPORTED_MAX)


class Native(NamedTuple):
    """What is compiled."""

    examine: Examine
    search: Search
    scatter: Scatter


class Variant(NamedTuple):
    """Code of `scatter` for processors with some instructions."""

    suffix: str
    flags: frozenset[str]
    """What the system calls them."""
    features: str
    """What LLVM calls them."""


VARIANTS = {
    "x86_64": (
        Variant(
            "-fold",
            frozenset(("sse4_2", "bmi1", "bmi2", "avx2", "avx512f", "avx512bw", "avx512vl", "pclmulqdq", "vpclmulqdq")),
            "+sse4.2,+crc32,+bmi,+bmi2,+avx2,+avx512f,+avx512bw,+avx512vl,+pclmul,+vpclmulqdq",
        ),
        Variant("-crc", frozenset(("sse4_2", "pclmulqdq")), "+sse4.2,+crc32,+pclmul"),
        Variant("-steps", frozenset(("sse4_2",)), "+sse4.2,+crc32"),
    ),
    "aarch64": (Variant("-crc", frozenset(("crc32",)), "+crc"),),
}
"""By architecture, the best first; without any of them the caller takes the checksums."""
_PLAIN = Variant("", frozenset(), "")
_MULTIPLIES = "pclmulqdq"
"""What the system calls multiplication without carries."""
LOCK = "lock"
_CPU_INFO = Path("/proc/cpuinfo")


@cache
def variant() -> Variant:
    """The code for this processor, as far as is known without compiling anything."""
    try:
        flags = set(_CPU_INFO.read_text().split())
    except OSError:
        return _PLAIN
    return next((each for each in VARIANTS.get(os.uname().machine, ()) if each.flags <= flags), _PLAIN)


def file_name(kernel: str) -> str:
    """The name of a kernel's file: code is for one architecture, and `scatter` for processors with an instruction."""
    suffix = variant().suffix if kernel == "scatter" else ""
    return f"{kernel}-{os.uname().machine}{suffix}.code"


def load() -> Native | None:
    """Find the code and make it callable; None where there is none, or no sound one."""
    for directory in _directories():
        with suppress(OSError, ValueError):
            examine, search, scatter = (_mapped(Path(directory, file_name(name))) for name in Native._fields)
            return Native(
                NativeExamination(examine),
                NativeSearch(search),
                NativeScatter(scatter, checksums=variant() is not _PLAIN, joins=_MULTIPLIES in variant().flags),
            )
    return None


def _directories() -> list[str]:
    try:
        return directories()
    except OSError:  # The sources are in an archive.
        return []


def build() -> list[Path]:
    """Compile the code and keep it where `load` finds it. Takes seconds; OSError where no directory can be written."""
    failure = OSError("there is no directory for machine code")
    for directory in _directories():
        try:
            make_only(directory)
            with _alone(Path(directory)):
                return _kept(Path(directory)) or _built(Path(directory))
        except OSError as error:
            failure = error
    raise failure


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Keep other processes from building here meanwhile: of brokers that start together one builds, the others wait."""
    with Path(directory, LOCK).open("wb") as lock:
        with suppress(OSError):  # Where there are no locks, several build, each a whole file.
            flock(lock, LOCK_EX)  # Until the file is closed, or the process ends.
        yield


def _kept(directory: Path) -> list[Path] | None:
    """The files of a directory that are there and sound; None if one is not."""
    paths = [Path(directory, file_name(name)) for name in Native._fields]
    try:
        for path in paths:
            _content(path)
    except (OSError, ValueError):
        return None
    return paths


def _built(directory: Path) -> list[Path]:
    from anabranch.records.kernels.ahead import machine_code
    from anabranch.records.kernels.examine import examine
    from anabranch.records.kernels.scatter import CHECKSUMS, FOLDS, JOINS, scatter
    from anabranch.records.kernels.search import search

    found = variant()
    if (found is not _PLAIN, found.suffix == "-fold", _MULTIPLIES in found.flags) != (CHECKSUMS, FOLDS, JOINS):
        raise OSError("kernels are not compiled for this processor, which has other instructions for checksums")
    codes = {
        "examine": machine_code(examine),
        "search": machine_code(search),
        "scatter": machine_code(scatter, variant().features),
    }
    return [_keep(Path(directory, file_name(name)), code) for name, code in codes.items()]


def _keep(path: Path, code: bytes) -> Path:
    """Write a file of code, whole or not at all."""
    written = path.with_name(f"{path.name}.{os.getpid()}")
    written.write_bytes(code + blake2b(code, digest_size=_DIGEST_SIZE).digest())
    return written.replace(path)


def _content(path: Path) -> bytes:
    """Read a file of code. OSError; ValueError where it is damaged."""
    content = path.read_bytes()
    code, digest = content[:-_DIGEST_SIZE], content[-_DIGEST_SIZE:]
    if not code or blake2b(code, digest_size=_DIGEST_SIZE).digest() != digest:
        raise ValueError(f"{path} is damaged")
    return content


def _mapped(path: Path) -> int:
    """Map the code of a file and return its address. It stays there. OSError, ValueError."""
    content = _content(path)
    mapping = ctypes.CDLL(None, use_errno=True).mmap
    mapping.restype = ctypes.c_void_p
    mapping.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t)
    with path.open("rb") as file:
        at = mapping(None, len(content), mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, file.fileno(), 0)
    if at in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "machine code cannot be mapped", str(path))
    return int(at)


class NativeExamination:
    """`records.examination.examine`, compiled."""

    def __init__(self, code_at: int) -> None:
        self._quick: Any = ctypes.PYFUNCTYPE(_Number, ctypes.c_void_p)(code_at)
        self._long: Any = ctypes.CFUNCTYPE(_Number, ctypes.c_void_p)(code_at)
        self._own = threading.local()

    def __call__(
        self, records: Bytes, count: int, base_timestamp: int, max_timestamp: int, accepted: Accepted
    ) -> Examined | None:
        try:
            sheet, sheet_at = self._own.sheet
        except AttributeError:
            sheet = _Sheet()
            sheet_at = ctypes.addressof(sheet)
            self._own.sheet = sheet, sheet_at
        size = len(records)
        try:
            held = _byte_of(records)
        except (TypeError, ValueError):
            held = _held(records)
        at = _address_of(held)
        _QUESTION.pack_into(sheet, 0, at, at + size, count, base_timestamp, max_timestamp, *accepted)
        found = self._quick(sheet_at) if size < _LARGE else self._long(sheet_at)
        if found == _SOUND:
            return None
        greatest, place, untimely, keyless, reported = sheet[_ANSWER:_ANSWER_END]
        if found:
            return Examined(0, Malformed(found), place)
        refused = sheet[_ANSWER_END : _ANSWER_END + reported]
        return Examined(
            greatest, counts=(untimely, keyless), refused=tuple((each >> 1, Flaw(each & 1)) for each in refused)
        )


class NativeSearch:
    """`records.timestamps.search`, compiled."""

    def __init__(self, code_at: int) -> None:
        self._run: Any = ctypes.CFUNCTYPE(_Number, ctypes.c_void_p)(code_at)

    def __call__(
        self, records: Bytes, header: BatchHeader, least_delta: int, timestamp: int | None
    ) -> tuple[int, int] | None:
        sheet = (_Number * _SEARCH_ANSWER_END)()
        held = _held(records)
        at = ctypes.addressof(held)
        largest = timestamp is None
        wanted = (header.base_timestamp, least_delta, 0 if timestamp is None else timestamp, largest)
        _SEARCH_QUESTION.pack_into(sheet, 0, at, at + len(records), header.record_count, *wanted)
        found = self._run(ctypes.addressof(sheet))
        if found == _MALFORMED:
            raise DecodeError(f"the record batch at offset {header.base_offset} has a record that is cut off")
        delta, recorded_ms = sheet[_SEARCH_ANSWER:_SEARCH_ANSWER_END]
        return (delta, recorded_ms) if found == _FOUND else None


def _held(records: Bytes) -> Any:
    """Something whose address is that of the bytes, which stay as long as it does."""
    try:
        return ctypes.c_char.from_buffer(records)
    except TypeError:  # They may not be written.
        return ctypes.create_string_buffer(bytes(records), max(len(records), 1))
    except ValueError:  # They are none.
        return ctypes.create_string_buffer(1)


if __name__ == "__main__":
    os.nice(10)
    build()

"""Files, as the storage layer uses them: positional, explicit about durability, replaceable by a disk that fails.

Durability: bytes of a file after `File.sync`, a name in a directory after `Disk.sync_directory`, both after
`Disk.replace`. Everything else may be lost, in part, when the power is. Errors are the operating system's `OSError`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from zlib import crc32

from anabranch.runtime import mapped

NAME_MAX = 255
"""Characters of a name in a directory."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SMALL_SIZE_MAX = 256 << 20
"""Bytes of a file that is read whole."""
DISCARD_SIZE_MAX = 4 << 20
"""Bytes of a file that is removed while the caller waits."""
DISCARDED_SUFFIX = ".deleted"


class OddFileError(OSError, ValueError):
    """A name that should be that of a small file is that of something else: its content is as good as damaged."""


class File:
    """An open file; closed when the last reference goes, so that a slice of a deleted file stays readable."""

    __slots__ = ("_among", "fd", "path")

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        self._among: set[int] | None = None

    def __del__(self) -> None:
        self.close()

    def count_in(self, among: set[int]) -> None:
        """Be a member of a set, by identity, until it is closed."""
        self._among = among
        among.add(id(self))

    def close(self) -> None:
        """Close the file, once."""
        if self._among is not None:
            self._among.discard(id(self))
            self._among = None
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def size(self) -> int:
        """The file's size in bytes."""
        return os.fstat(self.fd).st_size

    def write(self, data: bytes | bytearray | memoryview, position: int) -> None:
        """Write all of `data` at `position`."""
        written = os.pwrite(self.fd, data, position)
        if written < len(data):
            view = memoryview(data)
            while written < len(view):
                written += os.pwrite(self.fd, view[written:], position + written)

    def read(self, size: int, position: int) -> bytes:
        """Read up to `size` bytes from `position`; fewer only at the end of the file."""
        return os.pread(self.fd, size, position)

    def data_from(self, position: int) -> int:
        """The first position at or behind `position` that is not known to be in a hole; the end where there is none."""
        try:
            return os.lseek(self.fd, position, os.SEEK_DATA)
        except OSError as error:
            return self.size() if error.errno == errno.ENXIO else position

    def map(self, size: int, position: int) -> memoryview:
        """Map a stretch of the file for reading; it stays as it is for as long as the view lives. OSError."""
        return mapped.stretch(self.fd, size, position)

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes; views of what is cut off keep it."""
        mapped.cut(self.fd, size)

    def sync(self) -> None:
        """Make the file's bytes durable (fdatasync). Blocks."""
        os.fdatasync(self.fd)


def _check_ordinary(path: Path, fd: int) -> int:
    """The size of an open file. OddFileError for a directory, a pipe, which makes its reader wait, and the like."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise OddFileError(errno.EINVAL, "no ordinary file", str(path))
    return found.st_size


def _size_if_there(path: Path) -> int:
    """The bytes of a file; 0 if it is missing: another thread may be removing it."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _temporary(path: Path) -> Path:
    """The name of a file until it is complete; that of a long name is shorter."""
    if len(path.name) + len(".tmp") <= NAME_MAX:
        return path.with_name(path.name + ".tmp")
    return path.with_name(f"{path.name[-200:]}.{crc32(path.name.encode()):08x}.tmp")


class _Discarding:
    """Removes files in one thread, in their order; the thread ends when nothing is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Callable[[Path], None], Path]] = deque()
        self._running = False

    def add(self, unlink: Callable[[Path], None], paths: Sequence[Path]) -> None:
        """Have `unlink` called for each path."""
        with self._lock:
            self._waiting.extend((unlink, path) for path in paths)
            begin, self._running = not self._running, True
        if begin:
            threading.Thread(target=self._run, name="discard", daemon=True).start()

    def _run(self) -> None:
        while (next_one := self._next()) is not None:
            unlink, path = next_one
            try:
                unlink(path)
            except OSError:
                continue  # The next start removes it.
            except BaseException:
                self._running = False
                raise

    def _next(self) -> tuple[Callable[[Path], None], Path] | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._running = False
            return None


_discarding = _Discarding()


class Disk:
    """The file system."""

    def open(self, path: Path, *, create: bool = False) -> File:
        """Open a file for reading and writing."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_CREAT if create else 0)
        try:
            fd = os.open(path, flags, 0o644)
        except IsADirectoryError as error:
            raise OddFileError(error.errno, "a directory", str(path)) from error
        try:
            _check_ordinary(path, fd)
        except OSError:
            os.close(fd)
            raise
        return File(path, fd)

    def read(self, path: Path, size_max: int = SMALL_SIZE_MAX) -> bytes:
        """Read a small file whole. OddFileError for a larger one, and for what is no file: it could have no end."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            size = _check_ordinary(path, fd)
            if size > size_max:
                raise OddFileError(errno.EFBIG, f"{size} bytes are more than it can have", str(path))
            with open(fd, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(fd)

    def replace(self, path: Path, data: bytes) -> None:
        """Write a small file so that, whatever happens, the old content or the new is there, durably."""
        temporary = _temporary(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            fd = os.open(temporary, flags, 0o644)
        except FileExistsError:  # Left over, or put there: a link that would be followed, a pipe that nobody reads.
            self.unlink(temporary)
            fd = os.open(temporary, flags, 0o644)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
        self.sync_directory(path.parent)

    def exists(self, path: Path) -> bool:
        """Whether a file or directory of that name exists."""
        return path.exists()

    def linked(self, path: Path) -> Path | None:
        """Where a symbolic link leads in the end; None for anything else. OSError."""
        return Path(os.path.realpath(path)) if os.path.islink(path) else None

    def names(self, directory: Path) -> Sequence[str]:
        """The names in a directory, sorted."""
        return sorted(os.listdir(directory))

    def make_directory(self, path: Path) -> None:
        """Make a directory, and those above it, if it is not there."""
        path.mkdir(parents=True, exist_ok=True)

    def rename(self, old: Path, new: Path) -> None:
        """Rename within one directory; durable after `sync_directory`."""
        os.replace(old, new)

    def unlink(self, path: Path) -> None:
        """Remove a file; a missing one is no error."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def discard(self, paths: Sequence[Path]) -> None:
        """Remove files: their names are free for others at once.

        The blocks of large ones are given back in a thread for all, which can take a good part of a second. Those that
        the thread has not come to when the process ends stay, with `DISCARDED_SUFFIX` behind their names.
        """
        large = []
        for path in paths:
            if _size_if_there(path) <= DISCARD_SIZE_MAX:
                self.unlink(path)
                continue
            away = path if path.name.endswith(DISCARDED_SUFFIX) else path.with_name(path.name + DISCARDED_SUFFIX)
            try:
                self.rename(path, away)
            except OSError:
                self.unlink(path)
            else:
                large.append(away)
        if large:
            _discarding.add(self.unlink, large)

    def remove_tree(self, path: Path) -> None:
        """Remove a directory with its contents; a missing one is no error."""
        with contextlib.suppress(FileNotFoundError):
            from shutil import rmtree  # it imports every archive format, and a start needs none

            rmtree(path)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def size(self, path: Path) -> int:
        """The bytes of a file."""
        return path.stat().st_size

    def free(self, path: Path) -> int:
        """The bytes that can still be written in the file system of `path`."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def reserve(self, path: Path, size: int) -> None:
        """Make a file that takes `size` bytes of the file system. OSError, and then none is there."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            _check_ordinary(path, fd)
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError:
                self.unlink(path)
                raise
        finally:
            os.close(fd)

    def boot_id(self) -> bytes | None:
        """The id of this start of the machine: one with another id may have lost unsynced writes. None if unknown."""
        try:
            return BOOT_ID.read_bytes()
        except OSError:
            return None

    def lock(self, path: Path, locked: Callable[[], None] | None = None) -> DirectoryLock:
        """Take the lock file `path` for this process; raises BlockingIOError while another process holds it.

        `locked` makes room for the file, of a disk that no other process uses now.
        """
        return DirectoryLock(path, locked)


class DirectoryLock:
    """An advisory lock that ends with the process, however it ends. The file names its holder.

    The directory of the file is locked too: a file that is removed and made again is another one.
    """

    def __init__(self, path: Path, locked: Callable[[], None] | None = None) -> None:
        """`locked` is called when the directory is locked, before the file is made."""
        self._directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._fd = -1
        try:
            fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if locked is not None:
                locked()
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.release()
            raise
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Give the lock back."""
        for fd in (self._fd, self._directory):
            if fd >= 0:
                os.close(fd)
        self._fd = self._directory = -1

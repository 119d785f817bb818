"""Where the machine code of kernels is kept: in a directory named by a digest of every source of `anabranch.records`.

Any change of any source finds an empty directory, and two versions that run at once never write to the same files. A
new directory replaces those of other versions beside it. Together with `compiled` this is all of the pure packages that
touches the disk (docs/adr/0022-the-compiled-cache.md); nothing here needs Numba.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from hashlib import blake2b

PREFIX = "kernels-"
"""Of the directories' names; the digest follows."""
_KERNELS = os.path.dirname(__file__)
SOURCES = os.path.dirname(_KERNELS)


@cache
def digest(directory: str) -> str:
    """Return the digest of the names and contents of all Python sources in a directory and those below it."""
    found = blake2b(digest_size=10)
    pending = [directory]
    while pending:
        at = pending.pop()
        with os.scandir(at) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
        for entry in ordered:
            if entry.name.endswith(".py"):
                with open(entry.path, "rb") as file:
                    content = file.read()
                found.update(b"%s\0%d\0" % (os.path.relpath(entry.path, directory).encode(), len(content)))
                found.update(content)
            elif entry.is_dir() and entry.name != "__pycache__":
                pending.append(entry.path)
    return found.hexdigest()


def directories() -> list[str]:
    """List the directories for machine code of no locator of Numba's, the first choice first; they may not exist."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    users = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    parents = [os.path.join(given, "anabranch")] if given else []
    parents += [os.path.join(_KERNELS, "__pycache__"), os.path.join(users, "anabranch")]
    return [os.path.join(parent, PREFIX + digest(SOURCES)) for parent in parents]


@cache
def make_only(path: str) -> None:
    """Make a directory in the place of those of other versions, once in a process: two versions may run at once."""
    if not os.path.isdir(path):
        os.makedirs(path, exist_ok=True)
        for entry in os.scandir(os.path.dirname(path)):
            if entry.name.startswith(PREFIX) and entry.path != path:
                _remove(entry.path)


def _remove(path: str) -> None:
    """Remove a directory of files, unless another process is removing or filling the directory at the same time."""
    with suppress(OSError):
        for entry in os.scandir(path):
            os.unlink(entry.path)
        os.rmdir(path)

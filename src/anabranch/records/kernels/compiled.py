"""The decorators of kernels, and the cache of their machine code.

Numba keys the code of a function by the source file of that function alone, so the code of a caller would survive a
change of a callee, or of a constant, in another module. The rule kept here: machine code is kept in a directory named
by a digest of every source of `anabranch.records`, so any change of any of them finds an empty directory, and two
versions that run at once never write to the same files. A new directory replaces those of other versions. Where the
package's directory is read-only, the directory is made in the user's cache; NUMBA_CACHE_DIR is respected.

The directories are read and written while the module is imported, as `__pycache__` is by Python: this is the one module
of the pure packages that touches the disk (docs/adr/0022-the-compiled-cache.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from typing import Any, TypeVar, cast

from numba import njit
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    InTreeCacheLocator,
    UserProvidedCacheLocator,
    UserWideCacheLocator,
    ZipCacheLocator,
)

PREFIX = "kernels-"
"""Of the directories' names; the digest follows."""

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    """Compile a function when it is first called, or load its machine code; the GIL is released while it runs."""
    dispatcher: Any = njit(nogil=True, error_model="numpy")(function)
    dispatcher._cache = cast(Any, _Cache)(function)
    return cast(Function, dispatcher)


def inlined(function: Function) -> Function:
    """Make a function part of every kernel that calls it."""
    return cast(Function, njit(nogil=True, error_model="numpy", forceinline=True)(function))


def called(function: Function) -> Function:
    """Keep a function apart from the kernels that call it, because both need many registers."""
    return cast(Function, njit(nogil=True, error_model="numpy")(function))


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


@cache
def _replace_others(path: str) -> None:
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


class _KeyedBySources:
    """Makes a locator of Numba's put the files into a directory of their version."""

    def get_cache_path(self) -> str:
        return os.path.join(super().get_cache_path(), PREFIX + self.get_source_stamp())  # type: ignore[misc]

    def get_source_stamp(self) -> str:
        return digest(os.path.dirname(os.path.dirname(__file__)))

    def ensure_cache_path(self) -> None:
        path = self.get_cache_path()
        _replace_others(path)
        os.makedirs(path, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(f"{path} cannot be written")


class _UserProvided(_KeyedBySources, UserProvidedCacheLocator):
    pass


class _InTree(_KeyedBySources, InTreeCacheLocator):
    pass


class _UserWide(_KeyedBySources, UserWideCacheLocator):
    pass


class _CacheFiles(CompileResultCacheImpl):
    # A package in a zip archive has no directory; Numba keys its code by all of the archive.
    _locator_classes = [_UserProvided, _InTree, _UserWide, ZipCacheLocator]  # noqa: RUF012


class _Cache(FunctionCache):
    _impl_class = _CacheFiles

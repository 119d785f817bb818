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

from anabranch.records.kernels.sources import PREFIX, SOURCES, digest, make_only

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


class _KeyedBySources:
    """Makes a locator of Numba's put the files into a directory of their version."""

    def get_cache_path(self) -> str:
        return os.path.join(super().get_cache_path(), PREFIX + self.get_source_stamp())  # type: ignore[misc]

    def get_source_stamp(self) -> str:
        return digest(SOURCES)

    def ensure_cache_path(self) -> None:
        path = self.get_cache_path()
        make_only(path)
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

"""Slabs of memory that are lent again and again.

A slab returns to its shelf when the last Arrow buffer (or memoryview) of it is gone.
"""

from __future__ import annotations

from sys import getrefcount

import numpy as np
from numpy.typing import NDArray

_SLAB_SIZE_MIN = 64 * 1024
_SLAB_SIZE_MAX = 64 * 1024 * 1024
_SHELF_SIZE_MAX = 64 * 1024 * 1024
_SLABS_LOOKED_AT = 32


class Shelf:
    """Slabs of memory, each lent again as soon as nobody refers to it or a view of it any more.

    Those that were lent last are looked at first: they are in a cache, if any is. A slab that is looked at is not on
    the shelf, so that two threads never look at the same one.
    """

    def __init__(self) -> None:
        self._slabs: list[NDArray[np.uint8]] = []

    def take(self, size: int) -> NDArray[np.uint8]:
        """Lend at least `size` bytes, of any content, for as long as someone refers to the array or a view of it."""
        if size > _SLAB_SIZE_MAX:
            return np.empty(size, np.uint8)
        shelf_size = max(_SLAB_SIZE_MIN, 1 << (size - 1).bit_length())
        slab = self._found(shelf_size)
        if slab is None:
            self._make_room(shelf_size)
            slab = np.empty(shelf_size, np.uint8)
        self._slabs.append(slab)
        return slab

    def _found(self, shelf_size: int) -> NDArray[np.uint8] | None:
        lent: list[NDArray[np.uint8]] = []
        try:
            while len(lent) < _SLABS_LOOKED_AT:
                slab = self._slabs.pop()
                # The variable, and the argument.
                if len(slab) == shelf_size and getrefcount(slab) == 2:
                    return slab
                lent.append(slab)
        except IndexError:
            pass
        finally:
            lent.reverse()
            self._slabs += lent
        return None

    def _make_room(self, size: int) -> None:
        held = size + sum(map(len, tuple(self._slabs)))
        while held > _SHELF_SIZE_MAX and self._slabs:
            held -= len(self._slabs.pop(0))


shelf = Shelf()

"""Slabs of memory that are lent again and again: touching fresh memory costs more than decoding into it.

    shelf --take--> Slab --data, buffer--> memoryviews, Arrow arrays--the last of them gone--> shelf

The rule: all that shows the memory of a slab refers to the Slab, and only its finalizer puts the memory back; no count
of references is read. Between a memoryview and the Slab is an array of NumPy or a buffer of Arrow, which the garbage
collector does not look into: so a cycle that holds memory does not finalize the Slab before the cycle's other objects.
Finalizers run at any time and in any thread, within `take` too, so a shelf has no lock: each step is one operation of a
list, which is atomic, and memory that a thread looks at is not on the shelf meanwhile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from anabranch.records.arrow.memory import address_of

SLAB_SIZE_MIN = 64 * 1024
SLAB_SIZE_MAX = 64 * 1024 * 1024
"""Larger slabs are not kept."""
LARGE_SIZE_MIN = 2 * 1024 * 1024
LARGE_SHELF_SIZE_MAX = 64 * 1024 * 1024
"""Bytes on a shelf when a large slab comes back; smaller ones may be added, up to the number below."""
SHELF_COUNT_MAX = 32


class Memory(NamedTuple):
    """Memory of which the address is known."""

    array: NDArray[np.uint8]
    address: int
    size: int


def memory_of(array: NDArray[np.uint8]) -> Memory:
    """Find out the address of an array."""
    return Memory(array, address_of(array), len(array))


class Slab:
    """Memory of `size` bytes at `address`, of any content, lent for as long as this, `data` or `buffer` is there."""

    __slots__ = ("_memory", "_shelf", "address", "size")

    def __init__(self, memory: Memory, shelf: Shelf | None = None) -> None:
        self._memory = memory
        self._shelf = shelf
        _, self.address, self.size = memory

    @property
    def data(self) -> memoryview:
        """All of the memory, writable."""
        return np.asarray(self).data

    @property
    def buffer(self) -> pa.Buffer:
        """All of the memory, for Arrow."""
        return pa.foreign_buffer(self.address, self.size, self)

    @property
    def __array_struct__(self) -> Any:
        """The memory as NumPy takes it from a foreign object, to which the array then refers."""
        return self._memory.array.__array_struct__

    def __del__(self) -> None:
        if self._shelf is not None:
            self._shelf.put(self._memory)


class Shelf:
    """Memory that nothing refers to, in the order in which it came back: the last is in a cache, if any is."""

    def __init__(self) -> None:
        self._idle: list[Memory] = []

    def take(self, size: int) -> Slab:
        """Lend at least `size` bytes."""
        if size > SLAB_SIZE_MAX:
            return Slab(memory_of(np.empty(size, np.uint8)))
        shelf_size = SLAB_SIZE_MIN if size <= SLAB_SIZE_MIN else 1 << (size - 1).bit_length()
        others: list[Memory] = []
        try:
            while (memory := self._idle.pop()).size != shelf_size:
                others.append(memory)
        except IndexError:
            memory = memory_of(np.empty(shelf_size, np.uint8))
        if others:
            others.reverse()
            self._idle += others
        return Slab(memory, self)

    def take_view(self, size: int) -> tuple[memoryview, int]:
        """As `take`, for memoryviews: at least `size` bytes, writable, and their address."""
        if size < SLAB_SIZE_MIN:  # To lend it would cost more than to allocate it.
            array = np.empty(size, np.uint8)
            return array.data, address_of(array)
        slab = self.take(size)
        return slab.data, slab.address

    def put(self, memory: Memory) -> None:
        """Take memory back; drop what came back first as long as there is too much."""
        self._idle.append(memory)
        if memory.size >= LARGE_SIZE_MIN or len(self._idle) > SHELF_COUNT_MAX:
            self._trim()

    def _trim(self) -> None:
        idle = tuple(self._idle)
        count, size = len(idle), sum(memory.size for memory in idle)
        try:
            while size > LARGE_SHELF_SIZE_MAX or count > SHELF_COUNT_MAX:
                size -= self._idle.pop(0).size
                count -= 1
        except IndexError:
            pass  # Other threads have taken the rest.


shelf = Shelf()

"""The scatter kernel keeps to its memory, some blocks long: `make fuzz` scatters ten thousand."""

from __future__ import annotations

import ctypes

import pytest

from tests.fuzz.scatter import FoundError, Fuzz, Given, Memory

BLOCKS = 250


def test_the_kernel_keeps_to_its_memory_and_does_as_the_reference() -> None:
    fuzz = Fuzz(seed=3)
    fuzz.run(range(BLOCKS))
    kinds = ("right", "damaged", "malformed", "referred", "lay in pieces", "had no room", "had none for pieces")
    assert all(fuzz.counts[kind] > 2 for kind in kinds), fuzz.counts


def test_bytes_that_were_not_given_are_neither_read_nor_written() -> None:
    bytes_ = ctypes.create_string_buffer(100)
    at = ctypes.addressof(bytes_)
    memory = Memory()
    memory.give([Given(at, at + 40, True, "one"), Given(at + 40, at + 80, False, "two")])
    memory.write(at, b"x" * 40)
    assert memory.read(at + 40, 40) == bytes(40)
    for start, size in ((-1, 2), (39, 2), (79, 2), (80, 1)):
        with pytest.raises(FoundError):
            memory.read(at + start, size)
    with pytest.raises(FoundError):
        memory.write(at + 40, b"x")
    with pytest.raises(FoundError):
        memory.give([Given(at, at + 41, True, "one"), Given(at + 40, at + 80, False, "two")])

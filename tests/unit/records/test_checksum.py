from __future__ import annotations

import random

import pytest
from crc32c import crc32c

from anabranch.records.checksum import changed


@pytest.mark.parametrize("behind", [0, 1, 7, 8, 255, 4096, 99_999, 1 << 20, (1 << 20) + 12_345])
def test_a_change_is_what_taking_it_anew_says(behind: int) -> None:
    chance = random.Random(behind)
    before, after, rest = chance.randbytes(36), chance.randbytes(36), chance.randbytes(behind)
    assert changed(crc32c(before + rest), before, after, behind) == crc32c(after + rest)
    assert changed(5, before, before, behind) == 5

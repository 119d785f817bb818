"""A few cases of the fuzzer of whole data directories."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.directories import KINDS, Case
from tests.support.thorough import thorough


@pytest.mark.parametrize("seed", range(thorough(6, 3)))
def test_what_was_acknowledged_is_there_or_a_sentence_tells_why_not(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "data"
    path.mkdir()
    assert Case(seed, path).run()


def test_every_kind_of_file_has_its_turn(tmp_path: Path) -> None:
    kinds = {Case(seed, tmp_path).kind for seed in range(100)}
    assert kinds == set(KINDS)

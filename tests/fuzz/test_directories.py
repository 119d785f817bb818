"""A few lives of the fuzzer of whole data directories."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.directories import FINDING, MANY_LOGS, OF_A_LOG, PASSING, SHARED, WITNESSES, Life, kind_of
from tests.support.thorough import thorough


@pytest.mark.parametrize("seed", range(thorough(10, 3)))
def test_what_was_acknowledged_is_there_or_a_sentence_tells_why_not(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "data"
    path.mkdir()
    life = Life(seed, path)
    outcomes = life.run()
    if life.shared is not None:
        assert len(outcomes) == 1
        return
    assert len(outcomes) > sum(MANY_LOGS.values()) - WITNESSES
    assert {outcome.split()[0] for outcome in outcomes} <= {*OF_A_LOG}
    assert any("offline" in outcome for outcome in outcomes)
    assert not life.scrubs or any(outcome.startswith(FINDING) for outcome in outcomes)


def test_every_shared_file_has_its_turn(tmp_path: Path) -> None:
    lives = [Life(seed, tmp_path) for seed in range(100)]
    assert {life.shared for life in lives} == {None, *SHARED}
    assert {life.scrubs for life in lives} == {life.ends_cleanly for life in lives} == {True, False}


@pytest.mark.parametrize("kind", [*SHARED, *OF_A_LOG, *PASSING])
def test_a_file_of_a_known_kind_is_one(kind: str) -> None:
    assert kind_of(Path(f"0{kind}" if kind[0] in ".-" else kind)) == kind


@pytest.mark.parametrize("name", ["metadata.sqlite2", "new-checkpoint", "0.logs", "log"])
def test_a_file_of_an_unknown_kind_ends_the_fuzzer(name: str) -> None:
    with pytest.raises(AssertionError, match="of no kind that is known"):
        kind_of(Path(name))

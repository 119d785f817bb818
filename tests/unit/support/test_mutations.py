"""Every mutation of shipped code finds the text that it changes, and names tests that exist."""

from __future__ import annotations

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_finds_its_text_once_and_its_test(mutation: Mutation) -> None:
    for edit in mutation.edits:
        text = (ROOT / "src" / "anabranch" / edit.file).read_text(encoding="utf-8")
        assert text.count(edit.before) == 1, f"{edit.file}: {edit.before}"
        assert not edit.after or edit.after not in text
    file, _, test = mutation.test.partition("::")
    assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8")

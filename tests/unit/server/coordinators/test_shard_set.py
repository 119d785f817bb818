"""Which partition coordinates what: as Apache Kafka says, for every kind of text."""

from __future__ import annotations

import pytest

from anabranch.server.coordinators.shard_set import coordinator_partition, java_hash


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("a", 97),
        ("abc", 96_354),
        ("hello world", 1_794_106_052),
        ("polygenelubricants", -(2**31)),
        ("größe", 98_762_257),
        ("\N{GRINNING FACE}", 1_772_899),
    ],
)
def test_the_hash_is_javas(text: str, expected: int) -> None:
    assert java_hash(text) == expected


def test_a_key_has_a_partition_whatever_its_hash() -> None:
    assert coordinator_partition("abc", 50) == 4
    assert coordinator_partition("polygenelubricants", 50) == 0
    assert all(0 <= coordinator_partition(f"group-{number}", 50) < 50 for number in range(1_000))
    assert len({coordinator_partition(f"group-{number}", 50) for number in range(1_000)}) == 50

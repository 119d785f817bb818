"""The kinds of members that are tested, and what each of them can do."""

from __future__ import annotations

import pytest

from tests.conformance.members.group import Kind

KINDS = [
    Kind("confluent", "consumer"),
    Kind("confluent", "classic", "range"),
    Kind("confluent", "classic", "roundrobin"),
    Kind("confluent", "classic", "cooperative-sticky"),
    Kind("java", "consumer"),
    Kind("java", "classic", "range"),
    Kind("java", "classic", "cooperative-sticky"),
    Kind("aio", "classic"),
    Kind("python", "classic"),
    Kind("python", "classic", "cooperative-sticky"),
    Kind("kafkajs", "classic", is_static=False),
    Kind("platformatic", "consumer", has_patterns=False),
    Kind("platformatic", "classic", has_patterns=False),
    Kind("kcat", "classic", tells_commits=False),
    Kind("ours", "consumer"),
    Kind("ours", "classic", "cooperative-sticky"),
]


def each_kind(*, that: str | None = None) -> pytest.MarkDecorator:
    """Ask a test of each kind, or of each that can do something."""
    kinds = [kind for kind in KINDS if that is None or getattr(kind, that)]
    return pytest.mark.parametrize("kind", kinds, ids=str)

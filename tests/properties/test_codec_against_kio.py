"""Every message in every version that kio has: what one codec writes the other reads, to the same values and bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from anabranch.codec import decode, schema_of
from tests.support.messages import (
    CLASSES,
    forget_unknown_tags,
    has_ours,
    joined,
    kio_class,
    kio_versions,
    messages,
    read_by_kio,
    to_kio,
    versions_of,
    without_ours,
    written_by_kio,
)
from tests.support.thorough import thorough

BRIEF = settings(
    max_examples=thorough(20, 3),
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
KNOWN_TO_KIO = [declared for declared in CLASSES if kio_versions(declared)]


def pairs(declared: type) -> list[tuple[int, type]]:
    return [(version, theirs) for version in versions_of(declared) if (theirs := kio_class(declared, version))]


@pytest.mark.parametrize("declared", KNOWN_TO_KIO, ids=lambda declared: declared.__name__)
def test_every_version_that_kio_has_is_declared(declared: type) -> None:
    assert [version for version, _ in pairs(declared)] == kio_versions(declared)
    for version, theirs in pairs(declared):
        assert theirs.__flexible__ == (version in schema_of(declared).flexible)  # type: ignore[attr-defined]
        assert getattr(theirs, "__api_key__", None) == schema_of(declared).api_key


@pytest.mark.parametrize("declared", KNOWN_TO_KIO, ids=lambda declared: declared.__name__)
@BRIEF
@given(data=st.data())
def test_both_codecs_write_the_same_bytes_and_read_the_same_values(declared: type, data: st.DataObject) -> None:
    for version, theirs in pairs(declared):
        message = data.draw(messages(declared, version, with_ours=False))
        encoded = joined(message, version)
        as_kio = to_kio(message, theirs)
        assert read_by_kio(encoded, theirs) == as_kio
        assert written_by_kio(as_kio) == encoded
        again: Any = decode(declared, encoded, version)
        assert again == message
        assert joined(again, version) == encoded


EXTENDED = [declared for declared in KNOWN_TO_KIO if has_ours(declared)]


@pytest.mark.parametrize("declared", EXTENDED, ids=lambda declared: declared.__name__)
@BRIEF
@given(data=st.data())
def test_a_peer_that_does_not_know_our_fields_skips_and_keeps_them(declared: type, data: st.DataObject) -> None:
    stock = without_ours(declared)
    for version, theirs in pairs(declared):
        message = data.draw(messages(declared, version, with_ours=True))
        encoded = joined(message, version)
        assert decode(declared, encoded, version) == message
        kept: Any = decode(stock, encoded, version)
        assert joined(kept, version) == encoded
        forget_unknown_tags(kept)
        assert read_by_kio(joined(kept, version), theirs) == to_kio(message, theirs)


OWN = [declared for declared in CLASSES if declared not in KNOWN_TO_KIO]


@pytest.mark.parametrize("declared", OWN, ids=lambda declared: declared.__name__)
@BRIEF
@given(data=st.data())
def test_messages_that_only_we_have_survive_the_wire(declared: type, data: st.DataObject) -> None:
    for version in versions_of(declared):
        message = data.draw(messages(declared, version, with_ours=True))
        encoded = joined(message, version)
        assert decode(declared, encoded, version) == message
        assert joined(decode(declared, encoded, version), version) == encoded

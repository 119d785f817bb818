"""Which assignor decides, and what changes of the metadata call for a new assignment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.machines.groups.consumer.group import Assignor, Classic, ConsumerGroup, MemberMetadata, member_record
from anabranch.machines.groups.consumer.target import (
    CLASSIC_VERSION,
    Offer,
    client_assignor,
    metadata_hash,
    offers_of,
    server_assignor,
    subscription,
    subscriptions,
)
from anabranch.machines.groups.image import Image
from anabranch.machines.groups.regex import Regexes
from tests.support.groups import topics

OFFERED = ("uniform", "range")


def offer(name: str, lowest: int = 0, highest: int = 1) -> Assignor:
    return Assignor(name, lowest, highest, 0, highest, b"")


@pytest.mark.parametrize(
    ("named", "used"),
    [
        ([], "uniform"),
        ([None, None], "uniform"),
        (["range", None], "uniform"),
        (["range", "range", None], "range"),
        (["range", "uniform"], "uniform"),
        (["gone", "gone", "range"], "uniform"),
        (["gone", "range", "range"], "range"),
    ],
)
def test_members_vote_for_an_offered_server_assignor_and_others_for_the_brokers_first(
    named: list[str | None], used: str
) -> None:
    assert server_assignor([MemberMetadata(server_assignor=name) for name in named], OFFERED) == used


@pytest.mark.parametrize(
    ("offers", "used"),
    [
        ([], None),
        ([(offer("a"),), ()], None),
        ([(offer("a"),), (offer("b"),)], None),
        ([(offer("a"), offer("b")), (offer("b"), offer("a"), offer("c"))], Offer("a", 1)),
        ([(offer("b"), offer("a")), (offer("b"), offer("a"))], Offer("b", 1)),
        ([(offer("a", 0, 3),), (offer("a", 2, 5),)], Offer("a", 3)),
        ([(offer("a", 0, 1),), (offer("a", 2, 5),)], None),
    ],
)
def test_a_client_side_assignor_is_one_that_every_member_offers_in_versions_that_overlap(
    offers: list[tuple[Assignor, ...]], used: Offer | None
) -> None:
    assert client_assignor(offers) == used


def test_protocols_of_a_classic_member_count_as_client_side_assignors() -> None:
    said = MemberMetadata(classic=Classic(10_000, (("range", b"r"), ("sticky", b"s"))))
    assert [(it.name, it.version, it.metadata) for it in offers_of(said)] == [
        ("range", CLASSIC_VERSION, b"r"),
        ("sticky", CLASSIC_VERSION, b"s"),
    ]


def test_subscriptions_are_names_and_what_a_regex_matches() -> None:
    image, regexes = topics(foo=1, fig=1, bar=1), Regexes(100)
    both = MemberMetadata(topics=("bar",), regex="f.*")
    assert subscription(both, image, regexes) == {"bar", "foo", "fig"}
    group = ConsumerGroup("g")
    group.apply(member_record("g", "A", both))
    group.apply(member_record("g", "B", MemberMetadata(topics=("none",))))
    assert subscriptions(group, image, regexes) == {"bar", "foo", "fig", "none"}


def test_the_metadata_hash_changes_with_subscribed_partitions_alone() -> None:
    image = topics(foo=2, bar=1)
    before = metadata_hash(["foo"], image)
    assert before == metadata_hash(["foo", "none"], topics(9, foo=2, bar=7))
    assert metadata_hash([], image) == metadata_hash(["none"], image) == 0
    retired = Image(2, {"foo": replace(image.by_name["foo"], partitions=(0,), retiring=(1,))})
    changed = {
        before,
        metadata_hash(["foo"], topics(foo=3)),
        metadata_hash(["foo"], retired),
        metadata_hash(["foo", "bar"], image),
    }
    assert len(changed) == 4

"""The kinds of members that are tested, and what each of them can do."""

from __future__ import annotations

import os

import pytest

from tests.conformance.members.group import Kind

# What is not asked of these kinds, and why. Seen with Apache Kafka too: all of kafka-python, a platformatic consumer
# that does not rejoin, and its classic subscription; the rest was seen here, or read in the client's code.
# - kafka-python's cooperative-sticky assignor leaves a partition with a member that was out of the group meanwhile,
#   though another one has it now; and at times its members do not take what they are given in addition.
# - KafkaJS matches a pattern once, when it subscribes. When its topics have changed it joins anew and tells nobody that
#   it let go of what it had.
# - @platformatic/kafka takes a member id that is not known any more for an error that passes, and goes on asking. It
#   reads committed offsets anew while it commits, so that records come again. With every fetch it says the leader epoch
#   of the last record that it read, and fails when that is not the present one. As a classic member it always leaves
#   for good, and its subscription says version 1 but ends before what that version ends with.
# - The Java consumer acknowledges the part of its assignment whose topics' names it knows. That is none of it when it
#   has just joined, or when a pattern has just matched. It tells its listener of that empty part, and where metadata
#   comes meanwhile, also of the whole assignment, before the heartbeat leaves that says that it owns nothing, or before
#   its answer comes. So with Apache Kafka a part goes to another member, by the protocol rightly, and is the user's of
#   both for a moment: both read and commit there (seen on the wire). Ours releases nothing by a report that lacks what
#   the member keeps; it cannot know where the member keeps nothing, or says the same once more. So
#   `members.group.check_owners` and `check_deliveries` excuse what a heartbeat has disowned.
# Asked, though it fails where other work keeps the processors busy, with Apache Kafka as well: that kafka-python goes
# on when its group rebalances a second time. Its leader at times never takes the answer to its SyncGroup (its log
# shows it received, without an error, with the partitions), stops its heartbeats, is removed and does not come back;
# the others share what it had. In 3.0.12: a poll that ends before the join does leaves it to the next one, which first
# asks whether to join anew, and where only other topics were the reason, finds that it need not.
# Not asked, nor tried with Apache Kafka: that a static member of @platformatic/kafka bounces without a rebalance. It
# does on an idle machine, and at times does not on a busy one.
KINDS = [
    Kind("confluent", "consumer", is_example=True, is_hasty=True),
    Kind("confluent", "classic", "range", is_example=True),
    Kind("confluent", "classic", "roundrobin"),
    Kind("confluent", "classic", "cooperative-sticky"),
    Kind("java", "consumer", is_hasty=True),
    Kind("java", "classic", "range"),
    Kind("java", "classic", "cooperative-sticky"),
    Kind("aio", "classic", "roundrobin"),
    Kind("python", "classic", "range"),
    Kind("python", "classic", "cooperative-sticky", has_patterns=False, follows_resizes=False, comes_back=False),
    Kind("kafkajs", "classic", is_static=False, has_patterns=False, is_hasty=True),
    Kind(
        "platformatic",
        "consumer",
        is_static=False,
        has_patterns=False,
        follows_resizes=False,
        comes_back=False,
        is_exact=False,
    ),
    Kind(
        "platformatic",
        "classic",
        is_static=False,
        has_patterns=False,
        follows_resizes=False,
        migrates=False,
        is_exact=False,
    ),
    Kind("kcat", "classic", "range", tells_commits=False),
    Kind("ours", "consumer"),
    Kind("ours", "classic", "cooperative-sticky"),
]


ALL_KINDS = "ANABRANCH_ALL_KINDS"
"""Set by `make conformance`. Else one kind of each library is tried, so that `make test` stays short."""
ONE_OF_EACH = ("confluent-consumer", "java-consumer", "aio-classic-roundrobin", "kafkajs-classic", "ours-consumer")


def each_kind(*, that: str | None = None) -> pytest.MarkDecorator:
    """Ask a test of each kind, or of each that can do something."""
    kinds = [kind for kind in KINDS if that is None or getattr(kind, that)]
    if ALL_KINDS not in os.environ:
        kinds = [kind for kind in kinds if str(kind) in ONE_OF_EACH] or kinds[:1]
    return pytest.mark.parametrize("kind", kinds, ids=str)

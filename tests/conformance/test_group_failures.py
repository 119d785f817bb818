"""Groups of each kind of client when members stand still or die, and when their topics grow and shrink."""

from __future__ import annotations

import pytest

from tests.conformance.conftest import Broker
from tests.conformance.kinds import each_kind
from tests.conformance.members.group import Group, Kind

SESSION_TIMEOUT_MS = 2_000


@each_kind(that="comes_back")
def test_a_member_that_stands_still_is_fenced_and_comes_back(kind: Kind, group: Group) -> None:
    group.configure({"consumer.session.timeout.ms": str(SESSION_TIMEOUT_MS)})
    stays = group.join(kind, session_timeout_ms=SESSION_TIMEOUT_MS)
    stops = group.join(kind, session_timeout_ms=SESSION_TIMEOUT_MS, process=1)
    group.settles(4)
    group.produce(40)
    group.reads_all()
    group.pause(stops)
    group.settles(4, [stays])
    group.produce(40)
    group.reads_all()
    group.go_on(stops)
    group.settles(4)
    group.produce(40)
    group.reads_all()


@each_kind(that="is_example")
def test_a_member_that_dies_is_replaced(kind: Kind, group: Group) -> None:
    group.configure({"consumer.session.timeout.ms": str(SESSION_TIMEOUT_MS)})
    stays = group.join(kind, session_timeout_ms=SESSION_TIMEOUT_MS)
    dies = group.join(kind, session_timeout_ms=SESSION_TIMEOUT_MS, process=1)
    group.settles(4)
    group.produce(40)
    group.kill(dies)
    group.settles(4, [stays])
    group.produce(40)
    group.reads_all()


@each_kind(that="follows_resizes")
def test_a_topic_grows_and_shrinks_under_a_group_and_no_record_is_lost(
    kind: Kind, group: Group, group_broker: Broker
) -> None:
    if not group_broker.elastic:
        pytest.skip("only our broker takes partitions away")
    group.join(kind)
    group.join(kind)
    group.settles(4)
    group.produce(60)
    group.resize(6)
    group.settles(6)
    group.produce(60)
    group.reads_all()
    group.resize(4)
    group.produce(60)
    group.reads_all()

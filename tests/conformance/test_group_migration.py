"""Members of several kinds and both protocols in one group, while it moves from one protocol to the other and back."""

from __future__ import annotations

import pytest

from anabranch.client import sync
from tests.conformance.conftest import Broker
from tests.conformance.kinds import KINDS
from tests.conformance.members.group import Group, Kind

BY_NAME = {str(kind): kind for kind in KINDS}
CONFLUENT, JAVA, OURS = (BY_NAME[f"{library}-consumer"] for library in ("confluent", "java", "ours"))
CLASSIC = [kind for kind in KINDS if kind.protocol == "classic" and kind.migrates]


def type_of(broker: Broker, group: Group) -> str:
    with sync.Admin(broker.address) as admin:
        return str(admin.describe_groups(group.group_id)[group.group_id].type)


@pytest.mark.parametrize("assignor", ["range", "cooperative-sticky"])
def test_a_group_of_three_libraries_moves_to_the_consumer_protocol_and_back_one_member_at_a_time(
    assignor: str, group: Group, group_broker: Broker
) -> None:
    def read_on(partitions: int = 4) -> None:
        group.settles(partitions)
        group.produce(40)
        group.reads_all()

    confluent, java = BY_NAME[f"confluent-classic-{assignor}"], BY_NAME[f"java-classic-{assignor}"]
    old = [group.join(confluent), group.join(java)]
    read_on()
    assert type_of(group_broker, group) == "classic"
    new = []
    for kind in (CONFLUENT, JAVA, OURS):
        new.append(group.join(kind))
        read_on() if len(group.present) <= 4 else group.reads_all()
        assert type_of(group_broker, group) == "consumer"
    for member in old:
        group.leave(member)
        read_on()
    assert type_of(group_broker, group) == "consumer"
    old = []
    for kind in (java, confluent):
        old.append(group.join(kind))
        read_on() if len(group.present) <= 4 else group.reads_all()
    assert type_of(group_broker, group) == "consumer"
    for member in new:
        group.leave(member)
        read_on()
    assert type_of(group_broker, group) == "classic"
    group.leave(old[0])
    read_on()


@pytest.mark.parametrize("kind", CLASSIC, ids=str)
def test_a_classic_group_of_any_kind_is_joined_and_left_by_a_member_of_the_consumer_protocol(
    kind: Kind, group: Group, group_broker: Broker
) -> None:
    group.join(kind)
    group.join(kind)
    group.settles(4)
    group.produce(40)
    group.reads_all()
    guest = group.join(CONFLUENT)
    group.settles(4)
    assert type_of(group_broker, group) == "consumer"
    group.produce(40)
    group.reads_all()
    group.leave(guest)
    group.settles(4)
    assert type_of(group_broker, group) == "classic"
    group.produce(40)
    group.reads_all()

"""Each client administers groups that it is no member of, of both protocols."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.clients import RefusedError
from tests.conformance.conftest import Broker
from tests.conformance.group_admins import ADMINS, GroupAdmin, Java
from tests.conformance.members.group import Group, Kind

MEMBERS = {"consumer": Kind("confluent", "consumer"), "classic": Kind("confluent", "classic", "range")}


@pytest.fixture(scope="module", params=ADMINS)
def admin(request: pytest.FixtureRequest, group_broker: Broker) -> Iterator[GroupAdmin]:
    made = ADMINS[request.param](group_broker.address)
    yield made
    made.close()


@pytest.mark.parametrize("protocol", MEMBERS)
def test_a_group_is_listed_described_altered_and_deleted(protocol: str, admin: GroupAdmin, group: Group) -> None:
    name = group.group_id
    member = group.join(MEMBERS[protocol])
    group.settles(4)
    group.produce(40, partitions=range(4))
    group.reads_all()
    assert name in admin.listed()
    if protocol in admin.describes:
        assert admin.described(name) == ("stable", {(name, number) for number in range(4)})
    if isinstance(admin, Java) and protocol == "classic":
        assert admin.described_as_classic(name) == ("range", 1)
    assert admin.offsets(name, name) == dict.fromkeys(range(4), 10)
    if admin.deletes:
        with pytest.raises(RefusedError, match=r"(?i)non.?empty|not empty"):
            admin.delete(name)
    if protocol in admin.alters:
        with pytest.raises(RefusedError):
            admin.alter(name, {(name, 0): 3})
    group.leave(member)
    if protocol in admin.alters:
        admin.alter(name, {(name, 0): 3, (name, 1): 4})
        assert admin.offsets(name, name) == {0: 3, 1: 4, 2: 10, 3: 10}
    if admin.deletes_offsets:
        admin.delete_offset(name, (name, 1))
        assert admin.offsets(name, name).keys() == {0, 2, 3}
    if admin.deletes:
        admin.delete(name)
        assert name not in admin.listed()

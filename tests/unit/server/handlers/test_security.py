"""APIs of security refuse each thing that is named; many at a time are answered from a thread."""

from __future__ import annotations

from typing import Any, cast

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.alter_client_quotas import AlterClientQuotasRequest, EntityData, EntryData
from anabranch.protocol.messages.create_acls import AclCreation, CreateAclsRequest
from anabranch.protocol.messages.delete_acls import DeleteAclsFilter, DeleteAclsRequest
from anabranch.server.context import PARTITIONS_AT_A_TIME, Large
from anabranch.server.handlers.quotas import handle_alter_client_quotas
from anabranch.server.handlers.security import handle_create_acls, handle_delete_acls


def quotas(count: int) -> tuple[Any, str]:
    entity = [EntityData(entity_type="user", entity_name="a") for _ in range(count - 1)]
    request = AlterClientQuotasRequest(entries=[EntryData(entity=entity)])
    return handle_alter_client_quotas(cast(Any, None), request, cast(Any, None)), "entries"


def test_what_is_long_within_an_entry_is_told_from_a_thread_too() -> None:
    assert [isinstance(quotas(count)[0], Large) for count in (3, 20_000)] == [False, True]


def created(count: int) -> tuple[Any, str]:
    request = CreateAclsRequest(creations=[AclCreation(principal="User:a", host="*") for _ in range(count)])
    return handle_create_acls(cast(Any, None), request, cast(Any, None)), "results"


def deleted(count: int) -> tuple[Any, str]:
    request = DeleteAclsRequest(filters=[DeleteAclsFilter() for _ in range(count)])
    return handle_delete_acls(cast(Any, None), request, cast(Any, None)), "filter_results"


@pytest.mark.parametrize("asked", [created, deleted])
@pytest.mark.parametrize("count", [3, PARTITIONS_AT_A_TIME, 20_000])
def test_each_is_refused_and_many_are_refused_from_a_thread(asked: Any, count: int) -> None:
    """12,000 of them took the loop 15 ms."""
    answer, name = asked(count)
    assert isinstance(answer, Large) == (count >= PARTITIONS_AT_A_TIME)
    results = getattr(answer.make() if isinstance(answer, Large) else answer, name)
    assert [it.error_code for it in results] == [ErrorCode.SECURITY_DISABLED] * count

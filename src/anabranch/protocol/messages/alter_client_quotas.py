"""AlterClientQuotas (API 49). v1 is flexible."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, boolean, float64, int16, int32, message, string, struct


@struct()
class EntityData:
    """One part of the name of an entity; null is the default entity."""

    entity_type: str = string()
    entity_name: str | None = string(nullable=True)


@struct()
class OpData:
    """One quota to set or to remove."""

    key: str = string()
    value: float = float64()
    remove: bool = boolean()


@struct()
class EntryData:
    """The changes of one entity."""

    entity: Sequence[EntityData] = array(EntityData)
    ops: Sequence[OpData] = array(OpData)


@message(api_key=49, versions="0-1", flexible="1+")
class AlterClientQuotasRequest:
    """Set or remove quotas of clients."""

    entries: Sequence[EntryData] = array(EntryData)
    validate_only: bool = boolean()


@struct()
class EntryDataResult:
    """The result of the changes of one entity."""

    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    entity: Sequence[EntityData] = array(EntityData)


@message(api_key=49, versions="0-1", flexible="1+")
class AlterClientQuotasResponse:
    """A result for each entity."""

    throttle_time_ms: int = int32()
    entries: Sequence[EntryDataResult] = array(EntryDataResult)

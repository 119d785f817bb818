"""DescribeClientQuotas (API 48). v1 is flexible."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, boolean, float64, int8, int16, int32, message, string, struct


@struct()
class ComponentData:
    """One part of a filter: which names of which kind of entity."""

    entity_type: str = string()
    match_type: int = int8()
    match: str | None = string(nullable=True)


@message(api_key=48, versions="0-1", flexible="1+")
class DescribeClientQuotasRequest:
    """Ask for quotas of clients."""

    components: Sequence[ComponentData] = array(ComponentData)
    strict: bool = boolean()


@struct()
class EntityData:
    """One part of the name of an entity; null is the default entity."""

    entity_type: str = string()
    entity_name: str | None = string(nullable=True)


@struct()
class ValueData:
    """One quota."""

    key: str = string()
    value: float = float64()


@struct()
class EntryData:
    """The quotas of one entity."""

    entity: Sequence[EntityData] = array(EntityData)
    values: Sequence[ValueData] = array(ValueData)


@message(api_key=48, versions="0-1", flexible="1+")
class DescribeClientQuotasResponse:
    """The quotas that match the filter."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    entries: Sequence[EntryData] | None = array(EntryData, nullable=True)

"""ControllerRegistration (API 70)."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, boolean, int16, int32, message, string, struct, uint16, uuid


@struct()
class Listener:
    """Where a node listens."""

    name: str = string()
    host: str = string()
    port: int = uint16()
    security_protocol: int = int16()


@struct()
class Feature:
    """A feature, and its versions that the node supports."""

    name: str = string()
    min_supported_version: int = int16()
    max_supported_version: int = int16()


@message(api_key=70, versions="0", flexible="0+")
class ControllerRegistrationRequest:
    """Register a controller that starts."""

    controller_id: int = int32()
    incarnation_id: UUID = uuid()
    zk_migration_ready: bool = boolean()
    listeners: Sequence[Listener] = array(Listener)
    features: Sequence[Feature] = array(Feature)


@message(api_key=70, versions="0", flexible="0+")
class ControllerRegistrationResponse:
    """Whether the controller was registered."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)

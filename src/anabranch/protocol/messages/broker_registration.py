"""BrokerRegistration (API 62). v1 to v4 add the migration from ZooKeeper, directories, and the former epoch."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, boolean, int16, int32, int64, message, string, struct, uint16, uuid


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


@message(api_key=62, versions="0-4", flexible="0+")
class BrokerRegistrationRequest:
    """Register a broker that starts."""

    broker_id: int = int32()
    cluster_id: str = string()
    incarnation_id: UUID = uuid()
    listeners: Sequence[Listener] = array(Listener)
    features: Sequence[Feature] = array(Feature)
    rack: str | None = string(nullable=True)
    is_migrating_zk_broker: bool = boolean(since=1)
    log_dirs: Sequence[UUID] = array(uuid, since=2)
    previous_broker_epoch: int = int64(since=3, default=-1)


@message(api_key=62, versions="0-4", flexible="0+")
class BrokerRegistrationResponse:
    """The epoch of the broker."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    broker_epoch: int = int64(default=-1)

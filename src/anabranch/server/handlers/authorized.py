"""The operations that a connection may perform on a resource, told where a request asks for them (KIP-430).

They are a bit field of Kafka's codes of operations. While there are no access control lists, every connection may
perform all that the type of the resource has.
"""

from __future__ import annotations

from enum import IntEnum

NOT_SAID = -(2**31)
"""Kafka's value where nobody asked."""


class AclOperation(IntEnum):
    """Kafka's codes of operations."""

    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


def _bits(*operations: AclOperation) -> int:
    return sum(1 << operation for operation in operations)


_O = AclOperation
ON_TOPIC = _bits(_O.READ, _O.WRITE, _O.CREATE, _O.DELETE, _O.ALTER, _O.DESCRIBE, _O.DESCRIBE_CONFIGS, _O.ALTER_CONFIGS)
ON_GROUP = _bits(_O.READ, _O.DELETE, _O.DESCRIBE, _O.DESCRIBE_CONFIGS, _O.ALTER_CONFIGS)
ON_CLUSTER = _bits(
    _O.CREATE,
    _O.ALTER,
    _O.DESCRIBE,
    _O.CLUSTER_ACTION,
    _O.DESCRIBE_CONFIGS,
    _O.ALTER_CONFIGS,
    _O.IDEMPOTENT_WRITE,
)

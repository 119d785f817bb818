"""One function per API (translate, ask or submit, translate back), and the table of the endpoints they make.

`Endpoint.limits` are enforced in one place, before the handler is called (`server.network.connection`).
A handler answers with a message, with an awaitable of one, or, for acks=0, with None. Everything it does before its
first await happens in the order in which the requests of a connection arrived; after its first await it must not read
the request's bytes: the buffer is reused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from anabranch.base.limits import POSITION_WAIT_MAX_MS
from anabranch.server.context import BrokerContext, RequestContext
from anabranch.server.handlers.api_versions import handle_api_versions
from anabranch.server.handlers.cluster import (
    handle_describe_cluster,
    handle_describe_log_dirs,
    handle_find_coordinator,
)
from anabranch.server.handlers.configs import (
    handle_alter_configs,
    handle_describe_configs,
    handle_incremental_alter_configs,
    handle_list_config_resources,
)
from anabranch.server.handlers.delete_records import handle_delete_records
from anabranch.server.handlers.describe_groups import (
    handle_consumer_group_describe,
    handle_delete_groups,
    handle_describe_groups,
    handle_list_groups,
)
from anabranch.server.handlers.describe_topic_partitions import (
    PARTITIONS_MAX,
    handle_describe_topic_partitions,
)
from anabranch.server.handlers.fetch import handle_fetch
from anabranch.server.handlers.groups import (
    handle_consumer_group_heartbeat,
    handle_consumer_group_position,
    handle_heartbeat,
    handle_install_assignment,
    handle_join_group,
    handle_leave_group,
    handle_prepare_assignment,
    handle_sync_group,
)
from anabranch.server.handlers.in_parts import Parts, handle_in_parts
from anabranch.server.handlers.list_offsets import handle_list_offsets
from anabranch.server.handlers.metadata import handle_metadata
from anabranch.server.handlers.offset_for_leader_epoch import handle_offset_for_leader_epoch
from anabranch.server.handlers.offsets import handle_offset_commit, handle_offset_delete, handle_offset_fetch
from anabranch.server.handlers.partition_leader_epochs import handle_partition_leader_epochs
from anabranch.server.handlers.produce import handle_produce
from anabranch.server.handlers.resizes import handle_cancel_topic_resizes, handle_list_topic_resizes
from anabranch.server.handlers.topics import (
    TIMEOUT_MAX_MS,
    handle_create_partitions,
    handle_create_topics,
    handle_delete_topics,
)
from anabranch.server.handlers.transactions import (
    handle_add_offsets_to_txn,
    handle_add_partitions_to_txn,
    handle_describe_producers,
    handle_describe_transactions,
    handle_end_txn,
    handle_init_producer_id,
    handle_list_transactions,
    handle_txn_offset_commit,
    handle_write_txn_markers,
)

Handler = Callable[[BrokerContext, Any, RequestContext], Awaitable[Any] | Any]


class Operation(Enum):
    """The operation of a request on its resources, in the words of Kafka's ACLs."""

    NONE = "none"
    """Open to every connection: a client cannot begin without it."""
    READ = "read"
    WRITE = "write"
    CREATE = "create"
    DELETE = "delete"
    ALTER = "alter"
    DESCRIBE = "describe"
    DESCRIBE_CONFIGS = "describe-configs"
    ALTER_CONFIGS = "alter-configs"
    CLUSTER_ACTION = "cluster-action"


class Resource(Enum):
    """The type of the resources that a request names, in the words of Kafka's ACLs."""

    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactional-id"
    CLUSTER = "cluster"


@dataclass(frozen=True)
class _Rare:
    """A handler whose module is imported for its first request: a start does not wait for what few ask for."""

    module: str
    name: str

    def load(self) -> Handler:
        """Import it: up to 15 ms where its code is not compiled yet."""
        handler: Handler = getattr(import_module(f"{__name__}.{self.module}"), self.name)
        return handler

    def __call__(self, broker: BrokerContext, request: Any, call: RequestContext) -> Any:
        return self.load()(broker, request, call)


class Endpoint(NamedTuple):
    """One API as this broker serves it."""

    handler: Handler
    operation: Operation
    resources: tuple[Resource, ...] = ()
    """The kinds of resources that a request of this API names; none where `operation` is NONE."""
    limits: Mapping[str, int] = MappingProxyType({})
    """The largest value of a field of the request; a larger one is lowered to it before the handler is called."""

    parts: Parts | None = None
    """How a long request is cut; None where the handler does so, or where no request is long."""

    def load(self) -> None:
        """Import what the first request needs, in a thread."""
        if isinstance(self.handler, _Rare):
            self.handler.load()

    def handle(self, broker: BrokerContext, request: Any, call: RequestContext) -> Any:
        """Lower the fields of a request to their limits, find what it names twice, and handle it, in parts if long."""
        if self.limits:
            for name, limit in self.limits.items():
                if getattr(request, name) > limit:
                    setattr(request, name, limit)
        if self.parts is not None:
            if self.parts.long(request):
                return handle_in_parts(self.handler, self.parts, broker, request, call)
            call = self.parts.prepare(request, call)
        return self.handler(broker, request, call)


_TOPIC, _GROUP, _CLUSTER = (Resource.TOPIC,), (Resource.GROUP,), (Resource.CLUSTER,)
_TRANSACTION, _OFFSETS = (Resource.TRANSACTIONAL_ID,), (Resource.GROUP, Resource.TOPIC)
_TIMEOUT = MappingProxyType({"timeout_ms": TIMEOUT_MAX_MS})
_O = Operation
_NESTED = Parts("topics", "topics", "partitions", "partitions")
_COMMITS = _NESTED._replace(weight=2)
_NUMBERS = Parts("topics", "topics", "partition_indexes", "partitions")


def _itself(name: str) -> str:
    return name


def _name(named: Any) -> str:
    return str(named.name)


def _resource(named: Any) -> tuple[int, str]:
    return named.resource_type, named.resource_name


_PARTS: dict[int, Parts] = {
    8: _COMMITS,
    10: Parts("coordinator_keys", "coordinators", key=_itself),
    13: Parts("members", "members"),
    15: Parts("groups", "groups", key=_itself),
    19: Parts("topics", "topics", unique=_name),
    20: Parts("topics", "responses", asked_earlier="topic_names"),
    21: _NESTED._replace(key=_name, key_inner=lambda it: it.partition_index),
    23: _NESTED,
    28: _COMMITS,
    32: Parts("resources", "results", key=_resource, weight=40),
    33: Parts("resources", "responses", unique=_resource),
    37: Parts("topics", "results", unique=_name),
    42: Parts("groups_names", "results"),
    43: Parts("topic_partitions", "replica_election_results", "partitions", "partition_result"),
    44: Parts("resources", "responses", unique=_resource),
    45: Parts("topics", "responses", "partitions", "partitions"),
    46: _NUMBERS,
    47: _NESTED,
    61: _NUMBERS._replace(key=_name),
    65: Parts("transactional_ids", "transaction_states", key=_itself),
    69: Parts("group_ids", "groups", key=_itself),
    10000: _NESTED,
    10004: Parts("topics", "topics", key=_itself),
}
"""By API key. What is named again is answered once where there is a key, and refused where it is to be unique."""

_SERVED: dict[int, Endpoint] = {
    0: Endpoint(handle_produce, _O.WRITE, (Resource.TOPIC, Resource.TRANSACTIONAL_ID)),
    1: Endpoint(handle_fetch, _O.READ, _TOPIC),
    2: Endpoint(handle_list_offsets, _O.DESCRIBE, _TOPIC),
    3: Endpoint(handle_metadata, _O.DESCRIBE, _TOPIC),
    8: Endpoint(handle_offset_commit, _O.READ, _OFFSETS),
    9: Endpoint(handle_offset_fetch, _O.DESCRIBE, _OFFSETS),
    10: Endpoint(handle_find_coordinator, _O.DESCRIBE, (Resource.GROUP, Resource.TRANSACTIONAL_ID)),
    11: Endpoint(handle_join_group, _O.READ, _GROUP),
    12: Endpoint(handle_heartbeat, _O.READ, _GROUP),
    13: Endpoint(handle_leave_group, _O.READ, _GROUP),
    14: Endpoint(handle_sync_group, _O.READ, _GROUP),
    15: Endpoint(handle_describe_groups, _O.DESCRIBE, _GROUP),
    16: Endpoint(handle_list_groups, _O.DESCRIBE, _GROUP),
    18: Endpoint(handle_api_versions, _O.NONE),
    19: Endpoint(handle_create_topics, _O.CREATE, _TOPIC, _TIMEOUT),
    20: Endpoint(handle_delete_topics, _O.DELETE, _TOPIC, _TIMEOUT),
    21: Endpoint(handle_delete_records, _O.DELETE, _TOPIC),
    22: Endpoint(handle_init_producer_id, _O.WRITE, _TRANSACTION),
    23: Endpoint(handle_offset_for_leader_epoch, _O.DESCRIBE, _TOPIC),
    24: Endpoint(handle_add_partitions_to_txn, _O.WRITE, (Resource.TRANSACTIONAL_ID, Resource.TOPIC)),
    25: Endpoint(handle_add_offsets_to_txn, _O.WRITE, (Resource.TRANSACTIONAL_ID, Resource.GROUP)),
    26: Endpoint(handle_end_txn, _O.WRITE, _TRANSACTION),
    27: Endpoint(handle_write_txn_markers, _O.CLUSTER_ACTION, _CLUSTER),
    28: Endpoint(handle_txn_offset_commit, _O.WRITE, (Resource.TRANSACTIONAL_ID, Resource.GROUP, Resource.TOPIC)),
    29: Endpoint(_Rare("security", "handle_describe_acls"), _O.DESCRIBE, _CLUSTER),
    30: Endpoint(_Rare("security", "handle_create_acls"), _O.ALTER, _CLUSTER),
    31: Endpoint(_Rare("security", "handle_delete_acls"), _O.ALTER, _CLUSTER),
    32: Endpoint(handle_describe_configs, _O.DESCRIBE_CONFIGS, (Resource.TOPIC, Resource.GROUP, Resource.CLUSTER)),
    33: Endpoint(handle_alter_configs, _O.ALTER_CONFIGS, (Resource.TOPIC, Resource.CLUSTER)),
    34: Endpoint(_Rare("replicas", "handle_alter_replica_log_dirs"), _O.ALTER, _CLUSTER),
    35: Endpoint(handle_describe_log_dirs, _O.DESCRIBE, _CLUSTER),
    37: Endpoint(handle_create_partitions, _O.ALTER, _TOPIC, _TIMEOUT),
    38: Endpoint(_Rare("security", "handle_create_delegation_token"), _O.CREATE, _CLUSTER),
    39: Endpoint(_Rare("security", "handle_renew_delegation_token"), _O.ALTER, _CLUSTER),
    40: Endpoint(_Rare("security", "handle_expire_delegation_token"), _O.ALTER, _CLUSTER),
    41: Endpoint(_Rare("security", "handle_describe_delegation_token"), _O.DESCRIBE, _CLUSTER),
    42: Endpoint(handle_delete_groups, _O.DELETE, _GROUP),
    43: Endpoint(_Rare("replicas", "handle_elect_leaders"), _O.ALTER, _CLUSTER),
    44: Endpoint(
        handle_incremental_alter_configs, _O.ALTER_CONFIGS, (Resource.TOPIC, Resource.GROUP, Resource.CLUSTER)
    ),
    45: Endpoint(_Rare("replicas", "handle_alter_partition_reassignments"), _O.ALTER, _CLUSTER),
    46: Endpoint(_Rare("replicas", "handle_list_partition_reassignments"), _O.DESCRIBE, _CLUSTER),
    47: Endpoint(handle_offset_delete, _O.DELETE, _OFFSETS),
    48: Endpoint(_Rare("quotas", "handle_describe_client_quotas"), _O.DESCRIBE_CONFIGS, _CLUSTER),
    49: Endpoint(_Rare("quotas", "handle_alter_client_quotas"), _O.ALTER_CONFIGS, _CLUSTER),
    50: Endpoint(_Rare("security", "handle_describe_user_scram_credentials"), _O.DESCRIBE, _CLUSTER),
    51: Endpoint(_Rare("security", "handle_alter_user_scram_credentials"), _O.ALTER, _CLUSTER),
    55: Endpoint(_Rare("quorum", "handle_describe_quorum"), _O.DESCRIBE, _CLUSTER),
    57: Endpoint(_Rare("quorum", "handle_update_features"), _O.ALTER, _CLUSTER),
    60: Endpoint(handle_describe_cluster, _O.DESCRIBE, _CLUSTER),
    61: Endpoint(handle_describe_producers, _O.READ, _TOPIC),
    65: Endpoint(handle_describe_transactions, _O.DESCRIBE, _TRANSACTION),
    66: Endpoint(handle_list_transactions, _O.DESCRIBE, _TRANSACTION),
    68: Endpoint(handle_consumer_group_heartbeat, _O.READ, _OFFSETS),
    69: Endpoint(handle_consumer_group_describe, _O.DESCRIBE, _GROUP),
    74: Endpoint(handle_list_config_resources, _O.DESCRIBE_CONFIGS, _CLUSTER),
    75: Endpoint(
        handle_describe_topic_partitions,
        _O.DESCRIBE,
        _TOPIC,
        MappingProxyType({"response_partition_limit": PARTITIONS_MAX}),
    ),
    10000: Endpoint(handle_partition_leader_epochs, _O.DESCRIBE, _TOPIC),
    10001: Endpoint(
        handle_consumer_group_position, _O.READ, _GROUP, MappingProxyType({"max_wait_ms": POSITION_WAIT_MAX_MS})
    ),
    10002: Endpoint(handle_prepare_assignment, _O.READ, _GROUP),
    10003: Endpoint(handle_install_assignment, _O.READ, _GROUP),
    10004: Endpoint(handle_list_topic_resizes, _O.DESCRIBE, _TOPIC),
    10005: Endpoint(handle_cancel_topic_resizes, _O.ALTER, _TOPIC),
    10006: Endpoint(_Rare("load", "handle_describe_load"), _O.DESCRIBE, _TOPIC),
    10007: Endpoint(_Rare("slices", "handle_describe_slices"), _O.DESCRIBE, _OFFSETS),
}
ENDPOINTS = {key: endpoint._replace(parts=_PARTS.get(key)) for key, endpoint in _SERVED.items()}
"""By API key. An API without an endpoint is not in ApiVersions. A request of it is refused in its own form
(`handlers.refused`)."""

READS = frozenset(
    (1, 2, 3, 9, 10, 15, 16, 23, 29, 32, 35, 41, 46, 48, 50, 55, 60, 61, 65, 66, 69, 74, 75, 10000, 10004, 10006, 10007)
)
"""The APIs that change nothing but what their own client waits for (Metadata and FindCoordinator make what is missing):
nothing is lost when one is dropped because its client has hung up."""

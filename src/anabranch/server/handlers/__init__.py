"""One function per API: translate, ask or submit, translate back. What is awaited must not look at the frame again.

A handler answers with a message, with an awaitable of one, or, for acks=0, with None. Everything it does before its
first await happens in the order in which the requests of a connection arrived.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from anabranch.server.context import Node, RequestContext
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
from anabranch.server.handlers.describe_topic_partitions import handle_describe_topic_partitions
from anabranch.server.handlers.fetch import handle_fetch
from anabranch.server.handlers.groups import (
    handle_consumer_group_heartbeat,
    handle_heartbeat,
    handle_install_assignment,
    handle_join_group,
    handle_leave_group,
    handle_prepare_assignment,
    handle_sync_group,
)
from anabranch.server.handlers.list_offsets import handle_list_offsets
from anabranch.server.handlers.metadata import handle_metadata
from anabranch.server.handlers.offset_for_leader_epoch import handle_offset_for_leader_epoch
from anabranch.server.handlers.offsets import handle_offset_commit, handle_offset_delete, handle_offset_fetch
from anabranch.server.handlers.partition_leader_epochs import handle_partition_leader_epochs
from anabranch.server.handlers.produce import handle_produce
from anabranch.server.handlers.topics import handle_create_partitions, handle_create_topics, handle_delete_topics
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

Handler = Callable[[Node, Any, RequestContext], Awaitable[Any] | Any]

HANDLERS: dict[int, Handler] = {
    0: handle_produce,
    1: handle_fetch,
    2: handle_list_offsets,
    3: handle_metadata,
    8: handle_offset_commit,
    9: handle_offset_fetch,
    10: handle_find_coordinator,
    11: handle_join_group,
    12: handle_heartbeat,
    13: handle_leave_group,
    14: handle_sync_group,
    15: handle_describe_groups,
    16: handle_list_groups,
    18: handle_api_versions,
    19: handle_create_topics,
    20: handle_delete_topics,
    21: handle_delete_records,
    22: handle_init_producer_id,
    23: handle_offset_for_leader_epoch,
    24: handle_add_partitions_to_txn,
    25: handle_add_offsets_to_txn,
    26: handle_end_txn,
    27: handle_write_txn_markers,
    28: handle_txn_offset_commit,
    32: handle_describe_configs,
    33: handle_alter_configs,
    35: handle_describe_log_dirs,
    37: handle_create_partitions,
    42: handle_delete_groups,
    44: handle_incremental_alter_configs,
    47: handle_offset_delete,
    60: handle_describe_cluster,
    61: handle_describe_producers,
    65: handle_describe_transactions,
    66: handle_list_transactions,
    68: handle_consumer_group_heartbeat,
    69: handle_consumer_group_describe,
    74: handle_list_config_resources,
    75: handle_describe_topic_partitions,
    10000: handle_partition_leader_epochs,
    10002: handle_prepare_assignment,
    10003: handle_install_assignment,
}
"""By API key. What is not here is not advertised, and closes the connection that sends it."""

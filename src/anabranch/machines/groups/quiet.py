"""Heartbeats that say nothing: nearly all that a coordinator ever hears.

A member heartbeats every few seconds, and changes what it says once in hours. Null, and -1 for a timeout, keep the
value that a field had (KIP-848). So a heartbeat whose fields are all like this leaves nothing behind, needs no room,
has nothing to check but who sends it, and costs no more than a step of its member towards its target. The coordinator
decides about it as about any other; those who only prepare that ask here first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anabranch.protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest


def describes_nothing(request: ConsumerGroupHeartbeatRequest) -> bool:
    """Whether what is known of its member keeps its value, whether or not the member has joined."""
    return (
        request.subscribed_topic_names is None
        and request.subscribed_topic_regex is None
        and request.server_assignor is None
        and request.client_assignors is None
        and request.rebalance_timeout_ms == -1
        and request.rack_id is None
    )


def says_nothing(request: ConsumerGroupHeartbeatRequest) -> bool:
    """Whether it only keeps the session of a member that has joined."""
    return (
        request.member_epoch > 0
        and request.topic_partitions is None
        and not request.allow_key_share
        and describes_nothing(request)
    )

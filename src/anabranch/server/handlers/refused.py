"""APIs of Kafka's that this broker does not serve: each request is refused in its own form, and its connection goes on.

None of them is in ApiVersions, so that clients do not send them. A request of another API, or in a version that is not
declared, closes its connection.
"""

from __future__ import annotations

from typing import Any, cast

from anabranch.base.errors import ErrorCode
from anabranch.codec import schema_of
from anabranch.protocol.registry import api_of

_AMONG_NODES = (ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "is for brokers and controllers among themselves")
_SASL = (ErrorCode.ILLEGAL_SASL_STATE, "has no use on a listener without authentication")
_QUORUM = (ErrorCode.UNSUPPORTED_VERSION, "is not served: brokers and voters of the quorum cannot be added or removed")
_TELEMETRY = (ErrorCode.UNSUPPORTED_VERSION, "is not served: this broker takes no metrics of clients")
_SHARE = (ErrorCode.UNSUPPORTED_VERSION, "is not served: this broker has no share groups")
_STREAMS = (ErrorCode.UNSUPPORTED_VERSION, "is not served: this broker has no streams groups")
REFUSED: dict[int, tuple[ErrorCode, str]] = {
    # LeaderAndIsr, StopReplica, UpdateMetadata, ControlledShutdown, Vote, BeginQuorumEpoch, EndQuorumEpoch,
    # AlterPartition, Envelope, FetchSnapshot, BrokerRegistration, BrokerHeartbeat, AllocateProducerIds,
    # ControllerRegistration, AssignReplicasToDirs, UpdateRaftVoter, and the five of the states of share groups
    **dict.fromkeys((4, 5, 6, 7, 52, 53, 54, 56, 58, 59, 62, 63, 67, 70, 73, 82, *range(83, 88)), _AMONG_NODES),
    **dict.fromkeys((17, 36), _SASL),  # SaslHandshake, SaslAuthenticate
    **dict.fromkeys((64, 80, 81), _QUORUM),  # UnregisterBroker, AddRaftVoter, RemoveRaftVoter
    **dict.fromkeys((71, 72), _TELEMETRY),  # GetTelemetrySubscriptions, PushTelemetry
    # ShareGroupHeartbeat, ShareGroupDescribe, ShareFetch, ShareAcknowledge, and the offsets of share groups
    **dict.fromkeys((76, 77, 78, 79, 90, 91, 92), _SHARE),
    **dict.fromkeys((88, 89), _STREAMS),  # StreamsGroupHeartbeat, StreamsGroupDescribe
}
"""By API key: the error, and what the name of the API is followed by."""


def reason_of(api_key: int, name: str) -> str:
    """Why an API is refused, in one sentence."""
    return f"{name} {REFUSED[api_key][1]}."


def refusal_of(request: Any) -> Any:
    """The response that refuses a request: an error for all of it, or for each group or partition that it names."""
    api = api_of(type(request))
    response, reason = api.response, reason_of(api.key, api.name)

    def refused(declared: type[Any], **named: Any) -> Any:
        message = {"error_message": reason} if "error_message" in schema_of(declared).fields else {}
        return declared(error_code=REFUSED[api.key][0], **message, **named)

    if "error_code" in schema_of(response).fields:
        return refused(response)
    if "groups" in schema_of(response).fields:
        group = _element(response, "groups")
        ids = request.group_ids if hasattr(request, "group_ids") else [it.group_id for it in request.groups]
        return response(groups=[refused(group, group_id=it) for it in dict.fromkeys(ids)])
    topic = _element(response, "results")
    partition = _element(topic, "partitions")
    return response(
        results=[
            topic(topic_id=it.topic_id, partitions=[refused(partition, partition=of.partition) for of in it.partitions])
            for it in request.topics
        ]
    )


def _element(declared: type[Any], name: str) -> type[Any]:
    return cast(type[Any], schema_of(declared).fields[name].type.of.of)  # type: ignore[union-attr]

"""ApiVersions (API 18): the APIs of this broker. A request in an unsupported version is answered in version 0."""

from __future__ import annotations

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.api_versions import ApiVersion, ApiVersionsRequest, ApiVersionsResponse
from anabranch.protocol.messages.produce import ProduceRequest
from anabranch.protocol.registry import API, api_of
from anabranch.server.context import BrokerContext, RequestContext

# Older librdkafka compresses only if the broker lists the oldest Produce version, which the client then does not use.
# Like Apache Kafka 4, this broker lists that version, and answers its requests with UNSUPPORTED_VERSION.
SAID_TO_BE_SERVED_FROM = {api_of(ProduceRequest).key: 0}


def handle_api_versions(
    broker: BrokerContext, request: ApiVersionsRequest, call: RequestContext
) -> ApiVersionsResponse:
    """List every API with its versions."""
    return supported(ErrorCode.NONE)


def supported(error: ErrorCode) -> ApiVersionsResponse:
    """List the APIs that have an endpoint, with an error code."""
    from anabranch.server.handlers import ENDPOINTS

    keys = [
        ApiVersion(
            api_key=api.key, min_version=SAID_TO_BE_SERVED_FROM.get(api.key, api.served[0]), max_version=api.served[-1]
        )
        for api in API.values()
        if api.key in ENDPOINTS and api.served
    ]
    return ApiVersionsResponse(error_code=error, api_keys=sorted(keys, key=lambda api: api.api_key))

"""DescribeClientQuotas (48) and AlterClientQuotas (49): nobody has a quota, and none can be set (KIP-546)."""

from __future__ import annotations

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.alter_client_quotas import (
    AlterClientQuotasRequest,
    AlterClientQuotasResponse,
    EntryDataResult,
)
from anabranch.protocol.messages.describe_client_quotas import (
    DescribeClientQuotasRequest,
    DescribeClientQuotasResponse,
)
from anabranch.server.context import BrokerContext, Large, RequestContext, large_or_not

NO_QUOTAS = "This broker has no client quotas; the budgets of connections are settings of the broker."


def handle_describe_client_quotas(
    broker: BrokerContext, request: DescribeClientQuotasRequest, call: RequestContext
) -> DescribeClientQuotasResponse:
    """Find no quotas."""
    return DescribeClientQuotasResponse(entries=[])


def handle_alter_client_quotas(
    broker: BrokerContext, request: AlterClientQuotasRequest, call: RequestContext
) -> AlterClientQuotasResponse | Large:
    """Refuse the quotas of each entity."""

    def make() -> AlterClientQuotasResponse:
        return AlterClientQuotasResponse(
            entries=[
                EntryDataResult(error_code=ErrorCode.INVALID_REQUEST, error_message=NO_QUOTAS, entity=entry.entity)
                for entry in request.entries
            ]
        )

    return large_or_not(make, sum(1 + len(entry.entity) for entry in request.entries))

"""APIs of security, answered as by a Kafka broker without an authorizer and without SASL.

DescribeAcls (29), CreateAcls (30), DeleteAcls (31): SECURITY_DISABLED. DescribeUserScramCredentials (50): nobody has
credentials. AlterUserScramCredentials (51): there is no mechanism to have them for.
"""

from __future__ import annotations

from anabranch.base.errors import ErrorCode, shortened
from anabranch.protocol.messages.alter_user_scram_credentials import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    AlterUserScramCredentialsResult,
)
from anabranch.protocol.messages.create_acls import AclCreationResult, CreateAclsRequest, CreateAclsResponse
from anabranch.protocol.messages.delete_acls import DeleteAclsFilterResult, DeleteAclsRequest, DeleteAclsResponse
from anabranch.protocol.messages.describe_acls import DescribeAclsRequest, DescribeAclsResponse
from anabranch.protocol.messages.describe_user_scram_credentials import (
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
    DescribeUserScramCredentialsResult,
)
from anabranch.server.context import BrokerContext, Large, RequestContext, large_or_not

NO_AUTHORIZER = "This broker has no authorizer: every connection may do everything."
NO_MECHANISM = "This broker authenticates nobody: it has no SASL mechanism."


def handle_describe_acls(
    broker: BrokerContext, request: DescribeAclsRequest, call: RequestContext
) -> DescribeAclsResponse:
    """Say that there are no access control lists."""
    return DescribeAclsResponse(error_code=ErrorCode.SECURITY_DISABLED, error_message=NO_AUTHORIZER)


def handle_create_acls(broker: BrokerContext, request: CreateAclsRequest, call: RequestContext) -> CreateAclsResponse:
    """Refuse each entry."""
    refused = AclCreationResult(error_code=ErrorCode.SECURITY_DISABLED, error_message=NO_AUTHORIZER)
    return CreateAclsResponse(results=[refused] * len(request.creations))


def handle_delete_acls(broker: BrokerContext, request: DeleteAclsRequest, call: RequestContext) -> DeleteAclsResponse:
    """Refuse each filter."""
    refused = DeleteAclsFilterResult(error_code=ErrorCode.SECURITY_DISABLED, error_message=NO_AUTHORIZER)
    return DeleteAclsResponse(filter_results=[refused] * len(request.filters))


def handle_describe_user_scram_credentials(
    broker: BrokerContext, request: DescribeUserScramCredentialsRequest, call: RequestContext
) -> DescribeUserScramCredentialsResponse | Large:
    """Find no credentials: none of all users, or none of those asked for (KIP-554)."""

    def make() -> DescribeUserScramCredentialsResponse:
        return DescribeUserScramCredentialsResponse(
            results=[
                DescribeUserScramCredentialsResult(
                    user=name,
                    error_code=ErrorCode.RESOURCE_NOT_FOUND,
                    error_message=shortened(f"{name!r} has no credentials."),
                )
                for name in dict.fromkeys(user.name for user in request.users or ())
            ]
        )

    return large_or_not(make, len(request.users or ()))


def handle_alter_user_scram_credentials(
    broker: BrokerContext, request: AlterUserScramCredentialsRequest, call: RequestContext
) -> AlterUserScramCredentialsResponse | Large:
    """Refuse the changes of each user (KIP-554)."""

    def make() -> AlterUserScramCredentialsResponse:
        users = dict.fromkeys([it.name for it in request.deletions] + [it.name for it in request.upsertions])
        return AlterUserScramCredentialsResponse(
            results=[
                AlterUserScramCredentialsResult(
                    user=name, error_code=ErrorCode.UNSUPPORTED_SASL_MECHANISM, error_message=NO_MECHANISM
                )
                for name in users
            ]
        )

    return large_or_not(make, len(request.deletions) + len(request.upsertions))

"""APIs of security, answered as by a Kafka broker without an authorizer and without SASL.

DescribeAcls (29), CreateAcls (30), DeleteAcls (31): SECURITY_DISABLED. CreateDelegationToken (38),
RenewDelegationToken (39), ExpireDelegationToken (40), DescribeDelegationToken (41): not allowed on a listener without
authentication (KIP-48). DescribeUserScramCredentials (50): nobody has credentials. AlterUserScramCredentials (51):
there is no mechanism to have them for.
"""

from __future__ import annotations

from anabranch.base.errors import ErrorCode, shortened
from anabranch.protocol.messages.alter_user_scram_credentials import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    AlterUserScramCredentialsResult,
)
from anabranch.protocol.messages.create_acls import AclCreationResult, CreateAclsRequest, CreateAclsResponse
from anabranch.protocol.messages.create_delegation_token import (
    CreateDelegationTokenRequest,
    CreateDelegationTokenResponse,
)
from anabranch.protocol.messages.delete_acls import DeleteAclsFilterResult, DeleteAclsRequest, DeleteAclsResponse
from anabranch.protocol.messages.describe_acls import DescribeAclsRequest, DescribeAclsResponse
from anabranch.protocol.messages.describe_delegation_token import (
    DescribeDelegationTokenRequest,
    DescribeDelegationTokenResponse,
)
from anabranch.protocol.messages.describe_user_scram_credentials import (
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
    DescribeUserScramCredentialsResult,
)
from anabranch.protocol.messages.expire_delegation_token import (
    ExpireDelegationTokenRequest,
    ExpireDelegationTokenResponse,
)
from anabranch.protocol.messages.renew_delegation_token import RenewDelegationTokenRequest, RenewDelegationTokenResponse
from anabranch.server.context import BrokerContext, Large, RequestContext, large_or_not

NO_AUTHORIZER = "This broker has no authorizer: every connection may do everything."
NO_TOKENS = ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED
NO_MECHANISM = "This broker authenticates nobody: it has no SASL mechanism."


def handle_describe_acls(
    broker: BrokerContext, request: DescribeAclsRequest, call: RequestContext
) -> DescribeAclsResponse:
    """Say that there are no access control lists."""
    return DescribeAclsResponse(error_code=ErrorCode.SECURITY_DISABLED, error_message=NO_AUTHORIZER)


def handle_create_acls(
    broker: BrokerContext, request: CreateAclsRequest, call: RequestContext
) -> CreateAclsResponse | Large:
    """Refuse each entry."""
    refused = AclCreationResult(error_code=ErrorCode.SECURITY_DISABLED, error_message=NO_AUTHORIZER)
    count = len(request.creations)
    return large_or_not(lambda: CreateAclsResponse(results=[refused] * count), count)


def handle_delete_acls(
    broker: BrokerContext, request: DeleteAclsRequest, call: RequestContext
) -> DeleteAclsResponse | Large:
    """Refuse each filter."""
    refused = DeleteAclsFilterResult(error_code=ErrorCode.SECURITY_DISABLED, error_message=NO_AUTHORIZER)
    count = len(request.filters)
    return large_or_not(lambda: DeleteAclsResponse(filter_results=[refused] * count), count)


def handle_create_delegation_token(
    broker: BrokerContext, request: CreateDelegationTokenRequest, call: RequestContext
) -> CreateDelegationTokenResponse:
    """Refuse to create a token."""
    return CreateDelegationTokenResponse(
        error_code=NO_TOKENS, issue_timestamp_ms=-1, expiry_timestamp_ms=-1, max_timestamp_ms=-1
    )


def handle_renew_delegation_token(
    broker: BrokerContext, request: RenewDelegationTokenRequest, call: RequestContext
) -> RenewDelegationTokenResponse:
    """Refuse to renew a token."""
    return RenewDelegationTokenResponse(error_code=NO_TOKENS, expiry_timestamp_ms=-1)


def handle_expire_delegation_token(
    broker: BrokerContext, request: ExpireDelegationTokenRequest, call: RequestContext
) -> ExpireDelegationTokenResponse:
    """Refuse to expire a token."""
    return ExpireDelegationTokenResponse(error_code=NO_TOKENS, expiry_timestamp_ms=-1)


def handle_describe_delegation_token(
    broker: BrokerContext, request: DescribeDelegationTokenRequest, call: RequestContext
) -> DescribeDelegationTokenResponse:
    """Refuse to describe tokens."""
    return DescribeDelegationTokenResponse(error_code=NO_TOKENS)


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

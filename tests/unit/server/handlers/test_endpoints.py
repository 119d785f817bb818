"""The table of endpoints is total: what the registry serves has one, and every one says what it does to what."""

from __future__ import annotations

from anabranch.base.errors import ErrorCode
from anabranch.codec import schema_of
from anabranch.protocol.registry import API
from anabranch.server.handlers import ENDPOINTS, Operation, Resource
from anabranch.server.handlers.api_versions import supported
from anabranch.server.handlers.refused import REFUSED


def test_every_api_that_the_registry_serves_has_one_endpoint_and_no_other_has_one() -> None:
    assert sorted(ENDPOINTS) == sorted(key for key, api in API.items() if api.served)


def test_every_other_api_is_refused() -> None:
    assert REFUSED.keys() == API.keys() - ENDPOINTS.keys()
    for key in REFUSED:
        assert API[key].read == API[key].versions


def test_api_versions_lists_exactly_the_endpoints() -> None:
    assert [listed.api_key for listed in supported(ErrorCode.NONE).api_keys] == sorted(ENDPOINTS)


def test_no_handler_serves_two_apis() -> None:
    assert len({endpoint.handler for endpoint in ENDPOINTS.values()}) == len(ENDPOINTS)


def test_every_endpoint_says_which_resources_it_touches_but_those_that_are_open_to_all() -> None:
    unguarded = [key for key, endpoint in ENDPOINTS.items() if endpoint.operation is Operation.NONE]
    assert unguarded == [18], "clients ask for the versions before they can authenticate"
    for key, endpoint in ENDPOINTS.items():
        assert bool(endpoint.resources) is (key not in unguarded), API[key].name
        assert len(set(endpoint.resources)) == len(endpoint.resources)
        assert all(isinstance(resource, Resource) for resource in endpoint.resources)


def test_limits_are_of_fields_that_the_requests_have() -> None:
    for key, endpoint in ENDPOINTS.items():
        fields = set(schema_of(API[key].request).fields)
        assert endpoint.limits.keys() <= fields, API[key].name
        assert all(limit > 0 for limit in endpoint.limits.values())

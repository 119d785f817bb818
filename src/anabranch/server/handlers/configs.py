"""DescribeConfigs (32), AlterConfigs (33), IncrementalAlterConfigs (44), ListConfigResources (74).

Topics and groups have configs; the broker's own settings are read only.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.machines.controller.configs import (
    TOPIC_CONFIGS,
    AlterConfigs,
    ConfigChange,
    ConfigOperation,
    ConfigSource,
    ConfigType,
    ReplaceConfigs,
    Synonym,
    synonyms,
)
from anabranch.machines.controller.group_configs import AlterGroupConfigs, group_synonyms
from anabranch.protocol.messages.alter_configs import (
    AlterConfigsRequest,
    AlterConfigsResponse,
)
from anabranch.protocol.messages.alter_configs import AlterConfigsResource as Replaced
from anabranch.protocol.messages.alter_configs import AlterConfigsResourceResponse as ReplacedResponse
from anabranch.protocol.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    DescribeConfigsSynonym,
)
from anabranch.protocol.messages.incremental_alter_configs import (
    AlterConfigsResource,
    AlterConfigsResourceResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from anabranch.protocol.messages.list_config_resources import (
    ConfigResource,
    ListConfigResourcesRequest,
    ListConfigResourcesResponse,
)
from anabranch.server.context import BrokerContext, RequestContext
from anabranch.server.settings import described

TOPIC, BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP = 2, 4, 8, 16, 32
ALTER_TIMEOUT_MS = 30_000
KINDS = {
    "boolean": ConfigType.BOOLEAN,
    "string": ConfigType.STRING,
    "int": ConfigType.INT,
    "long": ConfigType.LONG,
    "double": ConfigType.DOUBLE,
    "list": ConfigType.LIST,
}


def handle_describe_configs(
    broker: BrokerContext, request: DescribeConfigsRequest, call: RequestContext
) -> DescribeConfigsResponse:
    """Describe every config of each resource, or those that are named."""
    return DescribeConfigsResponse(results=[_describe(broker, it, request) for it in request.resources])


def _describe(
    broker: BrokerContext, asked: DescribeConfigsResource, request: DescribeConfigsRequest
) -> DescribeConfigsResult:
    result = DescribeConfigsResult(resource_type=asked.resource_type, resource_name=asked.resource_name, configs=[])
    if asked.resource_type == TOPIC:
        if broker.view.topic(asked.resource_name) is None:
            result.error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            result.error_message = f"There is no topic {asked.resource_name!r}."
            return result
        found = _topic_configs(broker, asked.resource_name, request)
    elif asked.resource_type == BROKER:
        if asked.resource_name not in ("", str(broker.settings.node_id)):
            result.error_code = ErrorCode.INVALID_REQUEST
            result.error_message = f"This is broker {broker.settings.node_id}, not {asked.resource_name!r}."
            return result
        found = _broker_configs(broker, request)
    elif asked.resource_type == GROUP:
        if not asked.resource_name:
            result.error_code = ErrorCode.INVALID_REQUEST
            result.error_message = "A group's configs need the group's id; there are no defaults."
            return result
        found = _group_configs(broker, asked.resource_name, request)
    else:
        result.error_code = ErrorCode.INVALID_REQUEST
        result.error_message = (
            f"Resources of type {asked.resource_type} have no configs here; topics (2), brokers (4) and groups (32) do."
        )
        return result
    keys = asked.configuration_keys
    result.configs = found if keys is None else [config for config in found if config.name in keys]
    return result


def _topic_configs(
    broker: BrokerContext, topic: str, request: DescribeConfigsRequest
) -> list[DescribeConfigsResourceResult]:
    overrides = broker.view.configs(topic)
    found = []
    for config in TOPIC_CONFIGS.values():
        sources = synonyms(config, overrides, broker.broker_settings)
        found.append(_described(config.name, sources, config.type, config.documentation, request))
    return found


def _group_configs(
    broker: BrokerContext, group: str, request: DescribeConfigsRequest
) -> list[DescribeConfigsResourceResult]:
    overrides = broker.view.group_configs(group)
    found = []
    for config in broker.groups.configs.values():
        sources = group_synonyms(config, overrides, broker.broker_settings)
        found.append(_described(config.name, sources, ConfigType.INT, config.documentation, request))
    return found


def _described(
    name: str, sources: Sequence[Synonym], kind: ConfigType, documentation: str, request: DescribeConfigsRequest
) -> DescribeConfigsResourceResult:
    """Describe a config with the value of the first of its sources."""
    return DescribeConfigsResourceResult(
        name=name,
        value=sources[0].value,
        config_source=int(sources[0].source),
        config_type=int(kind),
        documentation=documentation if request.include_documentation else None,
        synonyms=[DescribeConfigsSynonym(name=it.name, value=it.value, source=int(it.source)) for it in sources]
        if request.include_synonyms
        else [],
    )


def _broker_configs(broker: BrokerContext, request: DescribeConfigsRequest) -> list[DescribeConfigsResourceResult]:
    return [
        DescribeConfigsResourceResult(
            name=it.name,
            value=it.value,
            read_only=True,
            config_source=int(
                ConfigSource.DEFAULT_CONFIG if it.value == it.default else ConfigSource.STATIC_BROKER_CONFIG
            ),
            config_type=int(KINDS[it.kind]),
            documentation=it.doc if request.include_documentation else None,
        )
        for it in described(broker.settings)
    ]


async def handle_incremental_alter_configs(
    broker: BrokerContext, request: IncrementalAlterConfigsRequest, call: RequestContext
) -> IncrementalAlterConfigsResponse:
    """Change some configs of each topic; they apply to its logs at once."""

    async def alter(resource: AlterConfigsResource) -> AlterConfigsResourceResponse:
        try:
            changes = [ConfigChange(it.name, _operation(it.config_operation), it.value) for it in resource.configs]
            if resource.resource_type == GROUP:
                grouped = AlterGroupConfigs(resource.resource_name, changes, request.validate_only)
                await broker.commands.alter_group_configs(grouped)
                return AlterConfigsResourceResponse(resource_type=GROUP, resource_name=resource.resource_name)
            _refuse_resource(resource.resource_type)
            command = AlterConfigs(resource.resource_name, changes, request.validate_only)
            await broker.commands.alter_configs(command, ALTER_TIMEOUT_MS)
        except ApiError as error:
            return AlterConfigsResourceResponse(
                error_code=error.code,
                error_message=error.message,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
            )
        return AlterConfigsResourceResponse(resource_type=resource.resource_type, resource_name=resource.resource_name)

    return IncrementalAlterConfigsResponse(responses=[await alter(it) for it in request.resources])


async def handle_alter_configs(
    broker: BrokerContext, request: AlterConfigsRequest, call: RequestContext
) -> AlterConfigsResponse:
    """Replace all configs of each topic."""

    async def replace(resource: Replaced) -> ReplacedResponse:
        try:
            _refuse_resource(resource.resource_type)
            given = {it.name: it.value for it in resource.configs}
            command = ReplaceConfigs(resource.resource_name, given, request.validate_only)
            await broker.commands.replace_configs(command, ALTER_TIMEOUT_MS)
        except ApiError as error:
            return ReplacedResponse(
                error_code=error.code,
                error_message=error.message,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
            )
        return ReplacedResponse(resource_type=resource.resource_type, resource_name=resource.resource_name)

    return AlterConfigsResponse(responses=[await replace(it) for it in request.resources])


def _refuse_resource(kind: int) -> None:
    if kind == BROKER:
        raise ApiError(ErrorCode.INVALID_REQUEST, "A broker's settings are changed in its file, then it is restarted.")
    if kind == GROUP:
        raise ApiError(ErrorCode.INVALID_REQUEST, "A group's configs are changed by IncrementalAlterConfigs.")
    if kind != TOPIC:
        message = f"Resources of type {kind} have no configs here; topics (2) and groups (32) do."
        raise ApiError(ErrorCode.INVALID_REQUEST, message)


def _operation(code: int) -> ConfigOperation:
    try:
        return ConfigOperation(code)
    except ValueError:
        raise ApiError(ErrorCode.INVALID_REQUEST, f"There is no config operation {code}.") from None


def handle_list_config_resources(
    broker: BrokerContext, request: ListConfigResourcesRequest, call: RequestContext
) -> ListConfigResourcesResponse:
    """Name the resources that can have configs, of the types asked for; version 0 asks for client metrics alone."""
    names: dict[int, list[str]] = {
        TOPIC: broker.view.topic_names(),
        BROKER: [str(broker.settings.node_id)],
        BROKER_LOGGER: [],
        CLIENT_METRICS: [],
        GROUP: broker.view.configured_groups(),
    }
    asked = list(request.resource_types) or list(names) if call.api_version else [CLIENT_METRICS]
    if any(kind not in names for kind in asked):
        return ListConfigResourcesResponse(error_code=ErrorCode.UNSUPPORTED_VERSION)
    return ListConfigResourcesResponse(
        config_resources=[
            ConfigResource(resource_name=name, resource_type=kind)
            for kind in dict.fromkeys(asked)
            for name in names[kind]
        ]
    )

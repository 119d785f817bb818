"""DescribeConfigs (32), AlterConfigs (33), IncrementalAlterConfigs (44), ListConfigResources (74).

Topics and groups have configs; of a broker's settings the dynamic ones can be changed (`machines.controller.
broker_configs`), and the levels of its loggers, which hold until it ends (KIP-226, KIP-412).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from anabranch.base.errors import ApiError, ErrorCode, shortened
from anabranch.base.limits import CONFIGS_PER_RESOURCE_MAX, CONFIGS_SIZE_MAX
from anabranch.machines.controller.broker_configs import DYNAMIC, FIXED, OLDER, AlterBrokerConfigs, broker_of
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
from anabranch.machines.controller.nodes import EVERY_BROKER
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
from anabranch.runtime.events import LEVEL_NAMES, levels, set_level
from anabranch.server.context import BrokerContext, Large, RequestContext
from anabranch.server.settings import described

TOPIC, BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP = 2, 4, 8, 16, 32
ALTER_TIMEOUT_MS = 30_000
STRING = ConfigType.STRING
LEVELS = "From which level on the logger writes; until the broker ends."
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
            result.error_message = shortened(f"There is no topic {asked.resource_name!r}.")
            return result
        found = _topic_configs(broker, asked.resource_name, request)
    elif asked.resource_type == BROKER:
        if not asked.resource_name:
            found = _default_broker_configs(broker, request)
        elif asked.resource_name == str(broker.settings.node_id):
            found = _broker_configs(broker, request)
        else:
            return _not_this_broker(broker, result)
    elif asked.resource_type == BROKER_LOGGER:
        if asked.resource_name != str(broker.settings.node_id):
            return _not_this_broker(broker, result)
        found = [
            _described(name, [Synonym(name, level, ConfigSource.DYNAMIC_BROKER_LOGGER_CONFIG)], STRING, LEVELS, request)
            for name, level in levels().items()
        ]
    elif asked.resource_type == GROUP:
        if not asked.resource_name:
            result.error_code = ErrorCode.INVALID_REQUEST
            result.error_message = "A group's configs need the group's id; there are no defaults."
            return result
        found = _group_configs(broker, asked.resource_name, request)
    else:
        result.error_code = ErrorCode.INVALID_REQUEST
        result.error_message = (
            f"Resources of type {asked.resource_type} have no configs here; topics (2), brokers (4), "
            "broker loggers (8) and groups (32) do."
        )
        return result
    keys = None if asked.configuration_keys is None else {*asked.configuration_keys}
    result.configs = found if keys is None else [config for config in found if config.name in keys]
    return result


def _not_this_broker(broker: BrokerContext, result: DescribeConfigsResult) -> DescribeConfigsResult:
    result.error_code = ErrorCode.INVALID_REQUEST
    result.error_message = shortened(f"This is broker {broker.settings.node_id}, not {result.resource_name!r}.")
    return result


def _topic_configs(
    broker: BrokerContext, topic: str, request: DescribeConfigsRequest
) -> list[DescribeConfigsResourceResult]:
    overrides = broker.view.configs(topic)
    found = []
    for config in TOPIC_CONFIGS.values():
        sources = synonyms(config, overrides, broker.view.broker_settings)
        found.append(_described(config.name, sources, config.type, config.documentation, request))
    return found


def _group_configs(
    broker: BrokerContext, group: str, request: DescribeConfigsRequest
) -> list[DescribeConfigsResourceResult]:
    overrides = broker.view.group_configs(group)
    found = []
    for config in broker.groups.configs.values():
        sources = group_synonyms(config, overrides, broker.view.broker_settings)
        found.append(_described(config.name, sources, ConfigType.INT, config.documentation, request))
    return found


def _described(
    name: str,
    sources: Sequence[Synonym],
    kind: ConfigType,
    documentation: str,
    request: DescribeConfigsRequest,
    *,
    read_only: bool = False,
) -> DescribeConfigsResourceResult:
    """Describe a config with the value of the first of its sources."""
    return DescribeConfigsResourceResult(
        name=name,
        value=sources[0].value,
        read_only=read_only,
        config_source=int(sources[0].source),
        config_type=int(kind),
        documentation=documentation if request.include_documentation else None,
        synonyms=[DescribeConfigsSynonym(name=it.name, value=it.value, source=int(it.source)) for it in sources]
        if request.include_synonyms
        else [],
    )


def _broker_configs(broker: BrokerContext, request: DescribeConfigsRequest) -> list[DescribeConfigsResourceResult]:
    """Describe all settings of this broker, those that only topics have a table of, those that are as they are,
    and other names."""
    told = broker.view.broker_settings
    known = {it.name: (it.default, KINDS[it.kind], it.doc) for it in described(broker.settings)}
    more = {**DYNAMIC, **FIXED}
    known |= {name: (it.default, it.type, it.documentation) for name, it in more.items() if name not in known}

    def sources(name: str) -> list[Synonym]:
        return [*told.sources(name), Synonym(name, known[name][0], ConfigSource.DEFAULT_CONFIG)]

    found = [
        _described(name, sources(name), kind, documentation, request, read_only=name not in DYNAMIC)
        for name, (_, kind, documentation) in known.items()
    ]
    for name, older in OLDER.items():
        in_force = sources(older.setting)
        found.append(_described(name, in_force, older.type, older.documentation, request, read_only=True))
        found[-1].value = older.value(in_force[0].value)
    return found


def _default_broker_configs(
    broker: BrokerContext, request: DescribeConfigsRequest
) -> list[DescribeConfigsResourceResult]:
    """Describe the dynamic settings of every broker: those that were set."""
    source = ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG
    return [
        _described(name, [Synonym(name, value, source)], DYNAMIC[name].type, DYNAMIC[name].documentation, request)
        for name, value in broker.view.broker_configs(EVERY_BROKER).items()
        if name in DYNAMIC
    ]


async def handle_incremental_alter_configs(
    broker: BrokerContext, request: IncrementalAlterConfigsRequest, call: RequestContext
) -> IncrementalAlterConfigsResponse:
    """Change some configs of each resource; they apply at once."""

    async def alter(resource: AlterConfigsResource) -> AlterConfigsResourceResponse:
        try:
            _refuse_twice(resource, call)
            check_configs(resource.configs)
            changes = [ConfigChange(it.name, _operation(it.config_operation), it.value) for it in resource.configs]
            if resource.resource_type == GROUP:
                grouped = AlterGroupConfigs(resource.resource_name, changes, request.validate_only)
                await broker.commands.alter_group_configs(grouped)
                return AlterConfigsResourceResponse(resource_type=GROUP, resource_name=resource.resource_name)
            if resource.resource_type == BROKER:
                key = _broker_key(broker, resource.resource_name)
                told = AlterBrokerConfigs(key, changes, request.validate_only)
                await broker.commands.alter_broker_configs(told)
                return AlterConfigsResourceResponse(resource_type=BROKER, resource_name=resource.resource_name)
            if resource.resource_type == BROKER_LOGGER:
                _broker_key(broker, resource.resource_name or "(none)")
                _alter_levels(changes, validate_only=request.validate_only)
                return AlterConfigsResourceResponse(resource_type=BROKER_LOGGER, resource_name=resource.resource_name)
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
    """Replace all configs of each topic, and all dynamic settings of a broker."""

    async def replace(resource: Replaced) -> ReplacedResponse:
        try:
            _refuse_twice(resource, call)
            check_configs(resource.configs)
            if resource.resource_type == BROKER:
                key = _broker_key(broker, resource.resource_name)
                changes = [ConfigChange(it.name, ConfigOperation.SET, it.value) for it in resource.configs]
                told = AlterBrokerConfigs(key, changes, request.validate_only, replaces=True)
                await broker.commands.alter_broker_configs(told)
                return ReplacedResponse(resource_type=BROKER, resource_name=resource.resource_name)
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


class Given(Protocol):
    """A config in a request."""

    name: str
    value: str | None


def check_configs(configs: Sequence[Given]) -> None:
    """Refuse more configs, and larger ones, than there are, before anybody looks at them one by one. ApiError."""
    if len(configs) > CONFIGS_PER_RESOURCE_MAX:
        message = f"{len(configs)} configs are given; a resource can have {CONFIGS_PER_RESOURCE_MAX} at most."
        raise ApiError(ErrorCode.INVALID_REQUEST, message)
    size = sum(len(it.name) + len(it.value or "") for it in configs)
    if size > CONFIGS_SIZE_MAX:
        message = f"The configs of a resource have {size} characters; {CONFIGS_SIZE_MAX} are allowed."
        raise ApiError(ErrorCode.INVALID_REQUEST, message)


def _refuse_twice(resource: AlterConfigsResource | Replaced, call: RequestContext) -> None:
    """Refuse a resource that the request names more than once: each time is a durable write that all logs take on."""
    if (resource.resource_type, resource.resource_name) in call.twice:
        raise ApiError(ErrorCode.INVALID_REQUEST, "Each resource may be given once.")


def _refuse_resource(kind: int) -> None:
    if kind in (BROKER_LOGGER, GROUP):
        raise ApiError(
            ErrorCode.INVALID_REQUEST, "Configs of these are changed one by one, by IncrementalAlterConfigs."
        )
    if kind != TOPIC:
        message = (
            f"Resources of type {kind} have no configs here; topics (2), brokers (4), loggers (8) and groups (32) do."
        )
        raise ApiError(ErrorCode.INVALID_REQUEST, message)


def _broker_key(broker: BrokerContext, name: str) -> str:
    """The key of a broker's configs; refuses what is neither this broker nor all."""
    key = broker_of(name)
    if key is None or key not in (EVERY_BROKER, str(broker.settings.node_id)):
        raise ApiError(ErrorCode.INVALID_REQUEST, f"This is broker {broker.settings.node_id}, not {name!r}.")
    return key


def _alter_levels(changes: Sequence[ConfigChange], *, validate_only: bool) -> None:
    """Set the levels of loggers, all or none; DELETE takes a level back."""
    known = levels()
    for change in changes:
        if change.name not in known:
            raise ApiError(ErrorCode.INVALID_CONFIG, f"There is no logger {change.name!r}.")
        if change.operation not in (ConfigOperation.SET, ConfigOperation.DELETE):
            raise ApiError(ErrorCode.INVALID_REQUEST, f"{change.operation.name} is for lists; a level is not one.")
        if change.operation is ConfigOperation.DELETE and change.name == next(iter(known)):
            raise ApiError(ErrorCode.INVALID_REQUEST, f"There is no logger above {change.name!r}: give it a level.")
        if change.operation is ConfigOperation.SET and (change.value or "").upper() not in LEVEL_NAMES:
            raise ApiError(ErrorCode.INVALID_CONFIG, f"{change.value!r} is not a level: {', '.join(LEVEL_NAMES)} are.")
    if not validate_only:
        for change in changes:
            set_level(change.name, change.value if change.operation is ConfigOperation.SET else None)


def _operation(code: int) -> ConfigOperation:
    try:
        return ConfigOperation(code)
    except ValueError:
        raise ApiError(ErrorCode.INVALID_REQUEST, f"There is no config operation {code}.") from None


def handle_list_config_resources(
    broker: BrokerContext, request: ListConfigResourcesRequest, call: RequestContext
) -> ListConfigResourcesResponse | Large:
    """Name the resources that can have configs, of the types asked for; version 0 asks for client metrics alone."""
    topics = broker.view.topics()
    names: dict[int, list[str]] = {
        TOPIC: [],
        BROKER: [str(broker.settings.node_id)],
        BROKER_LOGGER: [str(broker.settings.node_id)],
        CLIENT_METRICS: [],
        GROUP: broker.view.configured_groups(),
    }
    asked = list(request.resource_types) or list(names) if call.api_version else [CLIENT_METRICS]
    if any(kind not in names for kind in asked):
        return ListConfigResourcesResponse(error_code=ErrorCode.UNSUPPORTED_VERSION)

    def listed() -> ListConfigResourcesResponse:
        names[TOPIC] = [topic.name for topic in topics]
        return ListConfigResourcesResponse(
            config_resources=[
                ConfigResource(resource_name=name, resource_type=kind)
                for kind in dict.fromkeys(asked)
                for name in names[kind]
            ]
        )

    return Large(listed)

"""Administration of what a single broker without security has little of, by stock admin clients."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, ElectionType, KafkaException, TopicCollection, TopicPartition
from confluent_kafka import admin as confluent
from kafka import KafkaAdminClient

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.alter_client_quotas import AlterClientQuotasRequest, EntityData, EntryData, OpData
from anabranch.protocol.messages.alter_partition_reassignments import (
    AlterPartitionReassignmentsRequest,
    ReassignablePartition,
    ReassignableTopic,
)
from anabranch.protocol.messages.alter_replica_log_dirs import (
    AlterReplicaLogDir,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirTopic,
)
from anabranch.protocol.messages.api_versions import ApiVersionsRequest
from anabranch.protocol.messages.create_delegation_token import CreatableRenewers, CreateDelegationTokenRequest
from anabranch.protocol.messages.describe_acls import DescribeAclsRequest
from anabranch.protocol.messages.describe_client_quotas import DescribeClientQuotasRequest
from anabranch.protocol.messages.describe_delegation_token import DescribeDelegationTokenRequest
from anabranch.protocol.messages.elect_leaders import ElectLeadersRequest, TopicPartitions
from anabranch.protocol.messages.expire_delegation_token import ExpireDelegationTokenRequest
from anabranch.protocol.messages.renew_delegation_token import RenewDelegationTokenRequest
from anabranch.protocol.messages.sasl_authenticate import SaslAuthenticateRequest
from anabranch.protocol.messages.sasl_handshake import SaslHandshakeRequest
from anabranch.protocol.messages.update_features import FeatureUpdateKey, UpdateFeaturesRequest
from anabranch.protocol.registry import API, api_of
from anabranch.server.handlers.refused import REFUSED
from tests.support.broker import BrokerProcess
from tests.support.messages import filled
from tests.support.wire import WireClient

TIMEOUT_S = 20
ON_GROUP = {"READ", "DELETE", "DESCRIBE", "DESCRIBE_CONFIGS", "ALTER_CONFIGS"}
ON_TOPIC = ON_GROUP | {"WRITE", "CREATE", "ALTER"}
ON_CLUSTER = {"CREATE", "ALTER", "DESCRIBE", "CLUSTER_ACTION", "DESCRIBE_CONFIGS", "ALTER_CONFIGS", "IDEMPOTENT_WRITE"}


@pytest.fixture
def wire(broker: BrokerProcess) -> Iterator[WireClient]:
    with WireClient(broker.port) as client:
        client.create("placed", partitions=2)
        yield client


@pytest.fixture
def librdkafka(broker: BrokerProcess, wire: WireClient) -> confluent.AdminClient:
    return confluent.AdminClient({"bootstrap.servers": f"127.0.0.1:{broker.port}"})


@pytest.fixture
def kafka_python(broker: BrokerProcess, wire: WireClient) -> Iterator[Any]:
    client = KafkaAdminClient(bootstrap_servers=f"127.0.0.1:{broker.port}")
    yield client
    client.close()


def code_of(failure: pytest.ExceptionInfo[KafkaException]) -> int:
    return int(failure.value.args[0].code())


def test_access_control_lists_are_said_to_be_disabled(librdkafka: confluent.AdminClient, wire: WireClient) -> None:
    everything = confluent.AclBindingFilter(
        confluent.ResourceType.ANY,
        None,
        confluent.ResourcePatternType.ANY,
        None,
        None,
        confluent.AclOperation.ANY,
        confluent.AclPermissionType.ANY,
    )
    entry = confluent.AclBinding(
        confluent.ResourceType.TOPIC,
        "placed",
        confluent.ResourcePatternType.LITERAL,
        "User:somebody",
        "*",
        confluent.AclOperation.READ,
        confluent.AclPermissionType.ALLOW,
    )
    for version in API[29].versions:  # librdkafka's binding for Python passes over the error of this answer.
        assert wire.call(DescribeAclsRequest(), version).error_code == ErrorCode.SECURITY_DISABLED
    asked = [
        *librdkafka.create_acls([entry]).values(),
        *librdkafka.delete_acls([everything]).values(),
    ]
    for answer in asked:
        with pytest.raises(KafkaException) as refused:
            answer.result(TIMEOUT_S)
        assert code_of(refused) == ErrorCode.SECURITY_DISABLED


def test_nobody_has_credentials_and_none_can_be_made(librdkafka: confluent.AdminClient) -> None:
    assert librdkafka.describe_user_scram_credentials().result(TIMEOUT_S) == {}
    with pytest.raises(KafkaException) as unknown:
        librdkafka.describe_user_scram_credentials(["somebody"])["somebody"].result(TIMEOUT_S)
    assert code_of(unknown) == ErrorCode.RESOURCE_NOT_FOUND
    wanted = confluent.UserScramCredentialUpsertion(
        "somebody", confluent.ScramCredentialInfo(confluent.ScramMechanism.SCRAM_SHA_256, 4096), b"secret"
    )
    with pytest.raises(KafkaException) as refused:
        librdkafka.alter_user_scram_credentials([wanted])["somebody"].result(TIMEOUT_S)
    assert code_of(refused) == ErrorCode.UNSUPPORTED_SASL_MECHANISM


def test_leaders_need_no_election(librdkafka: confluent.AdminClient, wire: WireClient) -> None:
    named = [TopicPartition("placed", 0), TopicPartition("placed", 7)]
    for kind in (ElectionType.PREFERRED, ElectionType.UNCLEAN):
        answers = librdkafka.elect_leaders(kind, named).result(TIMEOUT_S)
        codes = {it.partition: answer.code() for it, answer in answers.items() if answer is not None}
        assert codes == {0: ErrorCode.ELECTION_NOT_NEEDED, 7: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
    assert librdkafka.elect_leaders(ElectionType.PREFERRED, None).result(TIMEOUT_S) == {}
    odd = ElectLeadersRequest(election_type=9, topic_partitions=[TopicPartitions(topic="placed", partitions=[0])])
    assert wire.call(odd, 2).error_code == ErrorCode.INVALID_REQUEST


def test_replicas_stay_where_they_are(kafka_python: Any, wire: WireClient, broker: BrokerProcess) -> None:
    assert not kafka_python.list_partition_reassignments()
    [brokers] = {tuple(it.replica_nodes) for it in wire.metadata("placed").partitions}

    def reassigned(*replicas: list[int] | None, topic: str = "placed") -> list[int]:
        partitions = [ReassignablePartition(partition_index=n, replicas=it) for n, it in enumerate(replicas)]
        topics = [ReassignableTopic(name=topic, partitions=partitions)]
        answer = wire.call(AlterPartitionReassignmentsRequest(topics=topics), 1)
        assert answer.error_code == 0
        return [it.error_code for it in answer.responses[0].partitions]

    assert reassigned(list(brokers), [*brokers, 99]) == [0, ErrorCode.INVALID_REPLICA_ASSIGNMENT]
    assert reassigned(None) == [ErrorCode.NO_REASSIGNMENT_IN_PROGRESS]
    assert reassigned([], topic="absent") == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]

    def moved_to(path: str, partitions: list[int]) -> list[int]:
        topics = [AlterReplicaLogDirTopic(name="placed", partitions=partitions)]
        answer = wire.call(AlterReplicaLogDirsRequest(dirs=[AlterReplicaLogDir(path=path, topics=topics)]), 2)
        return [it.error_code for it in answer.results[0].partitions]

    assert moved_to(str(Path(broker.data).absolute()), [0, 5]) == [0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert moved_to("/elsewhere", [0]) == [ErrorCode.LOG_DIR_NOT_FOUND]


def test_nobody_has_a_quota_and_none_can_be_set(wire: WireClient) -> None:
    for version in (0, 1):
        assert wire.call(DescribeClientQuotasRequest(), version).entries == []
        entity = [EntityData(entity_type="user", entity_name=None)]
        wanted = EntryData(entity=entity, ops=[OpData(key="producer_byte_rate", value=1.0)])
        [refused] = wire.call(AlterClientQuotasRequest(entries=[wanted]), version).entries
        assert refused.error_code == ErrorCode.INVALID_REQUEST
        assert refused.entity == entity
        assert "quotas" in refused.error_message


def test_the_controller_is_a_quorum_of_its_own(kafka_python: Any, wire: WireClient) -> None:
    described = kafka_python.describe_metadata_quorum()
    partition = described["topics"][0]["partitions"][0]
    assert partition["leader_id"] == wire.metadata("placed").partitions[0].leader_id
    assert [voter["replica_id"] for voter in partition["current_voters"]] == [partition["leader_id"]]
    assert partition["high_watermark"] > 0
    assert partition["leader_epoch"] > 0


def test_no_feature_has_versions(wire: WireClient) -> None:
    asked = UpdateFeaturesRequest(feature_updates=[FeatureUpdateKey(feature="metadata.version", max_version_level=20)])
    for version in (0, 1):
        [result] = wire.call(asked, version).results
        assert result.error_code == ErrorCode.INVALID_UPDATE_VERSION
    answer = wire.call(asked, 2)
    assert answer.error_code == ErrorCode.INVALID_UPDATE_VERSION
    assert "metadata.version" in answer.error_message


def test_authentication_is_answered_in_its_own_form(wire: WireClient) -> None:
    """A client that is told to authenticate learns why it cannot; before, its connection was closed without a word."""
    for version in API[17].versions:
        assert wire.call(SaslHandshakeRequest(mechanism="PLAIN"), version).error_code == ErrorCode.ILLEGAL_SASL_STATE
    for version in API[36].versions:
        assert wire.call(SaslAuthenticateRequest(auth_bytes=b"x"), version).error_code == ErrorCode.ILLEGAL_SASL_STATE
    assert wire.metadata("placed").error_code == 0, "the connection goes on"


@pytest.mark.parametrize("key", REFUSED, ids=lambda key: API[key].name)
def test_what_is_not_served_is_refused_in_its_own_form(broker: BrokerProcess, key: int) -> None:
    """Before, the connection was closed, which clients take for a broker that is gone."""
    api, chance, before = API[key], random.Random(key), len(broker.said("warning", "request refused"))
    with WireClient(broker.port) as client:
        for version in api.read:
            request = filled(api.request, version, chance)
            assert errors_of(client.call(request, version)) == {REFUSED[key][0]}, version
        assert client.call(ApiVersionsRequest(), 4).error_code == 0, "the connection goes on"
        assert key not in {it.api_key for it in client.call(ApiVersionsRequest(), 4).api_keys}
        client.sock.sendall(struct.pack(">ihhih", 10, key, api.versions[-1] + 1, 1, -1))
        assert client.sock.recv(1) == b"", "a version that is not known has no form"
    *_, said = broker.until_said("warning", "request refused", before + len(api.read))
    assert said["reason"].startswith(f"{api.name} ")


def errors_of(answer: Any) -> set[int]:
    """The error codes of an answer: its own, or those of all groups or partitions."""
    if hasattr(answer, "error_code"):
        return {answer.error_code}
    if hasattr(answer, "groups"):
        return {it.error_code for it in answer.groups}
    return {of.error_code for it in answer.results for of in it.partitions}


def test_delegation_tokens_are_not_given_without_authentication(wire: WireClient) -> None:
    """As by a Kafka broker on a PLAINTEXT listener."""
    for message in (
        CreateDelegationTokenRequest(renewers=[CreatableRenewers(principal_type="User", principal_name="a")]),
        RenewDelegationTokenRequest(hmac=b"x"),
        ExpireDelegationTokenRequest(hmac=b"x"),
        DescribeDelegationTokenRequest(owners=None),
    ):
        for version in api_of(type(message)).served:
            assert wire.call(message, version).error_code == ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED
    listed = {it.api_key for it in wire.call(ApiVersionsRequest(), 4).api_keys}
    assert listed >= {38, 39, 40, 41}


def test_authorized_operations_are_told_to_those_who_ask(
    librdkafka: confluent.AdminClient, broker: BrokerProcess
) -> None:
    """Every operation that a type of resource has (KIP-430); before, none was told, and tools showed "unknown"."""
    reader = Consumer({"bootstrap.servers": f"127.0.0.1:{broker.port}", "group.id": "readers"})
    reader.commit(offsets=[TopicPartition("placed", 0, 0)], asynchronous=False)
    for asked in (True, False):
        topic = librdkafka.describe_topics(TopicCollection(["placed"]), include_authorized_operations=asked)["placed"]
        cluster = librdkafka.describe_cluster(include_authorized_operations=asked)
        group = librdkafka.describe_consumer_groups(["readers"], include_authorized_operations=asked)["readers"]
        told = [it.result(TIMEOUT_S).authorized_operations for it in (topic, cluster, group)]
        names = [None if it is None else {operation.name for operation in it} for it in told]
        assert names == ([ON_TOPIC, ON_CLUSTER, ON_GROUP] if asked else [None, None, None])
    reader.close()

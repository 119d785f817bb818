"""How each client administers groups, behind one interface; each call raises RefusedError when the broker says no."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.group import MemberAssignment as AioAssignment
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from kafka import KafkaAdminClient, OffsetAndMetadata
from kafka import TopicPartition as PythonPartition
from kafka.errors import KafkaError
from py4j.protocol import Py4JJavaError

from benchmarks.peers.java import JavaMachine
from tests.conformance.clients import RefusedError
from tests.conformance.members.worker import At
from tests.support.javascript import Worker, WorkerError

TIMEOUT_S = 20
Answer = TypeVar("Answer")


class GroupAdmin(ABC):
    """What a client can do with groups that it is no member of."""

    describes: frozenset[str] = frozenset({"classic"})
    """The protocols of groups whose members it can show."""
    alters: frozenset[str] = frozenset({"classic", "consumer"})
    """The protocols of groups whose offsets it can set."""
    deletes_offsets = True
    deletes = True

    @abstractmethod
    def listed(self) -> set[str]: ...

    @abstractmethod
    def described(self, group: str) -> tuple[str, set[At]]:
        """Return the group's state in lower case, and all that its members are assigned."""

    @abstractmethod
    def offsets(self, group: str, topic: str) -> dict[int, int]: ...

    def alter(self, group: str, offsets: Mapping[At, int]) -> None:
        raise AssertionError("this client cannot alter offsets")

    def delete_offset(self, group: str, at: At) -> None:
        raise AssertionError("this client cannot delete offsets")

    def delete(self, group: str) -> None:
        raise AssertionError("this client cannot delete groups")

    @abstractmethod
    def close(self) -> None: ...


class Confluent(GroupAdmin):
    describes = frozenset({"classic", "consumer"})
    deletes_offsets = False

    def __init__(self, address: str) -> None:
        self._admin = AdminClient({"bootstrap.servers": address, "log_level": 0})

    def _ask(self, work: Callable[[], Any]) -> Any:
        try:
            answer = work()
            future = next(iter(answer.values())) if isinstance(answer, dict) else answer
            return future.result(TIMEOUT_S)
        except KafkaException as error:
            raise RefusedError(str(error)) from error

    def listed(self) -> set[str]:
        return {group.group_id for group in self._ask(self._admin.list_consumer_groups).valid}

    def described(self, group: str) -> tuple[str, set[At]]:
        found = self._ask(lambda: self._admin.describe_consumer_groups([group]))
        owned = {(at.topic, at.partition) for m in found.members for at in m.assignment.topic_partitions}
        return found.state.name.lower(), owned

    def offsets(self, group: str, topic: str) -> dict[int, int]:
        asked = ConsumerGroupTopicPartitions(group)
        found = self._ask(lambda: self._admin.list_consumer_group_offsets([asked]))
        return {at.partition: at.offset for at in found.topic_partitions if at.topic == topic}

    def alter(self, group: str, offsets: Mapping[At, int]) -> None:
        asked = ConsumerGroupTopicPartitions(group, [TopicPartition(*at, offset) for at, offset in offsets.items()])
        done = self._ask(lambda: self._admin.alter_consumer_group_offsets([asked]))
        if any(at.error for at in done.topic_partitions):
            raise RefusedError(str(done.topic_partitions))

    def delete(self, group: str) -> None:
        self._ask(lambda: self._admin.delete_consumer_groups([group]))

    def close(self) -> None:
        """It closes itself."""


class Java(GroupAdmin):
    describes = frozenset({"classic", "consumer"})

    def __init__(self, address: str) -> None:
        self._java = JavaMachine("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
        self._admin = self._java.admin(address)

    def _ask(self, work: Callable[[], Answer]) -> Answer:
        try:
            return work()
        except Py4JJavaError as error:
            cause = error.java_exception.getCause() or error.java_exception
            raise RefusedError(str(cause.toString())) from error

    def _one(self, value: object) -> Any:
        return self._java.list([value])

    def listed(self) -> set[str]:
        return {group.groupId() for group in self._ask(lambda: self._admin.listGroups().all().get())}

    def described(self, group: str) -> tuple[str, set[At]]:
        found = self._ask(lambda: self._admin.describeConsumerGroups(self._one(group)).all().get())[group]
        partitions = [at for member in found.members() for at in member.assignment().topicPartitions()]
        return found.groupState().toString().lower(), {(at.topic(), at.partition()) for at in partitions}

    def described_as_classic(self, group: str) -> tuple[str, int]:
        """Return what describeClassicGroups tells: the protocol, and how many members there are."""
        found = self._ask(lambda: self._admin.describeClassicGroups(self._one(group)).all().get())[group]
        return found.protocolData(), len(found.members())

    def offsets(self, group: str, topic: str) -> dict[int, int]:
        answer = self._ask(lambda: self._admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata().get())
        return {at.partition(): offset.offset() for at, offset in answer.items() if at.topic() == topic}

    def alter(self, group: str, offsets: Mapping[At, int]) -> None:
        metadata = self._java.jvm.org.apache.kafka.clients.consumer.OffsetAndMetadata
        asked = self._java.map({self._java.partition(*at): metadata(offset) for at, offset in offsets.items()})
        self._ask(lambda: self._admin.alterConsumerGroupOffsets(group, asked).all().get())

    def delete_offset(self, group: str, at: At) -> None:
        asked = self._java.jvm.java.util.HashSet(self._one(self._java.partition(*at)))
        self._ask(lambda: self._admin.deleteConsumerGroupOffsets(group, asked).all().get())

    def delete(self, group: str) -> None:
        self._ask(lambda: self._admin.deleteConsumerGroups(self._one(group)).all().get())

    def close(self) -> None:
        self._admin.close()
        self._java.close()


class Python(GroupAdmin):
    def __init__(self, address: str) -> None:
        self._admin = KafkaAdminClient(bootstrap_servers=address)

    def _ask(self, work: Callable[[], Answer]) -> Answer:
        try:
            return work()
        except KafkaError as error:
            raise RefusedError(f"{type(error).__name__}: {error}") from error

    def listed(self) -> set[str]:
        return {group["group_id"] for group in self._ask(self._admin.list_groups)}

    def described(self, group: str) -> tuple[str, set[At]]:
        found = self._ask(lambda: self._admin.describe_groups([group]))[group]
        owned = {
            (topic["topic"], number)
            for member in found["members"]
            for topic in member["member_assignment"]["assigned_partitions"]
            for number in topic["partitions"]
        }
        return found["group_state"].lower(), owned

    def offsets(self, group: str, topic: str) -> dict[int, int]:
        found = self._ask(lambda: self._admin.list_group_offsets({group: None}))[group]
        return {at.partition: offset.offset for at, offset in found.items() if at.topic == topic}

    def alter(self, group: str, offsets: Mapping[At, int]) -> None:
        asked = {PythonPartition(*at): OffsetAndMetadata(offset, "", -1) for at, offset in offsets.items()}
        self._refuse(self._ask(lambda: self._admin.alter_group_offsets(group, asked)))

    def delete_offset(self, group: str, at: At) -> None:
        self._refuse(self._ask(lambda: self._admin.delete_group_offsets(group, [PythonPartition(*at)])))

    def delete(self, group: str) -> None:
        self._refuse(self._ask(lambda: self._admin.delete_groups([group])))

    def _refuse(self, answers: Mapping[Any, Any]) -> None:
        for answer in answers.values():
            said = answer if isinstance(answer, str) else answer.__name__
            if said not in ("OK", "NoError"):
                raise RefusedError(said)

    def close(self) -> None:
        self._admin.close()


class Aio(GroupAdmin):
    alters = frozenset()
    deletes_offsets = deletes = False

    def __init__(self, address: str) -> None:
        self._runner = asyncio.Runner()
        self._admin = self._runner.run(self._open(address))

    async def _open(self, address: str) -> AIOKafkaAdminClient:
        admin = AIOKafkaAdminClient(bootstrap_servers=address)
        await admin.start()
        return admin

    def listed(self) -> set[str]:
        return {group[0] for group in self._runner.run(self._admin.list_consumer_groups())}

    def described(self, group: str) -> tuple[str, set[At]]:
        (answer,) = self._runner.run(self._admin.describe_consumer_groups([group]))
        _, _, state, _, _, members, *_ = answer.groups[0]
        owned = set()
        for member in members:
            for topic, numbers in AioAssignment.decode(member[-1]).assignment:
                owned |= {(topic, number) for number in numbers}
        return state.lower(), owned

    def offsets(self, group: str, topic: str) -> dict[int, int]:
        found = self._runner.run(self._admin.list_consumer_group_offsets(group))
        return {at.partition: offset.offset for at, offset in found.items() if at.topic == topic}

    def close(self) -> None:
        self._runner.run(self._admin.close())
        self._runner.close()


class JavaScript(GroupAdmin):
    """A client behind a worker script."""

    script: str

    def __init__(self, address: str) -> None:
        self._worker = Worker(self.script, address)

    def _call(self, call: str, **arguments: object) -> Any:
        try:
            return self._worker.call(call, **arguments)
        except WorkerError as error:
            raise RefusedError(str(error)) from error

    def listed(self) -> set[str]:
        return set(self._call("groups"))

    def described(self, group: str) -> tuple[str, set[At]]:
        state, owned = self._call("describeGroup", group=group)
        return state.lower(), {(topic, number) for topic, number in owned}

    def offsets(self, group: str, topic: str) -> dict[int, int]:
        return dict(self._call("groupOffsets", group=group, topic=topic))

    def alter(self, group: str, offsets: Mapping[At, int]) -> None:
        (topic,) = {topic for topic, _ in offsets}
        numbers = [(number, offset) for (_, number), offset in offsets.items()]
        self._call("setGroupOffsets", group=group, topic=topic, offsets=numbers)

    def delete_offset(self, group: str, at: At) -> None:
        self._call("deleteGroupOffset", group=group, topic=at[0], partition=at[1])

    def delete(self, group: str) -> None:
        self._call("deleteGroup", group=group)

    def close(self) -> None:
        self._worker.close()


class KafkaJs(JavaScript):
    script = "kafkajs.js"
    alters = frozenset({"classic"})  # it joins as a member, and commits
    deletes_offsets = False


class Platformatic(JavaScript):
    script = "platformatic.js"


ADMINS: dict[str, type[GroupAdmin]] = {
    "confluent": Confluent,
    "java": Java,
    "python": Python,
    "aio": Aio,
    "kafkajs": KafkaJs,
    "platformatic": Platformatic,
}

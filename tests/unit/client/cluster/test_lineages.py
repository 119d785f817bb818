"""Reading lineages: in as many answers as it takes, all of one layout, each cut once, and never silently in vain."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pytest

from anabranch.base.errors import ApiError, DecodeError, ErrorCode
from anabranch.client import Admin
from anabranch.client.cluster.metadata import ATTEMPTS_MAX
from anabranch.machines.cuts import encode_cuts
from anabranch.machines.lineage import Cuts, Lineage
from anabranch.protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResponse
from anabranch.protocol.messages.metadata import MetadataRequest, TopicLayout
from anabranch.protocol.messages.partition_leader_epochs_for_partitions import (
    PartitionLeaderEpochsForPartitionsRequest as CutsRequest,
)
from anabranch.protocol.messages.partition_leader_epochs_for_partitions import (
    PartitionLeaderEpochsForPartitionsResponse as CutsResponse,
)
from anabranch.protocol.messages.partition_leader_epochs_for_partitions import (
    PartitionLeaderEpochsForPartitionsResponsePartition as AnsweredPartition,
)
from anabranch.protocol.messages.partition_leader_epochs_for_partitions import (
    PartitionLeaderEpochsForPartitionsResponseTopic as AnsweredTopic,
)
from tests.simulation.virtual_time import run
from tests.support.scripted_broker import ScriptedBroker, topic_id
from tests.unit.client.consumer.test_driver import World


@dataclass
class Topic:
    """The topic t at a scripted broker: what Metadata says, and what the leaders of its partitions say."""

    broker: ScriptedBroker
    layouts: list[tuple[int, int]]
    """Number and count."""
    cuts: dict[int, list[tuple[int, int]]]
    answered_at_once: int = 1_000
    offline: set[int] = field(default_factory=set)
    leaderless: set[int] = field(default_factory=set)
    log_starts: dict[int, int] = field(default_factory=dict)
    ahead: int = 0
    """Answers that are left in which the leaders know one more layout than the metadata."""
    cut_codes: tuple[bytes, bytes] | None = None
    says_layout: bool = True
    id_of_leaders: UUID = field(default_factory=lambda: topic_id("t"))

    def __post_init__(self) -> None:
        self.broker.initial["t"] = self.layouts[0][1]
        usual = self.broker._metadata

        def metadata(request: MetadataRequest) -> Any:
            self.broker.topics["t"] = len(self.cuts)
            self.broker.retiring["t"] = len(self.cuts) - self.layouts[-1][1]
            response = usual(request)
            for topic in response.topics:
                topic.layouts = [TopicLayout(count=count, number=number) for number, count in self.layouts]
                for partition in topic.partitions:
                    if partition.partition_index in self.leaderless:
                        partition.leader_id = -1
            return response

        self.broker.on(MetadataRequest, metadata)
        self.broker.on(CutsRequest, self.answer)
        self.broker.on(DescribeConfigsRequest, lambda request: DescribeConfigsResponse())

    def answer(self, request: CutsRequest) -> CutsResponse:
        assert request.cuts
        left, topics = self.answered_at_once, []
        newest = self.layouts[-1][0]
        if self.ahead:
            self.ahead -= 1
            newest += 1
        for topic in request.topics:
            some = [self.answer_one(number, topic.first_layout) for number in topic.partitions[:left]]
            left -= len(some)
            layout = newest if self.says_layout else -1
            topics.append(AnsweredTopic(topic="t", topic_id=self.id_of_leaders, layout=layout, partitions=some))
        return CutsResponse(topics=topics)

    def answer_one(self, number: int, first_layout: int) -> AnsweredPartition:
        if number in self.offline:
            return AnsweredPartition(partition=number, error_code=ErrorCode.KAFKA_STORAGE_ERROR)
        start = self.log_starts.get(number, 0)
        cuts = Cuts.of((layout, end) for layout, end in self.cuts[number] if layout >= first_layout and end > start)
        layouts, ends = encode_cuts(cuts) if self.cut_codes is None else self.cut_codes
        return AnsweredPartition(partition=number, cut_layouts=layouts, cut_ends=ends, log_start=start)

    @property
    def asked(self) -> list[list[tuple[int, Sequence[int]]]]:
        """The partitions of each request, by the first layout that is asked for."""
        requests = self.broker.requests(CutsRequest)
        return [[(topic.first_layout, list(topic.partitions)) for topic in request.topics] for request in requests]


def resized() -> Topic:
    cuts: dict[int, list[tuple[int, int]]] = {0: [(0, 5), (2, 9)], 1: [(0, 3)], 2: [(1, 4)], 3: []}
    return Topic(ScriptedBroker(), [(0, 2), (1, 4), (2, 3), (3, 4)], cuts)


def play(story: Callable[[Topic], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        await story(resized())

    run(whole(), 1)


def cuts_of(lineage: Lineage) -> dict[int, list[tuple[int, int]]]:
    return {partition: list(zip(*cuts, strict=True)) for partition, cuts in lineage.cuts.items()}


WHOLE = {0: [(0, 5), (2, 9)], 1: [(0, 3)], 2: [(1, 4)]}


@pytest.mark.parametrize(("at_once", "requests"), [(1_000, 1), (3, 2), (1, 4)])
def test_a_lineage_is_read_in_as_many_answers_as_the_broker_has_room_for(at_once: int, requests: int) -> None:
    async def story(topic: Topic) -> None:
        topic.answered_at_once = at_once
        lineage = await topic.broker.cluster().lineage("t")
        assert (lineage.initial, lineage.first, lineage.counts) == (2, 0, (2, 4, 3, 4))
        assert cuts_of(lineage) == WHOLE
        assert not lineage.unknown
        assert len(topic.asked) == requests

    play(story)


def test_after_a_resize_only_later_cuts_are_asked_for_and_of_new_partitions_all() -> None:
    async def story(topic: Topic) -> None:
        cluster = topic.broker.cluster()
        await cluster.lineage("t")
        await cluster.lineage("t")
        assert len(topic.asked) == 1, "nothing is asked twice"
        topic.layouts = [(2, 3), (3, 4), (4, 5)]
        topic.cuts |= {3: [(3, 7)], 4: []}
        topic.log_starts[0] = 6
        lineage = await cluster.lineage("t")
        assert topic.asked[1:] == [[(3, [0, 1, 2, 3]), (0, [4])]]
        assert cuts_of(lineage) == {0: [(2, 9)], 1: [(0, 3)], 2: [(1, 4)], 3: [(3, 7)]}
        assert (lineage.first, lineage.current) == (2, 4)

    play(story)


def test_answers_of_a_later_layout_than_the_metadata_are_not_mixed_with_it() -> None:
    async def story(topic: Topic) -> None:
        topic.ahead = 3
        lineage = await topic.broker.cluster().lineage("t")
        assert lineage.current == 3
        assert len(topic.broker.requests(MetadataRequest)) >= 4

    play(story)


@pytest.mark.parametrize("fault", ["offline", "leaderless"])
def test_the_end_of_a_log_that_cannot_be_read_is_unknown_until_it_can_be(fault: str) -> None:
    async def story(topic: Topic) -> None:
        broken: set[int] = getattr(topic, fault)
        broken.add(0)
        cluster = topic.broker.cluster()
        lineage = await cluster.lineage("t")
        assert lineage.unknown == {0: 0}
        assert cuts_of(lineage) == {1: [(0, 3)], 2: [(1, 4)]}
        assert not lineage.may_deliver(2, 1, {0: 1 << 40, 1: 9, 2: 0, 3: 0}), "0 held its keys"
        assert lineage.may_deliver(3, 1, {0: 1 << 40, 1: 9, 2: 9, 3: 0}), "0 never held its keys"
        broken.clear()
        assert cuts_of(await cluster.lineage("t")) == WHOLE

    play(story)


def test_a_topic_made_again_under_its_name_shares_nothing_with_the_one_before() -> None:
    async def story(topic: Topic) -> None:
        topic.id_of_leaders = UUID(int=99)
        with pytest.raises(ApiError, match=r"the lineage of topic t cannot be read: .*resized while"):
            await topic.broker.cluster().lineage("t")

    play(story)


def test_a_lineage_that_never_settles_is_an_error_with_a_sentence() -> None:
    async def story(topic: Topic) -> None:
        topic.ahead = ATTEMPTS_MAX
        with pytest.raises(ApiError, match="the lineage of topic t cannot be read") as raised:
            await topic.broker.cluster().lineage("t")
        assert not raised.value.retriable

    play(story)


def test_a_broker_that_knows_no_cuts_is_named() -> None:
    async def story(topic: Topic) -> None:
        topic.says_layout = False
        with pytest.raises(ApiError, match="broker 1 is of an earlier version"):
            await topic.broker.cluster().lineage("t")

    play(story)


def test_a_broker_that_answers_nothing_is_not_asked_for_ever() -> None:
    async def story(topic: Topic) -> None:
        topic.answered_at_once = 0
        with pytest.raises(ApiError, match="broker 1 returns no cuts of t"):
            await topic.broker.cluster().lineage("t")
        assert len(topic.asked) == 1

    play(story)


@pytest.mark.parametrize("codes", [(b"123", b""), (bytes(8), bytes(16)), ((77).to_bytes(8), (5).to_bytes(8))])
def test_a_lineage_that_cannot_be_read_is_raised_in_poll(codes: tuple[bytes, bytes]) -> None:
    """It once was no error at all: a consumer returned nothing, for ever."""

    async def story() -> None:
        world = World()
        topic = resized()
        topic.broker = world.broker
        topic.__post_init__()
        topic.cut_codes = codes
        with pytest.raises(ApiError, match="the lineage of topic t cannot be read") as raised:
            await world.poll(60)
        assert not raised.value.retriable
        topic.cut_codes = None
        world.broker.hang_up()
        await world.poll(5)
        assert world.driver.fetcher.all_known, "it goes on as soon as it can be read"
        await world.end()

    run(story(), 1)


def test_a_response_that_cannot_be_decoded_is_raised_in_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        world = World()
        topic = resized()
        topic.broker = world.broker
        topic.__post_init__()
        monkeypatch.setattr("anabranch.client.cluster.lineages.decode_cuts", _beyond_all_bounds)
        with pytest.raises(ApiError, match="cannot be read"):
            await world.poll(60)
        await world.end()

    run(story(), 1)


def _beyond_all_bounds(layouts: bytes, ends: bytes) -> Cuts:
    raise DecodeError("the message has more array elements than one message may")


def test_a_key_of_a_broker_without_layouts_is_not_explained() -> None:
    async def story() -> None:
        admin = Admin(bootstrap_servers="broker:9092")
        admin._cluster = ScriptedBroker({"plain": 3}).cluster()
        with pytest.raises(ApiError, match="the broker of topic plain knows nothing of layouts"):
            await admin.explain("plain", b"k")
        with pytest.raises(ApiError, match="there is no topic 'nowhere'"):
            await admin.explain("nowhere", b"k")
        await admin.close()

    run(story(), 1)

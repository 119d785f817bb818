"""Groups that are asked for as soon as a large log of committed offsets is loaded: a thread still reads the offsets."""

from __future__ import annotations

import time
from pathlib import Path

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.list_groups import ListGroupsRequest
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from anabranch.protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
)
from tests.support.broker import BrokerProcess
from tests.support.group_client import RETRIABLE, GroupClient
from tests.support.steps import long_steps

PARTITIONS = 20_000
METADATA = "x" * 250
"""So that the log has more than 4 MiB, of which the offsets stay in place when it is loaded."""


def test_groups_are_listed_in_short_steps_while_their_offsets_are_still_read(tmp_path: Path) -> None:
    """The loop read 90,000 offsets for a list, for 0.6 s; or the connection was closed, as a thread had read them."""
    broker = BrokerProcess(tmp_path).start()
    try:
        with GroupClient(broker.port, 60) as client:
            client.create("wide", PARTITIONS)
            client.ready("g")
            parts = [
                OffsetCommitRequestPartition(partition_index=it, committed_offset=0, committed_metadata=METADATA)
                for it in range(PARTITIONS)
            ]
            topics = [OffsetCommitRequestTopic(name="wide", partitions=parts)]
            answer = client.call(OffsetCommitRequest(group_id="g", topics=topics), 8)
            assert {it.error_code for it in answer.topics[0].partitions} == {ErrorCode.NONE}
            # A group with a tombstone is read before it is listed.
            one = OffsetDeleteRequestTopic(name="wide", partitions=[OffsetDeleteRequestPartition(partition_index=0)])
            assert client.call(OffsetDeleteRequest(group_id="g", topics=[one])).error_code == ErrorCode.NONE
        for _ in range(2):
            assert broker.stop() == 0
            broker.start()
            with GroupClient(broker.port, 60) as client:
                deadline = time.monotonic() + 30
                while (listed := client.call(ListGroupsRequest())).error_code in RETRIABLE:
                    assert time.monotonic() < deadline
                    time.sleep(0.001)
                assert [(it.group_id, it.group_state) for it in listed.groups] == [("g", "Empty")]
            assert not {name: count for name, count in long_steps(broker).items() if "ListGroups" in name and count}
            assert not broker.said("error")
    finally:
        broker.kill()

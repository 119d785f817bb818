"""The buffer of a request goes to other connections only when no thread looks into it any more.

A client hangs up while its request is checked in a thread. The check corrects the largest timestamp of a batch in
place: in the midst of another client's records, if the buffer were theirs by then.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from pathlib import Path

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.leave_group import LeaveGroupRequest
from anabranch.protocol.messages.produce import PartitionProduceData
from anabranch.records.batch import build, check, headers
from anabranch.records.compression import Compression, compress
from tests.support.broker import running
from tests.support.group_client import GroupClient
from tests.support.wire import WireClient, batch, varint

NOW_MS = 1_700_000_000_000
HEADERS = 30_000_000
TRIES = 3
BEFORE_S = 0.3
"""So long after it was sent a bomb has been expanded, and is examined for a few times as long."""


def bomb() -> bytearray:
    """A batch of one record with millions of empty headers, which is wrong about its largest timestamp: 2 KB."""
    body = b"\0\0\0\1\1" + varint(HEADERS) + bytes(2 * HEADERS)
    return build(
        compress(Compression.ZSTD, varint(len(body)) + body),
        record_count=1,
        base_timestamp=NOW_MS,
        max_timestamp=NOW_MS - 1,
        attributes=Compression.ZSTD,
    )


def hang_up(client: WireClient) -> None:
    """Reset a connection, so that the next answer to it fails."""
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def test_a_check_whose_client_hung_up_changes_nothing_of_others(tmp_path: Path) -> None:
    slow = bomb()
    space = batch([bytes(1_000)] * 250, timestamp=NOW_MS)
    records = batch([bytes([number]) * 1_000 for number in range(200)] * 3, timestamp=NOW_MS)
    with (
        running(tmp_path, group_initial_rebalance_delay_ms=0) as broker,
        WireClient(broker.port, 60) as honest,
        contextlib.closing(GroupClient(broker.port)) as member,
    ):
        honest.create("t", 2)
        member.ready()
        for number in range(TRIES):
            joined = member.join(f"g{number}", version=3)
            hostile = GroupClient(broker.port)
            hostile.send(hostile.join_request(f"g{number}"), 3)  # Answered when the other member leaves.
            hostile.send(hostile.produce_request("t", 0, space + slow * 3 + space + space), 12)
            time.sleep(BEFORE_S * (1 + number / 2))
            hang_up(hostile)
            member.call(LeaveGroupRequest(group_id=f"g{number}", member_id=joined.member_id), 1)
            asked = honest.produce_request("t", 0, records)
            parts = [*asked.topic_data[0].partition_data, PartitionProduceData(index=1, records=bytes(slow))]
            asked.topic_data[0].partition_data = parts
            for answer in honest.call(asked, 12).responses[0].partition_responses:
                assert answer.error_code == ErrorCode.NONE
        found = honest.fetch("t", 0, 0, partition_max_bytes=1 << 24).records
        assert found is not None
        bodies = []
        for position, header in headers(found):
            check(found, position, header)
            bodies.append(bytes(found[position + 61 : position + header.size]))
        honest_body, hostile = bytes(records[61:]), [bytes(it[61:]) for it in (space, *[slow] * 3, space, space)]
        assert bodies.count(honest_body) == TRIES
        others = [body for body in bodies if body != honest_body]
        # A request whose check is over before its client hangs up is appended, all of it: a fast machine takes 0.55 s.
        assert others == hostile * (len(others) // len(hostile))

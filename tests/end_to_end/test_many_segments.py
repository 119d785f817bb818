"""Logs of many segments on a real broker: deleting their records holds nobody up, and gives their room back."""

from __future__ import annotations

from pathlib import Path

from anabranch.base.errors import ErrorCode
from tests.support.broker import running
from tests.support.steps import in_short_steps
from tests.support.wire import WireClient, batch

SEGMENTS = 400


def test_deleting_the_records_of_many_segments_takes_short_steps(tmp_path: Path) -> None:
    with running(tmp_path) as broker, WireClient(broker.port) as client:
        client.create("t", segment_bytes="14", durability="os")
        end = 0

        def fill_and_delete() -> None:
            nonlocal end
            sent = [client.send(client.produce_request("t", 0, batch([b"x"])), 12) for _ in range(SEGMENTS)]
            for each in sent:
                assert client.receive(each).responses[0].partition_responses[0].error_code == ErrorCode.NONE
            end += SEGMENTS
            log = tmp_path / "t-0"
            assert sum(path.stat().st_size > 0 for path in log.glob("*.log")) == SEGMENTS
            assert client.delete_everything("t", 0) == end
            assert [path.stat().st_size for path in log.glob("*.log")] == [0], "the answer comes when there is room"

        in_short_steps(broker, fill_and_delete)
        assert client.produce("t", 0, batch([b"last"])).base_offset == end
        assert client.read_all("t", start=end) == [(end, b"last")]
        broker.kill()
    with running(tmp_path) as broker, WireClient(broker.port) as client:
        assert client.read_all("t", start=end) == [(end, b"last")]

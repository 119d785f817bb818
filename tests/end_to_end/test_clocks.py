"""A clock that is set, back or forward, and a broker that stands still: what was promised by time is kept."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.find_coordinator import FindCoordinatorRequest
from anabranch.protocol.messages.heartbeat import HeartbeatRequest
from anabranch.protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from anabranch.protocol.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment
from anabranch.runtime.clock import Clock
from anabranch.server.broker import Broker
from anabranch.server.settings import Settings
from tests.support.broker import running
from tests.support.wire import WireClient, batch

DAY_MS = 24 * 3600 * 1000


class SetClock(Clock):
    """A wall clock that is wrong by as much as a test says."""

    wrong_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.wrong_ms


def serve(path: Path, clock: Clock, scene: Callable[[int], None], **settings: str) -> None:
    """Serve from this process, by another clock, while a thread plays a scene."""

    async def run() -> None:
        given = {"listeners": "127.0.0.1:0", "metrics.listener": "", "log.dirs": str(path), **settings}
        broker = Broker(Settings.of(given), clock=clock)
        await broker.start()
        try:
            await asyncio.to_thread(scene, broker.address.port)
        finally:
            assert await broker.stop()

    asyncio.run(run())


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def test_a_clock_that_is_set_doubles_no_record_and_deletes_and_refuses_none(tmp_path: Path) -> None:
    clock = SetClock()

    def scene(port: int) -> None:
        with WireClient(port) as client:
            client.create("t", retention_ms="3600000")
            producer = client.producer_id()
            batches = [batch([b"%d" % n], producer=(producer, 0, n), timestamp=now_ms()) for n in range(4)]
            for n in range(2):
                assert client.produce("t", 0, batches[n]).base_offset == n
            for repeated, days in ((1, 30), (2, -30)):
                clock.wrong_ms = days * DAY_MS
                time.sleep(0.3)  # Upkeep runs meanwhile, several times.
                for n in (repeated, repeated + 1):
                    answer = client.produce("t", 0, batches[n])
                    assert (answer.error_code, answer.base_offset) == (ErrorCode.NONE, n)
            assert [value for _, value in client.read_all("t")] == [b"0", b"1", b"2", b"3"]

    serve(tmp_path, clock, scene, **{"log.retention.check.interval.ms": "50"})


def test_a_broker_that_stood_still_reads_what_members_sent_before_it_misses_them(tmp_path: Path) -> None:
    settings = {"group_min_session_timeout_ms": 100, "group_initial_rebalance_delay_ms": 0}
    with running(tmp_path, **settings) as broker, WireClient(broker.port) as client:
        client.call(FindCoordinatorRequest(key_type=0, coordinator_keys=["g"]))
        join = JoinGroupRequest(
            group_id="g",
            session_timeout_ms=1_000,
            rebalance_timeout_ms=60_000,
            member_id="",
            protocol_type="consumer",
            protocols=[JoinGroupRequestProtocol(name="range", metadata=b"")],
        )
        while (joined := client.call(join, 3)).error_code != ErrorCode.NONE:
            assert ErrorCode(joined.error_code).retriable
            time.sleep(0.02)
        member, generation = joined.member_id, joined.generation_id
        assignments = [SyncGroupRequestAssignment(member_id=member, assignment=b"all")]
        sync = SyncGroupRequest(group_id="g", generation_id=generation, member_id=member, assignments=assignments)
        assert client.call(sync, 2).error_code == ErrorCode.NONE
        beat = HeartbeatRequest(group_id="g", generation_id=generation, member_id=member)
        assert client.call(beat, 2).error_code == ErrorCode.NONE
        broker.signal(signal.SIGSTOP)
        sent = client.send(beat, 2)
        time.sleep(2)
        broker.signal(signal.SIGCONT)
        assert client.receive(sent).error_code == ErrorCode.NONE
        time.sleep(2.5)
        assert client.call(beat, 2).error_code == ErrorCode.UNKNOWN_MEMBER_ID, "a silent member is missed"

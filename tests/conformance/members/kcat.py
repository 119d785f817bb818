"""Members that are `kcat -G` commands: a balanced consumer of librdkafka, which commits by itself.

It prints records on standard output and, on standard error, what a rebalance gave it and took from it.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from typing import IO

from tests.conformance.members.worker import METADATA_MS, POLL_S, At, Got, Member
from tests.support.kcat import kcat

REBALANCED = re.compile(r"% Group .* rebalanced \(memberid .*\): (assigned|revoked): (.*)")
PARTITION = re.compile(r"(\S+) \[(\d+)\]")


class LibraryMember(Member):
    def open(self) -> None:
        asked, command = self.asked, kcat()
        settings = {
            "session.timeout.ms": asked.session_timeout_ms,
            "heartbeat.interval.ms": 100,
            "partition.assignment.strategy": asked.assignor or "range",
            "auto.offset.reset": asked.reset,
            "auto.commit.interval.ms": 100,
            "fetch.wait.max.ms": 100,
            "topic.metadata.refresh.interval.ms": METADATA_MS,
        }
        if asked.instance:
            settings["group.instance.id"] = asked.instance
        given = [word for name, value in settings.items() for word in ("-X", f"{name}={value}")]
        topics = ["^" + asked.pattern] if asked.pattern else list(asked.topics)
        self._lines: queue.SimpleQueue[Got] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [command.path, "-b", asked.address, *given, "-u", "-f", "%t %p %o %s\n", "-G", asked.group, *topics],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **command.environment},
        )
        for work, stream in ((self._read, self._process.stdout), (self._hear, self._process.stderr)):
            threading.Thread(target=work, args=(stream,), daemon=True).start()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            topic, partition, offset, value = line.split()
            self._lines.put(Got(topic, int(partition), int(offset), value.encode()))

    def _hear(self, lines: IO[str]) -> None:
        for line in lines:
            if (said := REBALANCED.match(line)) is not None:
                partitions: list[At] = [(topic, int(number)) for topic, number in PARTITION.findall(said[2])]
                (self.assigned if said[1] == "assigned" else self.revoked)(partitions)

    def poll(self) -> Sequence[Got]:
        time.sleep(POLL_S / 5)
        return [self._lines.get() for _ in range(self._lines.qsize())]

    def commit(self, offsets: dict[At, int]) -> Iterable[At]:
        """kcat commits on its own, and does not say when."""
        return ()

    def close(self) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait()
        self._take(self.poll())

"""Apache Kafka as a peer: one node in KRaft mode with the settings and the JVM options it is shipped with.

    with ApacheKafka(settings={"log.flush.interval.messages": "1"}) as kafka:
        ... kafka.address ...

It logs at INFO, as it does out of the box. The data directory is formatted before the start is timed.
"""

from __future__ import annotations

import base64
import os
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.peers.artifacts import KAFKA_LOCK, fetch, java, read_lock
from benchmarks.peers.process import HOST, ServerError, ServerProcess, free_port

# What bin/kafka-server-start.sh and bin/kafka-run-class.sh of the distribution give to `java`.
JVM_OPTIONS = (
    "-Xmx1G",
    "-Xms1G",
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
    "-Djava.awt.headless=true",
)
LOGGING = """rootLogger.level = INFO
rootLogger.appenderRef.console.ref = console
appender.console.name = console
appender.console.type = Console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = [%d] %p %m (%c)%n
"""


def kafka_version() -> str:
    """Return the version that the lock pins."""
    return next(artifact.version for artifact in read_lock(KAFKA_LOCK) if artifact.name == "kafka-clients")


class ApacheKafka(ServerProcess):
    """One Apache Kafka node, broker and controller in one process."""

    def __init__(
        self,
        *,
        port: int | None = None,
        directory: Path | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__("apache-kafka", port=port, directory=directory)
        self._controller_port = free_port()
        self._settings = dict(settings or {})
        self._class_path = os.pathsep.join(map(str, fetch(KAFKA_LOCK)))

    @property
    def version(self) -> str:
        return f"Apache Kafka {kafka_version()}"

    def command(self) -> Sequence[str]:
        """Write the settings, format the data directory on the first start, and return the command."""
        properties = self.directory / "server.properties"
        first = not properties.exists()
        properties.write_text("".join(f"{name}={value}\n" for name, value in self._all_settings().items()))
        logging = self.directory / "log4j2.properties"
        logging.write_text(LOGGING)
        options = [java(), "-cp", self._class_path, f"-Dlog4j2.configurationFile={logging}"]
        if first:
            cluster_id = base64.urlsafe_b64encode(uuid.UUID(int=uuid.uuid4().int >> 1).bytes).decode().rstrip("=")
            format_it = ["kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(properties)]
            done = subprocess.run([*options, *format_it], capture_output=True, text=True)
            if done.returncode:
                raise ServerError(f"Apache Kafka's data directory was not formatted:\n{done.stdout}{done.stderr}")
        return [*options, *JVM_OPTIONS, "kafka.Kafka", str(properties)]

    def _all_settings(self) -> dict[str, str]:
        """Return what the distribution's config/server.properties sets, on this node's ports, and then the caller's."""
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{HOST}:{self._controller_port}",
            "listeners": f"PLAINTEXT://{HOST}:{self.port},CONTROLLER://{HOST}:{self._controller_port}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": str(self.directory / "data"),
            "num.network.threads": "3",
            "num.io.threads": "8",
            "num.partitions": "1",
            "offsets.topic.replication.factor": "1",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            **self._settings,
        }

"""The broker: puts the parts together, starts them in order, stops them in the reverse order.

Start: lock the data directory, open the metadata store, begin the controller's term, which opens every log and gives
its role, then listen. A stop answers the requests in progress, syncs and closes the logs, and leaves a marker, so that
the next start checks nothing. Without the marker every log is checked from its recovery point on.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from base64 import urlsafe_b64encode
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from anabranch.base.errors import AnabranchError
from anabranch.machines.cuts import lineage_of
from anabranch.machines.held_memory import FetchMemory
from anabranch.machines.partition.sharing import Stretch, stretch_of
from anabranch.runtime.chance import Chance
from anabranch.runtime.clock import Clock
from anabranch.runtime.descriptors import Shares, raise_limit, share
from anabranch.runtime.disk import Disk
from anabranch.runtime.events import EventLogger
from anabranch.runtime.loop_steps import LoopSteps
from anabranch.runtime.metrics import Looked, Metrics, MetricsServer, Sample
from anabranch.runtime.net.acceptor import ConnectionNumbers
from anabranch.server.cluster.commands import Commands
from anabranch.server.cluster.controller import Controller
from anabranch.server.cluster.peers import LocalPeers
from anabranch.server.cluster.repair import check_metadata, check_metadata_file
from anabranch.server.cluster.view import ClusterView
from anabranch.server.context import BrokerContext
from anabranch.server.coordinators.assignor_plug_ins import check_assignors
from anabranch.server.coordinators.group_metrics import describe as describe_groups
from anabranch.server.coordinators.groups import Groups, group_configs
from anabranch.server.coordinators.markers import Markers
from anabranch.server.coordinators.producer_ids import ProducerIds
from anabranch.server.coordinators.progress import Memberships
from anabranch.server.coordinators.shard_set import ShardServices
from anabranch.server.coordinators.transactions import Transactions
from anabranch.server.network.listener import Listener
from anabranch.server.partitions.checks import BatchChecks
from anabranch.server.partitions.compaction import Compaction, TopicShape
from anabranch.server.partitions.cutting import CutsNow, cuts_of
from anabranch.server.partitions.fetch_sessions import FetchSessions
from anabranch.server.partitions.fetching import Fetches
from anabranch.server.partitions.filtering import Filters
from anabranch.server.partitions.load import LoadSampling
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.replicas import Replicas
from anabranch.server.partitions.scrubbing import Scrubbing
from anabranch.server.partitions.slices import SWEEP_INTERVAL_MS, SliceBooks
from anabranch.server.partitions.topic_settings import SharedSettings, TopicSettings
from anabranch.server.settings import DEFAULT_METRICS_LISTENER, Address, Settings, described, explicit
from anabranch.storage.directory import METADATA_COPY_FILE, METADATA_FILE, DataDirectory, Identity
from anabranch.storage.log.open_files import OpenFiles
from anabranch.storage.metadata.embedded import EmbeddedMetadataStore

events = EventLogger("broker")
NEVER_MS = 1 << 62
FIRST_SCRUB_MS = 60_000
CLEARED_APART_MIN = 10_000
"""Entries of a dict that are freed in a thread: a millisecond."""
SETTING_READ_AGAIN_MS = 1_000
"""How long background work does not notice that its interval was changed."""


OF_ANOTHER_KIND = (errno.EISDIR, errno.ENOTDIR, errno.EINVAL)
"""What a directory in place of a file is answered with, a file in place of a directory, and a pipe or a device."""


class StartError(AnabranchError):
    """The broker cannot start; the message gives the reason and the remedy."""


class Broker:
    """One broker. `start` it, `stop` it, once."""

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Clock | None = None,
        disk: Disk | None = None,
        chance: Chance | None = None,
    ) -> None:
        self.settings = settings
        self._clock = clock or Clock()
        self._disk = disk or Disk()
        self._chance = chance or Chance()
        self._upkeep: list[asyncio.Task[None]] = []
        self._closing = contextlib.AsyncExitStack()
        self.address = settings.advertised_listeners or settings.listeners
        self.metrics_port: int | None = None
        self.context: BrokerContext
        self.loop_steps: LoopSteps
        """The steps of the loop since the broker's start."""
        self._descriptors: Shares
        self._listener: Listener
        self._metrics_server: MetricsServer | None = None

    async def start(self) -> None:
        """Start, and return when ready to serve. Raises `AnabranchError` with the reason if the broker cannot start."""
        try:
            await self._start()
        except OSError as error:
            if error.filename is None or error.errno not in OF_ANOTHER_KIND:
                raise
            raise StartError(
                f"{error.filename2 or error.filename} is of another kind than the broker needs ({error.strerror}). "
                "Move it out of the data directory, and start the broker again: it makes what is missing."
            ) from error

    async def _start(self) -> None:
        settings = self.settings
        check_assignors(settings)
        self._descriptors = _share_descriptors(settings)
        directory = self._directory = DataDirectory(settings.log_dirs.absolute(), self._disk)
        self._closing.callback(directory.release)
        new_id = urlsafe_b64encode(self._chance.uuid().bytes).decode().rstrip("=")
        identity = directory.identity(Identity(new_id, settings.node_id))
        clean = directory.stopped_cleanly
        check_metadata_file(directory)
        store = await EmbeddedMetadataStore.open(directory.path / METADATA_FILE)
        self._closing.push_async_callback(store.close)
        self._store = store
        await check_metadata(directory, store)
        self._assemble(directory, store, identity.cluster_id)
        for kept in (self.context.fetches.filters, self.context.slices):
            self.context.replicas.removed.watch(kept.forget)
        context, controller = self.context, self._controller
        port = self._listen()
        self.address = context.address = Address(self.address.host, self.address.port or port)
        await context.producer_ids.load()
        # A mere crash of the process loses nothing that readers saw.
        lost = not clean and directory.machine_restarted
        directory.began()
        await controller.start(
            settings.node_id, settings.broker_rack or None, (f"PLAINTEXT://{self.address}",), unclean=lost
        )
        directory.recovered()
        directory.begin_term(controller.state.controller_epoch)
        for topic in context.view.topics():
            if len(topic.layouts) > 1:  # The cuts of its logs are made before anyone waits for them.
                await self._peers.held_layouts(topic.name)
        await self._serve_metrics()
        self._listener.accept()
        for coordinators in context.coordinators.values():
            coordinators.start()
        self._upkeep = [
            asyncio.create_task(
                self._every(
                    settings.log_retention_check_interval_ms,
                    context.replicas.room.keep_reserve,
                    partial(context.replicas.maintain, settings.producer_id_expiration_ms),
                    controller.inspect_all_retiring,
                    controller.inspect_all_layouts,
                )
            ),
            asyncio.create_task(
                self._every(partial(context.view.setting, "log.cleaner.backoff.ms"), self._compaction.run)
            ),
            asyncio.create_task(self._every(SWEEP_INTERVAL_MS, context.slices.sweep)),
            asyncio.create_task(self._every(self._scrub_interval_ms, self._scrubbing.run)),
            asyncio.create_task(self._every(context.loads.pause_ms, context.loads.run)),
            asyncio.create_task(
                self._every(settings.log_flush_offset_checkpoint_interval_ms, context.replicas.save_checkpoints)
            ),
            asyncio.create_task(
                self._every(
                    settings.log_flush_offset_checkpoint_interval_ms,
                    partial(store.copy_to, directory.path / METADATA_COPY_FILE),
                )
            ),
            asyncio.create_task(self._every(settings.reaper_interval_ms, controller.inspect_all_retiring)),
            asyncio.create_task(context.checks.load()),
            asyncio.create_task(context.replicas.removal.clear()),
        ]
        await context.replicas.room.keep_reserve()
        if not clean and len(context.replicas):
            events.info("logs checked after a stop that was not clean", partitions=len(context.replicas))

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return self._listener.connections

    @property
    def partitions(self) -> int:
        """How many partitions live here."""
        return len(self.context.replicas)

    def _assemble(self, directory: DataDirectory, store: EmbeddedMetadataStore, cluster_id: str) -> None:
        """Make the parts, each of those that were made before it."""
        settings, clock, chance = self.settings, self._clock, self._chance
        metrics = Metrics()
        loop = asyncio.get_running_loop()
        self.loop_steps = LoopSteps(metrics)
        self._closing.enter_context(self.loop_steps.installed(loop))
        static = explicit(settings)
        view = ClusterView(settings.node_id, static)
        replicas = Replicas(
            directory,
            disk=self._disk,
            clock=clock,
            metrics=metrics,
            settings_of=partial(_settings_of, view, SharedSettings(settings.durability)),
            files=OpenFiles(self._descriptors.files),
            producers_size_max=settings.producer_state_max_bytes,
            disk_free_min=settings.log_dirs_free_bytes_min,
        )
        checks = BatchChecks()
        loads = LoadSampling(replicas, lambda: checks.scatter, partial(_stretch_of, view), clock, chance, metrics)
        peers = self._peers = LocalPeers(replicas, view, loads.of)
        controller = self._controller = Controller(store, peers, clock)
        commands = Commands(
            controller,
            view,
            default_partition_count=settings.num_partitions,
            deletes_topics=settings.delete_topic_enable,
            per_broker_max=settings.max_partitions_per_broker,
            broker_settings={item.name: item.value for item in described(settings)},
            group_configs=group_configs(settings),
        )
        connections = ConnectionNumbers()
        services = ShardServices(commands, view, replicas, clock, chance.uuid)
        groups = Groups(settings, services, peers=peers, connections=connections)
        markers = Markers(replicas, clock, groups)
        transactions = Transactions(settings, services, peers=markers)
        memberships = Memberships(groups)
        self.context = BrokerContext(
            settings=settings,
            cluster_id=cluster_id,
            address=self.address,
            clock=clock,
            chance=chance,
            metrics=metrics,
            replicas=replicas,
            checks=checks,
            view=view,
            commands=commands,
            fetches=self._fetches(replicas, view, checks, metrics),
            loads=loads,
            slices=SliceBooks(
                memberships.live,
                clock,
                metrics,
                hold_ms=settings.slice_hold_ms,
                size_max=settings.slices_size_max,
            ),
            memberships=memberships,
            producer_ids=ProducerIds(store),
            groups=groups,
            transactions=transactions,
            markers=markers,
            coordinators={0: groups, 1: transactions},
        )
        self._compaction = Compaction(
            replicas, partial(_shape_of, view, replicas), metrics, emptied=commands.inspect_retiring, clock=clock
        )
        self._scrubbing = Scrubbing(
            replicas, metrics, chance, rate=partial(view.setting, "log.scrub.max.bytes.per.second")
        )
        self._describe_in_metrics()
        describe_groups(groups, metrics)
        most = self._descriptors.connections
        self._listener = Listener(self.context, loop, connections, self.loop_steps, connections_max=most)

    def _fetches(self, replicas: Replicas, view: ClusterView, checks: BatchChecks, metrics: Metrics) -> Fetches:
        settings = self.settings
        filters = Filters(
            lambda: checks.scatter,
            partial(_stretch_of, view),
            self._clock,
            metrics,
            work_size_max=settings.filtering_size_max,
            kept_size_max=settings.key_range_cache_size_max,
        )
        sessions = FetchSessions(
            settings.fetch_sessions_max, self._chance.below, settings.fetch_sessions_size_max, _clear
        )
        memory = FetchMemory(settings.queued_max_fetch_bytes)
        return Fetches(replicas, sessions, view.name_of, filters, memory, size_max=settings.fetch_max_bytes)

    def _listen(self) -> int:
        address = self.settings.listeners
        try:
            return self._listener.listen()
        except OSError as error:
            raise StartError(
                f"The broker cannot listen on {address}: {error.strerror or error}. Stop what listens there, or set "
                "listeners to another address."
            ) from error

    async def _serve_metrics(self) -> None:
        address = self.settings.metrics_listener
        if address is None:
            return
        server = MetricsServer(self.context.metrics)
        try:
            await server.start(address.host, address.port)
        except OSError as error:
            reason = error.strerror or str(error)
            if address is DEFAULT_METRICS_LISTENER:  # Perhaps of another broker on this host: no reason not to serve.
                events.warning("metrics not served", listener=address, reason=reason)
                return
            raise StartError(
                f"Metrics cannot be served on {address}: {reason}. Set metrics.listener to another address, or to "
                "nothing to do without."
            ) from error
        self._metrics_server, self.metrics_port = server, server.port

    async def stop(self) -> bool:
        """Stop cleanly; whether everything is on disk."""
        for task in self._upkeep:
            task.cancel()
        self._scrubbing.stop()
        self.context.replicas.removal.stop()
        self.context.stop_waiting()
        self._controller.refuse_commands()
        await self._listener.close(self.settings.controlled_shutdown_timeout_ms / 1000)
        if self._metrics_server is not None:
            await self._metrics_server.stop()
        self.context.checks.close()
        self.context.fetches.filters.close()
        self.context.loads.close()
        await self._controller.stop()
        sound = await self.context.replicas.close()
        try:  # So that the next start knows an older file in the place of the metadata.
            await self._store.copy_to(self._directory.path / METADATA_COPY_FILE)
        except (OSError, AnabranchError) as error:
            events.warning("metadata not copied", reason=error)
        if sound:
            try:
                self._directory.stopped()
            except OSError as error:
                events.error("clean stop not noted", reason=error)
                sound = False
        await self._closing.aclose()
        return sound

    async def abandon(self) -> None:
        """Release the data directory after a failed start."""
        await self._closing.aclose()

    def _scrub_interval_ms(self) -> int:
        """The time to the next pass; the first one comes soon after the start."""
        interval_ms = self.context.view.setting("log.scrub.interval.ms")
        if interval_ms < 0:
            return NEVER_MS
        passes = self.context.metrics.counter("anabranch_scrub_passes_total", "Passes over all logs.").value
        return interval_ms if passes else min(interval_ms, FIRST_SCRUB_MS)

    # -- upkeep ------------------------------------------------------------------------------------------------------

    async def _every(self, interval_ms: int | Callable[[], int], *works: Callable[[], Awaitable[object]]) -> None:
        """Do works one after the other, again and again; one that fails ends neither the others nor the next time.

        An interval that is called for may change while it lasts.
        """
        while True:
            if isinstance(interval_ms, int):
                await asyncio.sleep(interval_ms / 1000)
            else:
                began = self._clock.monotonic_ms()
                while (left_ms := began + interval_ms() - self._clock.monotonic_ms()) > 0:
                    await asyncio.sleep(min(left_ms, SETTING_READ_AGAIN_MS) / 1000)
            for work in works:
                name = getattr(getattr(work, "func", work), "__qualname__", "?")
                try:
                    await work()
                except OSError as error:
                    self._count_failed(name)
                    events.warning("upkeep failed", work=name, reason=error)
                except Exception as error:  # A defect: without upkeep the logs would grow until the next start.
                    self._count_failed(name)
                    events.error("upkeep failed", work=name, exception=error)

    def _count_failed(self, work: str) -> None:
        name, doc = "anabranch_upkeep_works_failed_total", "Rounds of background work that failed as a whole."
        self.context.metrics.counter(name, doc, work=work).add()

    # -- metrics -----------------------------------------------------------------------------------------------------

    def _describe_in_metrics(self) -> None:
        context = self.context
        gauge, gauges = context.metrics.gauge, context.metrics.gauges
        gauge("kafka_server_replicamanager_partitioncount", "Partitions.", lambda: len(context.replicas))
        context.metrics.total(
            "kafka_server_replicamanager_offlinereplicacount",
            "Partitions whose log is damaged.",
            lambda: (partition.offline_reason is not None for partition in context.replicas),
        )
        context.checks.describe_in(context.metrics)
        gauge("kafka_controller_kafkacontroller_globaltopiccount", "Topics.", lambda: context.view.topic_count)
        gauge(
            "anabranch_controller_resizing_topics",
            "Topics that are being resized.",
            lambda: context.view.resizing_count,
        )
        context.metrics.total(
            "anabranch_retiring_partitions",
            "Partitions that take no more appends and are still read.",
            lambda: (partition.retiring for partition in context.replicas),
        )
        context.fetches.describe_in(context.metrics)
        gauge(
            "kafka_server_replicamanager_producerstate_bytes",
            "Memory for what logs remember of producers, at the most.",
            lambda: context.replicas.producers.size,
        )
        context.metrics.total(
            "anabranch_aborted_transactions",
            "Aborted transactions that partitions remember, 32 bytes each.",
            lambda: (len(partition.table.aborted) for partition in context.replicas),
        )
        gauge(
            "anabranch_configured_groups",
            "Groups that have configs of their own.",
            lambda: context.view.configured_group_count,
        )
        gauge(
            "kafka_server_transaction_coordinator_metrics_metadata_bytes",
            "Memory for transactional ids and the partitions that their transactions hold.",
            lambda: context.transactions.size(),
        )
        gauge(
            "anabranch_transactions_completing",
            "Transactions that are decided and wait for their markers.",
            lambda: context.transactions.deliveries,
        )
        files = context.replicas.files
        gauge("anabranch_log_open_files", "Files of logs that are open.", lambda: len(files))
        gauge("anabranch_log_open_files_max", "Files of logs that may be open.", lambda: files.most)
        gauge("anabranch_log_files_closed", "Files closed to open others, so far.", lambda: files.closed)
        gauge("anabranch_log_files_refused", "Files not opened for want of room, so far.", lambda: files.refused)
        controller = self._controller
        gauge(
            "anabranch_topic_inspections_failed",
            "Topics that searches for empty partitions and layouts have left out, so far.",
            lambda: controller.inspections_failed,
        )
        gauge("anabranch_log_syncs", "Group commits so far.", lambda: context.replicas.commits.syncs)

        def held_up() -> Iterator[Sample]:
            for topic, it, waiting_ms in self._controller.waits.all():
                where = {"partition": str(it.wait.partition), "broker": str(it.wait.broker_id)}
                yield {"topic": topic, **where}, waiting_ms / 1000

        name = "anabranch_controller_resize_waiting_seconds"
        gauges(name, "How long a partition has held up the resize of its topic.", held_up)

        def per_partition(read: str) -> Iterator[Sample | Looked]:
            for it in context.replicas:
                if it.offline_reason is None and it.log.end:
                    yield {"topic": it.name.topic, "partition": str(it.name.partition)}, float(getattr(it.log, read))
                else:  # Partitions without records say nothing.
                    yield 1

        gauges("kafka_log_log_size_bytes", "Bytes of a partition's log.", lambda: per_partition("size"))
        gauges("kafka_log_log_logstartoffset", "Where a log starts.", lambda: per_partition("log_start"))
        gauges("kafka_log_log_logendoffset", "Where a log ends.", lambda: per_partition("end"))


def _clear(held: dict[Any, Any]) -> None:
    """Free what a dict holds, in a thread if it is much."""
    if len(held) < CLEARED_APART_MIN:
        held.clear()
    else:
        asyncio.get_running_loop().run_in_executor(None, held.clear)


def _share_descriptors(settings: Settings) -> Shares:
    """Share the process's descriptors between connections and files; say so where these are fewer than asked for."""
    limit = raise_limit()
    shares = share(limit, connections=settings.max_connections, files=settings.max_open_files)
    if shares != (settings.max_connections, settings.max_open_files):
        text = "fewer connections or open files than set: the limit of descriptors (ulimit -n) is lower"
        events.info(text, limit=limit, connections=shares.connections, open_files=shares.files)
    return shares


def _settings_of(view: ClusterView, settings: SharedSettings, topic: str) -> TopicSettings:
    """Return the settings of a topic from its current configs."""
    return settings.of(view.configs(topic), view.broker_settings)


def _stretch_of(view: ClusterView, partition: Partition, offset: int) -> Stretch | None:
    """Return the layout that ruled at an offset; None while a resize runs, or the cuts of the log are not known."""
    topic, role = view.topic(partition.name.topic), partition.leadership
    if topic is None or role is None or role.layout != topic.topic.newest:
        return None
    cuts = cuts_of(partition, topic.topic)
    return None if cuts is None else stretch_of(topic.topic, partition.name.partition, cuts, offset)


def _shape_of(view: ClusterView, replicas: Replicas, name: str) -> TopicShape | None:
    """Return a topic's lineage and partitions; None if it does not exist. Its cuts are made when they are asked for."""
    found = view.topic(name)
    if found is None:
        return None
    shape = found.derived.get(TopicShape)
    if not isinstance(shape, TopicShape):
        topic = found.topic
        cuts = CutsNow(topic, partial(replicas.get, name))
        lineage = lineage_of(topic.initial_partition_count, found.layouts, cuts, {})
        shape = found.derived[TopicShape] = TopicShape(lineage, topic.partitions.keys())
    return shape

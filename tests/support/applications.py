"""Groups of applications in processes of their own, and the producers that feed them: what tests see from outside."""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
import threading
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from anabranch.client import AnabranchError, Producer, TopicPartition, sync
from tests.support.application_edge import ApplicationEdge, Handed, OrderError, Partition, Stream
from tests.support.broker import BrokerProcess
from tests.support.group_story import GroupStory
from tests.support.worker_process import WorkerProcess

_names = itertools.count()
NS = 1_000_000_000
LATE_NS = 2 * NS
"""How long after a failure its group is watched for what led to it: records of the coordinator come late."""
TOLD_S = 15.0
"""After which time a process of applications is taken for stuck; one may ask for a group's offsets for 10 s."""
CLOSED_MS_MIN = 20
CLOSED_S = 1.0
"""How long a gate is watched that must stay closed: positions travel between members in a tenth of it."""
QUICK = {
    "group.consumer.session.timeout.ms": 10_000,
    "group.consumer.min.session.timeout.ms": 1_000,
    "group.consumer.heartbeat.interval.ms": 200,
    "group.consumer.min.heartbeat.interval.ms": 100,
    "group.min.session.timeout.ms": 1_000,
    "group.initial.rebalance.delay.ms": 0,
}
"""Settings of a broker whose groups notice everything soon."""


class Worker(WorkerProcess):
    """A process that runs applications of one library."""

    def __init__(self, library: str, address: str) -> None:
        self._listeners: dict[str, Callable[[dict[str, Any]], None]] = {}
        self._ready = threading.Event()
        self._told_ns = 0
        super().__init__([sys.executable, "-m", "tests.support.application_worker", library, address])

    @property
    def told_ns(self) -> float:
        """Up to which time all that it has to say was taken; without end if it says nothing any more."""
        return self._told_ns if self.alive else math.inf

    def said(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "ready":
                self._ready.set()
            case "mark":
                self._told_ns = event["at"]
            case _:
                self._listeners[event["of"]](event)

    def tell(self, name: str, do: str, **more: object) -> None:
        """Give an application a command."""
        assert self._ready.wait(60), "the applications' process does not start"
        self.say({"of": name, "do": do, **more})

    def listen(self, name: str, listener: Callable[[dict[str, Any]], None]) -> None:
        """Have an application's events told."""
        self._listeners[name] = listener


Workers = dict[tuple[str, str], Worker]
"""Processes of applications, by library and name."""


class Member:
    """One application, as the test sees it."""

    def __init__(self, name: str, library: str, worker: Worker, group: Group) -> None:
        self.name = name
        self.library = library
        self.worker = worker
        self.group = group
        self.owned: set[Partition] = set()
        self.assignments = 0
        """How often it was given partitions."""
        self.handed = 0
        self.is_leaving = False
        self.is_gone = False

    def leave(self) -> None:
        """Have it close its consumer, which takes a while; its process knows no application of that name any more."""
        if not self.is_leaving:
            self.is_leaving = True
            self.worker.tell(self.name, "leave")

    def stand(self, seconds: float) -> None:
        """Have it poll nothing for a while, unless it leaves."""
        if not self.is_leaving:
            self.worker.tell(self.name, "stand", seconds=seconds)

    def commit(self, offsets: dict[int, int] | None = None) -> None:
        """Have it commit these offsets by partition, by default all that it was handed."""
        topic = self.group.stage.topic
        said = None if offsets is None else [(topic, number, offset) for number, offset in offsets.items()]
        if not self.is_leaving:
            self.worker.tell(self.name, "commit", offsets=said)

    def commit_on(self) -> None:
        """Have it commit all that it was handed, and from now on after each poll."""
        if not self.is_leaving:
            self.worker.tell(self.name, "commit each")

    def kill(self) -> None:
        """Kill its process, with all applications in it."""
        self.worker.kill()
        self.is_gone = True
        self.group.forget(self)


class Group:
    """The applications of one group, and their edge."""

    def __init__(self, stage: Stage, name: str, library: str, plan: dict[str, Any]) -> None:
        self.stage = stage
        self.name = name
        self.library = library
        self.plan = plan
        late = plan.get("reset", "earliest") == "latest"
        patience = plan.get("poll_interval_ms") if plan.get("commit") == "never" or plan.get("patient") else None
        self.plan.pop("patient", None)
        self._without_order: Collection[str] = self.plan.pop("without_order", ())
        """Libraries of whose members no order is promised."""
        load = stage.load
        self.edge = ApplicationEdge(
            deleted=lambda partition, offset: stage.is_deleted(partition, offset, name),
            place_of=load.place_of,
            begins_late=late,
            patience_ms=patience,
            resizes=stage.resizes,
            keeps_order=self._keeps_order,
        )
        self.members: list[Member] = []
        self.since: dict[Stream, int] = {}
        """For a group that reads from the end: the numbers from which on everything must be read."""
        self.closed_ms: list[float] = []
        """For how long gates were closed for certain: from the append of a record to the commit of the one before."""
        self.failures: list[str] = []
        self.story = GroupStory(stage.address, name, stage.topic)
        self.handed_from: Counter[int] = Counter()
        """By partition, how many records were handed out, those that came again included."""
        self.committed: dict[int, int] = {}
        """The committed offset of each partition."""
        self._commit_times: dict[Partition, list[tuple[int, int]]] = defaultdict(list)
        self._committing: dict[str, int] = {}
        """By member, when it began its newest commit, in ns."""
        self._lives: set[str] = {"1"}
        self._events: list[tuple[int, int, dict[str, Any]]] = []
        self._arrivals = itertools.count()
        self._lock = threading.Lock()

    def _keeps_order(self, member: str) -> bool:
        return not any(each.name == member and each.library in self._without_order for each in self.members)

    # -- members -------------------------------------------------------------------------------------------------------

    def join(self, *, library: str = "", process: str = "", **changed: Any) -> Member:
        """Start one more application, by default of the group's library; those with the same `process` share one."""
        library = library or self.library
        member = Member(f"{self.name}.{next(_names)}", library, self.stage.worker(library, process), self)
        member.worker.listen(member.name, self._arrived)
        self.members.append(member)
        topic = self.stage.topic
        member.worker.tell(member.name, "open", group=self.name, topic=topic, **{**self.plan, **changed})
        return member

    @property
    def present(self) -> list[Member]:
        return [member for member in self.members if not member.is_gone]

    @property
    def staying(self) -> list[Member]:
        """Those of `present` that were not told to leave."""
        return [member for member in self.present if not member.is_leaving]

    def forget(self, member: Member) -> None:
        """Owned nothing from now on."""
        with self._lock:
            member.owned.clear()
            now = time.monotonic_ns()
            self.story.note(now, member.name, "is killed")
            self._events.append((now, next(self._arrivals), {"at": now, "of": member.name, "event": "killed"}))

    def owners(self, number: int) -> list[Member]:
        """The members that own a partition."""
        return [member for member in self.present if (self.stage.topic, number) in member.owned]

    def owner(self, number: int) -> Member:
        """The only owner of a partition, once there is one."""
        self.stage.until_owned(self, [number])
        return self.owners(number)[0]

    # -- events --------------------------------------------------------------------------------------------------------

    def _arrived(self, event: dict[str, Any]) -> None:
        member = next(each for each in self.members if each.name == event["of"])
        if event["event"] not in ("records", "observed"):
            numbers = [number for _, number, *_ in event.get("partitions") or event.get("offsets") or ()]
            what = f"{event['event']} ({event['why']})" if "why" in event else event["event"]
            self.story.note(event["at"], member.name, what, numbers)
        with self._lock:
            self._events.append((event["at"], next(self._arrivals), event))
            match event["event"]:
                case "assigned":
                    member.owned |= {(topic, number) for topic, number in event["partitions"]}
                    member.assignments += 1
                case "revoked":
                    member.owned -= {(topic, number) for topic, number in event["partitions"]}
                case "records":
                    member.handed += len(event["records"])
                    self.handed_from.update(number for (_, number), *_ in event["records"])
                case "committed":
                    self.committed.update((number, end) for _, number, end in event["offsets"])
                case "left":
                    member.is_gone = True
                case "failed":
                    member.is_gone = True
                    self.failures.append(event["why"])

    def check(self, until_ns: int | None = None) -> None:
        """Hand the edge what happened before a time, by default all by now; in the order of its time.

        Only what happened before the time up to which every process has told all is handed on; all by now is waited
        for. OrderError, with a note of what became of the members and the partition concerned.
        """
        workers = {member.worker for member in self.members}
        if until_ns is None:
            until_ns, deadline = time.monotonic_ns(), time.monotonic() + TOLD_S
            while any(each.told_ns < until_ns for each in workers):
                assert time.monotonic() < deadline, f"a process of applications says nothing for {TOLD_S} s"
                time.sleep(0.01)
        until_ns = min([until_ns, *(each.told_ns for each in workers)])
        with self._lock:
            self._events.sort()
            first = bisect_right(self._events, until_ns, key=lambda item: item[0])
            events, self._events = self._events[:first], self._events[first:]
        for at, _, event in events:
            try:
                self._take(event, at // 1_000_000)
            except OrderError as error:
                numbers = () if error.partition is None else (error.partition[1],)
                error.add_note(self.story.before(at + LATE_NS, numbers=numbers, members=error.members))
                raise

    def _take(self, event: dict[str, Any], now_ms: int) -> None:
        edge, member = self.edge, event["of"]
        offsets = {(topic, number): end for topic, number, end in event.get("offsets", ())}
        match event["event"]:
            case "assigned":
                places = [(f"{topic}~{life}", number) for topic, number in event["partitions"] for life in self._lives]
                edge.assigned(member, places, now_ms)
            case "revoked":
                places = [(f"{topic}~{life}", number) for topic, number in event["partitions"] for life in self._lives]
                edge.revoked(member, places)
            case "left" | "killed":
                edge.gone(member)
            case "committing":
                edge.committing(offsets)
                self._committing[member] = event["at"]
                self._note_commit(offsets, now_ms)
            case "committed":
                edge.committed(offsets, now_ms)
            case "observed":
                edge.committed(offsets, now_ms)
                self._note_commit(offsets, now_ms)
            case "refused" if not self._may_have_counted(self._committing.get(member, 0), event["at"]):
                edge.refused(offsets)
            case "records":
                for (topic, number), offset, producer, key, index in event["records"]:
                    self._lives.add(topic.rpartition("~")[2])
                    self._deliver(member, Handed(producer, key, index, (topic, number), offset), now_ms)

    def _may_have_counted(self, began_ns: int, refused_ns: int) -> bool:
        """Whether a refused commit may count: a client sends it again when its broker has died before it answered.

        What the client tells is the answer to the last time. The first one may be in the log.
        """
        return any(began_ns <= ended and began <= refused_ns for began, ended in self.stage.outages)

    def _note_commit(self, offsets: dict[Partition, int], now_ms: int) -> None:
        """Note when a commit began: no gate that waits for it was open before."""
        for partition, end in offsets.items():
            self._commit_times[partition].append((end, now_ms))

    def _deliver(self, member: str, record: Handed, now_ms: int) -> None:
        moves = self.edge.moves
        last = self.edge.last(record.stream)
        self.edge.delivered(member, record, now_ms)
        if self.edge.moves == moves or last is None:
            return
        committed_ms = next((ms for end, ms in self._commit_times[last.partition] if end > last.offset), None)
        appended_ms = self.stage.load.appended_ms.get((record.stream, record.number))
        if committed_ms is not None and appended_ms is not None and committed_ms - appended_ms >= CLOSED_MS_MIN:
            self.closed_ms.append(committed_ms - appended_ms)

    # -- the end -------------------------------------------------------------------------------------------------------

    def read_all(self, timeout_s: float = 30.0) -> None:
        """Wait until all that was sent was handed out, then check it. OrderError names what is missing."""
        deadline = time.monotonic() + timeout_s
        sent = self.stage.load.sent
        while True:
            self.check(time.monotonic_ns())
            assert not self.failures, self.failures[0]
            if not self.edge.missing(sent, self.since):
                break
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        self.check()
        try:
            self.edge.check_complete(sent, self.since)
        except AssertionError as error:
            members = [(each.name, each.handed, sorted(each.owned)) for each in self.members]
            raise OrderError(f"{self.name} ({self.library}, {self.plan}): {error}; {members}") from None

    def close(self) -> None:
        """Have all applications leave."""
        for member in self.present:
            if member.worker.alive:
                member.leave()


class Load:
    """Producers of ours in a thread: each sends its keys' numbers in turn, and learns of resizes by being refused."""

    def __init__(self, address: str, topic: str) -> None:
        self.topic = topic
        self.address = address
        self.sent: dict[Stream, int] = {}
        self.places: dict[Stream, dict[int, tuple[Partition, int]]] = defaultdict(dict)
        self.appended_ms: dict[tuple[Stream, int], int] = {}
        self.life = 1
        self._stop = threading.Event()
        self._pause = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def live_again(self) -> None:
        """The topic is made again: from now on producers and records have other names."""
        self.life += 1

    def place_of(self, stream: Stream, number: int) -> tuple[Partition, int] | None:
        """Where a record is."""
        return self.places[stream].get(number)

    @property
    def acknowledged(self) -> int:
        """How many records are in the log for certain."""
        return len(self.appended_ms)

    def start(
        self,
        *,
        producers: int = 2,
        keys: int = 4,
        per_second: int = 200,
        linger_ms: int = 2,
        transactional: bool = False,
    ) -> None:
        """Send until `stop`."""
        self._stop.clear()
        self._pause.clear()
        run = self._run(producers, keys, per_second, linger_ms, transactional)
        self._thread = threading.Thread(target=self._guarded, args=(run,), daemon=True)
        self._thread.start()

    def _guarded(self, run: Any) -> None:
        try:
            asyncio.run(run)
        except BaseException as failure:
            self._failure = failure

    def pause(self) -> None:
        """Send nothing more; return when everything sent is acknowledged."""
        self._idle.clear()
        self._pause.set()
        assert self._idle.wait(60) and self._failure is None, self._failure

    def resume(self) -> None:
        """Go on."""
        self._pause.clear()

    def stop(self) -> None:
        """End; everything sent is acknowledged then."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(90)
            assert not self._thread.is_alive(), "the producers do not end"
        if self._failure is not None:
            raise self._failure

    def send(self, count: int, *, keys: int = 4, name: str = "once", transactional: bool = False) -> None:
        """Send so many records of each key from a producer of its own, and wait for them."""

        async def run() -> None:
            async with self._producer(name, 2, transactional) as producer:
                if transactional:
                    await producer.init_transactions()
                await self._send_some(producer, name, keys, count, transactional)

        asyncio.run(run())

    def _producer(self, name: str, linger_ms: int, transactional: bool) -> Producer:
        more: dict[str, Any] = {"transactional_id": f"{self.topic}-{name}"} if transactional else {}
        return Producer(self.address, linger_ms=linger_ms, retry_backoff_ms=30, retry_backoff_max_ms=200, **more)

    async def _send_some(self, producer: Producer, name: str, keys: int, count: int, transactional: bool) -> None:
        outcomes = []
        if transactional:
            await producer.begin_transaction()
        name = f"{name}~{self.life}" if self.life > 1 else name
        for key in [f"{name}-{number}" for number in range(keys) for _ in range(count)]:
            number = self.sent.get((name, key), 0)
            self.sent[name, key] = number + 1
            value = f"{self.life}|{name}|{key}|{number}"
            outcomes.append(((name, key), number, await producer.send(self.topic, value, key=key)))
        for stream, number, outcome in outcomes:
            found = await outcome
            self.places[stream][number] = (f"{self.topic}~{self.life}", found.partition), found.offset
            self.appended_ms[stream, number] = time.monotonic_ns() // 1_000_000
        if transactional:
            await producer.commit_transaction()

    async def _run(self, producers: int, keys: int, per_second: int, linger_ms: int, transactional: bool) -> None:
        pause_s = producers * keys / per_second

        async def produce(name: str) -> None:
            async with self._producer(name, linger_ms, transactional) as producer:
                if transactional:
                    await producer.init_transactions()
                sending: set[asyncio.Task[None]] = set()
                while not self._stop.is_set():
                    if self._pause.is_set():
                        if sending:
                            await asyncio.gather(*sending)
                        waiting.add(name)
                        if len(waiting) == producers:
                            self._idle.set()
                        await asyncio.sleep(0.02)
                        continue
                    waiting.discard(name)
                    task = asyncio.ensure_future(self._send_some(producer, name, keys, 1, transactional))
                    sending.add(task)
                    task.add_done_callback(sending.discard)
                    if transactional or len(sending) > 200:
                        await asyncio.gather(*sending)
                    await asyncio.sleep(pause_s)
                await asyncio.gather(*sending)

        waiting: set[str] = set()
        await asyncio.gather(*(produce(f"p{number}") for number in range(producers)))


class Stage:
    """One topic with its load and its groups, on a broker that the test owns."""

    def __init__(
        self, address: str, topic: str, partitions: int, workers: Workers, configs: Mapping[str, str] | None = None
    ) -> None:
        self.address = address
        self.topic = topic
        self.first_count = self.largest = self.count = partitions
        self.resizes = [(0, partitions)]
        """The partition counts, with the time in ms at which each was asked for."""
        self.load = Load(address, topic)
        self.groups: list[Group] = []
        self._workers = workers
        self.outages: list[tuple[int, int]] = []
        """From when, at the earliest, to when the broker was not there, in ns."""
        self._gone: dict[Partition, list[tuple[Collection[int], dict[str, int]]]] = defaultdict(list)
        """By partition: offsets whose records are gone, and what each group had committed there before."""
        self.admin = sync.Admin(address, default_api_timeout_ms=30_000)
        self.admin.create_topics(topic, partitions=partitions, configs=configs)

    def worker(self, library: str, process: str) -> Worker:
        """The process of that name; made when it is first asked for, or after it was killed."""
        worker = self._workers.get((library, process))
        if worker is None or not worker.alive:
            worker = self._workers[library, process] = Worker(library, self.address)
        return worker

    def group(self, library: str = "ours", *, members: int = 1, process: str = "", **plan: Any) -> Group:
        """Begin a group of so many applications."""
        group = Group(self, f"{self.topic}-g{len(self.groups)}", library, plan)
        self.groups.append(group)
        for _ in range(members):
            group.join(process=process)
        return group

    def resize(self, count: int) -> None:
        """Resize the topic, and wait until it is done; an attempt that a broker's end cuts off is made again."""
        self.largest = max(self.largest, count)
        self.resizes.append((time.monotonic_ns() // 1_000_000, count))

        def resized() -> bool:
            try:
                self.admin.resize(self.topic, count)
            except (AnabranchError, OSError) as error:
                return "already has" in str(error)
            return True

        self.until(resized, f"{self.topic} is not resized to {count}", 60)
        self.count = count

    def make_again(self, partitions: int) -> None:
        """Delete the topic, and make another one of its name."""
        self.admin.delete_topics(self.topic)
        self.load.live_again()

        def made() -> bool:
            try:
                self.admin.create_topics(self.topic, partitions=partitions)
            except AnabranchError:
                return False
            return True

        self.until(made, f"{self.topic} is not made again")
        self.first_count = partitions

    def until_partitions(self, count: int) -> None:
        """Wait until the topic has so many partitions, those that retire among them."""
        self.until(lambda: len(self.admin.topics([self.topic])[self.topic].leaders) == count, f"not {count} partitions")

    def wait_until_positioned(self, group: Group) -> None:
        """Send single records of keys that nobody checks until every partition has handed one out."""
        name = f"probe-{group.name}"

        def positioned() -> bool:
            self.load.send(1, keys=16, name=name)
            time.sleep(0.3)
            group.check(time.monotonic_ns())
            numbers = {number for (_, number), count in group.edge.by_partition.items() if count}
            return len(numbers) == self.largest

        self.until(positioned, f"{group.name} reads nothing")
        self.until(lambda: sum(member.handed for member in group.members) > 0, "nothing")

    def check_that_producers_were_refused(self, broker: BrokerProcess) -> None:
        """Check that producers counted with an earlier layout, and were told so."""
        found = broker.metrics().get(f'anabranch_produce_stalebatches_total{{topic="{self.topic}"}}', 0)
        assert found > 0, "no producer was refused"

    def committed(self, number: int) -> dict[str, int]:
        """What each group has committed of a partition, as its coordinator says; 0 for nothing."""
        tp = TopicPartition(self.topic, number)
        found = {group.name: self.admin.list_group_offsets(group.name) for group in self.groups}
        return {name: offsets[tp].offset if tp in offsets else 0 for name, offsets in found.items()}

    def delete_records(self, number: int, offset: int | None = None) -> int:
        """Delete the records of a partition before an offset, by default all; return where it starts then."""
        tp = (self.topic, number)
        read = self.committed(number)
        start = int(self.admin.delete_records({tp: -1 if offset is None else offset})[tp])
        self._gone[f"{self.topic}~{self.load.life}", number].append((range(start), read))
        return start

    def until_compacted(self, number: int, offsets: Collection[int]) -> None:
        """Wait until the cleaner has removed these records of a partition: from then on nobody can read them."""
        read = self.committed(number)
        self.until(lambda: self._left(number).isdisjoint(offsets), f"{self.topic}-{number} is not compacted", 60)
        self._gone[f"{self.topic}~{self.load.life}", number].append((offsets, read))

    def _left(self, number: int) -> set[int]:
        """Read the offsets of a partition that still have a record."""
        found: set[int] = set()
        with sync.Consumer(self.address, auto_offset_reset="earliest") as consumer:
            consumer.assign([(self.topic, number)])
            (end,) = consumer.end_offsets((self.topic, number)).values()
            while consumer.position(self.topic, number) < end:
                found.update(each.offset for each in consumer.poll(0.1))
        return found

    def is_deleted(self, partition: Partition, offset: int, group: str) -> bool:
        """Whether a record went before a group had committed it: what it had committed, it was handed."""
        return any(offset in gone and offset >= read.get(group, 0) for gone, read in self._gone.get(partition, ()))

    def until(self, holds: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, what
            for group in self.groups:
                assert not group.failures, group.failures[0]
            time.sleep(0.02)

    def keeps(self, holds: Callable[[], object], what: str, seconds: float = CLOSED_S) -> None:
        """Check that something stays so for a while, in which a member without the rule under test breaks it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert holds(), what
            time.sleep(0.02)

    def until_owned(self, group: Group, numbers: Sequence[int]) -> None:
        """Wait until every one of these partitions has one owner in the group."""
        self.until(
            lambda: all(len(group.owners(number)) == 1 for number in numbers),
            f"{group.name} should own {list(numbers)}: {[(m.name, sorted(m.owned)) for m in group.members]}",
        )

    def until_all_owned(self) -> None:
        """Wait until every group has all partitions that there were at first."""
        for group in self.groups:
            self.until_owned(group, range(self.first_count))

    def hold(self) -> None:
        """Have nobody read until `release`: what is sent meanwhile waits behind what was sent before."""
        for member in [member for group in self.groups for member in group.present]:
            member.stand(60)

    def release(self) -> None:
        """Have everybody read on."""
        for member in [member for group in self.groups for member in group.present]:
            member.stand(0)

    def grow(self, *counts: int, records: int = 60) -> None:
        """Resize again and again, with some records before, between and after; nobody reads for a while meanwhile."""
        self._send_more(records)
        for count in counts:
            self.hold()
            self.resize(count)
            self._send_more(records)
            self.release()

    def resize_held(self, *counts: int, before: int, after: int, keys: int = 4) -> None:
        """Resize between records that wait behind those sent before, as nobody reads until all are there."""
        self.hold()
        self.load.send(before, keys=keys)
        for count in counts:
            self.resize(count)
        self.load.send(after, keys=keys)
        self.release()

    def _send_more(self, records: int) -> None:
        least = self.load.acknowledged + records
        self.until(lambda: self.load.acknowledged >= least, "the producers are stuck", 60)

    def finish(self, timeout_s: float = 30.0) -> None:
        """Stop the load, read everything, check every group. OrderError."""
        self.load.stop()
        for group in self.groups:
            group.read_all(timeout_s)

    def check_that_it_tested(self, *groups: Group, closed: bool = True, moved: bool = True) -> None:
        """Check that keys moved to partitions that were not there at first, behind gates closed for a while."""
        for group in groups or self.groups:
            new = sum(count for (_, number), count in group.edge.by_partition.items() if number >= self.first_count)
            assert new > 0, f"{group.name} was handed no record of a new partition"
            assert not moved or group.edge.moves > 0, f"{group.name}: no key moved"
            assert not closed or group.closed_ms, f"{group.name}: no gate was closed for {CLOSED_MS_MIN} ms"

    def close(self) -> None:
        self.load._stop.set()
        for group in self.groups:
            group.close()
        self.admin.close()


@contextmanager
def own_processes() -> Iterator[Workers]:
    """Processes of applications, by library and name, ended with the `with`."""
    made: Workers = {}
    try:
        yield made
    finally:
        for worker in made.values():
            worker.kill()


@contextmanager
def stage(
    address: str, topic: str, partitions: int, workers: Workers, configs: Mapping[str, str] | None = None
) -> Iterator[Stage]:
    """A stage for the time of a `with`."""
    made = Stage(address, topic, partitions, workers, configs)
    try:
        yield made
    finally:
        made.close()

"""The images of the cluster's topics for the group coordinators, made from this broker's view of the cluster.

Half a layout is never shown, as in Metadata. Only the topics that an update names are looked at, some at a time. An
unchanged topic keeps its object, and an image without changed topics is the same image, so that the cost of a metadata
change is proportional to the change. The ends of a log that cannot be opened are unknown, which keeps the gates of its
children closed.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Mapping
from functools import partial
from itertools import islice

from anabranch.machines.controller.configs import TOPIC_CONFIGS, effective
from anabranch.machines.controller.nodes import Topic
from anabranch.machines.groups.image import Image, Life, TopicImage
from anabranch.server.cluster.lineages import lineage_prepared
from anabranch.server.cluster.peers import Peers
from anabranch.server.cluster.view import ClusterUpdate, ClusterView, TopicSnapshot

ORDERED_DELIVERY = TOPIC_CONFIGS["enable.ordered.delivery"]
MADE_APART_MIN = 2_000
"""Topics that were looked at of which an image is made in a thread: 2 ms."""
RANGE_FETCH = TOPIC_CONFIGS["accept.range.fetch"]


class Images:
    """The newest image; asked for after every change."""

    def __init__(self, view: ClusterView, peers: Peers) -> None:
        self._view = view
        self._peers = peers
        self.latest = Image()
        """The image that was made last."""
        self._made_of: dict[str, tuple[Topic, bool, bool]] = {}
        """By topic, the inputs of its part of the image: the topic node, whether delivery is ordered, and whether its
        records may be fetched by ranges of keys."""
        self._left: dict[str, None] = {}
        """Topics that may have changed since the newest image."""
        self._others = view.known()
        """Topics that are looked at after these: all, at first and when the broker's settings have changed."""
        self._incomplete: set[str] = set()
        """Topics with logs whose ends were not known: they are looked at after each update."""
        self._looked_at: dict[str, TopicImage | None] = {}
        """What has changed in those that were looked at."""
        self._making = False
        """Whether a thread makes an image."""
        view.watch(self._on_update)

    def _on_update(self, update: ClusterUpdate) -> None:
        if update.broker_configs:  # Also the defaults of topics without a config of their own.
            self._others = list(self.latest.by_name)
        self._left.update(dict.fromkeys(update.topics))
        self._left.update(dict.fromkeys(update.configs))
        self._left.update(dict.fromkeys(self._incomplete))

    def look(self, count: int) -> bool:
        """Look at some of the topics that may have changed; whether others are left."""
        names = list(islice(self._left, count))
        for name in names:
            del self._left[name]
        while self._others and len(names) < count:
            names.append(self._others.pop())
        for name in names:
            self._look_at(name)
        return bool(self._left or self._others)

    def newest(self) -> Image:
        """The image of the view as it is now, but for changes so many that `make` is for them."""
        self.look(len(self._left) + len(self._others))
        if not self._making and len(self._looked_at) < MADE_APART_MIN:
            looked_at, self._looked_at = self._looked_at, {}
            self.latest = _after(self.latest, looked_at)
        return self.latest

    async def make(self) -> None:
        """Make an image of what has changed in those that were looked at, if that is much: in a thread."""
        if len(self._looked_at) < MADE_APART_MIN or self._making:
            return
        looked_at, self._looked_at = self._looked_at, {}
        self._making = True
        try:
            self.latest = await asyncio.get_running_loop().run_in_executor(None, _spent, self.latest, looked_at)
        except BaseException:
            self._looked_at = looked_at | self._looked_at
            raise
        finally:
            self._making = False

    def _look_at(self, name: str) -> None:
        self._incomplete.discard(name)
        topic = self._view.topic(name)
        if topic is None:
            self._made_of.pop(name, None)
            self._looked_at[name] = None
            return
        configs, settings = self._view.configs(name), self._view.broker_settings
        ordered = effective(ORDERED_DELIVERY, configs, settings).value != "false"
        ranges = effective(RANGE_FETCH, configs, settings).value == "true"
        before = self._made_of.pop(name, None)
        if before is not None and before[0] is topic.topic and before[1:] == (ordered, ranges):
            self._made_of[name] = before
            return
        self._looked_at[name], complete = self._made(topic, ordered=ordered, ranges=ranges)
        if complete:
            self._made_of[name] = topic.topic, ordered, ranges
        else:
            self._incomplete.add(name)

    def _made(self, topic: TopicSnapshot, *, ordered: bool, ranges: bool) -> tuple[TopicImage, bool]:
        """Return a topic's image, and whether the image is complete: the ends of all its logs are known."""
        layouts = topic.layouts
        count = layouts[-1].count
        visible = topic.visible_partitions
        lineage, complete = None, len(visible) >= count
        if ordered and len(layouts) > 1:
            lineage = lineage_prepared(topic, self._peers.cuts)
            complete = complete and not lineage.unknown
        initial = topic.topic.initial_partition_count if len(layouts) > 1 or layouts[0].number else 0
        if initial:
            complete = complete and self._peers.opened(topic.name) >= len(visible)
        image = TopicImage(
            topic_id=topic.topic_id,
            name=topic.name,
            partitions=range(count) if len(visible) >= count else tuple(visible),
            retiring=tuple(visible[bisect_left(visible, count) :]),
            lineage=lineage,
            is_open=partial(self._peers.is_open, topic.name),
            log_start=partial(self._peers.log_start, topic.name),
            log_end=partial(self._peers.log_end, topic.name),
            stable_end=partial(self._peers.stable_end, topic.name),
            loads=partial(self._peers.load, topic.name),
            highest_count=1 + max(count - 1, max(topic.topic.partitions, default=0), *topic.topic.removed),
            accepts_ranges=ranges,
            rewritten=partial(self._peers.rewritten, topic.name),
            initial=initial,
            lives={
                number: Life(node.born, node.start_offset)
                for number in (visible if initial else ())
                if (node := topic.nodes[number]).born or node.start_offset
            },
        )
        return image, complete


def _after(image: Image, looked_at: Mapping[str, TopicImage | None]) -> Image:
    """The image after an earlier one; the same where nothing is different."""
    known = image.by_name
    changed = {name: topic for name, topic in looked_at.items() if known.get(name) is not topic}
    return image.next(changed) if changed else image


def _spent(image: Image, looked_at: dict[str, TopicImage | None]) -> Image:
    """As `_after`; frees what was looked at."""
    after = _after(image, looked_at)
    looked_at.clear()
    return after

"""The images of the cluster's topics for the group coordinators, made from this broker's view of the cluster.

Half a layout is never shown, as in Metadata. An unchanged topic keeps its object, and an image without changed
topics is the same image, so that the cost of a metadata change is proportional to the change. The ends of a log that
cannot be opened are unknown, which keeps the gates of its children closed.
"""

from __future__ import annotations

from functools import partial

from anabranch.machines.controller.configs import TOPIC_CONFIGS, effective
from anabranch.machines.controller.nodes import Topic
from anabranch.machines.cuts import lineage_of
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.lineage import Cuts, Lineage
from anabranch.server.cluster.peers import Peers
from anabranch.server.cluster.view import ClusterView, TopicSnapshot

ORDERED_DELIVERY = TOPIC_CONFIGS["enable.ordered.delivery"]
RANGE_FETCH = TOPIC_CONFIGS["accept.range.fetch"]


class Images:
    """The newest image; asked for after every change."""

    def __init__(self, view: ClusterView, peers: Peers) -> None:
        self._view = view
        self._peers = peers
        self._image = Image()
        self._made_of: dict[str, tuple[Topic, bool, bool]] = {}
        """By topic, the inputs of its part of the image: the topic node, whether delivery is ordered, and whether its
        records may be fetched by ranges of keys."""
        self._version = -1

    def newest(self) -> Image:
        """The image of the view as it is now."""
        view = self._view
        if self._version == view.version:
            return self._image
        known = self._image.by_name
        made_of: dict[str, tuple[Topic, bool, bool]] = {}
        topics: dict[str, TopicImage] = {}
        for topic in view.topics():
            name = topic.name
            configs = view.configs(name)
            ordered = effective(ORDERED_DELIVERY, configs, view.broker_settings).value != "false"
            ranges = effective(RANGE_FETCH, configs, view.broker_settings).value == "true"
            before = self._made_of.get(name)
            if before is not None and before[0] is topic.topic and before[1:] == (ordered, ranges):
                topics[name] = known[name]
                made_of[name] = before
                continue
            topics[name], complete = self._made(topic, ordered=ordered, ranges=ranges)
            if complete:
                made_of[name] = topic.topic, ordered, ranges
        if len(topics) != len(known) or any(known.get(name) is not topic for name, topic in topics.items()):
            self._image = Image(self._image.version + 1, topics)
        self._made_of, self._version = made_of, view.version
        return self._image

    def _made(self, topic: TopicSnapshot, *, ordered: bool, ranges: bool) -> tuple[TopicImage, bool]:
        """Return a topic's image, and whether the image is complete: the ends of all its logs are known."""
        layouts = topic.layouts
        count = layouts[-1].count
        visible = topic.visible_partitions
        lineage, complete = None, len(visible) >= count
        if ordered and len(layouts) > 1:
            lineage = lineage_now(topic, self._peers)
            complete = complete and not lineage.unknown
        image = TopicImage(
            topic_id=topic.topic_id,
            name=topic.name,
            partitions=range(count) if len(visible) >= count else tuple(visible),
            retiring=tuple(number for number in visible if number >= count),
            lineage=lineage,
            log_start=partial(self._peers.log_start, topic.name),
            log_end=partial(self._peers.log_end, topic.name),
            highest_count=1 + max(count - 1, *topic.topic.partitions, *topic.topic.removed),
            accepts_ranges=ranges,
            initial=topic.topic.initial_partition_count if len(layouts) > 1 or layouts[0].number else 0,
        )
        return image, complete


def lineage_now(topic: TopicSnapshot, peers: Peers) -> Lineage:
    """Make the lineage of a topic from its published layouts and the ends of its logs."""
    node = topic.topic
    cuts: dict[int, Cuts] = {}
    unknown: dict[int, int] = {}
    for partition in topic.visible_partitions:
        found = peers.cuts(node, partition)
        if found is None:
            if partition in node.ended:  # Its children wait: a partition whose end is not known is not read.
                unknown[partition] = node.ended[partition][0].layout
        elif found.ends:
            cuts[partition] = found
    return lineage_of(node.initial_partition_count, topic.layouts, cuts, unknown)

"""What the group coordinators see of the cluster's topics, made from the controller's state.

Half a layout is never shown, as in Metadata. A topic that did not change keeps its object, and an image in which no
topic changed is the same image, so that a change of the metadata costs as much as what changed.
"""

from __future__ import annotations

from functools import partial

from anabranch.machines.controller.configs import TOPIC_CONFIGS, effective
from anabranch.machines.controller.nodes import Topic
from anabranch.machines.controller.views import visible_partitions
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.lineage import Lineage
from anabranch.server.cluster.controller import Controller
from anabranch.server.partitions.replicas import Replicas

ORDERED_DELIVERY = TOPIC_CONFIGS["enable.ordered.delivery"]


class Images:
    """The newest image; asked for after every change."""

    def __init__(self, controller: Controller, replicas: Replicas) -> None:
        self._controller = controller
        self._replicas = replicas
        self._image = Image()
        self._made_of: dict[str, tuple[Topic, bool]] = {}
        """By topic, what its part was made of."""
        self._version = -1

    def newest(self) -> Image:
        """The image of the controller's state as it is now."""
        controller = self._controller
        if self._version == controller.version:
            return self._image
        state, known = controller.state, self._image.by_name
        made_of: dict[str, tuple[Topic, bool]] = {}
        topics: dict[str, TopicImage] = {}
        for name, topic in state.topics.items():
            if name in state.deleting:
                continue
            ordered = effective(ORDERED_DELIVERY, state.configs.get(name, {}), {}).value != "false"
            before = self._made_of.get(name)
            if before is not None and before[0] is topic and before[1] is ordered:
                topics[name] = known[name]
                made_of[name] = before
                continue
            topics[name], complete = self._made(topic, ordered=ordered)
            if complete:
                made_of[name] = topic, ordered
        if len(topics) != len(known) or any(known.get(name) is not topic for name, topic in topics.items()):
            self._image = Image(self._image.version + 1, topics)
        self._made_of, self._version = made_of, controller.version
        return self._image

    def _made(self, topic: Topic, *, ordered: bool) -> tuple[TopicImage, bool]:
        """A topic's image, and whether all of it is known: a log that could not be opened yet says nothing."""
        count = topic.published[-1].count
        visible = visible_partitions(self._controller.state, topic)
        lineage, complete = None, len(visible) >= count
        if ordered and len(topic.published) > 1:
            lineage = self._lineage(topic)
            complete = complete and all(
                number in ends
                for layout, ends in zip(topic.published, lineage.ends, strict=False)
                for number in visible
                if number < layout.count
            )
        image = TopicImage(
            topic_id=topic.topic_id,
            name=topic.name,
            partitions=range(count) if len(visible) >= count else tuple(visible),
            retiring=tuple(number for number in visible if number >= count),
            lineage=lineage,
            log_start=partial(self._log_start, topic.name),
        )
        return image, complete

    def _lineage(self, topic: Topic) -> Lineage:
        layouts = topic.published
        ends: list[dict[int, int]] = []
        for layout in layouts[:-1]:
            found: dict[int, int] = {}
            for number, epoch in layout.ended_epochs.items():
                partition = self._replicas.get(topic.name, number)
                if partition is not None and number in topic.partitions:
                    end = partition.log.end_offset_for_epoch(epoch)[1]
                    if end >= 0:
                        found[number] = end
            ends.append(found)
        return Lineage(topic.initial_partition_count, tuple(layout.count for layout in layouts), tuple(ends))

    def _log_start(self, topic: str, number: int) -> int:
        partition = self._replicas.get(topic, number)
        return 0 if partition is None else partition.log.log_start

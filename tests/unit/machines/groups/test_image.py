"""Images that follow each other: what differs between two of them is known without comparing all topics."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from anabranch.machines.groups import image as module
from anabranch.machines.groups.image import Image, TopicImage
from tests.support.groups import topics


def compared(before: Image, after: Image) -> set[str]:
    names = before.by_name.keys() | after.by_name.keys()
    return {name for name in names if before.by_name.get(name) is not after.by_name.get(name)}


@pytest.mark.parametrize("remembered", [5, 1_000])
def test_differences_hold_every_topic_that_differs(monkeypatch: pytest.MonkeyPatch, remembered: int) -> None:
    monkeypatch.setattr(module, "CHANGES_REMEMBERED_MAX", remembered)
    chance = Random(remembered)
    images = [Image()]
    for _ in range(60):
        now = images[-1]
        changes: dict[str, TopicImage | None] = {}
        for name in chance.sample([f"t{number}" for number in range(8)], chance.randrange(1, 4)):
            gone = name in now.by_name and chance.random() < 0.5
            changes[name] = None if gone else topics(**{name: 1}).by_name[name]
        images.append(now.next(changes))
    for _ in range(200):
        first, last = sorted(chance.choices(range(len(images)), k=2))
        before, after = images[first], images[last]
        found = after.differences(before)
        assert found >= compared(before, after)
        touched = [compared(one, other) for one, other in zip(images[first:last], images[first + 1 :], strict=False)]
        assert found <= set().union(*touched)
        assert dict(after.by_id) == {topic.topic_id: topic for topic in after.by_name.values()}


def test_images_that_do_not_follow_each_other_are_compared() -> None:
    same = topics(same=1).by_name["same"]
    before, after = Image(4, {"same": same, "gone": same}), Image(5, {"same": same, "new": same})
    assert after.differences(before) == {"gone", "new"}
    assert after.differences(after) == frozenset()
    assert after.next({"new": None}).differences(before) == {"gone"}


class Counted(tuple[int, ...]):
    """Numbers that count how many of them are looked at."""

    looks = 0

    def __getitem__(self, at: Any) -> Any:
        Counted.looks += 1
        return super().__getitem__(at)

    def __contains__(self, number: object) -> bool:
        raise AssertionError("all are looked at")


def test_a_partition_is_found_among_many_without_a_look_at_all() -> None:
    """A heartbeat asks for each of them: 100,000 retiring partitions took 50 s."""
    live, retiring = Counted(range(0, 20_000, 2)), Counted(range(20_001, 40_000, 2))
    topic = replace(topics(t=1).by_name["t"], partitions=live, retiring=retiring)
    for number in (-1, 0, 1, 9_998, 19_998, 19_999, 20_000, 20_001, 39_999, 40_000):
        Counted.looks = 0
        assert topic.has(number) == (number in set(live) | set(retiring))
        assert Counted.looks < 40

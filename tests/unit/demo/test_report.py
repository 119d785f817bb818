"""The report as a reader has it: well-formed, complete in itself, and without labels on top of each other."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree

import pytest

from anabranch.demo.flights import Result
from anabranch.demo.picture import WIDTH, path, river, ticks
from anabranch.demo.report import page
from anabranch.demo.story import Difference, Followed, Resize, Story, Wait
from tests.unit.demo.test_story import IN_ORDER, OUT_OF_ORDER, story

WRONG = (Difference("N<1>", Result(14, 3, 20.0), Result(14, 2, 25.5)), Difference("N2", Result(5, 1, 0.0), None))
FOLLOWED = Followed("N<1>", [(0, 2), (0, 7), (0, 9), (1, 1), (1, 4)])


def both() -> list[Story]:
    return [story(IN_ORDER, followed=FOLLOWED), story(OUT_OF_ORDER, followed=FOLLOWED, differences=WRONG)]


def test_the_page_says_what_came_out_and_names_what_is_wrong() -> None:
    text = page(both(), 1_234)
    assert "<b>0 of 1,234</b>" in text and "<b>2 of 1,234</b>" in text
    assert "20 records, sent within" in text and "changed: from 1 to 2." in text
    assert "N&lt;1&gt;" in text and "N<1>" not in text
    assert re.search(r"<td>3 <b[^>]*>2</b></td><td>20 <b[^>]*>25.5</b></td>", text)
    assert re.search(r"<td>N2</td><td>5 <b[^>]*>none</b></td>", text)


def test_the_page_needs_neither_network_nor_script() -> None:
    text = page(both(), 2)
    assert set(re.findall(r"[a-z]+://[^\"]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<script|<link|<img|src=|@import|url\((?!#)", text)


def test_red_stripes_and_their_legend_are_there_only_where_records_were_late() -> None:
    ordered, wrong = both()
    assert "url(#late)" not in river(ordered) and "url(#late)" in river(wrong)
    assert "read after later records" not in page([ordered], 2) and "read after later records" in page([wrong], 2)


def test_shapes_say_what_they_are() -> None:
    ordered, wrong = both()
    assert "micro-batch 2: 6 records of partition 1, layout 1, offsets 0 to 6" in river(ordered)
    assert "2.0 s for p0" in river(ordered) and "6 records of partition 1, layout 1, waited for p0" in river(ordered)
    assert "resize from 1 to 2 partitions in 250 ms" in river(ordered)
    assert path(wrong).count("after a record that was sent later") == 2


def changed(told: Story, at_s: tuple[float, ...]) -> Story:
    resizes = tuple(Resize(at, 20.0, 2, 6) for at in at_s)
    waits = (*told.waits, Wait(3, 1, 3.4, 3.5, (0, 1), 9), Wait(4, 1, 0.0, 0.01, (0, 1, 2), 9))
    return replace(told, resizes=resizes, waits=waits)


def boxes(picture: str) -> list[tuple[float, float, float, float, str]]:
    """Return left, top, right, bottom and text of all labels; a character is taken to be 6.3 px wide, or 7 if bold."""
    found = []
    for element in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text"):
        if element.get("transform"):
            continue
        tip = element.find("{http://www.w3.org/2000/svg}title")
        text = (element.text or "") + ((tip.tail or "") if tip is not None else "")
        size = float(element.get("font-size", "11"))
        width = len(text) * (7.0 if element.get("font-weight") == "600" else 6.3) * size / 11
        x, y = float(element.get("x", "0")), float(element.get("y", "0"))
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[element.get("text-anchor", "start")]
        found.append((left, y - 0.8 * size, left + width, y + 0.2 * size, text))
    return found


@pytest.mark.parametrize("at_s", [(), (0.75,), (0.5, 0.7, 0.9), (1.0, 1.0, 1.0), (0.0, 3.5)])
def test_no_label_lies_on_another_or_outside_of_the_picture(at_s: tuple[float, ...]) -> None:
    narrow = story(IN_ORDER, batches=[(101.0, 0.01), (101.01, 0.01), (120.0, 0.5)])
    pictures = [river(changed(told, at_s)) for told in (story(IN_ORDER), narrow)]
    for picture in (*pictures, *(draw(told) for draw in (river, path) for told in both())):
        labels = boxes(picture)
        assert len(labels) > 5
        for left, top, right, bottom, text in labels:
            assert left >= 0 and right <= WIDTH + 1 and top >= 0 and bottom > 0, text
        for one, other in combinations(labels, 2):
            apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
            assert apart, (one, other)


def test_ticks_of_counts_are_whole() -> None:
    assert ticks(3, 10, whole=True) == [0, 1, 2, 3] and ticks(0.5, 3, whole=True) == [0]


@pytest.mark.parametrize(
    ("high", "most", "wanted"),
    [
        (52.4, 12, [0, 5, 50]),
        (9, 12, [0, 1, 9]),
        (336_776, 4, [0, 100_000, 300_000]),
        (0, 4, [0, 0, 0]),
        (0.9, 3, [0, 0.5, 0.5]),
    ],
)
def test_ticks_are_round_and_few(high: float, most: int, wanted: list[float]) -> None:
    found = ticks(high, most)
    assert [found[0], found[min(1, len(found) - 1)], found[-1]] == pytest.approx(wanted) and len(found) <= most + 1

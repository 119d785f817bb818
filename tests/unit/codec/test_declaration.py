"""Messages as values: keyword construction, defaults, equality, and what a declaration must not say."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import pytest

from anabranch.codec import (
    NIL,
    Blob,
    array,
    boolean,
    bytes_,
    decode,
    encode,
    float64,
    int16,
    int32,
    int64,
    message,
    nested,
    schema_of,
    string,
    struct,
    uuid,
)


@struct()
class Leg:
    """A part of a way."""

    distance: int = int32(default=-1)
    stops: Sequence[str] = array(string)


@message(api_key=7777, versions="0-5", flexible="3+")
class Way:
    """Everything a field can be."""

    name: str = string()
    nickname: str | None = string(since=1, nullable="2+", default=None)
    code: int = int16(until=2)
    distance: int = int64(since=2, default=7)
    slope: float = float64(since=4)
    open: bool = boolean(default=True)
    way_id: UUID = uuid(since=3)
    seal: Blob | None = bytes_(nullable=True, default=None)
    legs: Sequence[Leg] | None = array(Leg, nullable="1+")
    first: Leg = nested(Leg)
    last: Leg | None = nested(Leg, since=2, nullable=True)
    weights: Sequence[int] = array(int32, tag=0)
    spare: Leg | None = nested(Leg, tag=10_000)
    remark: str = string(tag=10_001, default="none")


@message(api_key=7778, versions="0-5", flexible="3+")
class Detour(Leg):
    """What a leg has, in the message itself, then more."""

    reason: str = string()


def test_the_fields_of_a_base_come_first_as_fields_of_the_message_itself() -> None:
    detour = Detour(distance=3, reason="flood")
    assert list(schema_of(Detour).fields) == ["distance", "stops", "reason"]
    assert isinstance(detour, Leg) and detour != Leg(distance=3)
    assert detour.stops == []
    written = b"".join(bytes(part) for part in encode(detour, 3))
    assert written == b"\0\0\0\x03" + b"\x01" + b"\x06flood" + b"\0", "one set of tags, at the end"
    assert decode(Detour, written, 3) == detour


def test_every_field_has_its_default() -> None:
    way = Way()
    assert (way.name, way.nickname, way.code, way.distance, way.slope, way.open) == ("", None, 0, 7, 0.0, True)
    assert (way.way_id, way.seal, way.legs, way.last, way.weights, way.spare) == (NIL, None, [], None, [], None)
    assert way.first == Leg(distance=-1, stops=[])
    assert way.remark == "none"


def test_defaults_are_not_shared() -> None:
    one, other = Way(), Way()
    assert one.legs is not other.legs
    assert one.first is not other.first


def test_null_is_kept_where_an_array_may_be_null() -> None:
    assert Way(legs=None).legs is None


def test_construction_is_by_keyword_and_knows_its_fields() -> None:
    assert Way(name="a", legs=[Leg(distance=2)]).legs == [Leg(distance=2)]
    with pytest.raises(TypeError):
        Way("a")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Way(colour="red")  # type: ignore[call-arg]


def test_objects_have_no_other_attributes() -> None:
    with pytest.raises(AttributeError):
        Way().colour = "red"  # type: ignore[attr-defined]


def test_equality_is_by_fields_and_class_and_takes_a_tuple_for_a_list() -> None:
    assert Leg(stops=("a", "b")) == Leg(stops=["a", "b"])
    assert Leg(distance=1) != Leg(distance=2)
    assert Leg() != object()
    assert Leg().__eq__(Way()) is NotImplemented
    with pytest.raises(TypeError):
        hash(Leg())


def test_the_repr_shows_what_is_not_usual() -> None:
    assert repr(Way(name="a", legs=[Leg(distance=2)])) == "Way(name='a', legs=[Leg(distance=2)])"
    assert repr(Leg()) == "Leg()"


def test_a_tag_twice_is_our_fault() -> None:
    with pytest.raises(AssertionError):

        @struct()
        class Twice:
            a: int = int32(tag=1)
            b: int = int32(tag=1)


def test_a_field_without_a_type_is_our_fault() -> None:
    with pytest.raises(AssertionError):

        @struct()
        class Bare:
            a: int

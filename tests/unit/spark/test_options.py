from __future__ import annotations

import re

import pytest

from anabranch.spark.options import (
    CLIENT_SETTINGS,
    EARLIEST,
    LATEST,
    OPTIONS,
    REFUSED,
    Bound,
    OptionError,
    did_you_mean,
    for_batch,
    for_stream,
    parse,
)
from anabranch.spark.reader import _reader, range_settings
from anabranch.spark.sink import options as sink
from anabranch.spark.snapshot import SnapshotReader, connection_settings
from tests.support.broker import ROOT

LEAST = {"kafka.bootstrap.servers": "localhost:9092", "subscribe": "flights"}


def test_the_least_that_a_query_must_say_and_what_holds_otherwise() -> None:
    options = parse(LEAST)
    assert (options.servers, options.topics) == ("localhost:9092", ("flights",))
    assert options.fail_on_data_loss and options.ordered and options.split_by_key
    assert options.committed
    assert options.start is None and options.end is None and options.offsets_per_trigger_max is None


def test_names_are_read_without_regard_to_case_as_spark_hands_them_over() -> None:
    options = parse(
        {
            "BOOTSTRAP.servers": "a:1,b:2",
            "subscribe": " b, a ,a",
            "maxoffsetspertrigger": "100",
            "failondataloss": "False",
            "includeheaders": "true",
            "minpartitions": "7",
            "ordering": "NONE",
            "split": "offset",
            "kafka.fetch.max.wait.ms": "20",
            "kafka.check.crcs": "false",
            "kafka.isolation.level": "Read_Uncommitted",
        }
    )
    assert options.topics == ("a", "b")
    assert (options.offsets_per_trigger_max, options.min_partitions) == (100, 7)
    assert not options.fail_on_data_loss and options.headers
    assert not options.ordered and not options.split_by_key
    assert not options.committed
    assert options.client == {
        "kafka.fetch.max.wait.ms": 20,
        "kafka.check.crcs": False,
        "kafka.isolation.level": "read_uncommitted",
    }


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("startingOffsets", "Earliest", Bound(EARLIEST)),
        ("startingOffsets", "latest", Bound(LATEST)),
        ("startingOffsets", '{"flights":{"0":23,"1":-2}}', Bound(offsets={"flights": {0: 23, 1: EARLIEST}})),
        ("startingOffsetsByTimestamp", '{"flights":{"0":1000}}', Bound(timestamps={"flights": {0: 1000}})),
        ("startingTimestamp", "1000", Bound(timestamp=1000)),
    ],
)
def test_where_to_begin_can_be_said_in_the_ways_of_the_kafka_source(name: str, value: str, bound: Bound) -> None:
    assert parse({**LEAST, name: value}).start == bound
    assert parse({**LEAST, name.replace("starting", "ending"): value}).end == bound


def test_partitions_can_be_assigned_one_by_one() -> None:
    options = parse({"bootstrap.servers": "a", "assign": '{"b":[1,0],"a":[2]}'})
    assert options.assign == {"b": frozenset({0, 1}), "a": frozenset({2})}
    assert options.topics == ("a", "b")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"subscribe": "flights"}, "kafka.bootstrap.servers is missing"),
        ({"kafka.bootstrap.servers": "a"}, "subscribe, subscribePattern and assign"),
        ({**LEAST, "bootstrap.servers": "elsewhere"}, "different brokers"),
        ({**LEAST, "assign": '{"t":[0]}'}, "subscribe and assign contradict each other"),
        ({**LEAST, "maxOffsetPerTrigger": "1"}, "Did you mean maxOffsetsPerTrigger?"),
        ({**LEAST, "kafka.max.partition.fetch.byte": "1"}, "Did you mean kafka.max.partition.fetch.bytes?"),
        ({**LEAST, "zzz": "1"}, "There are bootstrap.servers, subscribe"),
        ({**LEAST, "kafka.auto.offset.reset": "latest"}, "set startingOffsets instead"),
        (
            {**LEAST, "kafka.security.protocol": "SASL_SSL"},
            "kafka.security.protocol is not supported: connections to br",
        ),
        ({**LEAST, "kafka.sasl.jaas.config": "x"}, "kafka.sasl.jaas.config is not supported: connections to brokers"),
        ({**LEAST, "Kafka.SSL.truststore.location": "x"}, "without TLS and SASL. Leave it out, and name a PLAINTEXT"),
        ({**LEAST, "minOffsetsPerTrigger": "5"}, "processing-time trigger"),
        ({**LEAST, "maxOffsetsPerTrigger": "0"}, "must be 1 or more; it is 0"),
        ({**LEAST, "maxOffsetsPerTrigger": "many"}, "must be a whole number; it is 'many'"),
        ({**LEAST, "failOnDataLoss": "yes"}, "must be true or false; it is 'yes'"),
        ({**LEAST, "kafka.isolation.level": "committed"}, "must be read_committed or read_uncommitted"),
        ({**LEAST, "ordering": "total"}, "must be key or none; it is 'total'"),
        ({**LEAST, "startingOffsets": "soon"}, "startingOffsets must be earliest, latest, or JSON"),
        ({**LEAST, "startingOffsets": '{"flights":{"0":-3}}'}, "negative offset"),
        ({**LEAST, "startingOffsets": '{"flights":{"0":1.5}}'}, "not a whole number"),
        ({**LEAST, "startingOffsets": '{"flights":3}'}, "startingOffsets must be"),
        (
            {**LEAST, "startingOffsets": "{}"},
            "startingOffsets names no partition; it must be earliest",
        ),
        ({**LEAST, "startingOffsetsByTimestamp": '{"t":{}}'}, "startingOffsetsByTimestamp names no partition"),
        ({**LEAST, "endingOffsets": "{}"}, "endingOffsets names no partition"),
        ({**LEAST, "startingTimestamp": "-1"}, "startingTimestamp must be 0 or more"),
        ({**LEAST, "startingOffsetsByTimestamp": '{"flights":{"0":0,"1":-1}}'}, "ByTimestamp has a time below 0"),
        ({**LEAST, "endingOffsetsByTimestamp": '{"flights":{"0":-2}}'}, "endingOffsetsByTimestamp has a time below 0"),
        ({**LEAST, "startingTimestamp": "1", "startingOffsets": "earliest"}, "contradict each other"),
        ({**LEAST, "subscribe": " , "}, "subscribe is empty"),
        ({"bootstrap.servers": "a", "assign": "{}"}, "assign must name partitions"),
        ({"bootstrap.servers": "a", "assign": '{"t":[]}'}, "assign must name partitions"),
        ({"bootstrap.servers": "a", "assign": "[1]"}, "assign must be"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_a_sentence(given: dict[str, str], sentence: str) -> None:
    with pytest.raises(OptionError) as refused:
        parse(given)
    assert sentence in str(refused.value)


def test_a_stream_has_no_end_and_a_batch_does_not_begin_there() -> None:
    ending = parse({**LEAST, "endingOffsets": "latest"})
    assert for_batch(ending) == ending
    with pytest.raises(OptionError, match="no end"):
        for_stream(ending)
    for given in ({"startingOffsets": "latest"}, {"startingOffsets": '{"flights":{"0":-1}}'}):
        with pytest.raises(OptionError, match="nothing to read"):
            for_batch(parse({**LEAST, **given}))
    with pytest.raises(OptionError, match="nothing to read"):
        for_batch(parse({**LEAST, "endingOffsets": "earliest"}))
    assert for_stream(parse({**LEAST, "startingOffsets": "latest"})).start == Bound(LATEST)


def test_a_pattern_that_is_not_re2_is_refused_with_the_engines_reason_alone(capfd: pytest.CaptureFixture[str]) -> None:
    reader = SnapshotReader(parse({"bootstrap.servers": "127.0.0.1:1", "subscribePattern": "flights-("}))
    try:
        with pytest.raises(OptionError, match=r"^subscribePattern: 'flights-\(' is not an RE2 .*: missing \)"):
            reader.read()
    finally:
        reader.close()
    assert capfd.readouterr().err == ""


def test_every_option_is_in_the_table_of_the_guide_and_no_other() -> None:
    text = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
    table = text.partition("## Options")[2].partition("\n### ")[0]
    firsts = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for first in firsts for name in re.findall(r"`([\w.]+)`", first)} == {*OPTIONS, *CLIENT_SETTINGS}


def test_every_refused_option_is_in_the_table_of_the_guide_and_no_other() -> None:
    text = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
    table = text.partition("### Connections")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    for kind, refused in (("reads", REFUSED), ("writes", sink.REFUSED)):
        named = {name for first, of in rows if kind in of for name in re.findall(r"`([\w.]+)`", first)}
        assert named == set(refused)


def test_every_client_setting_reaches_the_clients() -> None:
    """But two that are read where they are needed."""
    numbers = {name: 1_000 + place for place, (name, kind) in enumerate(CLIENT_SETTINGS.items()) if kind is int}
    options = parse({**LEAST, **{name: str(number) for name, number in numbers.items()}, "kafka.client.id": "me"})
    settings = [connection_settings(options), range_settings(options)]
    for name, number in numbers.items():
        field = name.removeprefix("kafka.").replace(".", "_")
        assert number in [getattr(each, field, None) for each in settings], name
    assert settings[0].client_id == "me"
    polled = range_settings(
        parse({**LEAST, "kafkaConsumer.pollTimeoutMs": "7", "kafka.isolation.level": "read_uncommitted"})
    )
    assert (polled.retry_timeout_ms, polled.read_committed) == (7, False)
    assert range_settings(options).read_committed


def test_the_closest_name_is_asked_for() -> None:
    assert did_you_mean("Flihgts", ["orders", "flights"]) == "Did you mean flights?"
    assert did_you_mean("flights", ["orders"]) == ""


def test_a_query_with_another_time_limit_in_the_same_worker_keeps_to_its_own() -> None:
    """It was that of the query whose tasks the worker had run first."""
    one, other = (_reader(parse({**LEAST, "kafkaConsumer.pollTimeoutMs": limit})) for limit in ("1000", "2000"))
    assert one is not other and one is _reader(parse({**LEAST, "kafkaConsumer.pollTimeoutMs": "1000"}))

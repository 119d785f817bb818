"""The clients' settings: one table for the constructors, `from_config` and docs/client-settings.md."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from anabranch.client import Admin, Consumer, Producer, sync
from anabranch.client.settings import ConsumerSettings, ProducerSettings, as_keywords, taken
from anabranch.client.settings_table import CLIENTS, as_markdown
from anabranch.machines.clients.fetching import FetcherSettings
from anabranch.machines.clients.sending import BatcherSettings
from anabranch.records.compression import Compression


def test_the_documented_table_is_the_one_in_force() -> None:
    document = Path(__file__).parents[3] / "docs" / "client-settings.md"
    assert document.read_text() == as_markdown(), (
        "run: python -m anabranch.client.settings_table > docs/client-settings.md"
    )


@pytest.mark.parametrize("model", CLIENTS.values())
def test_every_setting_is_documented_in_a_sentence(model: type[Any]) -> None:
    for item in fields(model):
        doc = item.metadata["doc"]
        assert doc[0].isupper() or doc.startswith("`"), item.name
        assert doc.endswith("."), item.name


@pytest.mark.parametrize(
    ("name", "clients"),
    [
        ("producer", (Producer, sync.Producer)),
        ("consumer", (Consumer, sync.Consumer)),
        ("admin", (Admin, sync.Admin)),
    ],
)
def test_constructors_take_exactly_the_settings_of_the_table(name: str, clients: tuple[type[Any], ...]) -> None:
    wanted = {item.name: item.default for item in fields(CLIENTS[name])}
    for client in clients:
        parameters = inspect.signature(client).parameters
        assert {key: parameter.default for key, parameter in parameters.items()} == wanted
        assert [key for key, it in parameters.items() if it.kind is not it.KEYWORD_ONLY] == ["bootstrap_servers"]


def test_dotted_names_and_text_become_keywords() -> None:
    config = {"linger.ms": "7", "acks": "all", "allow.auto.create.topics": "False", "bootstrap.servers": "h:1"}
    assert as_keywords(Producer, config) == {
        "linger_ms": 7,
        "acks": "all",
        "allow_auto_create_topics": False,
        "bootstrap_servers": "h:1",
    }


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"linger": 7}, TypeError, "Producer has no setting 'linger'"),
        ({"linger.ms": "x"}, ValueError, "linger.ms is 'x'; it must be a whole number"),
        ({"enable.idempotence": "on"}, ValueError, "enable.idempotence is 'on'; it can be true or false"),
    ],
)
def test_a_config_that_says_nothing_is_refused(config: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        as_keywords(Producer, config)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"acks": 2}, "acks is 2"),
        ({"acks": 1, "enable_idempotence": True}, "enable.idempotence needs acks='all'"),
        ({"transactional_id": "t", "acks": 1}, "transactional.id must not be empty, and needs"),
        ({"transactional_id": ""}, "transactional.id must not be empty"),
        ({"delivery_timeout_ms": 100}, "delivery.timeout.ms must be at least"),
        ({"compression_type": "rar"}, "compression.type is 'rar'"),
        ({"max_in_flight_requests_per_connection": 6}, "must be 1 to 5"),
        ({"max_in_flight_requests_per_connection": 0, "acks": 1}, "must be 1 to 5"),
    ],
)
def test_producer_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ProducerSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"auto_offset_reset": "first"}, "auto.offset.reset is 'first'; it can be earliest or latest or none"),
        ({"ordering": "all"}, "ordering is 'all'"),
        ({"isolation_level": "x"}, "isolation.level is 'x'"),
        ({"group_protocol": "x"}, "group.protocol is 'x'"),
        ({"group_local_assignors": [object()], "group_remote_assignor": "range"}, "cannot be used together"),
        ({"group_local_assignors": [object()], "group_protocol": "classic"}, "cannot be used together"),
    ],
)
def test_consumer_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ConsumerSettings(**settings)


def test_what_follows_from_settings() -> None:
    unsure = ProducerSettings(acks="1", compression_type="zstd")
    assert (unsure.acks_count, unsure.idempotent, unsure.compression) == (1, False, Compression.ZSTD)
    assert ProducerSettings().idempotent
    consumer = ConsumerSettings(partition_assignment_strategy="range", group_local_assignors=iter(()))
    assert (consumer.strategies, consumer.local_assignors, consumer.read_committed) == (("range",), (), False)


def test_machines_are_given_the_settings_of_their_names() -> None:
    given = ProducerSettings(linger_ms=9, max_block_ms=3)
    machine = taken(BatcherSettings, given, acks=1, enable_idempotence=False, transactional=True)
    assert (machine.linger_ms, machine.max_block_ms, machine.acks, machine.transactional) == (9, 3, 1, True)
    assert taken(FetcherSettings, ConsumerSettings(fetch_max_bytes=77)).fetch_max_bytes == 77


def test_a_member_that_commits_no_ranges_cannot_share_partitions() -> None:
    with pytest.raises(ValueError, match=r"allow\.key\.share needs allow\.individual\.commit"):
        ConsumerSettings(group_id="g", allow_key_share=True, allow_individual_commit=False)
    assert not ConsumerSettings(group_id="g", allow_individual_commit=False).allow_key_share
    assert ConsumerSettings(group_id="g", allow_key_share=True).allow_individual_commit

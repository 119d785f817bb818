"""Settings: read, checked, explained."""

from __future__ import annotations

import re
from dataclasses import fields
from itertools import permutations
from pathlib import Path

import pytest

import anabranch
from anabranch.machines.controller.broker_configs import OLDER
from anabranch.machines.controller.configs import TOPIC_CONFIGS
from anabranch.server.settings import (
    Address,
    Settings,
    SettingsError,
    described,
    explicit,
    from_environment,
    layered,
    parse_address,
    read_properties,
)
from anabranch.server.settings.markdown import as_markdown


def test_settings_have_kafkas_names_and_defaults() -> None:
    settings = Settings.of({"listeners": "PLAINTEXT://0.0.0.0:19092", "log.dirs": "/data", "durability": "os"})
    assert settings.listeners == Address("0.0.0.0", 19092)
    assert settings.log_dirs == Path("/data")
    assert settings.durability == "os"
    assert settings.num_partitions == 1


def test_older_names_and_units_are_understood() -> None:
    settings = Settings.of({"broker.id": "7", "log.retention.hours": "2", "log.roll.hours": "1"})
    assert (settings.node_id, settings.log_retention_ms, settings.log_roll_ms) == (7, 7_200_000, 3_600_000)
    assert Settings.of({"log.retention.hours": "-1"}).log_retention_ms == -1


def test_an_older_name_gives_way_to_the_real_one_and_its_value_fits_that() -> None:
    for names in permutations(("log.dirs", "log.dir")):
        assert str(Settings.of({name: f"/{name}" for name in names}).log_dirs) == "/log.dirs"
    for hours in (2**63 - 1, 2_562_047_788_016):
        with pytest.raises(SettingsError, match=r"log\.retention\.hours cannot be"):
            Settings.of({"log.retention.hours": str(hours)})


def test_a_later_source_replaces_a_setting_whatever_its_name_there() -> None:
    file = {"log.retention.ms": "60000", "log.dirs": "/file", "num.partitions": "3"}
    merged = layered(file, {"log.dir": "/environment"}, {"log.retention.hours": "24"}, {"log.dirs": "/option"})
    settings = Settings.of(merged)
    assert (settings.log_retention_ms, str(settings.log_dirs), settings.num_partitions) == (86_400_000, "/option", 3)


def test_of_several_names_of_a_setting_the_finest_unit_counts_wherever_it_stands() -> None:
    """As in Kafka, where server.properties has hours, and minutes or milliseconds are added."""
    for names in permutations(("log.retention.ms", "log.retention.minutes", "log.retention.hours")):
        assert Settings.of(dict.fromkeys(names, "7")).log_retention_ms == 7
    assert Settings.of({"log.retention.minutes": "7", "log.retention.hours": "1"}).log_retention_ms == 420_000


@pytest.mark.parametrize(
    ("name", "in_force", "value"),
    [
        ("log.retention.hours", "7200000", "2"),
        ("log.retention.hours", "5400000", None),
        ("log.retention.minutes", "5400000", "90"),
        ("log.retention.minutes", "-1", "-1"),
        ("log.roll.hours", str(3_600_000 * 2**31), None),
        ("log.dir", "/data", "/data"),
    ],
)
def test_an_older_name_has_the_value_in_force_or_none(name: str, in_force: str, value: str | None) -> None:
    assert OLDER[name].value(in_force) == value


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("listners", "x", "There is no setting listners. Did you mean listeners?"),
        ("zzzzzz", "x", "There is no setting zzzzzz. `anabranch serve --settings` lists all of them."),
        ("num.partitions", "none", "num.partitions cannot be 'none': expected a whole number."),
        ("num.partitions", "0", "num.partitions cannot be '0': expected 1 to 100000."),
        ("durability", "yes", "durability cannot be 'yes': expected one of fsync, os."),
        ("listeners", "SSL://a:1", "listeners cannot be 'SSL://a:1': SSL:// is not supported, only PLAINTEXT://."),
        ("listeners", "localhost", "listeners cannot be 'localhost': expected HOST:PORT."),
        ("auto.create.topics.enable", "1", "auto.create.topics.enable cannot be '1': expected true or false."),
        ("log.cleanup.policy", "x", "log.cleanup.policy cannot be 'x': expected some of delete, compact."),
        ("log.dirs", "/a,/b", "log.dirs cannot be '/a,/b': expected one directory: "
                              "a broker keeps all its data in one place."),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_explained_in_a_sentence(name: str, value: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as raised:
        Settings.of({name: value})
    assert str(raised.value) == sentence


def test_a_properties_file_has_comments_and_joined_lines() -> None:
    text = "# a comment\n! another\n\nnode.id = 3\nlog.cleanup.policy=compact,\\\n  delete\n"
    assert read_properties(text) == {"node.id": "3", "log.cleanup.policy": "compact,delete"}
    with pytest.raises(SettingsError, match="Line 1 is not name=value"):
        read_properties("node.id 3")


def test_the_environment_names_settings_and_other_variables_are_left_alone() -> None:
    found = from_environment({"ANABRANCH_LOG_DIRS": "/x", "ANABRANCH_HOME": "/y", "PATH": "/bin"})
    assert found == {"log.dirs": "/x"}


def test_every_setting_is_described_and_its_default_can_be_read_back() -> None:
    for item in described():
        assert item.doc.endswith(".")
        assert item.value == item.default
        if item.name != "broker.rack":
            Settings.of({item.name: item.default})


def test_explicit_settings_are_those_that_differ() -> None:
    assert explicit(Settings.of({"num.partitions": "4", "node.id": "1"})) == {"num.partitions": "4"}


def test_addresses() -> None:
    assert parse_address("PLAINTEXT://:9092") == Address("", 9092)
    assert parse_address("[::1]:9092") == Address("::1", 9092)
    assert str(Address("::1", 9092)) == "[::1]:9092"


SOURCES = Path(anabranch.__file__).parent
TABLES = ("controller/configs.py", "settings/table.py")


def test_a_config_or_setting_that_no_code_reads_is_described_as_accepted() -> None:
    """Else an operator who sets one trusts in what does not happen."""
    code = "\n".join(path.read_text() for path in SOURCES.rglob("*.py") if not str(path).endswith(TABLES))
    topics = (SOURCES / "machines/controller/configs.py").read_text()
    wrong = [
        config.name
        for config in TOPIC_CONFIGS.values()
        if config.documentation.startswith("Accepted;") is (f'"{config.name}"' in code)
    ]
    accepted = {
        config.broker_setting: config.documentation.startswith("Accepted;") for config in TOPIC_CONFIGS.values()
    }
    for item in fields(Settings):
        name = item.metadata["name"]
        is_read = re.search(rf"\b{item.name}\b", code) or f'"{name}"' in code or f'"{name}", ' in topics
        is_accepted = accepted.get(name, not is_read)
        if item.metadata["doc"].startswith("Accepted;") is not is_accepted:
            wrong.append(name)
    assert wrong == []


def test_the_documented_table_is_the_one_in_force() -> None:
    document = Path(__file__).parents[3] / "docs" / "settings.md"
    assert document.read_text() == as_markdown(), "run: anabranch serve --settings --markdown > docs/settings.md"

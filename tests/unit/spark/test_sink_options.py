"""The options of a write."""

from __future__ import annotations

import pytest

from anabranch.spark.options import OptionError
from anabranch.spark.sink.options import REFUSED, parse

LEAST = {"kafka.bootstrap.servers": "a", "topic": "t"}


@pytest.mark.parametrize("given", ["true", "false"])
def test_the_option_of_the_source_for_headers_changes_nothing(given: str) -> None:
    assert parse({**LEAST, "includeheaders": given}) == parse(LEAST)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_what_to_do_instead(name: str) -> None:
    with pytest.raises(OptionError, match=f"^The option {name} is not supported: .*(set|call|encode)"):
        parse({**LEAST, name.upper(): "1"})


def test_a_write_is_not_secured_either() -> None:
    with pytest.raises(OptionError, match=r"kafka.security.protocol is not supported: .* without TLS and SASL"):
        parse({**LEAST, "kafka.security.protocol": "SSL"})


def test_how_long_a_batch_is_sent_again_is_said_instead_of_how_often() -> None:
    with pytest.raises(OptionError, match=r"kafka.retries is not supported: .* kafka.delivery.timeout.ms"):
        parse({**LEAST, "kafka.retries": "3"})
    assert parse({**LEAST, "kafka.delivery.timeout.ms": "70000"}).producer["delivery_timeout_ms"] == 70_000

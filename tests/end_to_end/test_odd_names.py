"""What an application gives as the name of a topic, and is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.client.producer.delivery import DeliveryError
from anabranch.client.sync import Admin, Producer
from tests.support.broker import running

NAMES = (np.array(["a", "b"]), "half a character \ud800", 7, b"t", None)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory: Path = tmp_path_factory.mktemp("names")
    with running(directory) as broker, Admin(f"127.0.0.1:{broker.port}") as admin:
        admin.create_topics("t", partitions=1)
        yield f"127.0.0.1:{broker.port}"


@pytest.mark.parametrize("name", NAMES, ids=lambda name: type(name).__name__)
@pytest.mark.parametrize("first", [True, False])
def test_what_is_no_name_of_a_topic_fails_alone(servers: str, name: Any, first: bool) -> None:
    """An array left the records beside it without outcomes; half a character failed those of all topics."""
    with Producer(servers, linger_ms=50, max_block_ms=2_000) as producer:
        outcomes = [producer.send(topic, b"v") for topic in ([name, "t"] if first else ["t", name])]
        good, bad = reversed(outcomes) if first else outcomes
        assert good.result(10).partition == 0
        error = bad.exception(10)
        assert isinstance(error, ApiError) and error.code is ErrorCode.INVALID_TOPIC_EXCEPTION
        with pytest.raises(DeliveryError, match="1 record was"):
            producer.flush()
        with pytest.raises(ApiError, match="the name of a topic"):
            producer.send_arrow(name, pa.table({"value": [b"v"]}))
        assert producer.send("t", b"v").result(10).partition == 0

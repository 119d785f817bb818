"""How connections and files of logs share the descriptors of the process."""

from __future__ import annotations

import asyncio
import errno
import resource

import pytest

from anabranch.base.errors import AnabranchError
from anabranch.runtime import descriptors
from anabranch.runtime.descriptors import LEAST, OWN, Shares, patiently, patiently_in_loop, raise_limit, share


def test_where_there_are_enough_each_gets_what_it_asks_for() -> None:
    assert share(1 << 20, connections=10_000, files=10_000) == Shares(10_000, 10_000)
    assert share(OWN + 300, connections=100, files=200) == Shares(100, 200)


@pytest.mark.parametrize("limit", [256, 1_024, 20_001])
def test_where_there_are_too_few_neither_takes_all(limit: int) -> None:
    shares = share(limit, connections=1_000_000, files=1_000_000)
    assert sum(shares) + OWN == limit
    assert abs(shares.connections - shares.files) <= 1


def test_one_may_use_what_the_other_leaves() -> None:
    assert share(1_024, connections=50, files=10_000) == Shares(50, 1_024 - OWN - 50)
    assert share(1_024, connections=10_000, files=50) == Shares(1_024 - OWN - 50, 50)


def test_a_limit_that_leaves_no_share_is_refused_with_what_to_do() -> None:
    least = OWN + 2 * LEAST
    assert share(least, connections=10_000, files=10_000) == Shares(LEAST, LEAST)
    with pytest.raises(AnabranchError, match="ulimit -n"):
        share(least - 1, connections=10_000, files=10_000)


def test_the_limit_is_raised_as_far_as_the_process_may() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
        assert raise_limit() == (hard if hard != resource.RLIM_INFINITY else 1 << 30)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("way", ["thread", "loop"])
def test_work_is_done_again_while_there_are_too_few_descriptors(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "PAUSES_S", (0.0, 0.0))

    def run(*errors: int) -> str:
        left = list(errors)

        def work() -> str:
            if left:
                raise OSError(left.pop(0), "no")
            return "done"

        return patiently(work) if way == "thread" else asyncio.run(patiently_in_loop(work))

    assert run() == run(errno.EMFILE) == run(errno.ENFILE, errno.ENOMEM) == "done"
    with pytest.raises(OSError) as other:
        run(errno.EIO)
    assert other.value.errno == errno.EIO
    with pytest.raises(OSError) as lasting:
        run(*[errno.EMFILE] * 3)
    assert lasting.value.errno == errno.EMFILE

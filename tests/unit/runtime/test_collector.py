"""The collector's pause."""

from __future__ import annotations

import gc

import pytest

from anabranch.runtime.collector import collector_paused


def _fail_while_paused() -> None:
    with collector_paused():
        assert not gc.isenabled()
        raise KeyError


def test_nothing_is_collected_inside_and_again_afterwards_even_if_the_work_fails() -> None:
    assert gc.isenabled()
    with pytest.raises(KeyError):
        _fail_while_paused()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()

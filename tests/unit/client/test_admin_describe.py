"""Descriptions of topics that change meanwhile."""

from __future__ import annotations

import asyncio
from unittest import mock

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.client import Admin

REMOVED = ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "topic t has no partition 1; it has 0")


def described(*found: object) -> object:
    admin = Admin("127.0.0.1:9")
    with mock.patch.object(admin, "_describe", side_effect=found):
        return asyncio.run(admin.describe_topics("t"))


def test_a_partition_that_is_removed_between_two_questions_fails_no_description() -> None:
    assert described(REMOVED, "again") == {"t": "again"}


def test_a_topic_that_does_not_exist_is_said() -> None:
    with pytest.raises(ApiError, match="has no partition 1"):
        described(REMOVED, REMOVED)
    with pytest.raises(ApiError, match="not allowed"):
        described(ApiError(ErrorCode.TOPIC_AUTHORIZATION_FAILED, "not allowed"), "again")

"""The sentences of errors."""

from __future__ import annotations

from anabranch.base.errors import MESSAGE_LENGTH_MAX, ApiError, ErrorCode


def test_a_sentence_that_quotes_a_long_name_keeps_its_beginning_and_its_end() -> None:
    error = ApiError(ErrorCode.GROUP_ID_NOT_FOUND, f"There is no group {'é' * 32_767} of the consumer protocol.")
    assert len(error.message) == MESSAGE_LENGTH_MAX + len("...")
    assert error.message.startswith("There is no group é") and error.message.endswith("é of the consumer protocol.")
    assert str(error) == f"GROUP_ID_NOT_FOUND: {error.message}"
    assert ApiError(ErrorCode.NONE, "x" * MESSAGE_LENGTH_MAX).message == "x" * MESSAGE_LENGTH_MAX

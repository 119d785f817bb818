"""The phases of a producer's transactions: every call in every phase is allowed, or refused with what to do."""

from __future__ import annotations

from itertools import product
from typing import Any, cast

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.client.producer.transactions import AGAIN, MAY, WHY_NOT, Phase, Transactions, _worst, group_of


def in_phase(phase: Phase) -> Transactions:
    made = Transactions(cast(Any, None), "t", timeout_ms=1, request_timeout_ms=1, max_block_ms=1)
    made.phase = phase
    made.why = ApiError(ErrorCode.PRODUCER_FENCED, "another producer")
    return made


@pytest.mark.parametrize(("phase", "action"), [*product(Phase, MAY)])
def test_every_call_in_every_phase_is_allowed_or_refused(phase: Phase, action: str) -> None:
    transactions = in_phase(phase)
    if phase in MAY[action]:
        assert (phase, action) not in WHY_NOT
        transactions.check(action)
        return
    with pytest.raises(ApiError) as refused:
        transactions.check(action)
    if phase is Phase.FENCED:
        assert refused.value is transactions.why
    else:
        assert refused.value.code is ErrorCode.INVALID_TXN_STATE
        assert str(WHY_NOT.get((phase, action), "no transaction is open")) in str(refused.value)


@pytest.mark.parametrize("phase", list(Phase))
def test_only_an_open_transaction_is_spoilt_and_a_fenced_producer_stays_so(phase: Phase) -> None:
    transactions = in_phase(phase)
    reason = ValueError("lost")
    transactions.spoil(reason)
    spoilt = phase in (Phase.OPEN, Phase.FLUSHING, Phase.COMMITTING)
    assert transactions.phase is (Phase.SPOILT if spoilt else phase)
    assert (transactions.why is reason) == spoilt
    transactions.fence(reason)
    assert transactions.phase is Phase.FENCED


def test_of_many_codes_one_that_no_repetition_helps_decides() -> None:
    again = next(iter(AGAIN))
    assert _worst([]) is ErrorCode.NONE
    assert _worst([ErrorCode.NONE, ErrorCode.OPERATION_NOT_ATTEMPTED]) is ErrorCode.NONE
    assert _worst([ErrorCode.NONE, again]) is again
    assert _worst([again, ErrorCode.INVALID_TXN_STATE]) is ErrorCode.INVALID_TXN_STATE


def test_a_group_without_members_is_named_by_its_id() -> None:
    assert group_of("g") == ("g", -1, "", None)
    assert group_of(group_of("g")) == group_of("g")

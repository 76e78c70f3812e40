from __future__ import annotations

from typing import Any

import pytest
import torch

from experience_buffer import (
    AnnotateRefusedError,
    ClientOptions,
    InvalidRequestError,
    UnavailableError,
)
from tests.unit.client.rpc.pushed import FAST

OPTIONS = ClientOptions(max_push_bytes=2000, retry=FAST.retry)
MANY: dict[str, dict[str, Any]] = {
    f"3/5/{run}/0/a": {"values": torch.full((100,), float(run)), "reward": run} for run in range(7)
}


@pytest.fixture
def annotate(connected: Any) -> Any:
    """The verb of either client."""
    with connected(options=OPTIONS) as client:
        yield client.annotate


def test_it_splits_retries_and_joins(script: Any, annotate: Any) -> None:
    script.failures += [UnavailableError("starting"), UnavailableError("connection lost")]
    result = annotate(MANY, buffer="math")
    assert [outcome.uid for outcome in result.outcomes] == list(MANY)
    assert (result.num_stored, result.refused) == (7, ())
    assert {outcome.status for outcome in result.outcomes} == {"stored"}
    assert [len(request.annotations) for request in script.requests] == [4, 4, 4, 3]
    assert {request.buffer for request in script.requests} == {"math"}
    assert [a.reward for request in script.requests[2:] for a in request.annotations] == [
        *map(float, range(7))
    ]


def test_refused_ones_raise_after_the_others_are_stored(script: Any, annotate: Any) -> None:
    bad = "3/5/2/0/a"
    script.refuse = lambda uid: uid == bad
    with pytest.raises(
        AnnotateRefusedError, match=r"1 annotation .* 3/5/2/0/a: delivered"
    ) as caught:
        annotate(MANY)
    result = caught.value.result
    assert [(o.uid, o.reason, o.message) for o in result.refused] == [
        (bad, "delivered", "lease 17 of 'trainer' holds it")
    ]
    assert result.num_stored == 6
    assert annotate(MANY, raise_on_refused=False) == result


def test_nothing_is_sent_when_one_cannot_be(script: Any, annotate: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"annotations\['u'\]\['values'\]"):
        annotate({**MANY, "u": {"values": "high"}})
    assert annotate({}).outcomes == ()
    assert script.requests == []

"""The clients' own verbs, given what no argument expects; `make fuzz ARGS=verbs` goes on for long."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experience_buffer import (
    EID,
    BufferConfig,
    PushRefusedError,
    Tombstone,
)
from tests.fuzz import hostile
from tests.fuzz.verbs import GOOD, Verbs, rollout

NEVER: Final[dict[str, tuple[Any, ...]]] = {
    "int": (
        True,
        False,
        1.5,
        math.nan,
        "7",
        b"7",
        None,
        [7],
        object(),
        10**5000,
        torch.tensor(1.5),
    ),
    "float": (True, "1.0", b"1", math.nan, None, [1.0], object(), np.arange(3.0)),
    "str": (7, b"text", None, ["text"], "\ud835", "a\udc00b", object(), np.arange(3)),
    "bool": (7, "yes", None, [True], object(), torch.tensor(True)),
}
"""By what a parameter is annotated as: what it never takes."""


@pytest.fixture(scope="module")
def verbs() -> Iterator[Verbs]:
    logging.getLogger("experience_buffer").setLevel(logging.ERROR)
    made = Verbs()
    yield made
    made.close()
    logging.getLogger("experience_buffer").setLevel(logging.NOTSET)


@settings(max_examples=500, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_wrong_arguments_are_named_before_anything_is_sent(
    verbs: Verbs, data: st.DataObject
) -> None:
    verbs.run(lambda count: data.draw(st.integers(0, count - 1)))


def test_each_argument_of_each_verb_is_named(verbs: Verbs) -> None:
    num_calls = 0
    for case in verbs.cases:
        for name in case.parameters:
            for make in (*hostile.SCALARS, *hostile.WHOLES):
                verbs.check(case, {name: make()})
                num_calls += 1
    assert num_calls > 15_000, "there are that many"


def test_what_would_be_taken_for_something_else_is_refused(verbs: Verbs) -> None:
    """No truth value for a number, no number for a text, no NaN, no text that can't be written."""
    taken, num_calls = [], 0
    for case in verbs.cases:
        for name, annotated in case.kinds.items():
            kind = annotated.removesuffix(" | None")
            for value in NEVER.get(kind, ()):
                if value is None and (kind != annotated or case.name.endswith("update_buffer")):
                    continue
                if case.name.endswith("snapshot") and value is None:
                    continue  # The client's timeout then.
                if name == "reason" and isinstance(value, str):
                    continue  # People read it: what can't be written is replaced.
                num_calls += 1
                if verbs.check(case, {name: value}) is None:
                    taken.append((case.name, name, value))
    assert not taken
    assert num_calls > 1_000


@pytest.mark.parametrize("broken", ["\ud835", "tool said: \ud835", "\udc00 and \ud800\udc00"])
def test_reasons_are_kept_as_far_as_they_can_be_written(verbs: Verbs, broken: str) -> None:
    sent: list[Any] = []
    client = verbs.clients[0]
    answer = client.counting._answer

    def keep(method: str, request: Any) -> Any:
        sent.append(request)
        return answer(method, request)

    client.counting._answer = keep
    try:
        client.push([], tombstones=[Tombstone(EID("a", "b"), broken)])
        client.nack(3, reason=broken)
        client.drop_group("a/b", reason=broken)
    finally:
        del client.counting._answer
    written = [
        request if isinstance(request, bytes) else request.SerializeToString() for request in sent
    ]
    assert all("\ufffd".encode() in data for data in written)
    assert len(written) == 3


def test_a_push_that_holds_what_is_no_experience_stores_the_others(verbs: Verbs) -> None:
    odd = [rollout(), {"tokens": [1]}, hostile.Silent(), rollout()]
    with pytest.raises(PushRefusedError) as caught:
        verbs.clients[0].push(odd)
    assert [each.index for each in caught.value.result.refused] == [1, 2]


@pytest.mark.parametrize("field", ["eid", "tokens", "info", "metrics", "custom_fields", "extra"])
@pytest.mark.parametrize("place", range(len(hostile.SCALARS)))
def test_an_attribute_that_was_set_to_anything_refuses_its_experience(
    verbs: Verbs, field: str, place: int
) -> None:
    value = hostile.SCALARS[place]()
    changed = rollout()
    changed.__dict__[field] = value  # As setting it refuses most of them.
    pushed = [rollout(), changed, rollout()]
    result = verbs.clients[0].push(pushed, raise_on_refused=False)
    assert [each.index for each in result.refused] in ([1], [])


def test_the_buffer_of_each_good_argument_is_good(verbs: Verbs) -> None:
    """Else errors would name what isn't wrong."""
    for case in verbs.cases:
        assert verbs.check(case, {}) is None, case.name
    assert GOOD["config"]() == BufferConfig("math")

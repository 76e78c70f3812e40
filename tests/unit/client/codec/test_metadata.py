"""What passes at a glance is what the thorough walk passes, unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experience_buffer._codec import metadata
from experience_buffer._codec.limits import DEFAULT_LIMITS, Limits
from experience_buffer._codec.metadata import plain_metas
from experience_buffer._codec.plain_values import Normaliser
from experience_buffer.errors import TrxpError

ATOMS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3)
)
ODD = st.sampled_from(
    [
        np.float64(0.5),
        np.int8(3),
        np.zeros(2),
        1j,
        bytearray(b"x"),
        2**8192,
        (1, "a"),
        {1, 2},
        {3: 1},
        {(1, (2,)): 1},
        {"a": {np.float32(1): 2}},
        type("Text", (str,), {})("x"),
        type("Dict", (dict,), {})(a=1),
        print,
    ]
)


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
        ),
        max_leaves=12,
    )


METAS = st.lists(st.dictionaries(st.text(max_size=3), nested(ATOMS | ODD), max_size=4), max_size=3)


def thorough(metas: list[dict[str, Any]], limits: Limits = DEFAULT_LIMITS) -> Any:
    normaliser = Normaliser(limits)
    return [normaliser.normal(meta, index=index) for index, meta in enumerate(metas)]


def outcome(decide: Any, *arguments: Any) -> Any:
    """What it returns, or the text of its refusal."""
    try:
        return repr(decide(*arguments))
    except TrxpError as error:
        return str(error), error.item


@given(METAS)
def test_the_glance_and_the_walk_agree(metas: list[dict[str, Any]]) -> None:
    assert outcome(plain_metas, metas) == outcome(thorough, metas)


@given(st.lists(st.dictionaries(st.text(max_size=3), nested(ATOMS), max_size=4), max_size=3))
def test_what_is_plain_stays_the_very_same(metas: list[dict[str, Any]]) -> None:
    for before, after in zip(metas, plain_metas(metas), strict=True):
        assert before is after


@pytest.mark.parametrize("depth", [1, 15, 16, 17, 61, 62, 63, 64, 65])
def test_depth(depth: int) -> None:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"x": value}
    assert outcome(plain_metas, [{"info": value}]) == outcome(thorough, [{"info": value}])


@pytest.mark.parametrize("num_items", [24, 25, 26, 27])
def test_values_are_counted_as_often_as_they_are_reached(
    num_items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(max_nodes=100)
    monkeypatch.setattr(metadata, "DEFAULT_LIMITS", limits)
    shared = [1, 2]
    metas: list[dict[str, Any]] = [{"info": shared} for _ in range(num_items // 5)]
    metas += [{}] * (100 - 5 * (num_items // 5) + num_items - 25)
    assert outcome(plain_metas, metas) == outcome(thorough, metas, limits)


def test_sharing_that_explodes_is_refused_in_time() -> None:
    value: list[Any] = [1] * 50
    for _ in range(14):
        value = [value] * 50
    with pytest.raises(TrxpError, match="more than 1,000,000 values"):
        plain_metas([{"info": value}])

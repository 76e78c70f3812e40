"""Tokens as columns: windows with every number that a token has, and a response in a few points."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from experience_buffer import errors, trxp
from experience_buffer._codec.item import Item
from experience_buffer_server.web.inside.columns import MOST_TOKENS, overview, window
from tests.unit.builders import NUM_PROMPT, NUM_RESPONSE, experience

MASK = [True, False, True, True, True, False, True]


def item_of(**fields: Any) -> Item:
    (item,) = trxp.read(trxp.encode([experience(1, 1, **fields)]))
    assert isinstance(item, Item)
    return item


def test_a_window_has_the_numbers_of_its_tokens() -> None:
    item = item_of(
        action_mask=MASK,
        advantages=[0.1, 9.0, -0.3, 0.25, math.nan, 7.0, math.inf],
        versions=[2**60 + each for each in range(7)],
    )
    found = window(item, "response", 2, 3, None)
    assert (found.num_tokens, found.num_prompt_tokens, found.start) == (7, 3, 2)
    assert found.ids == (18, 19, 20)
    assert found.mask == (True, True, True)
    assert found.texts is None
    assert found.columns["advantages"] == [-0.3, 0.25, None]
    assert found.columns["versions"] == [2**60 + 2, 2**60 + 3, 2**60 + 4]
    assert found.columns["logprobs"] == [-0.5] * 3
    # Of those that train, and are numbers.
    scale = found.scales["advantages"]
    assert (scale.min, scale.max) == pytest.approx((-0.3, 0.25))
    assert json.dumps(found.to_dict(), allow_nan=False)


def test_a_prompt_has_ids_and_no_numbers_and_all_has_both() -> None:
    item = item_of(advantages=[1.0] * NUM_RESPONSE)
    prompt = window(item, "prompt", 0, 100, None)
    assert (prompt.ids, prompt.columns, prompt.mask) == ((13, 14, 15), {}, None)
    every = window(item, "all", 1, 4, None)
    assert every.ids == (14, 15, 16, 17)
    assert every.columns["advantages"] == [None, None, 1.0, 1.0]
    assert every.mask == (None, None, True, True)
    assert every.num_tokens == NUM_PROMPT + NUM_RESPONSE


def test_a_value_more_than_tokens_and_one_less_fit() -> None:
    found = window(item_of(values=[0.5] * 8, returns=[1.0] * 7), "response", 0, 100, None)
    assert len(found.columns["values"]) == len(found.ids) == 7


def test_pairs_have_their_own_tokens() -> None:
    (item,) = trxp.read(
        trxp.encode(
            [experience(1, 0, logprobs=None, prompt_length=None, chosen=[1, 2], rejected=[3])]
        )
    )
    assert isinstance(item, Item)
    assert window(item, "chosen", 0, 10, None).ids == (1, 2)
    assert window(item, "rejected", 0, 10, None).ids == (3,)


def test_a_window_behind_the_end_is_refused_and_a_wide_one_bounded() -> None:
    with pytest.raises(errors.InvalidRequestError, match="start 8 is behind the last of 7"):
        window(item_of(), "response", 8, 1, None)
    assert window(item_of(), "response", 7, 1, None).ids == ()
    tokens = torch.arange(10_000)
    long = item_of(tokens=tokens, logprobs=torch.zeros(10_000 - NUM_PROMPT))
    assert len(window(long, "response", 0, 10_000, None).ids) == MOST_TOKENS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_kind_of_float_is_read(dtype: torch.dtype) -> None:
    item = item_of(advantages=torch.full((7,), -1.5, dtype=dtype))
    assert window(item, "response", 0, 2, None).columns["advantages"] == [-1.5, -1.5]


def test_an_overview_shows_what_is_farthest_from_zero_of_what_trains() -> None:
    item = item_of(action_mask=MASK, advantages=[0.1, 9.0, -0.3, 0.25, math.nan, 7.0, 0.0])
    found = overview(item, 3)
    assert found.starts == (0, 2, 4)
    assert found.columns["advantages"] == [0.1, -0.3, 0.0]
    assert found.mask == (0.5, 1.0, 0.6667)
    assert overview(item, 4096).starts == tuple(range(7))


def test_a_response_of_no_tokens_has_an_overview_of_no_points() -> None:
    item = item_of(tokens=torch.arange(3), logprobs=torch.zeros(0), action_mask=[])
    assert overview(item, 10).starts == ()
    assert window(item, "response", 0, 10, None).ids == ()

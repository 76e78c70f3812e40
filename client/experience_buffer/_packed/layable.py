"""Which fields of a packed batch are laid out, and whether they can be. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

import torch
from torch import Tensor

from experience_buffer._arguments import MOST_INT, as_whole, names
from experience_buffer._packed.exact import exactly, holds
from experience_buffer._packed.join import (
    Joined,
    element_of,
    is_prompt_cut,
    lacking,
    num_having,
    uid_of,
)
from experience_buffer._packed.table import Table

RESPONSE_FIELDS: Final = (
    "action_mask",
    "logprobs",
    "token_level_reward",
    "advantages",
    "returns",
    "teacher_logprobs",
    "values",
    "ref_logprobs",
    "versions",
)
"""Fields with one row per response token that batches hold unless told otherwise."""
ROUTES: Final = "routed_experts"
"""The field with a row for each token but the last, of prompt and response."""


def names_of(table: Table, fields: Sequence[str] | None, drop: Collection[str]) -> list[str]:
    """The fields to lay out: those asked for, or the known ones; always the mask.

    Raises:
        InvalidRequestError: `fields` is one text, or holds something else.
        ValueError: Some experiences have a known field and others don't.
    """
    if fields is not None:
        fields = names("fields", fields)
        has_mask = lacking(table, "action_mask") is None
        return [*dict.fromkeys((*(("action_mask",) if has_mask else ()), *fields))]
    found = []
    for name in (*RESPONSE_FIELDS, ROUTES):
        if name in drop:
            continue
        index = lacking(table, name)
        if index is None:
            found.append(name)
        elif num_having(table, name):
            raise ValueError(
                f"{uid_of(table, index)} has no {name}, which {num_having(table, name)} of the "
                f"{table.num_rows} experiences have; push it with all of them, or leave it out: "
                f"fields=[...] without it, or drop=[{name!r}] of a collation function"
            )
    return found


def check_ids(tokens: Tensor, *, where: Callable[[list[int]], str]) -> None:
    """Check that token ids are integers, and below 2**63.

    Args:
        tokens: Of one dimension.
        where: Names the one at an index, for the error.
    """
    dtype = tokens.dtype
    if dtype in (torch.int32, torch.int64) or not len(tokens):
        return
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise ValueError(
            f"{where([0])} is {tokens[0].item()}, of {dtype}; token ids are integers: push int32 or "
            "int64"
        )
    exactly(tokens, torch.int64, where=where, cure="token ids are below 2**63")


def token_id(value: int) -> int:
    """A padding id as an int; torch's and NumPy's integers are taken, too.

    Raises:
        InvalidRequestError: It is something else, such as the None of a tokenizer without one.
    """
    wanted = (
        "a token id, such as the tokenizer's pad_token_id, or its eos_token_id where it has none"
    )
    return as_whole("pad_token_id", value, least=-(2**63), most=MOST_INT, wanted=wanted)


def beside(tokens: Tensor, pad_token_id: int) -> Tensor:
    """The tokens in a dtype that holds what they are padded with, too."""
    return tokens if holds(tokens.dtype, pad_token_id) else tokens.long()


def check_lengths(table: Table, joined: dict[str, Joined], responses: Tensor) -> None:
    """Check that known fields have a value for each response token, or as it may be, one more.

    Where a prompt was truncated there is no telling how many they are.
    """
    is_cut = is_prompt_cut(table)
    for name, each in joined.items():
        if name not in RESPONSE_FIELDS or each.lengths.equal(responses):
            continue
        is_odd = (each.lengths != responses) & ~is_cut
        if name == "values":  # With the bootstrap value last.
            is_odd &= each.lengths != responses + 1
        if is_odd.any():
            index = int(is_odd.nonzero()[0])
            raise ValueError(
                f"{uid_of(table, index)}: {name} has {int(each.lengths[index])} values, but the "
                f"response has {int(responses[index])} tokens"
            )


def check_mask(table: Table, mask: Joined) -> None:
    """Check that a mask of numbers is one: the server refuses others, but not all come from it."""
    if mask.flat.dtype == torch.bool:
        return
    is_odd = (mask.flat != 0) & (mask.flat != 1)
    if is_odd.any():
        place = is_odd.nonzero()[0].tolist()
        raise ValueError(
            f"{element_of(table, 'action_mask', mask.lengths, place)} is "
            f"{mask.flat[tuple(place)].item()}; a mask has 1 where the model chose the token, else "
            "0: give weights another name"
        )


def check_routes(table: Table, routes: Joined, lengths: Tensor) -> None:
    """Check that no experience has routes of more tokens than it has."""
    is_odd = routes.lengths > lengths
    if is_odd.any():
        index = int(is_odd.nonzero()[0])
        raise ValueError(
            f"{uid_of(table, index)}: {ROUTES} has {int(routes.lengths[index])} rows for "
            f"{int(lengths[index])} tokens; give one for each token but the last"
        )

"""One field of a packed batch's experiences behind one another, whatever its forms. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from experience_buffer._dense.tensors import common_dtype, tensor_of
from experience_buffer._packed.exact import exactly
from experience_buffer._packed.table import Form, Table
from experience_buffer._packed.writer import TRUNCATE_CODES


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """One field of all experiences."""

    flat: Tensor
    """Row after row, shape [sum of lengths, ...]."""
    lengths: Tensor
    """How many each experience has, int64, shape [B]."""


def column(table: Table, name: str) -> Tensor:
    """One of the batch's columns, shape [B]."""
    return tensor_of(table.column(name))


def joined_field(table: Table, name: str) -> Joined:
    """Put a field's forms together, in the dtype that they promote to.

    Raises:
        ValueError: An experience lacks the field, or its rows can't lie behind one another.
    """
    index = lacking(table, name)
    if index is not None:
        raise ValueError(f"{uid_of(table, index)} has no {name}")
    parts = []
    for form in table.fields.get(name, ()):
        if form.is_scalar:
            raise ValueError(f"{name} is a scalar, so it has no rows to lay out; take of(index)")
        parts.append((_presence(form), Joined(tensor_of(form.view), _lengths(name, form))))
    if name == "action_mask":
        has_none = ~_present(table, name)
        if has_none.any():
            parts.append((has_none, _single_turn_masks(table, has_none)))
    if len(parts) == 1:
        return parts[0][1]
    return _interleaved(table, name, parts)


def lacking(table: Table, name: str) -> int | None:
    """Index of the first experience that lacks a field; None if all have it."""
    missing = (~_has(table, name)).nonzero()
    return int(missing[0]) if len(missing) else None


def num_having(table: Table, name: str) -> int:
    """How many experiences have a field, or, of masks, get one."""
    return table.num_rows - int((~_has(table, name)).sum())


def uid_of(table: Table, index: int) -> str:
    """Name of an experience, for errors."""
    return str(table.values["uid"][index], "utf-8")


def element_of(table: Table, name: str, lengths: Tensor, place: list[int]) -> str:
    """Name an element of a field whose rows lie behind one another, for errors."""
    ends = lengths.cumsum(0)
    index = int((ends <= place[0]).sum())
    row = place[0] - int(ends[index] - lengths[index])
    return f"{uid_of(table, index)}: {name}{[row, *place[1:]]}"


def _has(table: Table, name: str) -> Tensor:
    """Which experiences have a field, or of masks get one, bool, shape [B].

    Log-probabilities without a value are how some producers say that they have none.
    """
    has = _present(table, name)
    if name == "action_mask":  # Only dpo experiences have none.
        has |= ~(_present(table, "chosen") & _present(table, "rejected"))
    if name == "logprobs":
        responses = _field_lengths(table, "tokens") - column(table, "prompt_length")
        has &= (_field_lengths(table, name) > 0) | (responses <= 0) | is_prompt_cut(table)
    return has


def is_prompt_cut(table: Table) -> Tensor:
    """Which experiences' prompts were truncated, bool, shape [B]; their fields are of any length."""
    return column(table, "truncate_status") == TRUNCATE_CODES["prompt_truncated"]


def _present(table: Table, name: str) -> Tensor:
    """Which experiences came with a field, bool, shape [B]."""
    has = torch.zeros(table.num_rows, dtype=torch.bool, device="cpu")
    for form in table.fields.get(name, ()):
        has |= _presence(form)
    return has


def _presence(form: Form) -> Tensor:
    return torch.frombuffer(bytearray(form.present), dtype=torch.bool)


def _interleaved(table: Table, name: str, parts: list[tuple[Tensor, Joined]]) -> Joined:
    """Copy parts, each with the experiences that it has, into the experiences' order."""
    flats = [part.flat for _, part in parts]
    if len({flat.shape[1:] for flat in flats}) > 1:
        texts = ", ".join(
            f"{['*', *part.flat.shape[1:]]} in {uid_of(table, int(present.nonzero()[0]))}"
            for present, part in parts
        )
        raise ValueError(f"{name} differs in shape between experiences: {texts}; take of(index)")
    dtype = flats[0].dtype
    for flat in flats[1:]:
        try:
            dtype = common_dtype(dtype, flat.dtype)
        except ValueError as error:
            raise ValueError(f"{name}: {error}; take of(index)") from None
    lengths = torch.stack([part.lengths for _, part in parts]).sum(0)
    joined = flats[0].new_empty((int(lengths.sum()), *flats[0].shape[1:]), dtype=dtype)
    for present, part in parts:
        joined[present.repeat_interleave(lengths)] = exactly(
            part.flat,
            dtype,
            where=partial(element_of, table, name, part.lengths),
            cure="the experiences' dtypes have no other in common: push one dtype, or take of(index)",
        )
    return Joined(joined, lengths)


def _single_turn_masks(table: Table, rows: Tensor) -> Joined:
    """Make the masks that experiences without one get when they are constructed.

    Ones for the response; if the prompt was truncated, zeros for the logprobs.

    Args:
        table: The batch.
        rows: Which experiences to make masks for, bool, shape [B].
    """
    is_truncated = is_prompt_cut(table)
    lengths = _field_lengths(table, "tokens") - column(table, "prompt_length")
    lengths = torch.where(is_truncated, _field_lengths(table, "logprobs"), lengths)
    lengths = torch.where(rows, lengths, 0)
    return Joined((~is_truncated).repeat_interleave(lengths), lengths)


def _field_lengths(table: Table, name: str) -> Tensor:
    """Rows of each experience in all forms of a field, int64, shape [B]."""
    lengths = torch.zeros(table.num_rows, dtype=torch.int64, device="cpu")
    for form in table.fields.get(name, ()):
        lengths += _lengths(name, form)
    return lengths


def _lengths(name: str, form: Form) -> Tensor:
    """Rows of each experience, int64, shape [B]; together no more than there are bytes."""
    if form.view.shape[0] and not len(form.view.data):
        raise ValueError(f"{name} has rows of no elements; take `tensor`")
    return tensor_of(form.offsets_view).diff()

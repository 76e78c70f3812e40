"""Tensors of a packed batch: views, padded batches and the cu_seqlens form. Imports torch.

B is the number of experiences, N of tokens of all of them, P and R the padded lengths of prompt and
response, T the number of response tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from experience_buffer._dense.tensors import tensor_of
from experience_buffer._packed.join import Joined, column, element_of, joined_field, uid_of
from experience_buffer._packed.layable import (
    ROUTES,
    beside,
    check_ids,
    check_lengths,
    check_mask,
    check_routes,
    names_of,
    token_id,
)
from experience_buffer._packed.table import Table

_LONG: Final = 4096
"""Width from which a copy per experience is faster than one masked copy of all."""
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Padding:
    """Where experiences' rows go in a padded tensor, shape [B, width]. Rows are copied bit for bit.

    Bits are copied whatever the dtype: so any dtype goes, and a NaN stays the NaN it was.
    """

    def __init__(self, starts: Tensor, lengths: Tensor, width: int) -> None:
        self.starts, self.lengths, self.width = starts, lengths, width
        self._mask: Tensor | None = None

    def mask(self) -> Tensor:
        """True where a row is, bool, shape [B, width]."""
        if self._mask is None:
            columns = torch.arange(self.width, device="cpu")
            starts = self.starts[:, None]
            self._mask = (columns >= starts) & (columns < starts + self.lengths[:, None])
        return self._mask

    def filled(self, flat: Tensor, pad_value: int) -> Tensor:
        """Put rows that lie behind one another where they belong, and a value elsewhere."""
        shape = (len(self.lengths), self.width, *flat.shape[1:])
        padded = flat.new_full(shape, pad_value)
        out, values = bits_of(padded), bits_of(flat)
        if self.width < _LONG:
            mask = self.mask()
            out.masked_scatter_(mask.view(*mask.shape, *(1 for _ in shape[2:])), values)
            return padded
        starts, parts = self.starts.tolist(), values.split_with_sizes(self.lengths.tolist())
        for row, start, part in zip(out.unbind(), starts, parts, strict=True):
            row[start : start + len(part)] = part
        return padded


def bits_of(values: Tensor) -> Tensor:
    """A view of values that every operation knows, which torch's unsigned integers and others aren't."""
    return values.view(_BITS[values.element_size()])


def padded(
    table: Table,
    *,
    pad_token_id: int,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
    fields: Sequence[str] | None = None,
    drop: Collection[str] = (),
) -> dict[str, Tensor]:
    """Do what `PackedBatch.padded` says, without the known fields that are named in `drop`."""
    pad_token_id = token_id(pad_token_id)
    tokens, prompts = _tokens(table)
    joined = {name: joined_field(table, name) for name in names_of(table, fields, drop)}
    responses = tokens.lengths - prompts
    routes = joined.pop(ROUTES, None)
    if "action_mask" in joined:
        check_mask(table, joined["action_mask"])
    check_lengths(table, joined, responses)
    num_prompt = _maximum("prompt", max_prompt_length, [("tokens", prompts)], table)
    lengths = [("tokens", responses), *((name, each.lengths) for name, each in joined.items())]
    num_response = _maximum("response", max_response_length, lengths, table)
    whole = Padding(num_prompt - prompts, tokens.lengths, num_prompt + num_response)
    batch = {
        "input_ids": whole.filled(beside(tokens.flat, pad_token_id), pad_token_id),
        "attention_mask": whole.mask(),
    }
    if routes is not None:
        check_routes(table, routes, tokens.lengths)
        batch[ROUTES] = Padding(whole.starts, routes.lengths, whole.width).filled(routes.flat, 0)
    layouts: list[Padding] = []
    for name, each in joined.items():
        layout = next((known for known in layouts if known.lengths.equal(each.lengths)), None)
        if layout is None:
            layout = Padding(torch.zeros_like(each.lengths), each.lengths, num_response)
            layouts.append(layout)
        _add(batch, name, layout.filled(each.flat, 0))
    return batch


def varlen(
    table: Table, *, fields: Sequence[str] | None = None, drop: Collection[str] = ()
) -> dict[str, Tensor]:
    """Do what `PackedBatch.varlen` says, without the known fields that are named in `drop`."""
    tokens, prompts = _tokens(table)
    cu_seqlens = _cumulated(tokens.lengths)
    position_ids = torch.arange(len(tokens.flat), device="cpu")
    position_ids -= cu_seqlens[:-1].repeat_interleave(tokens.lengths)
    responses = tokens.lengths - prompts
    # Before a response token are the response tokens before it, and the prompts up to its own.
    response_index = prompts.cumsum(0).repeat_interleave(responses)
    response_index += torch.arange(len(response_index), device="cpu")
    batch = {
        "input_ids": tokens.flat,
        "cu_seqlens": cu_seqlens,
        "max_seqlen": tokens.lengths.max(),
        "position_ids": position_ids,
        "response_index": response_index,
        "cu_response_seqlens": _cumulated(responses),
    }
    for name in names_of(table, fields, drop):
        joined = joined_field(table, name)
        _add(batch, name, joined.flat)
        if name == ROUTES:
            check_routes(table, joined, tokens.lengths)
        if name == "action_mask":
            check_mask(table, joined)
        if name == ROUTES or not joined.lengths.equal(responses):
            _add(batch, f"{name}.cu_seqlens", _cumulated(joined.lengths))
    return batch


def _tokens(table: Table) -> tuple[Joined, Tensor]:
    """The tokens of all experiences, shape [N], and how many of each are the prompt's, shape [B]."""
    if not table.num_rows:
        raise ValueError("the batch is empty; there is nothing to lay out")
    for form in table.fields.get("tokens", ()):
        if len(form.view.shape) == 1:  # What has other shapes is refused with them.
            lengths = tensor_of(form.offsets_view).diff()
            check_ids(tensor_of(form.view), where=partial(element_of, table, "tokens", lengths))
    joined = joined_field(table, "tokens")
    prompts = column(table, "prompt_length")
    if joined.flat.dim() != 1:
        raise ValueError(f"tokens have {joined.flat.dim()} dimensions; token ids have 1")
    is_odd = (prompts < 0) | (prompts > joined.lengths)
    if is_odd.any():
        index = int(is_odd.nonzero()[0])
        raise ValueError(
            f"{uid_of(table, index)} has {int(joined.lengths[index])} tokens, but a prompt of "
            f"{int(prompts[index])}"
        )
    return joined, prompts


def _add(batch: dict[str, Tensor], name: str, value: Tensor) -> None:
    if name in batch:
        raise ValueError(f"field {name!r} has the name of another entry; take `tensor({name!r})`")
    batch[name] = value


def _cumulated(lengths: Tensor) -> Tensor:
    """Offsets as kernels want them: int32, shape [B + 1]."""
    sums = torch.zeros(len(lengths) + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(lengths, 0, out=sums[1:])
    if sums[-1] >= 2**31:
        raise ValueError(f"{int(sums[-1])} tokens don't fit into 32 bits; take smaller batches")
    return sums.int()


def _maximum(
    what: str, given: int | None, lengths: Sequence[tuple[str, Tensor]], table: Table
) -> int:
    """The padded length: the one given if all fit, else as long as the longest."""
    longest = max(int(each.max()) for _, each in lengths)
    if given is None:
        return longest
    for name, each in lengths if longest > given else ():
        if each.max() > given:
            index = int(each.argmax())
            raise ValueError(
                f"{uid_of(table, index)}: {name} has {int(each[index])} {what} tokens; the batch "
                f"has room for {given}"
            )
    return given

"""Batches as other frameworks' trainers name and lay them out; `collation.py` has the makers.

B is the number of experiences, P and R the padded lengths of prompt and response, S that of whole
experiences, N the number of tokens of all of them. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from experience_buffer._data import beside_tokens
from experience_buffer._data.collation_input import Experiences, as_packed, check
from experience_buffer._messages.batch_data import BatchData
from experience_buffer._packed import torch_views
from experience_buffer._packed.exact import exactly
from experience_buffer._packed.join import element_of
from experience_buffer._packed.layable import RESPONSE_FIELDS, ROUTES, beside
from experience_buffer._packed.torch_views import Padding, bits_of
from experience_buffer.experience import Experience
from experience_buffer.packed import PackedBatch


class Collate(Protocol):
    """Makes what a trainer takes of the experiences of one batch."""

    def __call__(self, experiences: Any, /) -> Any:
        """Lay out a `PackedBatch`, or a list of `Experience`."""


_KNOWN: Final = (*RESPONSE_FIELDS, ROUTES)
_VERL: Final = {
    "logprobs": "rollout_log_probs",
    "token_level_reward": "token_level_scores",
    "ref_logprobs": "ref_log_prob",
}
_TRL: Final = {"logprobs": "old_per_token_logps", "ref_logprobs": "ref_per_token_logps"}
_AREAL: Final = {"action_mask": "loss_mask"}


def padded(
    experiences: Experiences,
    /,
    *,
    fields: Sequence[str] | None,
    columns: Sequence[str],
    drop: Collection[str],
    **options: Any,
) -> dict[str, Any]:
    """Do what `collation.padded_collate` says."""
    packed = as_packed(experiences)
    batch = torch_views.padded(packed._table, fields=fields, drop=drop, **options)
    return _with_rest(batch, experiences, packed, columns, drop, fields=fields)


def varlen(
    experiences: Experiences,
    /,
    *,
    fields: Sequence[str] | None,
    columns: Sequence[str],
    drop: Collection[str],
) -> dict[str, Any]:
    """Do what `collation.varlen_collate` says."""
    packed = as_packed(experiences)
    batch = torch_views.varlen(packed._table, fields=fields, drop=drop)
    return _with_rest(batch, experiences, packed, columns, drop, fields=fields)


def verl(
    experiences: Experiences,
    /,
    *,
    pad_token_id: int,
    max_prompt_length: int | None,
    max_response_length: int | None,
    columns: Sequence[str],
    drop: Collection[str],
) -> dict[str, Any]:
    """Do what `collation.verl_collate` says."""
    packed = as_packed(experiences)
    found = torch_views.padded(
        packed._table,
        pad_token_id=pad_token_id,
        max_prompt_length=max_prompt_length,
        max_response_length=max_response_length,
        drop=drop,
    )
    response_mask = _action_mask(found)
    input_ids, attention_mask = found.pop("input_ids").long(), found.pop("attention_mask").long()
    num_prompt = input_ids.shape[1] - response_mask.shape[1]
    batch: dict[str, Any] = {
        "prompts": input_ids[:, :num_prompt],
        "responses": input_ids[:, num_prompt:],
        "response_mask": response_mask,
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
        **_renamed(found, _VERL),
    }
    rewards = None if "token_level_scores" in batch else _rewards(packed, drop)
    if rewards is not None:
        batch["token_level_scores"] = _at_last_token(rewards, attention_mask)[:, num_prompt:]
    batch["uid"] = _objects(beside_tokens.tasks(packed))
    batch["unique_ids"] = _objects(packed.uids)
    return _with_rest(batch, experiences, packed, columns, drop, listed=_objects)


def trl(
    experiences: Experiences,
    /,
    *,
    pad_token_id: int,
    max_prompt_length: int | None,
    max_response_length: int | None,
    columns: Sequence[str],
    drop: Collection[str],
) -> dict[str, Any]:
    """Do what `collation.trl_collate` says."""
    packed = as_packed(experiences)
    found = torch_views.padded(
        packed._table,
        pad_token_id=pad_token_id,
        max_prompt_length=max_prompt_length,
        max_response_length=max_response_length,
        drop=drop,
    )
    tool_mask = _action_mask(found)
    input_ids, attention_mask = found.pop("input_ids").long(), found.pop("attention_mask").long()
    num_prompt = input_ids.shape[1] - tool_mask.shape[1]
    batch = {
        "prompt_ids": input_ids[:, :num_prompt],
        "prompt_mask": attention_mask[:, :num_prompt],
        "completion_ids": input_ids[:, num_prompt:],
        "completion_mask": attention_mask[:, num_prompt:],
        "tool_mask": tool_mask,
        **_renamed(found, _TRL),
    }
    return _with_rest(batch, experiences, packed, columns, drop)


def areal(
    experiences: Experiences,
    /,
    *,
    pad_token_id: int,
    columns: Sequence[str],
    drop: Collection[str],
) -> dict[str, Any]:
    """Do what `collation.areal_collate` says."""
    packed = as_packed(experiences)
    flat = torch_views.varlen(packed._table, drop=drop)
    flat["action_mask"] = _action_mask(flat)
    lengths = flat["cu_seqlens"].diff()
    rows = Padding(torch.zeros_like(lengths), lengths, int(flat["max_seqlen"]))
    input_ids = beside(flat["input_ids"], pad_token_id)
    batch = {"input_ids": rows.filled(input_ids, pad_token_id), "attention_mask": rows.mask()}
    for name in (name for name in _KNOWN if name in flat):
        value = flat[name]
        if name == ROUTES:
            index = flat["position_ids"] < flat[f"{name}.cu_seqlens"].diff().repeat_interleave(
                lengths
            )
        elif f"{name}.cu_seqlens" in flat or value.dim() != 1:
            cure = "" if name == "action_mask" else f", or drop=[{name!r}]"
            raise ValueError(
                f"{name} isn't one number per response token; lay it out with varlen_collate{cure}"
            )
        else:
            index = flat["response_index"]
        is_version = name == "versions"
        if is_version:
            value = _exact(packed, flat, name, torch.int64, "versions are whole numbers")
        whole = value.new_full((len(input_ids), *value.shape[1:]), -1 if is_version else 0)
        bits_of(whole)[index] = bits_of(value)
        batch[_AREAL.get(name, name)] = rows.filled(whole, 0)
    rewards = _rewards(packed, drop)
    if rewards is not None:
        batch["rewards"] = rewards
    return _with_rest(batch, experiences, packed, columns, drop)


def trinity(experiences: Experiences, /) -> list[Experience]:
    """Do what `collation.trinity_collate` says."""
    if not isinstance(experiences, PackedBatch | BatchData):
        check(experiences)
    return list(experiences)


def _with_rest(
    batch: dict[str, Any],
    experiences: Experiences,
    packed: PackedBatch,
    columns: Sequence[str],
    drop: Collection[str],
    *,
    fields: Sequence[str] | None = None,
    listed: Callable[[list[Any]], Any] = list,
) -> dict[str, Any]:
    """Add what isn't laid out per token; of tensors nothing more where `fields` chooses them."""
    return beside_tokens.add(
        batch,
        packed,
        taken=_KNOWN if fields is None else packed.fields,
        columns=columns,
        drop=drop,
        is_delivered=isinstance(experiences, PackedBatch | BatchData),
        listed=listed,
    )


def _renamed(found: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    """Fields under a framework's names, or their own."""
    return {names.get(name, name): value for name, value in found.items() if name != "action_mask"}


def _action_mask(found: dict[str, Tensor]) -> Tensor:
    """The mask of what was laid out, padded or not, as int64.

    Raises:
        ValueError: There is none, since experiences are dpo's.
    """
    mask = found.get("action_mask")
    if mask is None:
        raise ValueError(
            "an experience is dpo's and has no response; make two of it with "
            "collation.split_dpo_experience_to_single_turn"
        )
    return mask.long()


def _exact(
    packed: PackedBatch, flat: dict[str, Tensor], name: str, dtype: torch.dtype, cure: str
) -> Tensor:
    return exactly(
        flat[name], dtype, where=lambda place: _element(packed, flat, name, place), cure=cure
    )


def _element(packed: PackedBatch, flat: dict[str, Tensor], name: str, place: list[int]) -> str:
    """Name an element of a field of a batch without padding."""
    offsets = flat.get(f"{name}.cu_seqlens", flat["cu_response_seqlens"])
    return element_of(packed._table, name, offsets.diff(), place)


def _rewards(packed: PackedBatch, drop: Collection[str]) -> Tensor | None:
    """The scalar rewards, float32, shape [B]; None where no experience has one.

    Raises:
        ValueError: Some have one and others don't, or one isn't finite in float32.
    """
    has_reward = packed.column("has_reward")
    if "reward" in drop or not has_reward.any():
        return None
    rewards = packed.column("reward")

    def where(place: list[int]) -> str:
        return f"{packed.uids[place[0]]}: reward"

    if not has_reward.all():
        index = int((~has_reward).nonzero()[0])
        raise ValueError(
            f"{where([index])} is None, but {int(has_reward.sum())} of the {len(packed)} experiences "
            "have one; push it with all of them, or drop=['reward']"
        )
    cure = "scale rewards before they are pushed, or drop=['reward']"
    if not rewards.isfinite().all():
        index = int((~rewards.isfinite()).nonzero()[0])
        raise ValueError(
            f"{where([index])} is {rewards[index].item()}, not a finite number; {cure}"
        )
    return exactly(rewards, torch.float32, where=where, cure=cure)


def _at_last_token(rewards_B: Tensor, attention_mask: Tensor) -> Tensor:
    """Scalar rewards at the last token of each row, float32, of the mask's shape."""
    scores = torch.zeros(attention_mask.shape, dtype=torch.float32, device="cpu")
    # The sum grows up to the last token; of equal ones argmax takes the first.
    last = attention_mask.cumsum(-1).argmax(-1)
    scores[torch.arange(len(rewards_B), device="cpu"), last] = rewards_B
    return scores


def _objects(values: list[Any]) -> Any:
    """An array of objects, as DataProto takes them, shape [B]."""
    import numpy as np

    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array

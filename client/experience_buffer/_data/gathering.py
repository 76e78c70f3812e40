"""What `collation` has for lists of experiences: padded tensors, groups, Hugging Face datasets.

B is the number of experiences, P the padded prompt length, R the padded response length. Prompts
are padded on the left, responses on the right; lengths come from the experiences, never from masks.
`concat` and `split` join and separate batches that are padded already. Importing this module imports torch; `datasets` is
imported only by the two functions that need it. All functions are thread-safe.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor

from experience_buffer._arguments import refused
from experience_buffer._codec.item import META_FIELDS, TENSOR_FIELDS
from experience_buffer._dense.tensors import common_dtype, plain
from experience_buffer._packed.exact import exactly, holds
from experience_buffer._packed.layable import check_ids, token_id
from experience_buffer._payloads import custom_field, custom_field_entry
from experience_buffer.eid import EID
from experience_buffer.experience import Experience

_ONE_RESPONSES: Final = tuple(
    name for name in TENSOR_FIELDS if name not in ("tokens", "chosen", "rejected", "action_mask")
)
"""Tensors that belong to a response."""

if TYPE_CHECKING:
    from datasets import Dataset  # type: ignore[import-not-found,unused-ignore]


def split_dpo_experience_to_single_turn(experiences: Sequence[Experience]) -> list[Experience]:
    """Make two single-turn experiences of each dpo one: the chosen response, then the rejected.

    Both keep the batch, task, run and step and get a suffix of their own; both get what isn't one
    response's.

    Args:
        experiences: Of type dpo.

    Raises:
        ValueError: An experience has no chosen or no rejected response, or a tensor of which nothing
            says whose of the two it is.
    """
    halves = []
    for experience in experiences:
        if experience.chosen is None or experience.rejected is None:
            raise ValueError(f"{experience.eid} isn't dpo: give it chosen and rejected")
        for name in (*_ONE_RESPONSES, *experience.extra):
            if experience.extra.get(name, getattr(experience, name, None)) is not None:
                raise ValueError(
                    f"{experience.eid} has {name}, and nothing says of which response; take it out"
                )
        eid = experience.eid
        for response, messages in (
            (experience.chosen, experience.chosen_messages),
            (experience.rejected, experience.rejected_messages),
        ):
            halves.append(
                Experience(
                    eid=EID(eid.batch, eid.task, eid.run, eid.step),
                    tokens=torch.cat([experience.tokens, response]),
                    prompt_length=len(experience.tokens),
                    reward=experience.reward,
                    info=experience.info,
                    metrics=experience.metrics,
                    prompt_text=experience.prompt_text,
                    messages=messages,
                    tools=experience.tools,
                    multi_modal_inputs=experience.multi_modal_inputs,
                    custom_fields=experience.custom_fields,
                )
            )
    return halves


def gather_token_ids(
    experiences: Sequence[Experience],
    max_prompt_length: int,
    max_response_length: int,
    pad_token_id: int,
) -> Tensor:
    """Pad tokens so that all responses begin in one column.

    Args:
        experiences: B of them.
        max_prompt_length: P.
        max_response_length: R.
        pad_token_id: What fills the columns where no token is.

    Returns:
        Shape [B, P + R], in the dtype that the experiences' tokens have in common; of integers one
        that holds all ids, and `pad_token_id`.

    Raises:
        ValueError: There are no experiences; a prompt or response is longer than its maximum; tokens
            aren't integers, or their dtypes have none in common.
    """
    _check_any(experiences)
    tokens = _attributes(experiences, "tokens")
    for experience, each in zip(experiences, tokens, strict=True):
        check_ids(each, where=partial(_element, experience, "tokens"))
    pad_token_id = token_id(pad_token_id)
    dtype = reduce(common_dtype, [each.dtype for each in tokens])
    if not holds(dtype, pad_token_id):
        dtype = torch.int64
    token_ids = tokens[0].new_full(
        (len(experiences), max_prompt_length + max_response_length), pad_token_id, dtype=dtype
    )
    for row, experience, each in zip(token_ids, experiences, tokens, strict=True):
        start, end = _columns(experience, max_prompt_length, max_response_length)
        row[start:end] = each
    return token_ids


def gather_attention_masks(
    experiences: Sequence[Experience], max_prompt_length: int, max_response_length: int
) -> Tensor:
    """Mark what `gather_token_ids` filled with tokens.

    Args:
        experiences: B of them.
        max_prompt_length: P.
        max_response_length: R.

    Returns:
        True where a token is, shape [B, P + R], bool.

    Raises:
        ValueError: A prompt or response is longer than its maximum.
    """
    masks = torch.zeros(
        (len(experiences), max_prompt_length + max_response_length), dtype=torch.bool, device="cpu"
    )
    for row, experience in zip(masks, experiences, strict=True):
        start, end = _columns(experience, max_prompt_length, max_response_length)
        row[start:end] = True
    return masks


def gather_action_masks(experiences: Sequence[Experience], max_response_length: int) -> Tensor:
    """Pad action masks with False on the right.

    Args:
        experiences: B of them.
        max_response_length: R.

    Returns:
        Shape [B, R]; bool, or wider if an experience's mask is.

    Raises:
        ValueError: An action mask is missing or longer than R.
    """
    return gather_response_attrs(experiences, "action_mask", max_response_length)


def gather_response_attrs(
    experiences: Sequence[Experience],
    attr_name: str,
    max_response_length: int,
    pad_value: float = 0,
) -> Tensor:
    """Pad one tensor per response token (`logprobs`, `advantages`, ...) on the right.

    Args:
        experiences: B of them.
        attr_name: An attribute of shape [T, ...], or the name of an extra tensor.
        max_response_length: R.
        pad_value: What to fill with.

    Returns:
        Shape [B, R, ...], in the dtype that they have in common.

    Raises:
        ValueError: There are no experiences; one lacks it, or has another shape, or it is longer than
            R; or the dtype can't hold one of its values, or what to fill with.
    """
    _check_any(experiences)
    values = _attributes(experiences, attr_name)
    dtype = reduce(common_dtype, [value.dtype for value in values])
    if not holds(dtype, pad_value):
        raise ValueError(
            f"pad_value is {pad_value!r}, which {attr_name} of {dtype} can't hold; give another one"
        )
    first = values[0]
    gathered = first.new_full(
        (len(values), max_response_length, *first.shape[1:]), pad_value, dtype=dtype
    )
    for row, value, experience in zip(gathered, values, experiences, strict=True):
        if value.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"{attr_name} differs in shape: {list(first.shape)} in {experiences[0].eid}, "
                f"{list(value.shape)} in {experience.eid}"
            )
        if len(value) > max_response_length:
            raise ValueError(
                f"{attr_name} of {experience.eid} has {len(value)} response tokens; the batch has "
                f"room for {max_response_length}"
            )
        row[: len(value)] = exactly(
            value,
            dtype,
            where=partial(_element, experience, attr_name),
            cure="the experiences' dtypes have no other in common: push one dtype",
        )
    return gathered


def gather_multi_modal_inputs(experiences: Sequence[Experience]) -> dict[str, list[Tensor]]:
    """List each multi-modal input, one tensor per experience.

    Args:
        experiences: B of them.

    Raises:
        ValueError: There are no experiences, one has no multi-modal inputs, or lacks one that another
            has. Collation functions lay those out, too: a dict per experience.
    """
    _check_any(experiences)
    inputs = []
    for experience in experiences:
        if experience.multi_modal_inputs is None:
            raise ValueError(f"{experience.eid} has no multi_modal_inputs")
        inputs.append(experience.multi_modal_inputs)
    keys = list(dict.fromkeys(key for each in inputs for key in each))
    for experience, each in zip(experiences, inputs, strict=True):
        if lacking := [key for key in keys if key not in each]:
            owner = next(other.eid for other in experiences if lacking[0] in _inputs(other))
            raise ValueError(
                f"{experience.eid} has no multi_modal_inputs[{lacking[0]!r}], which {owner} has; "
                "gather those that have the same keys, or take a collation function, whose entry is a "
                "dict per experience"
            )
    return {key: [each[key] for each in inputs] for key in keys}


def group_by(
    experiences: Sequence[Experience], id_type: Literal["task", "run", "step"]
) -> dict[str, list[Experience]]:
    """Group experiences by tid, rid or sid, in order of appearance.

    Args:
        experiences: Any number.
        id_type: "task", "run" or "step".

    Raises:
        InvalidRequestError: `id_type` is none of the three.
    """
    attribute = {"task": "tid", "run": "rid", "step": "sid"}.get(id_type)
    if attribute is None:
        raise refused("id_type", id_type, "'task', 'run' or 'step'")
    groups: dict[str, list[Experience]] = {}
    for experience in experiences:
        groups.setdefault(getattr(experience.eid, attribute), []).append(experience)
    return groups


def to_hf_datasets(experiences: Sequence[Experience]) -> Dataset:
    """Make a Hugging Face dataset, a row per experience; superseded by `tables.to_table`.

    Its columns and their types depend on the experiences, so two of them may not fit together, and
    tensors lose their dtype. In its place: `datasets.Dataset(tables.to_table(experiences))`.

    Args:
        experiences: Any number.
    """
    from datasets import Dataset

    warnings.warn(
        "the columns of to_hf_datasets depend on the experiences, and so two datasets don't fit together: "
        "take datasets.Dataset(experience_buffer.tables.to_table(experiences)), and "
        "tables.from_table(dataset.data.table) back; this one goes with version 1.0",
        DeprecationWarning,
        stacklevel=2,
    )
    return Dataset.from_list([_row(experience) for experience in experiences])


def from_hf_datasets(dataset: Dataset) -> list[Experience]:
    """Make experiences of a dataset's rows; lists become tensors as in the constructor.

    A column that `Experience` doesn't have is left out. Nested dicts come back with every key that
    any row of the dataset had, None where the row had none: that is how such datasets store them.

    Args:
        dataset: What `to_hf_datasets` made, or another with such columns; of those that were made of a
            table, `tables.from_table(dataset.data.table)` makes exactly what it was made of.
    """
    return [_experience(row) for row in dataset.to_list()]


def _check_any(experiences: Sequence[Experience]) -> None:
    if not experiences:
        raise ValueError("there are no experiences to gather from; give at least one")


def _inputs(experience: Experience) -> Mapping[str, Tensor]:
    return experience.multi_modal_inputs or {}


def _element(experience: Experience, name: str, place: list[int]) -> str:
    """Name an element of an experience's tensor, for errors."""
    return f"{experience.eid}: {name}{place}"


def _columns(
    experience: Experience, max_prompt_length: int, max_response_length: int
) -> tuple[int, int]:
    """Return where the tokens begin and end in a padded row."""
    num_tokens, prompt_length = len(experience.tokens), experience.prompt_length
    if prompt_length > max_prompt_length or num_tokens - prompt_length > max_response_length:
        raise ValueError(
            f"{experience.eid} has {prompt_length} + {num_tokens - prompt_length} tokens; the "
            f"batch has room for {max_prompt_length} + {max_response_length}"
        )
    start = max_prompt_length - prompt_length
    return start, start + num_tokens


def _attributes(experiences: Sequence[Experience], name: str) -> list[Tensor]:
    values = []
    for experience in experiences:
        value = getattr(experience, name, None)
        if value is None:
            value = experience.extra.get(name)
        if value is None:
            raise ValueError(f"{experience.eid} has no {name}")
        values.append(_plain(experience, name, value))
    return values


def _plain(experience: Experience, name: str, value: Tensor) -> Tensor:
    try:
        return plain(value)
    except TypeError as error:
        raise ValueError(f"{experience.eid}: {name} is {error}") from None


def _row(experience: Experience) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(experience, name) for name in META_FIELDS}
    # A column has one type, and a batch or task may be a number here and text there.
    row["eid"] = experience.eid.to_dict() | {
        "batch": str(experience.eid.batch),
        "task": str(experience.eid.task),
    }
    for name in TENSOR_FIELDS:
        value = getattr(experience, name)
        row[name] = None if value is None else _plain(experience, name, value).tolist()
    for name in ("multi_modal_inputs", "extra"):
        tensors = getattr(experience, name) or {}
        row[name] = {
            key: _plain(experience, f"{name}[{key!r}]", value).tolist()
            for key, value in tensors.items()
        } or None
    row["custom_fields"] = list(map(custom_field_entry, experience.custom_fields))
    return row


def _experience(row: dict[str, Any]) -> Experience:
    known = (*META_FIELDS, *TENSOR_FIELDS, "multi_modal_inputs")
    given = {name: row[name] for name in known if row.get(name) is not None}
    if given.get("multi_modal_inputs"):
        inputs = given["multi_modal_inputs"]
        given["multi_modal_inputs"] = {k: v for k, v in inputs.items() if v is not None}
    extra = {name: v for name, v in (row.get("extra") or {}).items() if v is not None}
    fields = list(map(custom_field, row.get("custom_fields") or ()))
    return Experience(extra=extra, custom_fields=fields, **given)

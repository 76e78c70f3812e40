"""What trainers are fed with: collation functions for packed batches and lists of experiences.

Each `*_collate` makes a collation function that can be pickled, so that DataLoader workers can
use it. It takes a `PackedBatch`, or a sequence of `Experience`, and so it is a `collate_fn` for any
DataLoader of experiences as well. Names of entries are those of the fields, or of the framework
that the function is named after.

`gather_*` pad one field of a list, `group_by` and the others take lists apart, or into Hugging Face
datasets and back; `concat` and `split` join and separate batches that are padded already.

B is the number of experiences, P and R the padded lengths of prompt and response, S that of whole
experiences, N the number of tokens of all of them, T of their response tokens. Importing this
module imports torch. All functions are thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from experience_buffer._data import framework_collation as framework
from experience_buffer._data.framework_collation import Collate, Experiences, as_packed
from experience_buffer._data.gathering import (
    from_hf_datasets,
    gather_action_masks,
    gather_attention_masks,
    gather_multi_modal_inputs,
    gather_response_attrs,
    gather_token_ids,
    group_by,
    split_dpo_experience_to_single_turn,
    to_hf_datasets,
)
from experience_buffer._data.trajectories import TrajectoryLayout, concat, split
from experience_buffer.errors import InvalidRequestError
from experience_buffer.packed import PackedBatch

__all__ = [
    "Collate",
    "Experiences",
    "TrajectoryLayout",
    "areal_collate",
    "concat",
    "from_hf_datasets",
    "gather_action_masks",
    "gather_attention_masks",
    "gather_multi_modal_inputs",
    "gather_response_attrs",
    "gather_token_ids",
    "group_by",
    "padded_collate",
    "split",
    "split_dpo_experience_to_single_turn",
    "to_hf_datasets",
    "trinity_collate",
    "trl_collate",
    "varlen_collate",
    "verl_collate",
]
__dir__ = __all__.copy


def padded_collate(
    *,
    pad_token_id: int,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
    fields: Sequence[str] | None = None,
    columns: Sequence[str] = (),
) -> Collate:
    """Pad prompts on the left and responses on the right, as `PackedBatch.padded` does.

    The entries are `input_ids` and `attention_mask`, shape [B, P + R]; `action_mask`, `logprobs`,
    `advantages` and other fields, shape [B, R, ...].

    Args:
        pad_token_id: What fills `input_ids` where no token is: the tokenizer's.
        max_prompt_length: P; None for the longest prompt of each batch. With both lengths given,
            all batches have the same shape. A longer prompt or response is an error.
        max_response_length: R; None for the longest response of each batch.
        fields: Fields of one row per response token, which every experience must have; None for
            the known ones that all of them have.
        columns: What to add of each experience: columns such as `"reward"` and `"staleness"`,
            tensors of shape [B]; `"uid"` and `"group"`, lists of B texts.
    """
    return partial(
        _padded,
        pad_token_id=pad_token_id,
        max_prompt_length=max_prompt_length,
        max_response_length=max_response_length,
        fields=None if fields is None else tuple(fields),
        columns=tuple(columns),
    )


def varlen_collate(*, fields: Sequence[str] | None = None, columns: Sequence[str] = ()) -> Collate:
    """Lay experiences behind one another without padding, as `PackedBatch.varlen` does.

    The entries are `input_ids` and `position_ids`, shape [N]; `cu_seqlens`, `max_seqlen`,
    `response_index`, `cu_response_seqlens`; fields, shape [T, ...].

    Args:
        fields: As for `padded_collate`.
        columns: As for `padded_collate`.
    """
    return partial(
        _varlen, fields=None if fields is None else tuple(fields), columns=tuple(columns)
    )


def verl_collate(
    *,
    pad_token_id: int,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
) -> Collate:
    """Make what `verl.DataProto.from_single_dict` takes.

    The entries are `prompts` [B, P], `responses` and `response_mask` [B, R], `input_ids`,
    `attention_mask` and `position_ids` [B, P + R], all int64; where all experiences have them,
    `rollout_log_probs`, `ref_log_prob`, `advantages`, `returns`, `values`, `teacher_logprobs` and
    `token_level_scores` [B, R]: the rewards per token or else the scalar ones, at the last token;
    `uid` (of the groups) and `unique_ids`, numpy arrays of B texts. A dpo experience is an error.

    Args:
        pad_token_id: As for `padded_collate`.
        max_prompt_length: As for `padded_collate`.
        max_response_length: As for `padded_collate`.

    Source: verl `DataProto`; Trinity-RFT 0.6.0 `to_data_proto`.
    """
    return partial(
        framework.verl,
        pad_token_id=pad_token_id,
        max_prompt_length=max_prompt_length,
        max_response_length=max_response_length,
    )


def trl_collate(
    *,
    pad_token_id: int,
    max_prompt_length: int | None = None,
    max_completion_length: int | None = None,
) -> Collate:
    """Make the inputs of the loss of TRL's `GRPOTrainer`.

    The entries are `prompt_ids` and `prompt_mask` [B, P]; `completion_ids`, `completion_mask`
    (where a token is) and `tool_mask` (where the model wrote it) [B, R], all int64; where all
    experiences have them, `old_per_token_logps`, `ref_per_token_logps` and `advantages`, which are
    per token, [B, R]. A dpo experience is an error.

    Args:
        pad_token_id: As for `padded_collate`.
        max_prompt_length: As for `padded_collate`.
        max_completion_length: R; None for the longest response of each batch.

    Source: TRL `GRPOTrainer`, whose loss takes advantages of shape [B] or [B, R].
    """
    return partial(
        framework.trl,
        pad_token_id=pad_token_id,
        max_prompt_length=max_prompt_length,
        max_response_length=max_completion_length,
    )


def areal_collate(*, pad_token_id: int = 0) -> Collate:
    """Make AReaL's trajectories: everything per token, padded on the right.

    The entries are `input_ids`, `attention_mask` (bool) and `loss_mask` [B, S]; where all
    experiences have them, `logprobs`, `advantages`, `returns` and `values` [B, S], 0 on prompts,
    `versions`, -1 on prompts; `rewards` [B], float32, 0 where there is none. A dpo experience is an
    error, and so is a field that isn't one number per response token, such as `values` with a
    bootstrap value.

    Args:
        pad_token_id: What fills `input_ids` where no token is.

    Source: AReaL `RLVRWorkflow`, `concat_padded_tensors`.
    """
    return partial(framework.areal, pad_token_id=pad_token_id)


def trinity_collate() -> Collate:
    """Make a list of `Experience`, whose attributes are those that Trinity-RFT's trainers read.

    Its `gather_*` functions and `to_data_proto` take them as they are.
    """
    return framework.trinity


def _padded(
    experiences: Experiences, /, *, columns: Sequence[str], **options: Any
) -> dict[str, Any]:
    packed = as_packed(experiences)
    return _with_columns(packed.padded(**options), packed, columns)


def _varlen(
    experiences: Experiences, /, *, fields: Sequence[str] | None, columns: Sequence[str]
) -> dict[str, Any]:
    packed = as_packed(experiences)
    return _with_columns(packed.varlen(fields), packed, columns)


def _with_columns(
    batch: dict[str, Tensor], packed: PackedBatch, columns: Sequence[str]
) -> dict[str, Any]:
    found: dict[str, Any] = dict(batch)
    for name in columns:
        if name in found:
            raise InvalidRequestError(
                f"column {name!r} has the name of another entry of the batch: leave it out of "
                "columns, or of fields",
                subject="columns",
            )
        if name in ("uid", "group"):
            found[name] = packed.uids if name == "uid" else packed.groups
        else:
            found[name] = packed.column(name)
    return found

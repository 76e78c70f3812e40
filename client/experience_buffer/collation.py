"""What trainers are fed with: collation functions for packed batches and lists of experiences.

Each `*_collate` makes a collation function that can be pickled, so that DataLoader workers can
use it. It takes a batch, a `PackedBatch`, or a sequence of `Experience`, and makes the same of all of them; so
it is a `collate_fn` for any DataLoader of experiences as well. Names of entries are those of the
fields, or of the framework that the function is named after.

Nothing that was pushed is left behind in silence. Beside what each function names, a batch has

- a field that is known to have a value per response token, under its own name where the framework
  has none for it;
- `routed_experts`, laid out like `input_ids`, 0 where a token has none;
- `multi_modal_inputs`, a list of B dicts of tensors, empty ones where an experience has none;
- the custom fields, under their destinations, shape [B, ...];
- every other tensor under its name, a list of B tensors as they are, None where there is none;
- the columns that are asked for.

For verl, lists are NumPy arrays of B objects. An experience that lacks a known field which others
have, a number that the entry's dtype can't hold, a mask that is neither 0 nor 1: all of these are a
`ValueError` that names the experience and the field, and `drop` leaves fields out on purpose.

`gather_*` pad one field of a list, `group_by` and the others take lists apart, or into Hugging Face
datasets and back; `concat` and `split` join and separate batches that are padded already.

B is the number of experiences, P and R the padded lengths of prompt and response, S that of whole
experiences, N the number of tokens of all of them, T of their response tokens. Importing this
module imports torch. All functions are thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from experience_buffer._arguments import MOST_INT, as_whole, names
from experience_buffer._dense.convert import require_torch

try:
    from experience_buffer._data import framework_collation as framework
except ModuleNotFoundError:
    require_torch("experience_buffer.collation")
    raise

from experience_buffer._data.collation_input import Experiences
from experience_buffer._data.framework_collation import Collate
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
from experience_buffer._packed.layable import token_id
from experience_buffer.errors import InvalidRequestError

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
    drop: Sequence[str] = (),
) -> Collate:
    """Pad prompts on the left and responses on the right, as `PackedBatch.padded` does.

    The entries are `input_ids` and `attention_mask`, shape [B, P + R]; `action_mask`, `logprobs`,
    `advantages` and other fields, shape [B, R, ...], in the dtypes of the experiences.

    Args:
        pad_token_id: What fills `input_ids` where no token is: the tokenizer's. Where the tokens'
            dtype can't hold it, they become int64.
        max_prompt_length: P; None for the longest prompt of each batch. With both lengths given,
            all batches have the same shape. A longer prompt or response is an error.
        max_response_length: R; None for the longest response of each batch.
        fields: Fields of one row per response token, which every experience must have, in place of
            all tensors but `multi_modal_inputs`; None for all that were pushed.
        columns: What to add of each experience: columns of a packed batch such as `"reward"` and
            `"staleness"`, tensors of shape [B]; `"uid"`, `"task"`, `"group"`, `"flags"`, and
            metadata such as `"info"` and `"messages"`, lists of B. What a delivery knows, such as the
            group, a list of experiences doesn't. Where some have no reward, or no staleness, it takes
            `"has_reward"` or `"has_staleness"`, too.
        drop: Fields to leave out: names of tensors, `"multi_modal_inputs"`, `"custom_fields"`, or
            destinations of these.
    """
    return partial(
        framework.padded,
        pad_token_id=token_id(pad_token_id),
        max_prompt_length=_length("max_prompt_length", max_prompt_length),
        max_response_length=_length("max_response_length", max_response_length),
        fields=None if fields is None else names("fields", fields),
        columns=names("columns", columns),
        drop=names("drop", drop),
    )


def varlen_collate(
    *,
    fields: Sequence[str] | None = None,
    columns: Sequence[str] = (),
    drop: Sequence[str] = (),
) -> Collate:
    """Lay experiences behind one another without padding, as `PackedBatch.varlen` does.

    The entries are `input_ids` and `position_ids`, shape [N]; `cu_seqlens`, `max_seqlen`,
    `response_index`, `cu_response_seqlens`; fields, shape [T, ...].

    Args:
        fields: As for `padded_collate`.
        columns: As for `padded_collate`.
        drop: As for `padded_collate`.
    """
    return partial(
        framework.varlen,
        fields=None if fields is None else names("fields", fields),
        columns=names("columns", columns),
        drop=names("drop", drop),
    )


def verl_collate(
    *,
    pad_token_id: int,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
    columns: Sequence[str] = (),
    drop: Sequence[str] = (),
) -> Collate:
    """Make what `verl.DataProto.from_single_dict` takes.

    The entries are `prompts` [B, P], `responses` and `response_mask` [B, R], `input_ids`,
    `attention_mask` and `position_ids` [B, P + R], all int64; where the experiences have them,
    `rollout_log_probs`, `ref_log_prob`, `advantages`, `returns`, `values`, `teacher_logprobs`,
    `versions` and `token_level_scores` [B, R]: the rewards per token or else the scalar ones, in
    float32, at the last token; `uid` (of the task, by which verl's estimators group) and
    `unique_ids`, NumPy arrays of B texts. A dpo experience is an error. `position_ids` are those of
    text: a model with a `get_rope_index` makes its own of `multi_modal_inputs`.

    Args:
        pad_token_id: As for `padded_collate`.
        max_prompt_length: As for `padded_collate`.
        max_response_length: As for `padded_collate`.
        columns: As for `padded_collate`.
        drop: As for `padded_collate`; also `"reward"`.

    Source: verl `DataProto`; Trinity-RFT 0.6.0 `to_data_proto`.
    """
    return partial(
        framework.verl,
        pad_token_id=token_id(pad_token_id),
        max_prompt_length=_length("max_prompt_length", max_prompt_length),
        max_response_length=_length("max_response_length", max_response_length),
        columns=names("columns", columns),
        drop=_but_the_mask(drop),
    )


def trl_collate(
    *,
    pad_token_id: int,
    max_prompt_length: int | None = None,
    max_completion_length: int | None = None,
    columns: Sequence[str] = (),
    drop: Sequence[str] = (),
) -> Collate:
    """Make the inputs of the loss of TRL's `GRPOTrainer`.

    The entries are `prompt_ids` and `prompt_mask` [B, P]; `completion_ids`, `completion_mask`
    (where a token is) and `tool_mask` (where the model wrote it) [B, R], all int64; where the
    experiences have them, `old_per_token_logps`, `ref_per_token_logps` and `advantages`, which are
    per token, [B, R]. A dpo experience is an error.

    Args:
        pad_token_id: As for `padded_collate`.
        max_prompt_length: As for `padded_collate`.
        max_completion_length: R; None for the longest response of each batch.
        columns: As for `padded_collate`.
        drop: As for `padded_collate`.

    Source: TRL `GRPOTrainer`, whose loss takes advantages of shape [B] or [B, R].
    """
    return partial(
        framework.trl,
        pad_token_id=token_id(pad_token_id),
        max_prompt_length=_length("max_prompt_length", max_prompt_length),
        max_response_length=_length("max_completion_length", max_completion_length),
        columns=names("columns", columns),
        drop=_but_the_mask(drop),
    )


def areal_collate(
    *, pad_token_id: int = 0, columns: Sequence[str] = (), drop: Sequence[str] = ()
) -> Collate:
    """Make AReaL's trajectories: everything per token, padded on the right.

    The entries are `input_ids`, `attention_mask` (bool) and `loss_mask` (int64) [B, S]; where the
    experiences have them, `logprobs`, `advantages`, `returns` and `values` [B, S], 0 on prompts,
    `versions`, int64, -1 on prompts; `rewards` [B], float32. A dpo experience is an error, and so is
    a field that isn't one number per response token, such as `values` with a bootstrap value.

    Args:
        pad_token_id: What fills `input_ids` where no token is.
        columns: As for `padded_collate`.
        drop: As for `padded_collate`; also `"reward"`.

    Source: AReaL `RLVRWorkflow`, `concat_padded_tensors`.
    """
    return partial(
        framework.areal,
        pad_token_id=token_id(pad_token_id),
        columns=names("columns", columns),
        drop=_but_the_mask(drop),
    )


def trinity_collate() -> Collate:
    """Make a list of `Experience`, whose attributes are those that Trinity-RFT's trainers read.

    Its `gather_*` functions and `to_data_proto` take them as they are.
    """
    return framework.trinity


def _length(name: str, value: int | None) -> int | None:
    """A length as an int, or None."""
    if value is None:
        return None
    return as_whole(name, value, least=0, most=MOST_INT, wanted="a number of tokens, or None")


def _but_the_mask(drop: Sequence[str]) -> tuple[str, ...]:
    """What to leave out of a framework's batch, which always has a mask."""
    left_out = names("drop", drop)
    if "action_mask" in left_out:
        raise InvalidRequestError(
            "drop names 'action_mask', of which the mask is made that the framework's loss goes by; "
            "leave other fields out, or take padded_collate",
            subject="drop",
        )
    return left_out

"""Batches as other frameworks' trainers name and lay them out; `collation.py` has the makers.

B is the number of experiences, P and R the padded lengths of prompt and response, S that of whole
experiences, N the number of tokens of all of them. Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor

from experience_buffer import trxp
from experience_buffer.experience import Experience
from experience_buffer.packed import PackedBatch, PackedRow, pack

Experiences: TypeAlias = PackedBatch | Sequence[Experience]
"""What a collation function takes."""


class Collate(Protocol):
    """Makes what a trainer takes of the experiences of one batch."""

    def __call__(self, experiences: Any, /) -> Any:
        """Lay out a `PackedBatch`, or a list of `Experience`."""


_VERL: Final = {
    "logprobs": "rollout_log_probs",
    "token_level_reward": "token_level_scores",
    "ref_logprobs": "ref_log_prob",
    "advantages": "advantages",
    "returns": "returns",
    "values": "values",
    "teacher_logprobs": "teacher_logprobs",
}
_TRL: Final = {
    "logprobs": "old_per_token_logps",
    "ref_logprobs": "ref_per_token_logps",
    "advantages": "advantages",
}
_AREAL: Final = {
    "action_mask": "loss_mask",
    "logprobs": "logprobs",
    "advantages": "advantages",
    "returns": "returns",
    "values": "values",
    "versions": "versions",
}


def as_packed(experiences: Experiences) -> PackedBatch:
    """Pack experiences, unless they are packed already; each one's group is its task.

    Raises:
        ValueError: An experience can't be encoded.
    """
    if isinstance(experiences, PackedBatch):
        return experiences
    rows = [
        PackedRow(uid=each.eid.uid, group=each.eid.tid, payload=trxp.encode([each]), tensors={})
        for each in experiences
    ]
    return PackedBatch.parse(bytearray().join(pack(rows)))


def verl(experiences: Experiences, /, *, pad_token_id: int, **lengths: int | None) -> Any:
    """Do what `collation.verl_collate` says."""
    import numpy as np

    packed = as_packed(experiences)
    padded = packed.padded(pad_token_id=pad_token_id, **lengths)  # type: ignore[arg-type]
    response_mask = _action_mask(padded)
    input_ids, attention_mask = padded["input_ids"].long(), padded["attention_mask"].long()
    num_prompt = input_ids.shape[1] - response_mask.shape[1]
    batch: dict[str, Any] = {
        "prompts": input_ids[:, :num_prompt],
        "responses": input_ids[:, num_prompt:],
        "response_mask": response_mask.long(),
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
        **_renamed(padded, _VERL),
    }
    if "token_level_scores" not in batch and bool(packed.column("has_reward").all()):
        scores = _at_last_token(packed.column("reward"), attention_mask)
        batch["token_level_scores"] = scores[:, num_prompt:]
    batch["uid"] = np.array(packed.groups, dtype=object)
    batch["unique_ids"] = np.array(packed.uids, dtype=object)
    return batch


def trl(experiences: Experiences, /, *, pad_token_id: int, **lengths: int | None) -> Any:
    """Do what `collation.trl_collate` says."""
    padded = as_packed(experiences).padded(
        pad_token_id=pad_token_id,
        **lengths,  # type: ignore[arg-type]
    )
    tool_mask = _action_mask(padded).long()
    input_ids, attention_mask = padded["input_ids"].long(), padded["attention_mask"].long()
    num_prompt = input_ids.shape[1] - tool_mask.shape[1]
    return {
        "prompt_ids": input_ids[:, :num_prompt],
        "prompt_mask": attention_mask[:, :num_prompt],
        "completion_ids": input_ids[:, num_prompt:],
        "completion_mask": attention_mask[:, num_prompt:],
        "tool_mask": tool_mask,
        **_renamed(padded, _TRL),
    }


def areal(experiences: Experiences, /, *, pad_token_id: int) -> Any:
    """Do what `collation.areal_collate` says."""
    packed = as_packed(experiences)
    flat = packed.varlen()
    _action_mask(flat)
    lengths = flat["cu_seqlens"].diff()
    mask = torch.arange(int(flat["max_seqlen"])) < lengths[:, None]
    batch = {"input_ids": _rows(flat["input_ids"], mask, pad_token_id), "attention_mask": mask}
    for name in (name for name in _AREAL if name in flat):
        value = flat[name]
        if f"{name}.cu_seqlens" in flat or value.dim() != 1:
            raise ValueError(
                f"{name} isn't one number per response token; lay it out with varlen_collate"
            )
        whole = value.new_full(flat["input_ids"].shape, -1 if name == "versions" else 0)
        whole[flat["response_index"]] = value
        batch[_AREAL[name]] = _rows(whole, mask, 0)
    batch["rewards"] = packed.column("reward").nan_to_num(0.0).float()
    return batch


def trinity(experiences: Experiences, /) -> list[Experience]:
    """Do what `collation.trinity_collate` says."""
    if isinstance(experiences, PackedBatch):
        return [experiences.of(index) for index in range(len(experiences))]
    return list(experiences)


def _renamed(batch: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    return {new: batch[name] for name, new in names.items() if name in batch}


def _action_mask(batch: dict[str, Tensor]) -> Tensor:
    mask = batch.get("action_mask")
    if mask is None:
        raise ValueError(
            "an experience is dpo's and has no response; make two of it with "
            "collation.split_dpo_experience_to_single_turn"
        )
    return mask


def _at_last_token(rewards_B: Tensor, attention_mask: Tensor) -> Tensor:
    """Scalar rewards at the last token of each row, float32, of the mask's shape."""
    scores = torch.zeros(attention_mask.shape, dtype=torch.float32)
    # The sum grows up to the last token; of equal ones argmax takes the first.
    last = attention_mask.cumsum(-1).argmax(-1)
    scores[torch.arange(len(rewards_B)), last] = rewards_B.float()
    return scores


def _rows(flat_N: Tensor, mask: Tensor, pad_value: int) -> Tensor:
    """Tokens that lie behind one another as padded rows, shape [B, S]."""
    padded = flat_N.new_full(mask.shape, pad_value)
    padded[mask] = flat_N
    return padded

"""The former name of a part of `collation`, which has all that was here."""

from __future__ import annotations

import warnings
from typing import Any

_NAMES = (
    "TrajectoryLayout",
    "concat",
    "from_hf_datasets",
    "gather_action_masks",
    "gather_attention_masks",
    "gather_multi_modal_inputs",
    "gather_response_attrs",
    "gather_token_ids",
    "group_by",
    "split",
    "split_dpo_experience_to_single_turn",
    "to_hf_datasets",
)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from experience_buffer import collation

    warnings.warn(
        f"experience_buffer.collate is now experience_buffer.collation: take {name} from there; the "
        "former name goes with version 1.0",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(collation, name)


def __dir__() -> list[str]:
    return list(_NAMES)

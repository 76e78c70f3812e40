"""Payloads that a reader's and a writer's shortcuts could get wrong, made of plain bytes.

Names that sort oddly or need escapes, tables in another order or spelling, shapes of any rank, texts
that are one object in one payload and several in another, and lengths that don't agree.
"""

from __future__ import annotations

import math
from typing import Any

from tests.fuzz.bombs import frame, safetensors, top

_KEYS = (
    "eid", "reward", "truncate_status", "info", "metrics", "prompt_length", "response_text",
    "prompt_text", "messages", "tools", "chosen_messages", "rejected_messages", "custom_fields",
    "multi_modal_input_keys",
)  # fmt: skip
_SIZES = {"F32": 4, "I64": 8, "I32": 4, "BOOL": 1, "BF16": 2, "U8": 1, "F64": 8, "I16": 2, "I8": 1}

Table = dict[str, tuple[str, tuple[int, ...]]]


def meta(run: int, **changes: Any) -> dict[str, Any]:
    """The metadata of one experience of task 7."""
    parts = {"batch": 3, "task": 7, "run": run, "step": 0, "suffix": f"{run:06x}"}
    values: list[Any] = [parts, run / 8, None, {"model_version": run}, {}, 2, "text"]
    return dict(zip(_KEYS, [*values, *[None] * 5, [], []], strict=True)) | changes


def table(index: int, num_tokens: int = 5, **changes: tuple[str, tuple[int, ...]] | None) -> Table:
    """Names, dtypes and shapes of one experience's tensors."""
    num_response = num_tokens - 2
    found: dict[str, tuple[str, tuple[int, ...]] | None] = {
        "tokens": ("I32", (num_tokens,)),
        "logprobs": ("F32", (num_response,)),
        "action_mask": ("BOOL", (num_response,)),
    }
    found |= changes
    return {f"{index}:{name}": entry for name, entry in found.items() if entry is not None}


def section(tensors: Table, *, spelling: Any = (",", ":"), ranked: bool = True) -> bytes:
    """A safetensors file; the data counts upwards, so that no two tensors are alike."""
    names = list(tensors)
    if ranked:
        names.sort(key=lambda name: (-_SIZES[tensors[name][0]], tensors[name][0], name))
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        dtype, shape = tensors[name]
        begin = end
        end += math.prod(shape) * _SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    return safetensors(header, bytes(place * 7 % 251 for place in range(end)), spelling=spelling)


def payload(metas: list[Any], tensors: bytes) -> bytes:
    return frame(top(metas), tensors)


def one(*, spelling: Any = (",", ":"), ranked: bool = True, meta_: Any = None, **t: Any) -> bytes:
    tensors = section(table(0, **t), spelling=spelling, ranked=ranked)
    return payload([meta(0) if meta_ is None else meta_], tensors)


def batch(num_items: int, *, ragged: bool = True) -> bytes:
    """A payload of several experiences, each of another length."""
    tensors: Table = {}
    for run in range(num_items):
        tensors |= table(run, 5 + run % 3 * ragged)
    return payload([meta(run) for run in range(num_items)], section(tensors))


def _shared() -> bytes:
    info = {"model_version": 2, "tags": ["a", "a", "", "response_text"], "x": {"y": {}}}
    metas = [meta(run, info=info, metrics=info["x"], response_text="same" * 9) for run in range(3)]
    return payload(metas, section(table(0) | table(1) | table(2)))


def _mixed() -> bytes:
    metas = [
        meta(0, reward="high"),
        meta(1, prompt_length=True),
        meta(2, info=[]),
        meta(3, prompt_length=9),
        meta(4, reward=float("nan")),
        meta(5, reward=10**60),
        meta(6, info={"version_start": 5, "version_end": 2, "priority": 7}),
        meta(7, info={"model_version": -1, "priority": -1.0}),
        meta(8, info={"version_start": 2**70}),
        meta(9, truncate_status="prompt_truncated"),
        meta(10, eid={"batch": "b/é", "task": "t" * 600, "run": 0, "step": 0, "suffix": ""}),
        meta(11, eid={"batch": "\ud800", "task": 1, "run": 0, "step": 0, "suffix": ""}),
        meta(12, eid={"batch": 1, "task": 1, "run": 2**63, "step": 0, "suffix": "s"}),
        "no dict",
        meta(14, multi_modal_input_keys=["a"]),
        meta(15),
    ]
    tensors: Table = {}
    for run in range(16):
        tensors |= table(run)
    return payload(metas, section(tensors))


_ODD_NAMES: dict[str, Any] = {
    "100%s %(x)d": ("U8", (3,)),
    'quo"te': ("I8", (1,)),
    "é\n": ("F64", ()),
}
_IMAGES: dict[str, Any] = {
    "multi_modal_inputs:a:b": ("U8", (2, 2)),
    "multi_modal_inputs:": ("U8", (1,)),
}
PAYLOADS = {
    "one": one(),
    "eleven": batch(11),
    "alike": batch(9, ragged=False),
    "shared": _shared(),
    "mixed": _mixed(),
    "spaced": one(spelling=(", ", ": ")),
    "unsorted": one(ranked=False),
    "percent": one(**_ODD_NAMES),
    "ranks": one(
        scalar=("F32", ()), cube=("I16", (2, 3, 4)), none=("F32", (0,)), flat=("F32", (3, 0, 2))
    ),
    "empty_logprobs": one(logprobs=("F32", (0,))),
    "no_mask": one(action_mask=None),
    "no_mask_values": one(action_mask=None, values=("F32", (4,)), versions=("I64", (3,))),
    "image": one(
        meta_=meta(0, multi_modal_input_keys=["a:b", ""]), **_IMAGES,
    ),
    "unlisted_image": one(**_IMAGES),
    "dpo": one(chosen=("I32", (4,)), rejected=("I32", (3,)), action_mask=None, logprobs=None),
    "short_logprobs": one(logprobs=("F32", (2,))),
    "square_mask": one(action_mask=("BOOL", (3, 1))),
    "long_values": one(values=("F32", (9,))),
    "float_versions": one(versions=("F32", (3,))),
    "inputs": one(
        meta_=meta(0, info={"baseline_reward": 0.5, "values": [1, 2, 3], "env_state_hash": "h"}),
        token_level_reward=("F32", (3,)), teacher_logprobs=("F32", (3,)), ref_logprobs=("F32", (0,)),
    ),
    "no_reward": one(meta_=meta(0, reward=None)),
    "empty": payload([], section({})),
}  # fmt: skip
"""By name."""

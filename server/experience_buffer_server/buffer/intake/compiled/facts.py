"""Notes what the server has to know of an experience, if it is sound in every respect.

The checks are those of `trxp` and of `admission`; what they refuse isn't known here.
"""

from __future__ import annotations

from typing import Final

from experience_buffer_server.buffer.intake.compiled import workspace as ws
from experience_buffer_server.buffer.intake.compiled.primitives import Array, compiled, int64
from experience_buffer_server.buffer.intake.compiled.workspace import KEYS, TENSOR_NAMES

_MODEL_VERSION: Final = 3 * KEYS.index("model_version")
_VERSION_START: Final = 3 * KEYS.index("version_start")
_VERSION_END: Final = 3 * KEYS.index("version_end")
_PRIORITY: Final = 3 * KEYS.index("priority")
_RUN: Final = 3 * KEYS.index("run")
_STEP: Final = 3 * KEYS.index("step")
_SUFFIX: Final = 3 * KEYS.index("suffix")
_EID: Final = KEYS.index("eid")
_REWARD: Final = KEYS.index("reward")
_TRUNCATE_STATUS: Final = KEYS.index("truncate_status")
_INFO: Final = KEYS.index("info")
_METRICS: Final = KEYS.index("metrics")
_PROMPT_LENGTH: Final = KEYS.index("prompt_length")
_CUSTOM_FIELDS: Final = KEYS.index("custom_fields")
_IMAGE_KEYS: Final = KEYS.index("multi_modal_input_keys")
_RESPONSE_TRUNCATED: Final = KEYS.index("response_truncated")

_EID_PARTS: Final = 5
_TOKENS: Final = TENSOR_NAMES.index("tokens")
_MASK: Final = TENSOR_NAMES.index("action_mask")
_LOGPROBS: Final = TENSOR_NAMES.index("logprobs")
_VALUES: Final = TENSOR_NAMES.index("values")
"""What is from `_LOGPROBS` up to here has one value per response token, and so have versions."""
_VERSIONS: Final = TENSOR_NAMES.index("versions")
_ROUTES: Final = TENSOR_NAMES.index("routed_experts")


@compiled
def note_facts(work: Array, fact: int) -> bool:
    """Note what the experience's metadata says; False where the experience has to be looked at.

    Args:
        work: What was read of it.
        fact: The row of facts.
    """
    eid, info = int64(-1), int64(-1)
    prompt_length, is_cut_off, is_sound = int64(1), False, True
    work[fact + ws.REWARD] = ws.NONE
    for key in range(work[ws.FIRST], work[ws.LAST], 2 * ws.STACK_WIDTH):
        name, value = work[key + ws.NAME], key + ws.STACK_WIDTH
        kind, number = work[value + ws.KIND], work[value + ws.NUMBER]
        if name == _EID:
            is_sound = kind == ws.DICT and number == _EID_PARTS
            eid = work[value + ws.TEXT_BYTES]
        elif name == _REWARD:
            is_sound = kind in (ws.NONE, ws.INT, ws.FLOAT)
            work[fact + ws.REWARD], work[fact + ws.REWARD + 1] = kind, number
        elif name == _TRUNCATE_STATUS:
            is_cut_off = kind == ws.TEXT and work[value + ws.NAME] == _RESPONSE_TRUNCATED
            is_sound = is_cut_off or kind == ws.NONE
        elif name == _INFO:
            is_sound = kind in (ws.NONE, ws.DICT)
            info = work[value + ws.TEXT_BYTES] if kind == ws.DICT else info
        elif name == _METRICS:
            is_sound = kind in (ws.NONE, ws.DICT)
        elif name == _PROMPT_LENGTH:
            is_sound = kind == ws.INT
            prompt_length = number
        elif name in (_CUSTOM_FIELDS, _IMAGE_KEYS):
            is_sound = kind == ws.NONE or (kind == ws.LIST and number == 0)
        if not is_sound:
            return False
    work[fact + ws.IS_CUT_OFF] = 1 if is_cut_off else 0
    return (
        _note_eid(work, eid, fact)
        and _note_info(work, info, fact)
        and _note_lengths(work, prompt_length, is_cut_off, fact)
    )


@compiled
def _note_eid(work: Array, row: int, fact: int) -> bool:
    if row < 0:
        return False
    for part in range(row, row + 6, 3):
        if work[part] != ws.INT and work[part] != ws.TEXT:
            return False
    if work[row + _RUN] != ws.INT or work[row + _STEP] != ws.INT or work[row + _SUFFIX] != ws.TEXT:
        return False
    for column in range(6):
        work[fact + ws.BATCH + column] = work[row + column]
    work[fact + ws.RUN], work[fact + ws.STEP] = work[row + _RUN + 1], work[row + _STEP + 1]
    for column in range(2):
        work[fact + ws.SUFFIX + column] = work[row + _SUFFIX + 1 + column]
    return True


@compiled
def _note_info(work: Array, row: int, fact: int) -> bool:
    work[fact + ws.PRIORITY] = ws.ABSENT
    work[fact + ws.MIN_VERSION] = work[fact + ws.MAX_VERSION] = -1
    if row < 0:
        return True
    kind = work[row + _PRIORITY]
    if work[row + ws.KEPT_INPUT] == 1 or kind not in (ws.ABSENT, ws.INT, ws.FLOAT):
        return False
    work[fact + ws.PRIORITY], work[fact + ws.PRIORITY + 1] = kind, work[row + _PRIORITY + 1]
    start, end = row + _VERSION_START, row + _VERSION_END
    if work[start] == ws.ABSENT:
        start = row + _MODEL_VERSION
    if work[end] == ws.ABSENT:
        end = start
    if work[end] == ws.ABSENT:
        return True
    if work[start] != ws.INT or work[end] != ws.INT or not 0 <= work[start + 1] <= work[end + 1]:
        return False
    work[fact + ws.MIN_VERSION], work[fact + ws.MAX_VERSION] = work[start + 1], work[end + 1]
    return True


@compiled
def _note_lengths(work: Array, prompt_length: int, is_cut_off: bool, fact: int) -> bool:
    num_tokens, num_masked = work[ws.SIZES + _TOKENS], work[ws.SIZES + _MASK]
    if num_tokens < 0 or not 0 <= prompt_length <= num_tokens:
        return False
    length = num_tokens - prompt_length
    # Where there is no token, an empty tensor doesn't say what it says elsewhere.
    if length == 0 or num_masked not in (-1, length) or (num_masked < 0 and prompt_length == 0):
        return False
    for field in range(_LOGPROBS, _VALUES):
        size = work[ws.SIZES + field]
        # Those of no token stand for logprobs that weren't kept.
        if size >= 0 and size != length and not (field == _LOGPROBS and size == 0):
            return False
    num_versions, num_values = work[ws.SIZES + _VERSIONS], work[ws.SIZES + _VALUES]
    if (num_versions >= 0 and num_versions != length) or work[ws.SIZES + _ROUTES] > num_tokens:
        return False
    if num_values >= 0 and not length <= num_values <= length + 1:
        return False
    work[fact + ws.LENGTH], work[fact + ws.IS_ORDINARY] = length, 0 if is_cut_off else 1
    return True

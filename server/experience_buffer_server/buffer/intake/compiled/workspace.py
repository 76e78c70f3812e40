"""What a scan works in, and where in it is what.

All numbers are in one array, which is asked for once and used for every payload: compiled functions
count the references to each array that they are given, whenever they call one another. It consists
of regions of rows, all of one width in a region; a row is known by where it begins in the array, and
a column by its place in the row. Indices are checked against the array alone, so whoever adds a row
has to see that its region has room.

A value takes three columns: its kind, then the number itself (a float's bits), or where its text
begins and how many bytes it has.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from numba import types

from experience_buffer_server.buffer.intake.compiled.primitives import names_table

OUT_BYTES: Final = 4 * 2**20
"""For what precedes the tensors' bytes in each canonical payload."""
MAX_ITEMS: Final = 1_000
"""Experiences of a payload; a list of more of them is written in parts."""
MAX_STACK: Final = 4_096
MAX_MEMO: Final = 16_384
MAX_TENSORS: Final = 8_192
MAX_ROWS: Final = 16

# Kinds of values.
ABSENT: Final = -1
NONE: Final = 0
INT: Final = 1
FLOAT: Final = 2
TEXT: Final = 3
BOOL: Final = 4
DICT: Final = 5
LIST: Final = 6
MARK: Final = 7

# Columns of the facts about an experience: from where to where what is written and its spans go,
# then values, or only their numbers or texts.
OUT: Final = 0
SPANS: Final = 2
BATCH: Final = 4
TASK: Final = 7
RUN: Final = 10
STEP: Final = 11
SUFFIX: Final = 12
REWARD: Final = 14
LENGTH: Final = 16
TENSORS: Final = 17
IS_ORDINARY: Final = 18
MIN_VERSION: Final = 19
MAX_VERSION: Final = 20
PRIORITY: Final = 21
IS_CUT_OFF: Final = 23
PLACES: Final = 24
"""A row of three per name in `TENSOR_NAMES`: dtype, -1 where there is none, and where in the payload its
elements begin and end."""
NUM_FACTS: Final = 57

# The state, at the beginning of the array.
POS: Final = 0
"""Where the payload is read."""
END: Final = 1
"""Where its metadata ends."""
WRITTEN: Final = 2
"""Where the next byte is written."""
SPAN: Final = 3
"""Where the next span goes."""
NUM_NODES: Final = 4
NUM_MEMO: Final = 5
ITEM: Final = 6
"""The experience that is read."""
NUM_OUT: Final = 7
"""Values that its own pickle has memoized."""
SP: Final = 8
"""Where the next value on the stack goes."""
INNERMOST: Final = 9
"""The last mark on the stack; -1: none."""
NUM_ROWS: Final = 10
FIRST: Final = 11
"""Where the members of the dict that was filled last begin, on the stack."""
LAST: Final = 12
"""Where they end."""
COMPARED: Final = 13
"""Bytes of keys that were compared with others, at most."""
NUM_BYTES: Final = 14
"""Of the payload, of which only what precedes the tensors' bytes need be there to be read."""

# Columns of the stack: kind, number or text as everywhere. Of a text also its name; of a list or
# dict the number of members in the place of the number, and in that of the bytes the row of what is kept
# of it.
KIND: Final = 0
NUMBER: Final = 1
TEXT_BYTES: Final = 2
NAME: Final = 3
DEPTH: Final = 4
"""Containers inside one another, itself included."""

# Columns of the memo: where the opcode that spells the text begins and how many bytes it and what
# belongs to it have; the text itself, -1 bytes for what is none; its name; the last experience
# that it was written for, and its number there.
SPELLED: Final = 0
SPELLED_BYTES: Final = 1
START: Final = 2
SIZE: Final = 3
KNOWN_AS: Final = 4
OWNER: Final = 5
INDEX: Final = 6

# Columns of the tensor table.
OF_ITEM: Final = 0
FIELD_START: Final = 1
FIELD_SIZE: Final = 2
FIELD: Final = 3
DTYPE: Final = 4
SHAPE_START: Final = 5
SHAPE_SIZE: Final = 6
BEGIN: Final = 7
STOP: Final = 8
NEXT: Final = 9

# Keys of the metadata. Of every dict the values of the first are kept, and whether there is one of
# the following: estimators read those from `info`.
KEYS: Final = (
    "batch", "task", "run", "step", "suffix",
    "model_version", "version_start", "version_end", "priority",
    "token_level_reward", "values", "logprobs", "ref_logprobs", "teacher_logprobs",
    "baseline_reward", "env_state_hash", "num_turns",
    "eid", "reward", "truncate_status", "info", "metrics", "prompt_length",
    "custom_fields", "multi_modal_input_keys", "response_truncated",
)  # fmt: skip
"""The last one is a value."""
KEY_BYTES, KEY_ENDS = names_table(KEYS)
NUM_KEPT: Final = 9
NUM_NOTED: Final = 17
KEPT_INPUT: Final = 3 * NUM_KEPT
"""Place in a dict's row that says whether it has an input of an estimator."""

TENSOR_NAMES: Final = (
    "tokens", "action_mask", "logprobs", "token_level_reward", "advantages", "returns",
    "teacher_logprobs", "ref_logprobs", "values", "versions", "routed_experts",
)  # fmt: skip
"""Tensors that something depends on: a bit of `TENSORS` each, set where there are elements."""
DTYPES: Final = (
    "U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E5M2FNUZ",
    "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL",
)  # fmt: skip
"""In the order in which the format's writer sorts tensors."""
assert PLACES + 3 * len(TENSOR_NAMES) == NUM_FACTS


# The regions, and how wide their rows are.
STACK_WIDTH: Final = 5
MEMO_WIDTH: Final = 7
TENSOR_WIDTH: Final = 10
ROW_WIDTH: Final = 3 * NUM_KEPT + 1
HEAD_WIDTH: Final = 3
SIZES: Final = 16
"""Elements of an experience's tensors, of the last one rows; -1 where there is none: a column per
name."""
SINGLETONS: Final = SIZES + len(TENSOR_NAMES)
"""The last experience that a text was written for of which Python has one object."""
NUM_SINGLETONS: Final = 257
ROWS: Final = SINGLETONS + NUM_SINGLETONS
"""What is kept of dicts."""
STACK: Final = ROWS + ROW_WIDTH * MAX_ROWS
MEMO: Final = STACK + STACK_WIDTH * MAX_STACK
HEADS: Final = MEMO + MEMO_WIDTH * MAX_MEMO
"""The rows of each experience's first and last tensor, -1 for none, and how many it has."""
TENSOR_TABLE: Final = HEADS + HEAD_WIDTH * MAX_ITEMS
SPANS_TABLE: Final = TENSOR_TABLE + TENSOR_WIDTH * MAX_TENSORS
"""Where in the payload the tensors' bytes of a canonical one begin and end."""
FACTS: Final = SPANS_TABLE + 2 * MAX_TENSORS
WORK_SIZE: Final = FACTS + NUM_FACTS * MAX_ITEMS


class Bounds(NamedTuple):
    """Limits on a payload; see `trxp.Limits`."""

    max_metadata_bytes: int
    max_header_bytes: int
    max_tensors: int
    max_nodes: int
    max_depth: int


BOUNDS_TYPE: Final = types.NamedUniTuple(types.int64, 5, Bounds)  # type: ignore[no-untyped-call]
"""How compiled functions know it."""

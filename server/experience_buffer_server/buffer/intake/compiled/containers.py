"""Fills lists and dicts with what stands above them on the stack, as `pickle.dumps` has it filled.

Each is empty when it is filled, and filled once: member by member if there is one, else all since a
mark. Values and marks are known by where their rows begin in `work`.
"""

from __future__ import annotations

from typing import Final

from experience_buffer_server.buffer.intake.compiled.opcodes import MEMOIZE
from experience_buffer_server.buffer.intake.compiled.primitives import (
    Array,
    are_equal,
    compiled,
    int64,
)
from experience_buffer_server.buffer.intake.compiled.scalars import push
from experience_buffer_server.buffer.intake.compiled.workspace import (
    ABSENT,
    COMPARED,
    DEPTH,
    DICT,
    FIRST,
    INNERMOST,
    KEPT_INPUT,
    KIND,
    LAST,
    LIST,
    MARK,
    MAX_MEMO,
    MAX_ROWS,
    MEMO,
    MEMO_WIDTH,
    NAME,
    NUM_BYTES,
    NUM_KEPT,
    NUM_MEMO,
    NUM_NOTED,
    NUM_OUT,
    NUM_ROWS,
    NUMBER,
    POS,
    ROW_WIDTH,
    ROWS,
    SIZE,
    SP,
    STACK,
    STACK_WIDTH,
    TEXT,
    TEXT_BYTES,
)

_MAX_MEMBERS: Final = 1_000
"""A list or dict of more is written in parts."""
_MAX_KEYS: Final = 64
"""They are compared with each other."""
_COMPARED_PER_BYTE: Final = 16
_MIN_COMPARED: Final = 65_536
"""What all keys may take to be compared, by the payload's size: shared ones are written in two bytes."""


@compiled
def open_container(data: Array, kind: int, work: Array) -> bool:
    """An empty list or dict; it may be filled later."""
    if data[work[POS]] != MEMOIZE or work[NUM_MEMO] >= MAX_MEMO:
        return False
    work[POS] += 1
    work[MEMO + MEMO_WIDTH * work[NUM_MEMO] + SIZE] = -1
    work[NUM_MEMO] += 1
    work[NUM_OUT] += 1
    return push(kind, 0, work)


@compiled
def mark(work: Array) -> bool:
    """The two or more members of the list or dict below follow, which is empty yet."""
    below = work[SP] - STACK_WIDTH
    if below < STACK or not DICT <= work[below + KIND] <= LIST or work[below + NUMBER] != 0:
        return False
    outer, work[INNERMOST] = work[INNERMOST], work[SP]
    return push(MARK, outer, work)


@compiled
def fill(data: Array, kind: int, is_marked: bool, max_depth: int, work: Array) -> bool:
    """Put what is above a list or dict into it: all since the mark, or the one member."""
    end, width = work[SP], (2 if kind == DICT else 1) * STACK_WIDTH
    if is_marked:
        mark = work[INNERMOST]
        if mark < 0:
            return False
        first, target = mark + STACK_WIDTH, mark - STACK_WIDTH
        work[INNERMOST] = work[mark + NUMBER]
    else:
        first, target = end - width, end - width - STACK_WIDTH
        if target < STACK or target <= work[INNERMOST]:
            return False
    num_members = (end - first) // width
    if (end - first) % width or num_members > _MAX_MEMBERS or (num_members > 1) != is_marked:
        return False
    if num_members < 1 or work[target + KIND] != kind or work[target + NUMBER] != 0:
        return False
    depth = int64(1)
    for member in range(first, end, STACK_WIDTH):
        depth = max(depth, work[member + DEPTH] + 1)
    if depth > max_depth or (kind == DICT and not _note_dict(data, first, end, target, work)):
        return False
    work[target + NUMBER], work[target + DEPTH] = num_members, depth
    work[SP], work[FIRST], work[LAST] = target + STACK_WIDTH, first, end
    return True


@compiled
def _note_dict(data: Array, first: int, end: int, target: int, work: Array) -> bool:
    """Check a dict's keys, and keep the values that something may depend on."""
    if end - first > 2 * STACK_WIDTH * _MAX_KEYS:
        return False
    row = int64(-1)
    for key in range(first, end, 2 * STACK_WIDTH):
        if work[key + KIND] != TEXT or not _is_new(data, first, key, work):
            return False
        name = work[key + NAME]
        if not 0 <= name < NUM_NOTED:
            continue
        if row < 0:
            if work[NUM_ROWS] >= MAX_ROWS:
                return False
            row = ROWS + ROW_WIDTH * work[NUM_ROWS]
            work[NUM_ROWS] += 1
            for column in range(ROW_WIDTH):
                work[row + column] = ABSENT
        if name < NUM_KEPT:
            for column in range(3):
                work[row + 3 * name + column] = work[key + STACK_WIDTH + column]
        else:
            work[row + KEPT_INPUT] = 1
    work[target + TEXT_BYTES] = row
    return True


@compiled
def _is_new(data: Array, first: int, key: int, work: Array) -> bool:
    """Whether none of the keys before is the same; False where that would take too long to say."""
    start, size = work[key + NUMBER], work[key + TEXT_BYTES]
    for other in range(first, key, 2 * STACK_WIDTH):
        if work[other + TEXT_BYTES] == size:
            work[COMPARED] += 1 + size
            if are_equal(data, start, work[other + NUMBER], size):
                return False
    return bool(work[COMPARED] <= _MIN_COMPARED + _COMPARED_PER_BYTE * work[NUM_BYTES])

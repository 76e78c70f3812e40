"""Fills lists and dicts with what stands above them on the stack, as `pickle.dumps` has it filled.

Each is empty when it is filled, and filled once: member by member if there is one, else all since a
mark. Values and marks are known by where their rows begin in `work`.
"""

from __future__ import annotations

from typing import Final

from experience_buffer_server.buffer.intake.compiled import workspace as ws
from experience_buffer_server.buffer.intake.compiled.opcodes import MEMOIZE
from experience_buffer_server.buffer.intake.compiled.primitives import (
    Array,
    are_equal,
    compiled,
    int64,
)
from experience_buffer_server.buffer.intake.compiled.scalars import push

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
    if data[work[ws.POS]] != MEMOIZE or work[ws.NUM_MEMO] >= ws.MAX_MEMO:
        return False
    work[ws.POS] += 1
    work[ws.MEMO + ws.MEMO_WIDTH * work[ws.NUM_MEMO] + ws.SIZE] = -1
    work[ws.NUM_MEMO] += 1
    work[ws.NUM_OUT] += 1
    return push(kind, 0, work)


@compiled
def mark(work: Array) -> bool:
    """The two or more members of the list or dict below follow, which is empty yet."""
    below = work[ws.SP] - ws.STACK_WIDTH
    if (
        below < ws.STACK
        or not ws.DICT <= work[below + ws.KIND] <= ws.LIST
        or work[below + ws.NUMBER] != 0
    ):
        return False
    outer, work[ws.INNERMOST] = work[ws.INNERMOST], work[ws.SP]
    return push(ws.MARK, outer, work)


@compiled
def fill(data: Array, kind: int, is_marked: bool, max_depth: int, work: Array) -> bool:
    """Put what is above a list or dict into it: all since the mark, or the one member."""
    end, width = work[ws.SP], (2 if kind == ws.DICT else 1) * ws.STACK_WIDTH
    if is_marked:
        mark = work[ws.INNERMOST]
        if mark < 0:
            return False
        first, target = mark + ws.STACK_WIDTH, mark - ws.STACK_WIDTH
        work[ws.INNERMOST] = work[mark + ws.NUMBER]
    else:
        first, target = end - width, end - width - ws.STACK_WIDTH
        if target < ws.STACK or target <= work[ws.INNERMOST]:
            return False
    num_members = (end - first) // width
    if (end - first) % width or num_members > _MAX_MEMBERS or (num_members > 1) != is_marked:
        return False
    if num_members < 1 or work[target + ws.KIND] != kind or work[target + ws.NUMBER] != 0:
        return False
    depth = int64(1)
    for member in range(first, end, ws.STACK_WIDTH):
        depth = max(depth, work[member + ws.DEPTH] + 1)
    if depth > max_depth or (kind == ws.DICT and not _note_dict(data, first, end, target, work)):
        return False
    work[target + ws.NUMBER], work[target + ws.DEPTH] = num_members, depth
    work[ws.SP], work[ws.FIRST], work[ws.LAST] = target + ws.STACK_WIDTH, first, end
    return True


@compiled
def _note_dict(data: Array, first: int, end: int, target: int, work: Array) -> bool:
    """Check a dict's keys, and keep the values that something may depend on."""
    if end - first > 2 * ws.STACK_WIDTH * _MAX_KEYS:
        return False
    row = int64(-1)
    for key in range(first, end, 2 * ws.STACK_WIDTH):
        if work[key + ws.KIND] != ws.TEXT or not _is_new(data, first, key, work):
            return False
        name = work[key + ws.NAME]
        if not 0 <= name < ws.NUM_NOTED:
            continue
        if row < 0:
            if work[ws.NUM_ROWS] >= ws.MAX_ROWS:
                return False
            row = ws.ROWS + ws.ROW_WIDTH * work[ws.NUM_ROWS]
            work[ws.NUM_ROWS] += 1
            for column in range(ws.ROW_WIDTH):
                work[row + column] = ws.ABSENT
        if name < ws.NUM_KEPT:
            for column in range(3):
                work[row + 3 * name + column] = work[key + ws.STACK_WIDTH + column]
        else:
            work[row + ws.KEPT_INPUT] = 1
    work[target + ws.TEXT_BYTES] = row
    return True


@compiled
def _is_new(data: Array, first: int, key: int, work: Array) -> bool:
    """Whether none of the keys before is the same; False where that would take too long to say."""
    start, size = work[key + ws.NUMBER], work[key + ws.TEXT_BYTES]
    for other in range(first, key, 2 * ws.STACK_WIDTH):
        if work[other + ws.TEXT_BYTES] == size:
            work[ws.COMPARED] += 1 + size
            if are_equal(data, start, work[other + ws.NUMBER], size):
                return False
    return bool(work[ws.COMPARED] <= _MIN_COMPARED + _COMPARED_PER_BYTE * work[ws.NUM_BYTES])

"""Reads one experience's metadata out of a pickle, and writes the pickle of it alone.

A value is accepted only in the order of opcodes in which `pickle.dumps` writes it (protocols 4 and
5), and written in that order. So what differs from the pickle that was read are the numbers under
which texts are memoized, and where they are spelled. Only texts may be shared.
"""

from __future__ import annotations

from typing import Final

from experience_buffer_server.buffer.intake.compiled.containers import fill, mark, open_container
from experience_buffer_server.buffer.intake.compiled.opcodes import (
    APPEND,
    APPENDS,
    BINFLOAT,
    BINGET,
    BININT,
    BININT1,
    BININT2,
    BINUNICODE,
    EMPTY_DICT,
    EMPTY_LIST,
    FRAME,
    LONG1,
    LONG_BINGET,
    NEWFALSE,
    NEWTRUE,
    OP_MARK,
    OP_NONE,
    SETITEM,
    SETITEMS,
    SHORT_BINUNICODE,
)
from experience_buffer_server.buffer.intake.compiled.primitives import (
    Array,
    compiled,
    constant,
    copy,
    int64,
    put,
    put_uint,
    uint,
)
from experience_buffer_server.buffer.intake.compiled.scalars import (
    get_text,
    push,
    read_int,
    read_text,
)
from experience_buffer_server.buffer.intake.compiled.workspace import (
    BOOL,
    DICT,
    END,
    FLOAT,
    INDEX,
    INNERMOST,
    INT,
    ITEM,
    KIND,
    LIST,
    MAX_STACK,
    MEMO,
    MEMO_WIDTH,
    NONE,
    NUM_NODES,
    NUM_OUT,
    NUM_ROWS,
    NUMBER,
    OWNER,
    POS,
    SP,
    STACK,
    STACK_WIDTH,
    WRITTEN,
    Bounds,
)

_HEAD = constant("}\x94(\x8c\x07version\x94K\x01\x8c\tnum_items\x94K\x01\x8c\x05items\x94]\x94")
"""What precedes the only experience of a payload."""
_TAIL = constant("au.")
_HEAD_MEMO: Final = 5
"""Values that the head memoizes; its three keys are the second to the fourth."""
_FRAME_START_BYTES: Final = 11
_MAX_PICKLE_BYTES: Final = 64_000
"""A pickle that is longer has more than one frame."""
_STACK_END: Final = STACK + STACK_WIDTH * MAX_STACK


@compiled
def read_metadata(data: Array, bounds: Bounds, work: Array, out: Array) -> bool:
    """Read the experience that begins at `POS`; False where it isn't known here.

    What its dict holds is on the stack then, from `FIRST` to `LAST`; its own pickle is in `out`.
    """
    start = work[WRITTEN]
    work[WRITTEN] = put(out, start + _FRAME_START_BYTES, _HEAD)
    for key in range(1, 4):
        text = MEMO + MEMO_WIDTH * key
        work[text + OWNER], work[text + INDEX] = work[ITEM], key
    work[NUM_OUT], work[NUM_ROWS], work[INNERMOST] = _HEAD_MEMO, 0, -1
    work[SP] = STACK
    is_open = True
    while is_open:
        work[NUM_NODES] += 1
        pos = work[POS]
        if work[NUM_NODES] > bounds.max_nodes or pos >= work[END]:
            return False
        if work[WRITTEN] - start > _MAX_PICKLE_BYTES or work[SP] >= _STACK_END:
            return False
        op = data[pos]
        if op in (BINGET, LONG_BINGET):
            is_known = get_text(data, op == LONG_BINGET, work, out)
        elif op in (SHORT_BINUNICODE, BINUNICODE):
            is_known = read_text(data, op == BINUNICODE, work, out)
        elif op == FRAME:
            num_bytes = uint(data, pos + 1, 8)
            work[POS] += 9
            is_known = 0 <= num_bytes <= work[END] - work[POS]
        else:
            is_known = _read_other(data, bounds.max_depth, work)
            work[WRITTEN] = copy(data, pos, work[POS] - pos, out, work[WRITTEN])
            is_open = work[SP] != STACK + STACK_WIDTH or work[STACK + NUMBER] == 0
        if not is_known:
            return False
    w = put(out, work[WRITTEN], _TAIL)
    out[start], out[start + 1], out[start + 2] = 0x80, 5, FRAME
    put_uint(out, start + 3, w - start - _FRAME_START_BYTES, 8)
    work[WRITTEN] = w
    return bool(work[STACK + KIND] == DICT)


@compiled
def _read_other(data: Array, max_depth: int, work: Array) -> bool:
    """Read an opcode that is written as it came."""
    pos = work[POS]
    op = data[pos]
    work[POS] += 1
    if op in (BININT1, BININT2, BININT, LONG1):
        number, work[POS] = read_int(data, pos)
        return work[POS] > 0 and push(INT, number, work)
    if op == BINFLOAT:
        bits = int64(0)
        for i in range(8):
            bits = bits << 8 | int64(data[pos + 1 + i])
        work[POS] += 8
        return push(FLOAT, bits, work)
    if op == OP_NONE:
        return push(NONE, 0, work)
    if op in (NEWTRUE, NEWFALSE):
        return push(BOOL, 0, work)
    if op in (EMPTY_DICT, EMPTY_LIST):
        return open_container(data, DICT if op == EMPTY_DICT else LIST, work)
    if op == OP_MARK:
        return mark(work)
    if op in (SETITEM, SETITEMS):
        return fill(data, DICT, op == SETITEMS, max_depth, work)
    if op in (APPEND, APPENDS):
        return fill(data, LIST, op == APPENDS, max_depth, work)
    return False

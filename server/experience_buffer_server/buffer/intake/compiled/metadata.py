"""Reads one experience's metadata out of a pickle, and writes the pickle of it alone.

A value is accepted only in the order of opcodes in which `pickle.dumps` writes it (protocols 4 and
5), and written in that order. So what differs from the pickle that was read are the numbers under
which texts are memoized, and where they are spelled. Only texts may be shared.
"""

from __future__ import annotations

from typing import Final

from experience_buffer_server.buffer.intake.compiled import opcodes
from experience_buffer_server.buffer.intake.compiled import workspace as ws
from experience_buffer_server.buffer.intake.compiled.containers import fill, mark, open_container
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
from experience_buffer_server.buffer.intake.compiled.workspace import Bounds

_HEAD = constant("}\x94(\x8c\x07version\x94K\x01\x8c\tnum_items\x94K\x01\x8c\x05items\x94]\x94")
"""What precedes the only experience of a payload."""
_TAIL = constant("au.")
_HEAD_MEMO: Final = 5
"""Values that the head memoizes; its three keys are the second to the fourth."""
_FRAME_START_BYTES: Final = 11
_MAX_PICKLE_BYTES: Final = 64_000
"""A pickle that is longer has more than one frame."""
_STACK_END: Final = ws.STACK + ws.STACK_WIDTH * ws.MAX_STACK


@compiled
def read_metadata(data: Array, bounds: Bounds, work: Array, out: Array) -> bool:
    """Read the experience that begins at `POS`; False where it isn't known here.

    What its dict holds is on the stack then, from `FIRST` to `LAST`; its own pickle is in `out`.
    """
    start = work[ws.WRITTEN]
    work[ws.WRITTEN] = put(out, start + _FRAME_START_BYTES, _HEAD)
    for key in range(1, 4):
        text = ws.MEMO + ws.MEMO_WIDTH * key
        work[text + ws.OWNER], work[text + ws.INDEX] = work[ws.ITEM], key
    work[ws.NUM_OUT], work[ws.NUM_ROWS], work[ws.INNERMOST] = _HEAD_MEMO, 0, -1
    work[ws.SP] = ws.STACK
    is_open = True
    while is_open:
        work[ws.NUM_NODES] += 1
        pos = work[ws.POS]
        if work[ws.NUM_NODES] > bounds.max_nodes or pos >= work[ws.END]:
            return False
        if work[ws.WRITTEN] - start > _MAX_PICKLE_BYTES or work[ws.SP] >= _STACK_END:
            return False
        op = data[pos]
        if op in (opcodes.BINGET, opcodes.LONG_BINGET):
            is_known = get_text(data, op == opcodes.LONG_BINGET, work, out)
        elif op in (opcodes.SHORT_BINUNICODE, opcodes.BINUNICODE):
            is_known = read_text(data, op == opcodes.BINUNICODE, work, out)
        elif op == opcodes.FRAME:
            num_bytes = uint(data, pos + 1, 8)
            work[ws.POS] += 9
            is_known = 0 <= num_bytes <= work[ws.END] - work[ws.POS]
        else:
            is_known = _read_other(data, bounds.max_depth, work)
            work[ws.WRITTEN] = copy(data, pos, work[ws.POS] - pos, out, work[ws.WRITTEN])
            is_open = work[ws.SP] != ws.STACK + ws.STACK_WIDTH or work[ws.STACK + ws.NUMBER] == 0
        if not is_known:
            return False
    w = put(out, work[ws.WRITTEN], _TAIL)
    out[start], out[start + 1], out[start + 2] = 0x80, 5, opcodes.FRAME
    put_uint(out, start + 3, w - start - _FRAME_START_BYTES, 8)
    work[ws.WRITTEN] = w
    return bool(work[ws.STACK + ws.KIND] == ws.DICT)


@compiled
def _read_other(data: Array, max_depth: int, work: Array) -> bool:
    """Read an opcode that is written as it came."""
    pos = work[ws.POS]
    op = data[pos]
    work[ws.POS] += 1
    if op in (opcodes.BININT1, opcodes.BININT2, opcodes.BININT, opcodes.LONG1):
        number, work[ws.POS] = read_int(data, pos)
        return work[ws.POS] > 0 and push(ws.INT, number, work)
    if op == opcodes.BINFLOAT:
        bits = int64(0)
        for i in range(8):
            bits = bits << 8 | int64(data[pos + 1 + i])
        work[ws.POS] += 8
        return push(ws.FLOAT, bits, work)
    if op == opcodes.OP_NONE:
        return push(ws.NONE, 0, work)
    if op in (opcodes.NEWTRUE, opcodes.NEWFALSE):
        return push(ws.BOOL, 0, work)
    if op in (opcodes.EMPTY_DICT, opcodes.EMPTY_LIST):
        return open_container(data, ws.DICT if op == opcodes.EMPTY_DICT else ws.LIST, work)
    if op == opcodes.OP_MARK:
        return mark(work)
    if op in (opcodes.SETITEM, opcodes.SETITEMS):
        return fill(data, ws.DICT, op == opcodes.SETITEMS, max_depth, work)
    if op in (opcodes.APPEND, opcodes.APPENDS):
        return fill(data, ws.LIST, op == opcodes.APPENDS, max_depth, work)
    return False

"""Reads one experience's metadata out of a pickle, and writes the pickle of it alone.

A value is accepted only in the order of opcodes in which `pickle.dumps` writes it (protocols 4 and
5), and written in that order. So what differs from the pickle that was read are the numbers under
which texts are memoized, and where they are spelled: where a text is first met in an experience, which
is referred to afterwards. Only texts may be shared. A list or dict is empty when it is filled, and
filled once: member by member if there is one, else all since a mark.

A value or mark on the stack, and a text in the memo, are known by where their rows begin in `work`.
"""

from __future__ import annotations

from typing import Final

from experience_buffer_server.buffer.intake.compiled import workspace as ws
from experience_buffer_server.buffer.intake.compiled.primitives import (
    Array,
    are_equal,
    compiled,
    constant,
    copy,
    find,
    int64,
    is_utf8,
    put,
    put_uint,
    uint,
)
from experience_buffer_server.buffer.intake.compiled.workspace import KEY_BYTES, KEY_ENDS, Bounds

# The opcodes that `pickle.dumps` writes for plain data, as `pickletools` names them.
BININT: Final = 0x4A
BININT1: Final = 0x4B
BININT2: Final = 0x4D
LONG1: Final = 0x8A
BINFLOAT: Final = 0x47
OP_NONE: Final = 0x4E
NEWTRUE: Final = 0x88
NEWFALSE: Final = 0x89
SHORT_BINUNICODE: Final = 0x8C
BINUNICODE: Final = 0x58
BINGET: Final = 0x68
LONG_BINGET: Final = 0x6A
MEMOIZE: Final = 0x94
EMPTY_DICT: Final = 0x7D
EMPTY_LIST: Final = 0x5D
OP_MARK: Final = 0x28
SETITEM: Final = 0x73
SETITEMS: Final = 0x75
APPEND: Final = 0x61
APPENDS: Final = 0x65
FRAME: Final = 0x95

_HEAD = constant("}\x94(\x8c\x07version\x94K\x01\x8c\tnum_items\x94K\x01\x8c\x05items\x94]\x94")
"""What precedes the only experience of a payload."""
_TAIL = constant("au.")
_HEAD_MEMO: Final = 5
"""Values that the head memoizes; its three keys are the second to the fourth."""
_FRAME_START_BYTES: Final = 11
_MAX_PICKLE_BYTES: Final = 64_000
"""A pickle that is longer has more than one frame."""
_STACK_END: Final = ws.STACK + ws.STACK_WIDTH * ws.MAX_STACK
_MAX_MEMBERS: Final = 1_000
"""A list or dict of more is written in parts."""
_MAX_KEYS: Final = 64
"""They are compared with each other."""
_COMPARED_PER_BYTE: Final = 16
_MIN_COMPARED: Final = 65_536
"""What all keys may take to be compared, by the payload's size: shared ones are written in two bytes."""


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
        if op in (BINGET, LONG_BINGET):
            is_known = _get_text(data, op == LONG_BINGET, work, out)
        elif op in (SHORT_BINUNICODE, BINUNICODE):
            is_known = _read_text(data, op == BINUNICODE, work, out)
        elif op == FRAME:
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
    out[start], out[start + 1], out[start + 2] = 0x80, 5, FRAME
    put_uint(out, start + 3, w - start - _FRAME_START_BYTES, 8)
    work[ws.WRITTEN] = w
    return bool(work[ws.STACK + ws.KIND] == ws.DICT)


@compiled
def _read_other(data: Array, max_depth: int, work: Array) -> bool:
    """Read an opcode that is written as it came."""
    pos = work[ws.POS]
    op = data[pos]
    work[ws.POS] += 1
    if op in (BININT1, BININT2, BININT, LONG1):
        number, work[ws.POS] = read_int(data, pos)
        return work[ws.POS] > 0 and _push(ws.INT, number, work)
    if op == BINFLOAT:
        bits = int64(0)
        for i in range(8):
            bits = bits << 8 | int64(data[pos + 1 + i])
        work[ws.POS] += 8
        return _push(ws.FLOAT, bits, work)
    if op == OP_NONE:
        return _push(ws.NONE, 0, work)
    if op in (NEWTRUE, NEWFALSE):
        return _push(ws.BOOL, 0, work)
    if op in (EMPTY_DICT, EMPTY_LIST):
        return _open_container(data, ws.DICT if op == EMPTY_DICT else ws.LIST, work)
    if op == OP_MARK:
        return _mark(work)
    if op in (SETITEM, SETITEMS):
        return _fill(data, ws.DICT, op == SETITEMS, max_depth, work)
    if op in (APPEND, APPENDS):
        return _fill(data, ws.LIST, op == APPENDS, max_depth, work)
    return False


# --- integers and texts


@compiled
def _push(kind: int, number: int, work: Array) -> bool:
    """Put a value that is no text on the stack; always True."""
    value = work[ws.SP]
    work[value + ws.KIND], work[value + ws.NUMBER] = kind, number
    work[value + ws.TEXT_BYTES] = work[value + ws.NAME] = -1
    work[value + ws.DEPTH] = 1 if kind in (ws.DICT, ws.LIST) else 0
    work[ws.SP] = value + ws.STACK_WIDTH
    return True


@compiled
def read_int(data: Array, pos: int) -> tuple[int, int]:
    """An integer in the shortest opcode for it, and where it ends; else an end of -1."""
    op = data[pos]
    if op == BININT1:
        return int64(data[pos + 1]), pos + 2
    if op == BININT2:
        value = uint(data, pos + 1, 2)
        return value, pos + 3 if value > 0xFF else -1
    if op == BININT:
        value = uint(data, pos + 1, 4)
        value -= (value >> 31) << 32
        return value, pos + 5 if not 0 <= value <= 0xFFFF else -1
    size = int64(data[pos + 1])
    if op != LONG1 or not 4 < size <= 8:
        return 0, -1
    value = uint(data, pos + 2, size)
    if size < 8:
        value -= (value >> (8 * size - 1)) << (8 * size)
    smaller = int64(1) << (8 * size - 9)
    return value, pos + 2 + size if not -smaller <= value < smaller else -1


@compiled
def _read_text(data: Array, is_long: bool, work: Array, out: Array) -> bool:
    """Memoize a text, and write it."""
    pos = work[ws.POS]
    if is_long:
        start, size = pos + 5, uint(data, pos + 1, 4)
        if size <= 0xFF:
            return False
    else:
        start, size = pos + 2, int64(data[pos + 1])
    end = start + size
    if end >= work[ws.END] or data[end] != MEMOIZE or not is_utf8(data, start, size):
        return False
    if work[ws.NUM_MEMO] >= ws.MAX_MEMO:
        return False
    text = ws.MEMO + ws.MEMO_WIDTH * work[ws.NUM_MEMO]
    work[text + ws.SPELLED], work[text + ws.SPELLED_BYTES] = pos, end + 1 - pos
    work[text + ws.START], work[text + ws.SIZE], work[text + ws.OWNER] = start, size, -1
    work[text + ws.KNOWN_AS] = find(data, start, size, KEY_BYTES, KEY_ENDS)
    work[ws.NUM_MEMO] += 1
    work[ws.POS] = end + 1
    return _write_text(data, text, work, out)


@compiled
def _get_text(data: Array, is_long: bool, work: Array, out: Array) -> bool:
    """Write a text that was memoized before, in this experience or in another one."""
    num_bytes = 4 if is_long else 1
    index = uint(data, work[ws.POS] + 1, num_bytes)
    work[ws.POS] += 1 + num_bytes
    text = ws.MEMO + ws.MEMO_WIDTH * index
    if index >= work[ws.NUM_MEMO] or work[text + ws.SIZE] < 0:
        return False
    return _write_text(data, text, work, out)


@compiled
def _write_text(data: Array, text: int, work: Array, out: Array) -> bool:
    """Write a text: spelled, or where this experience has it already, as that."""
    w = work[ws.WRITTEN]
    if work[text + ws.OWNER] == work[ws.ITEM]:
        is_long = work[text + ws.INDEX] > 0xFF
        out[w] = LONG_BINGET if is_long else BINGET
        work[ws.WRITTEN] = put_uint(out, w + 1, work[text + ws.INDEX], 4 if is_long else 1)
    else:
        # Python has one object for an empty text and for each character of Latin-1. What spells
        # one of them twice isn't what Python would write.
        single = _singleton(data, work[text + ws.START], work[text + ws.SIZE])
        if single >= 0:
            if work[ws.SINGLETONS + single] == work[ws.ITEM]:
                return False
            work[ws.SINGLETONS + single] = work[ws.ITEM]
        work[text + ws.OWNER], work[text + ws.INDEX] = work[ws.ITEM], work[ws.NUM_OUT]
        work[ws.NUM_OUT] += 1
        work[ws.WRITTEN] = copy(
            data, work[text + ws.SPELLED], work[text + ws.SPELLED_BYTES], out, w
        )
    value = work[ws.SP]
    work[value + ws.KIND], work[value + ws.NUMBER] = ws.TEXT, work[text + ws.START]
    work[value + ws.TEXT_BYTES], work[value + ws.NAME] = (
        work[text + ws.SIZE],
        work[text + ws.KNOWN_AS],
    )
    work[value + ws.DEPTH] = 0
    work[ws.SP] = value + ws.STACK_WIDTH
    return True


@compiled
def _singleton(data: Array, start: int, size: int) -> int:
    """Number of a character of Latin-1, 256 for an empty text; -1 for all others."""
    if size == 0:
        return 256
    if size == 1:
        return int64(data[start])
    if size == 2 and (data[start] == 0xC2 or data[start] == 0xC3):
        return int64(data[start + 1]) + (64 if data[start] == 0xC3 else 0)
    return -1


# --- lists and dicts


@compiled
def _open_container(data: Array, kind: int, work: Array) -> bool:
    """An empty list or dict; it may be filled later."""
    if data[work[ws.POS]] != MEMOIZE or work[ws.NUM_MEMO] >= ws.MAX_MEMO:
        return False
    work[ws.POS] += 1
    work[ws.MEMO + ws.MEMO_WIDTH * work[ws.NUM_MEMO] + ws.SIZE] = -1
    work[ws.NUM_MEMO] += 1
    work[ws.NUM_OUT] += 1
    return _push(kind, 0, work)


@compiled
def _mark(work: Array) -> bool:
    """The two or more members of the list or dict below follow, which is empty yet."""
    below = work[ws.SP] - ws.STACK_WIDTH
    if (
        below < ws.STACK
        or not ws.DICT <= work[below + ws.KIND] <= ws.LIST
        or work[below + ws.NUMBER] != 0
    ):
        return False
    outer, work[ws.INNERMOST] = work[ws.INNERMOST], work[ws.SP]
    return _push(ws.MARK, outer, work)


@compiled
def _fill(data: Array, kind: int, is_marked: bool, max_depth: int, work: Array) -> bool:
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

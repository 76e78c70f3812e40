"""Reads one experience's metadata out of a pickle, and writes the pickle of it alone.

A value is accepted only in the order of opcodes in which `pickle.dumps` writes it (protocols 4 and
5), and written in that order: each list or dict is empty when it is filled, and filled once. So
what differs from the pickle that was read are the numbers under which texts are memoized, and that
a text is spelled where it is first met in this experience. Only texts may be shared.

Legend: a value on the stack, a text and a mark are known by where their rows begin in `work`.
"""

from __future__ import annotations

from typing import Final

from experience_buffer_server.compiled.primitives import (
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
from experience_buffer_server.compiled.workspace import (
    ABSENT,
    BOOL,
    DEPTH,
    DICT,
    END,
    FIRST,
    FLOAT,
    INDEX,
    INNERMOST,
    INT,
    ITEM,
    KEPT_INPUT,
    KEY_BYTES,
    KEY_ENDS,
    KIND,
    KNOWN_AS,
    LAST,
    LIST,
    MARK,
    MAX_MEMO,
    MAX_ROWS,
    MAX_STACK,
    MEMO,
    MEMO_WIDTH,
    NAME,
    NONE,
    NUM_KEPT,
    NUM_MEMO,
    NUM_NODES,
    NUM_NOTED,
    NUM_OUT,
    NUM_ROWS,
    NUMBER,
    OWNER,
    POS,
    ROW_WIDTH,
    ROWS,
    SINGLETONS,
    SIZE,
    SP,
    SPELLED,
    SPELLED_BYTES,
    STACK,
    STACK_WIDTH,
    START,
    TEXT,
    TEXT_BYTES,
    WRITTEN,
    Bounds,
)

_BININT: Final = 0x4A
_BININT1: Final = 0x4B
_BININT2: Final = 0x4D
_LONG1: Final = 0x8A
_BINFLOAT: Final = 0x47
_NONE: Final = 0x4E
_NEWTRUE: Final = 0x88
_NEWFALSE: Final = 0x89
_SHORT_BINUNICODE: Final = 0x8C
_BINUNICODE: Final = 0x58
_BINGET: Final = 0x68
_LONG_BINGET: Final = 0x6A
_MEMOIZE: Final = 0x94
_EMPTY_DICT: Final = 0x7D
_EMPTY_LIST: Final = 0x5D
_MARK: Final = 0x28
_SETITEM: Final = 0x73
_SETITEMS: Final = 0x75
_APPEND: Final = 0x61
_APPENDS: Final = 0x65
_FRAME: Final = 0x95

_HEAD = constant("}\x94(\x8c\x07version\x94K\x01\x8c\tnum_items\x94K\x01\x8c\x05items\x94]\x94")
"""What precedes the only experience of a payload."""
_TAIL = constant("au.")
_HEAD_MEMO: Final = 5
"""Values that the head memoizes; its three keys are the second to the fourth."""
_FRAME_START_BYTES: Final = 11
_MAX_PICKLE_BYTES: Final = 64_000
"""A pickle that is longer has more than one frame."""
_MAX_MEMBERS: Final = 1_000
"""A list or dict of more is written in parts."""
_MAX_KEYS: Final = 64
"""They are compared with each other."""
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
        if op in (_BINGET, _LONG_BINGET):
            is_known = _get(data, op == _LONG_BINGET, work, out)
        elif op in (_SHORT_BINUNICODE, _BINUNICODE):
            is_known = _read_text(data, op == _BINUNICODE, work, out)
        elif op == _FRAME:
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
    out[start], out[start + 1], out[start + 2] = 0x80, 5, _FRAME
    put_uint(out, start + 3, w - start - _FRAME_START_BYTES, 8)
    work[WRITTEN] = w
    return bool(work[STACK + KIND] == DICT)


@compiled
def _read_other(data: Array, max_depth: int, work: Array) -> bool:
    """Read an opcode that is written as it came."""
    pos = work[POS]
    op = data[pos]
    work[POS] += 1
    if op in (_BININT1, _BININT2, _BININT, _LONG1):
        number, work[POS] = read_int(data, pos)
        return work[POS] > 0 and _push(INT, number, work)
    if op == _BINFLOAT:
        bits = int64(0)
        for i in range(8):
            bits = bits << 8 | int64(data[pos + 1 + i])
        work[POS] += 8
        return _push(FLOAT, bits, work)
    if op == _NONE:
        return _push(NONE, 0, work)
    if op in (_NEWTRUE, _NEWFALSE):
        return _push(BOOL, 0, work)
    if op in (_EMPTY_DICT, _EMPTY_LIST):
        return _open(data, DICT if op == _EMPTY_DICT else LIST, work)
    if op == _MARK:
        return _mark(work)
    if op in (_SETITEM, _SETITEMS):
        return _fill(data, DICT, op == _SETITEMS, max_depth, work)
    if op in (_APPEND, _APPENDS):
        return _fill(data, LIST, op == _APPENDS, max_depth, work)
    return False


@compiled
def _push(kind: int, number: int, work: Array) -> bool:
    value = work[SP]
    work[value + KIND], work[value + NUMBER] = kind, number
    work[value + TEXT_BYTES] = work[value + NAME] = -1
    work[value + DEPTH] = 1 if kind in (DICT, LIST) else 0
    work[SP] = value + STACK_WIDTH
    return True


@compiled
def read_int(data: Array, pos: int) -> tuple[int, int]:
    """An integer in the shortest opcode for it, and where it ends; else an end of -1."""
    op = data[pos]
    if op == _BININT1:
        return int64(data[pos + 1]), pos + 2
    if op == _BININT2:
        value = uint(data, pos + 1, 2)
        return value, pos + 3 if value > 0xFF else -1
    if op == _BININT:
        value = uint(data, pos + 1, 4)
        value -= (value >> 31) << 32
        return value, pos + 5 if not 0 <= value <= 0xFFFF else -1
    size = int64(data[pos + 1])
    if op != _LONG1 or not 4 < size <= 8:
        return 0, -1
    value = uint(data, pos + 2, size)
    if size < 8:
        value -= (value >> (8 * size - 1)) << (8 * size)
    smaller = int64(1) << (8 * size - 9)
    return value, pos + 2 + size if not -smaller <= value < smaller else -1


@compiled
def _read_text(data: Array, is_long: bool, work: Array, out: Array) -> bool:
    """Memoize a text, and write it."""
    pos = work[POS]
    if is_long:
        start, size = pos + 5, uint(data, pos + 1, 4)
        if size <= 0xFF:
            return False
    else:
        start, size = pos + 2, int64(data[pos + 1])
    end = start + size
    if end >= work[END] or data[end] != _MEMOIZE or not is_utf8(data, start, size):
        return False
    if work[NUM_MEMO] >= MAX_MEMO:
        return False
    text = MEMO + MEMO_WIDTH * work[NUM_MEMO]
    work[text + SPELLED], work[text + SPELLED_BYTES] = pos, end + 1 - pos
    work[text + START], work[text + SIZE], work[text + OWNER] = start, size, -1
    work[text + KNOWN_AS] = find(data, start, size, KEY_BYTES, KEY_ENDS)
    work[NUM_MEMO] += 1
    work[POS] = end + 1
    return _write_text(data, text, work, out)


@compiled
def _get(data: Array, is_long: bool, work: Array, out: Array) -> bool:
    """Write a text that was memoized before, in this experience or in another one."""
    num_bytes = 4 if is_long else 1
    index = uint(data, work[POS] + 1, num_bytes)
    work[POS] += 1 + num_bytes
    text = MEMO + MEMO_WIDTH * index
    if index >= work[NUM_MEMO] or work[text + SIZE] < 0:
        return False
    return _write_text(data, text, work, out)


@compiled
def _write_text(data: Array, text: int, work: Array, out: Array) -> bool:
    """Write a text: spelled, or where this experience has it already, as that."""
    w = work[WRITTEN]
    if work[text + OWNER] == work[ITEM]:
        is_long = work[text + INDEX] > 0xFF
        out[w] = _LONG_BINGET if is_long else _BINGET
        work[WRITTEN] = put_uint(out, w + 1, work[text + INDEX], 4 if is_long else 1)
    else:
        # Python has one object for an empty text and for each character of Latin-1. What spells
        # one of them twice isn't what Python would write.
        single = _singleton(data, work[text + START], work[text + SIZE])
        if single >= 0:
            if work[SINGLETONS + single] == work[ITEM]:
                return False
            work[SINGLETONS + single] = work[ITEM]
        work[text + OWNER], work[text + INDEX] = work[ITEM], work[NUM_OUT]
        work[NUM_OUT] += 1
        work[WRITTEN] = copy(data, work[text + SPELLED], work[text + SPELLED_BYTES], out, w)
    value = work[SP]
    work[value + KIND], work[value + NUMBER] = TEXT, work[text + START]
    work[value + TEXT_BYTES], work[value + NAME] = work[text + SIZE], work[text + KNOWN_AS]
    work[value + DEPTH] = 0
    work[SP] = value + STACK_WIDTH
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


@compiled
def _open(data: Array, kind: int, work: Array) -> bool:
    """An empty list or dict; it may be filled later."""
    if data[work[POS]] != _MEMOIZE or work[NUM_MEMO] >= MAX_MEMO:
        return False
    work[POS] += 1
    work[MEMO + MEMO_WIDTH * work[NUM_MEMO] + SIZE] = -1
    work[NUM_MEMO] += 1
    work[NUM_OUT] += 1
    return _push(kind, 0, work)


@compiled
def _mark(work: Array) -> bool:
    """The two or more members of the list or dict below follow, which is empty yet."""
    below = work[SP] - STACK_WIDTH
    if below < STACK or not DICT <= work[below + KIND] <= LIST or work[below + NUMBER] != 0:
        return False
    outer, work[INNERMOST] = work[INNERMOST], work[SP]
    return _push(MARK, outer, work)


@compiled
def _fill(data: Array, kind: int, is_marked: bool, max_depth: int, work: Array) -> bool:
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
    """Whether none of the keys before is the same."""
    start, size = work[key + NUMBER], work[key + TEXT_BYTES]
    for other in range(first, key, 2 * STACK_WIDTH):
        if work[other + TEXT_BYTES] == size and are_equal(data, start, work[other + NUMBER], size):
            return False
    return True

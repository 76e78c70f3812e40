"""Reads integers and texts out of a pickle; texts are written, too.

A text is spelled where it is first met in an experience, and referred to afterwards. A value on the
stack, and a text in the memo, are known by where their rows begin in `work`.
"""

from __future__ import annotations

from experience_buffer_server.buffer.intake.compiled import opcodes
from experience_buffer_server.buffer.intake.compiled import workspace as ws
from experience_buffer_server.buffer.intake.compiled.primitives import (
    Array,
    compiled,
    copy,
    find,
    int64,
    is_utf8,
    put_uint,
    uint,
)
from experience_buffer_server.buffer.intake.compiled.workspace import KEY_BYTES, KEY_ENDS


@compiled
def push(kind: int, number: int, work: Array) -> bool:
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
    if op == opcodes.BININT1:
        return int64(data[pos + 1]), pos + 2
    if op == opcodes.BININT2:
        value = uint(data, pos + 1, 2)
        return value, pos + 3 if value > 0xFF else -1
    if op == opcodes.BININT:
        value = uint(data, pos + 1, 4)
        value -= (value >> 31) << 32
        return value, pos + 5 if not 0 <= value <= 0xFFFF else -1
    size = int64(data[pos + 1])
    if op != opcodes.LONG1 or not 4 < size <= 8:
        return 0, -1
    value = uint(data, pos + 2, size)
    if size < 8:
        value -= (value >> (8 * size - 1)) << (8 * size)
    smaller = int64(1) << (8 * size - 9)
    return value, pos + 2 + size if not -smaller <= value < smaller else -1


@compiled
def read_text(data: Array, is_long: bool, work: Array, out: Array) -> bool:
    """Memoize a text, and write it."""
    pos = work[ws.POS]
    if is_long:
        start, size = pos + 5, uint(data, pos + 1, 4)
        if size <= 0xFF:
            return False
    else:
        start, size = pos + 2, int64(data[pos + 1])
    end = start + size
    if end >= work[ws.END] or data[end] != opcodes.MEMOIZE or not is_utf8(data, start, size):
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
def get_text(data: Array, is_long: bool, work: Array, out: Array) -> bool:
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
        out[w] = opcodes.LONG_BINGET if is_long else opcodes.BINGET
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

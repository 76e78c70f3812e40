"""Reads the tensor table of a payload, and writes those of its experiences alone.

A table is accepted as the safetensors format's own writer spells it, with names of ASCII letters,
digits and underscores: the tensors of each experience in its order, their bytes one after another.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from experience_buffer_server.buffer.intake.compiled import workspace as ws
from experience_buffer_server.buffer.intake.compiled.primitives import (
    Array,
    are_equal,
    compiled,
    constant,
    copy,
    decimal,
    find,
    int64,
    is_at,
    is_less,
    names_table,
    put,
    put_decimal,
    put_uint,
    uint,
)
from experience_buffer_server.buffer.intake.compiled.workspace import DTYPES, TENSOR_NAMES, Bounds

_NUM_KNOWN: Final = len(TENSOR_NAMES)
_FIELDS, _FIELD_ENDS = names_table(
    (*TENSOR_NAMES, "chosen", "rejected", "baseline_reward", "env_state_hash", "num_turns")
)
"""The last ones change what an experience is, or are no tensors."""
_ROUTES: Final = TENSOR_NAMES.index("routed_experts")
"""The one that may have several dimensions."""
_CODES, _CODE_ENDS = names_table(DTYPES)
_ITEM_BYTES = np.array([8, 8, 8, 8, 4, 4, 4, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1])
_AFTER_NAME = constant('":{"dtype":"')
_AFTER_DTYPE = constant('","shape":[')
_AFTER_SHAPE = constant('],"data_offsets":[')
_FIRST_NAME = constant('{"0:')
_NEXT_NAME = constant(',"0:')
_QUOTE: Final = 0x22
_COMMA: Final = 0x2C
_COLON: Final = 0x3A
_BRACKET: Final = 0x5D
_OPEN_BRACE: Final = 0x7B
_BRACE: Final = 0x7D
_SPACE: Final = 0x20
_MAX_NAMES: Final = 32
"""Tensors of an experience; their names are compared with each other."""
_MAX_NAME_BYTES: Final = 128
_MAX_DIMENSIONS: Final = 8
_MAX_ELEMENTS: Final = 2**44
_MIN_HEADER_BYTES: Final = 2
_TABLE_END: Final = ws.TENSOR_TABLE + ws.TENSOR_WIDTH * ws.MAX_TENSORS


@compiled
def read_table(data: Array, start: int, num_items: int, bounds: Bounds, work: Array) -> int:
    """Read the tensor section from `start` to the payload's end.

    Returns:
        Where the tensors' bytes begin; -1 where the table isn't known here.
    """
    header_bytes = uint(data, start, 8)
    if not _MIN_HEADER_BYTES <= header_bytes <= min(bounds.max_header_bytes, data.size - start - 8):
        return -1
    pos, base = start + 8, start + 8 + header_bytes
    stop = base
    while data[stop - 1] == _SPACE:
        stop -= 1
    for item in range(num_items):
        work[ws.HEADS + ws.HEAD_WIDTH * item] = -1
        work[ws.HEADS + ws.HEAD_WIDTH * item + 2] = 0
    max_tensors = min(bounds.max_tensors, _MAX_NAMES)
    expected, tensor = int64(0), int64(ws.TENSOR_TABLE)
    while pos < stop - 1:
        if tensor >= _TABLE_END or data[pos + 1] != _QUOTE:
            return -1
        if data[pos] != (_OPEN_BRACE if tensor == ws.TENSOR_TABLE else _COMMA):
            return -1
        pos = _read_tensor(data, pos + 2, num_items, tensor, work)
        if pos < 0 or work[tensor + ws.BEGIN] != expected:
            return -1
        if not _link(data, tensor, max_tensors, work):
            return -1
        expected = work[tensor + ws.STOP]
        tensor += ws.TENSOR_WIDTH
    if pos != stop - 1 or data[pos] != _BRACE or expected != work[ws.NUM_BYTES] - base:
        return -1
    return base


@compiled
def _read_tensor(data: Array, pos: int, num_items: int, tensor: int, work: Array) -> int:
    """Read one entry of the table, from its experience's number on; returns where it ends, or -1."""
    item, pos = decimal(data, pos)
    if not 0 <= item < num_items or data[pos] != _COLON:
        return -1
    start = pos + 1
    pos = start
    while _is_of_name(data[pos]):
        pos += 1
    size = pos - start
    work[tensor + ws.OF_ITEM], work[tensor + ws.FIELD_START] = item, start
    work[tensor + ws.FIELD_SIZE] = size
    if not 0 < size <= _MAX_NAME_BYTES or not is_at(data, pos, _AFTER_NAME):
        return -1
    dtype, pos = _read_dtype(data, pos + _AFTER_NAME.size)
    if dtype < 0 or not is_at(data, pos, _AFTER_DTYPE):
        return -1
    pos += _AFTER_DTYPE.size
    work[tensor + ws.DTYPE], work[tensor + ws.SHAPE_START] = dtype, pos
    num_elements, num_dimensions, pos = _read_shape(data, pos)
    work[tensor + ws.SHAPE_SIZE] = pos - work[tensor + ws.SHAPE_START]
    if num_elements < 0 or not is_at(data, pos, _AFTER_SHAPE):
        return -1
    begin, pos = decimal(data, pos + _AFTER_SHAPE.size)
    if begin < 0 or data[pos] != _COMMA:
        return -1
    end, pos = decimal(data, pos + 1)
    if end - begin != num_elements * _ITEM_BYTES[dtype]:
        return -1
    if data[pos] != _BRACKET or data[pos + 1] != _BRACE:
        return -1
    field = find(data, start, size, _FIELDS, _FIELD_ENDS)
    work[tensor + ws.BEGIN], work[tensor + ws.STOP], work[tensor + ws.FIELD] = begin, end, field
    if field >= _NUM_KNOWN or (field == _ROUTES and num_dimensions == 0):
        return -1
    if field >= 0 and field != _ROUTES and num_dimensions != 1:
        return -1
    return pos + 2


@compiled
def _is_of_name(byte: int) -> bool:
    is_letter = 0x61 <= byte <= 0x7A or 0x41 <= byte <= 0x5A
    return is_letter or 0x30 <= byte <= 0x39 or byte == 0x5F


@compiled
def _read_dtype(data: Array, start: int) -> tuple[int, int]:
    """Which dtype stands there, -1 for none that is known, and where it ends."""
    pos = start
    while data[pos] != _QUOTE:
        pos += 1
    return find(data, start, pos - start, _CODES, _CODE_ENDS), pos


@compiled
def _read_shape(data: Array, pos: int) -> tuple[int, int, int]:
    """Number of elements, -1 where the shape isn't known here; of dimensions; and where it ends."""
    num_elements, num_dimensions = int64(1), 0
    while data[pos] != _BRACKET:
        if num_dimensions > 0:
            if data[pos] != _COMMA:
                return -1, 0, pos
            pos += 1
        size, pos = decimal(data, pos)
        num_dimensions += 1
        if size < 0 or size > _MAX_ELEMENTS or num_dimensions > _MAX_DIMENSIONS:
            return -1, 0, pos
        # The product must not exceed 64 bits before it is compared.
        if size > 0 and num_elements > _MAX_ELEMENTS // size:
            return -1, 0, pos
        num_elements *= size
        # What is empty in more than one dimension may be huge in another.
        if num_elements == 0 and num_dimensions > 1:
            return -1, 0, pos
    return num_elements, num_dimensions, pos


@compiled
def _link(data: Array, tensor: int, max_tensors: int, work: Array) -> bool:
    """Append a tensor to those of its experience; False where it isn't in order, or twice there."""
    head = ws.HEADS + ws.HEAD_WIDTH * work[tensor + ws.OF_ITEM]
    work[tensor + ws.NEXT] = -1
    start, size = work[tensor + ws.FIELD_START], work[tensor + ws.FIELD_SIZE]
    if work[head] < 0:
        work[head] = tensor
    else:
        last = work[head + 1]
        if work[tensor + ws.DTYPE] < work[last + ws.DTYPE]:
            return False
        if work[tensor + ws.DTYPE] == work[last + ws.DTYPE] and not is_less(
            data, work[last + ws.FIELD_START], work[last + ws.FIELD_SIZE], start, size
        ):
            return False
        other = work[head]
        while other >= 0:
            if work[other + ws.FIELD_SIZE] == size and are_equal(
                data, work[other + ws.FIELD_START], start, size
            ):
                return False
            other = work[other + ws.NEXT]
        work[last + ws.NEXT] = tensor
    work[head + 1] = tensor
    work[head + 2] += 1
    return bool(work[head + 2] <= max_tensors)


@compiled
def write_table(data: Array, base: int, first: int, fact: int, work: Array, out: Array) -> int:
    """Write one experience's table, and where its tensors' bytes are; returns how many both take.

    Args:
        data: The payload.
        base: Where the tensors' bytes begin.
        first: The experience's first row in the table.
        fact: Its row of facts; receives what its tensors are.
        work: Receives the spans, and the sizes.
        out: Receives the table.
    """
    start, w, end = work[ws.WRITTEN], work[ws.WRITTEN] + 8, int64(0)
    first_span = work[ws.SPAN]
    for field in range(_NUM_KNOWN):
        work[ws.SIZES + field] = -1
        work[fact + ws.PLACES + 3 * field] = -1
    work[fact + ws.TENSORS] = 0
    tensor = first
    while tensor >= 0:
        w = put(out, w, _FIRST_NAME if tensor == first else _NEXT_NAME)
        w = _write_tensor(data, tensor, end, work, out, w)
        end += work[tensor + ws.STOP] - work[tensor + ws.BEGIN]
        _note_span(base + work[tensor + ws.BEGIN], base + work[tensor + ws.STOP], first_span, work)
        _note_tensor(data, tensor, base, fact, work)
        tensor = work[tensor + ws.NEXT]
    out[w] = _BRACE
    w += 1
    while (w - start) % 8:
        out[w] = _SPACE
        w += 1
    put_uint(out, start, w - start - 8, 8)
    work[ws.WRITTEN] = w
    num_bytes: int = w - start + end
    return num_bytes


@compiled
def _write_tensor(data: Array, tensor: int, begin: int, work: Array, out: Array, w: int) -> int:
    dtype = work[tensor + ws.DTYPE]
    w = copy(data, work[tensor + ws.FIELD_START], work[tensor + ws.FIELD_SIZE], out, w)
    w = put(out, w, _AFTER_NAME)
    code = _CODE_ENDS[dtype]
    w = copy(_CODES, code, _CODE_ENDS[dtype + 1] - code, out, w)
    w = put(out, w, _AFTER_DTYPE)
    w = copy(data, work[tensor + ws.SHAPE_START], work[tensor + ws.SHAPE_SIZE], out, w)
    w = put(out, w, _AFTER_SHAPE)
    w = put_decimal(out, w, begin)
    out[w] = _COMMA
    w = put_decimal(out, w + 1, begin + work[tensor + ws.STOP] - work[tensor + ws.BEGIN])
    out[w], out[w + 1] = _BRACKET, _BRACE
    return w + 2


@compiled
def _note_span(begin: int, end: int, first_span: int, work: Array) -> None:
    """Note where a tensor's bytes are; what follows the span before becomes a part of it.

    There are no more spans than tensors, so they have room.
    """
    span = work[ws.SPAN]
    if span > first_span and work[span - 1] == begin:
        work[span - 1] = end
    else:
        work[span], work[span + 1] = begin, end
        work[ws.SPAN] = span + 2


@compiled
def _note_tensor(data: Array, tensor: int, base: int, fact: int, work: Array) -> None:
    """Note how many elements a tensor has, or rows, if something depends on it."""
    field, dtype = work[tensor + ws.FIELD], work[tensor + ws.DTYPE]
    if field < 0:
        return
    begin, end = work[tensor + ws.BEGIN], work[tensor + ws.STOP]
    if field == _ROUTES:
        work[ws.SIZES + field], _ = decimal(data, work[tensor + ws.SHAPE_START])
    else:
        work[ws.SIZES + field] = (end - begin) // _ITEM_BYTES[dtype]
    if end > begin:
        work[fact + ws.TENSORS] |= 1 << field
    place = fact + ws.PLACES + 3 * field
    work[place], work[place + 1], work[place + 2] = dtype, base + begin, base + end

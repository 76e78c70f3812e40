"""A compiled reader of payloads as their writers write them, which cuts them into canonical ones.

It knows one spelling of everything, that of `pickle.dumps` and of the safetensors format's own
writer, and only what most experiences are made of. Whatever else it meets, sound or not, isn't
known here, and the checked reader (`trxp.read` and `admission.admit`), the authority on all of it,
reads the payload from its beginning. What it does read is what those two would make of it: the
tests compare both byte by byte. Nothing that a payload says is called, looked up or allocated.

Importing this compiles it, which takes half a minute, unless numba has kept it: in `__pycache__`, the
user's cache or NUMBA_CACHE_DIR. Where it can't be kept, that is a RuntimeError.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

import numba
import xxhash
from numba import types

from experience_buffer_server.compiled.facts import note_facts
from experience_buffer_server.compiled.metadata import read_metadata
from experience_buffer_server.compiled.primitives import (
    Array,
    compiled,
    constant,
    is_at,
    put,
    put_uint,
    uint,
)
from experience_buffer_server.compiled.scalars import read_int
from experience_buffer_server.compiled.tables import read_table, write_table
from experience_buffer_server.compiled.workspace import (
    BOUNDS_TYPE,
    END,
    FACTS,
    HEAD_WIDTH,
    HEADS,
    ITEM,
    KNOWN_AS,
    MAX_ITEMS,
    MEMO,
    MEMO_WIDTH,
    NUM_FACTS,
    NUM_MEMO,
    NUM_NODES,
    NUM_SINGLETONS,
    OUT,
    POS,
    SINGLETONS,
    SIZE,
    SPAN,
    SPANS,
    SPANS_TABLE,
    START,
    WRITTEN,
    Bounds,
)

UNKNOWN: Final = -1
"""What isn't known here."""

_MAGIC = constant("TRXP\x01")
_FRAME_BYTES: Final = 21
_UP_TO_NUM_ITEMS = constant("}\x94(\x8c\x07version\x94K\x01\x8c\tnum_items\x94")
_UP_TO_ITEMS = constant("\x8c\x05items\x94]\x94")
_PICKLE_START_BYTES: Final = 11
_NUM_MEMO: Final = 5
"""Values that are memoized before the first experience."""
_MARK: Final = 0x28
_APPEND = constant("au.")
_APPENDS = constant("eu.")

_BYTES = types.Array(types.uint8, 1, "C", readonly=True)


@compiled
def _begin(data: Array, bounds: Bounds, work: Array) -> int:
    """Read what precedes the first experience; returns how many there are, or -1."""
    if not is_at(data, 0, _MAGIC):
        return -1
    metadata_bytes, tensor_bytes = uint(data, 5, 8), uint(data, 13, 8)
    if not 0 <= metadata_bytes <= min(data.size, bounds.max_metadata_bytes):
        return -1
    pos, end = _FRAME_BYTES, _FRAME_BYTES + metadata_bytes
    if tensor_bytes != data.size - end:
        return -1
    if data[pos] != 0x80 or not 4 <= data[pos + 1] <= 5 or data[pos + 2] != 0x95:
        return -1
    frame_bytes = uint(data, pos + 3, 8)
    pos += _PICKLE_START_BYTES
    if not 0 <= frame_bytes <= end - pos or not is_at(data, pos, _UP_TO_NUM_ITEMS):
        return -1
    _note_key(1, pos + 5, 7, work)
    _note_key(2, pos + 17, 9, work)
    num_items, pos = read_int(data, pos + _UP_TO_NUM_ITEMS.size)
    if pos < 0 or not 1 <= num_items <= MAX_ITEMS or not is_at(data, pos, _UP_TO_ITEMS):
        return -1
    _note_key(3, pos + 2, 5, work)
    # The dict and the list around them.
    work[MEMO + SIZE] = work[MEMO + 4 * MEMO_WIDTH + SIZE] = -1
    pos += _UP_TO_ITEMS.size
    if num_items > 1:
        if data[pos] != _MARK:
            return -1
        pos += 1
    work[POS], work[END], work[NUM_MEMO] = pos, end, _NUM_MEMO
    return num_items


@compiled
def _note_key(number: int, start: int, size: int, work: Array) -> None:
    text = MEMO + MEMO_WIDTH * number
    work[text + START], work[text + SIZE], work[text + KNOWN_AS] = start, size, -1


def _compiled_for(sources: int) -> Callable[[Array, Bounds, Array, Array], int]:
    @numba.njit(
        types.int64(_BYTES, BOUNDS_TYPE, types.int64[::1], types.uint8[::1]),
        cache=True,
        boundscheck=True,
    )
    def scan(data: Array, bounds: Bounds, work: Array, out: Array) -> int:
        """Read a payload.

        Args:
            data: The payload, uint8[bytes].
            bounds: What exceeds them isn't known here.
            work: Receives the facts and the spans, int64[WORK_SIZE].
            out: Receives what precedes the tensors' bytes in each canonical payload, uint8[OUT_BYTES].

        Returns:
            How many experiences there are, or UNKNOWN.

        Raises:
            IndexError: The same as UNKNOWN: the payload ends too early, or there isn't room in `out`.
        """
        # One of the constants by which numba knows again what it has kept.
        _ = sources
        num_items = _begin(data, bounds, work)
        if num_items < 1:
            return UNKNOWN
        base = read_table(data, work[END], num_items, bounds, work)
        if base < 0:
            return UNKNOWN
        for single in range(NUM_SINGLETONS):
            work[SINGLETONS + single] = -1
        work[WRITTEN] = work[NUM_NODES] = 0
        work[SPAN] = SPANS_TABLE
        for item in range(num_items):
            fact, frame = FACTS + NUM_FACTS * item, work[WRITTEN]
            first = work[HEADS + HEAD_WIDTH * item]
            work[fact + OUT], work[fact + SPANS] = frame, work[SPAN]
            work[ITEM], work[WRITTEN] = item, frame + _FRAME_BYTES
            if first < 0 or not read_metadata(data, bounds, work, out):
                return UNKNOWN
            pickle_bytes = work[WRITTEN] - frame - _FRAME_BYTES
            section_bytes = write_table(data, base, first, fact, work, out)
            w = put(out, frame, _MAGIC)
            w = put_uint(out, w, pickle_bytes, 8)
            put_uint(out, w, section_bytes, 8)
            work[fact + OUT + 1], work[fact + SPANS + 1] = work[WRITTEN], work[SPAN]
            if not note_facts(work, fact):
                return UNKNOWN
        end = _APPENDS if num_items > 1 else _APPEND
        if work[POS] + end.size != work[END] or not is_at(data, work[POS], end):
            return UNKNOWN
        return num_items

    return cast(Callable[[Array, Bounds, Array, Array], int], scan)


def _digest() -> int:
    """Of all that is compiled."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return xxhash.xxh3_64_intdigest(b"".join(file.read_bytes() for file in files)) >> 1


scan = _compiled_for(_digest())

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
from typing import Any, Final, cast

import numba
import numpy as np
import xxhash
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from experience_buffer._codec.payload import Buffer
from experience_buffer_server.buffer.intake.compiled import workspace as ws
from experience_buffer_server.buffer.intake.compiled.facts import note_facts
from experience_buffer_server.buffer.intake.compiled.metadata import read_int, read_metadata
from experience_buffer_server.buffer.intake.compiled.primitives import (
    Array,
    compiled,
    constant,
    is_at,
    put,
    put_uint,
    uint,
)
from experience_buffer_server.buffer.intake.compiled.tables import read_table, write_table
from experience_buffer_server.buffer.intake.compiled.workspace import BOUNDS_TYPE, Bounds

UNKNOWN: Final = -1
"""What isn't known here."""

_MAGIC = constant("TRXP\x01")
_FRAME_BYTES: Final = 21
_UP_TO_NUM_ITEMS = constant("}\x94(\x8c\x07version\x94K\x01\x8c\tnum_items\x94")
_UP_TO_ITEMS = constant("\x8c\x05items\x94]\x94")
_PICKLE_START_BYTES: Final = 11
_NODES_AROUND: Final = 12
"""Opcodes around the experiences, at most, as the checked reader counts them."""
_NUM_MEMO: Final = 5
"""Values that are memoized before the first experience."""
_MARK: Final = 0x28
_APPEND = constant("au.")
_APPENDS = constant("eu.")


@compiled
def _begin(data: Array, bounds: Bounds, work: Array) -> int:
    """Read what precedes the first experience; returns how many there are, or -1."""
    if not is_at(data, 0, _MAGIC):
        return -1
    metadata_bytes, tensor_bytes = uint(data, 5, 8), uint(data, 13, 8)
    if not 0 <= metadata_bytes <= min(data.size, bounds.max_metadata_bytes):
        return -1
    pos, end = _FRAME_BYTES, _FRAME_BYTES + metadata_bytes
    if tensor_bytes != work[ws.NUM_BYTES] - end:
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
    if pos < 0 or not 1 <= num_items <= ws.MAX_ITEMS or not is_at(data, pos, _UP_TO_ITEMS):
        return -1
    _note_key(3, pos + 2, 5, work)
    # The dict and the list around them.
    work[ws.MEMO + ws.SIZE] = work[ws.MEMO + 4 * ws.MEMO_WIDTH + ws.SIZE] = -1
    pos += _UP_TO_ITEMS.size
    if num_items > 1:
        if data[pos] != _MARK:
            return -1
        pos += 1
    work[ws.POS], work[ws.END], work[ws.NUM_MEMO] = pos, end, _NUM_MEMO
    return num_items


@compiled
def _note_key(number: int, start: int, size: int, work: Array) -> None:
    text = ws.MEMO + ws.MEMO_WIDTH * number
    work[text + ws.START], work[text + ws.SIZE], work[text + ws.KNOWN_AS] = start, size, -1


@compiled
def _scan(data: Array, bounds: Bounds, work: Array, out: Array) -> int:
    num_items = _begin(data, bounds, work)
    if num_items < 1:
        return UNKNOWN
    base = read_table(data, work[ws.END], num_items, bounds, work)
    if base < 0:
        return UNKNOWN
    for single in range(ws.NUM_SINGLETONS):
        work[ws.SINGLETONS + single] = -1
    work[ws.WRITTEN] = work[ws.COMPARED] = 0
    work[ws.NUM_NODES], work[ws.SPAN] = _NODES_AROUND, ws.SPANS_TABLE
    for item in range(num_items):
        fact, frame = ws.FACTS + ws.NUM_FACTS * item, work[ws.WRITTEN]
        first = work[ws.HEADS + ws.HEAD_WIDTH * item]
        work[fact + ws.OUT], work[fact + ws.SPANS] = frame, work[ws.SPAN]
        work[ws.ITEM], work[ws.WRITTEN] = item, frame + _FRAME_BYTES
        if first < 0 or not read_metadata(data, bounds, work, out):
            return UNKNOWN
        pickle_bytes = work[ws.WRITTEN] - frame - _FRAME_BYTES
        section_bytes = write_table(data, base, first, fact, work, out)
        w = put(out, frame, _MAGIC)
        w = put_uint(out, w, pickle_bytes, 8)
        put_uint(out, w, section_bytes, 8)
        work[fact + ws.OUT + 1], work[fact + ws.SPANS + 1] = work[ws.WRITTEN], work[ws.SPAN]
        if not note_facts(work, fact):
            return UNKNOWN
    end = _APPENDS if num_items > 1 else _APPEND
    if work[ws.POS] + end.size != work[ws.END] or not is_at(data, work[ws.POS], end):
        return UNKNOWN
    return num_items


def _to_pointer(context: Any, address: Any) -> Any:
    """What numba's `carray` takes for an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


_pointer: Any = intrinsic(_to_pointer)
_array_at: Any = numba.carray  # type: ignore[attr-defined]


def _compiled_for(sources: int) -> Callable[[int, int, int, Bounds, int, int], int]:
    # Addresses: of arrays, numba keeps the references that inner functions hold when one raises, and
    # so the payload for ever.
    @numba.njit(
        types.int64(*[types.int64] * 3, BOUNDS_TYPE, types.int64, types.int64),
        cache=True,
        boundscheck=True,
    )
    def scan_at(
        data_at: int, head_bytes: int, num_bytes: int, bounds: Bounds, work_at: int, out_at: int
    ) -> int:
        # One of the constants by which numba knows again what it has kept.
        _ = sources
        data = _array_at(_pointer(data_at), (head_bytes,), np.uint8)
        work = _array_at(_pointer(work_at), (ws.WORK_SIZE,), np.int64)
        out = _array_at(_pointer(out_at), (ws.OUT_BYTES,), np.uint8)
        work[ws.NUM_BYTES] = num_bytes
        return _scan(data, bounds, work, out)

    return cast(Callable[[int, int, int, Bounds, int, int], int], scan_at)


def _digest() -> int:
    """Of all that is compiled."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return xxhash.xxh3_64_intdigest(b"".join(file.read_bytes() for file in files)) >> 1


_scan_at = _compiled_for(_digest())


class Scanner:
    """Reads payloads. Not thread-safe: what it works in is asked for once.

    Args:
        bounds: What exceeds them isn't known here.

    Raises:
        RuntimeError: numba was told not to check indices (NUMBA_BOUNDSCHECK).
    """

    def __init__(self, bounds: Bounds) -> None:
        self.work = np.zeros(ws.WORK_SIZE, np.int64)
        """The facts and the spans of the last payload, among others; int64[WORK_SIZE]."""
        self.out = np.zeros(ws.OUT_BYTES, np.uint8)
        """What precedes the tensors' bytes in each of its canonical payloads, uint8[OUT_BYTES]."""
        self._bounds = bounds
        self._places = _address(self.work), _address(self.out)
        try:
            _scan_at(_address(_MAGIC), _MAGIC.size, _MAGIC.size, bounds, *self._places)
        except IndexError:
            return
        raise RuntimeError("it was compiled without checks of its indices (NUMBA_BOUNDSCHECK)")

    def scan(self, head: Buffer, num_bytes: int) -> int:
        """Read a payload; how many experiences it holds, or UNKNOWN.

        Args:
            head: What precedes the tensors' bytes, at least; it must not change meanwhile.
            num_bytes: Of the whole payload.
        """
        data = np.frombuffer(head, np.uint8)
        try:
            return _scan_at(_address(data), data.size, num_bytes, self._bounds, *self._places)
        except IndexError:
            # It ends too early, or there isn't room in `out`.
            return UNKNOWN


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address

"""The safetensors byte format: a checked table of tensors, and its canonical writing.

Bytes and shapes only; names are opaque here, and torch is not needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import itemgetter
from typing import Final, TypeAlias, TypeGuard

from experience_buffer._trxp_error import trxp_error
from experience_buffer.errors import TrxpError

ITEM_BYTES: Final = {
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
    "F32": 4,
    "U32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "U16": 2,
    "I16": 2,
    "F8_E5M2FNUZ": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E8M0": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Size of one element by dtype code, in the order in which the format's writer sorts tensors."""

_RANKS: Final = {code: rank for rank, code in enumerate(ITEM_BYTES)}
_MAX_DIMENSIONS: Final = 64
_MAX_EMPTY_ELEMENTS: Final = 2**48
_MAX_KEPT_TENSORS: Final = 64
_MAX_KEPT_CHARS: Final = 4096
_WHERE: Final = "tensor table"
_ENTRY: Final = re.compile(
    r'(?:\A\{|,)"([^"\\\x00-\x1f]*)":\{"dtype":"([A-Z0-9_]+)"'
    r',"shape":\[((?:\d{1,18}(?:,\d{1,18})*)?)\],"data_offsets":\[(\d{1,18}),(\d{1,18})\]\}'
)
"""An entry as the format's writer writes it, with the brace or comma before it."""
_ENTRY_CHARS: Final = len('{"":{"dtype":"","shape":[],"data_offsets":[,]}')

_range = itemgetter(3, 4)

_Entry: TypeAlias = tuple[str, str, str, str, str]
"""Name, dtype code, shape, and where the data begins and ends, as spelled."""
_Row: TypeAlias = tuple[str, str, tuple[int, ...], int, int]
"""The same as values."""


@dataclass(slots=True, eq=False)
class TensorView:
    """A tensor as it lies in a payload: no copy, no torch. Reading it is thread-safe."""

    dtype: str
    """Code of the safetensors format, such as `"F32"`; a key of `ITEM_BYTES`."""
    shape: tuple[int, ...]
    """Sizes of the dimensions; `()` for a scalar."""
    data: memoryview
    """The elements, little endian, row-major: `prod(shape) * ITEM_BYTES[dtype]` bytes."""


def read(data: memoryview, *, max_header_bytes: int) -> list[tuple[str, TensorView]]:
    """Read and check a safetensors file.

    Args:
        data: The whole file.
        max_header_bytes: Bound on the JSON header.

    Returns:
        Names and views, in the order of the header; a name may occur more than once.

    Raises:
        TrxpError: The header is damaged, a dtype is unknown, a shape doesn't match its range, or
            the ranges overlap, leave a hole or don't end with the data.
    """
    if len(data) < 8:
        raise _error(f"the tensor section has {len(data)} bytes; a safetensors file has 8 or more")
    header_bytes = int.from_bytes(data[:8], "little")
    if header_bytes > max_header_bytes:
        raise _error(
            f"a header of {header_bytes} bytes exceeds the limit of {max_header_bytes} "
            "(max_header_bytes)"
        )
    start = 8 + header_bytes
    if start > len(data):
        raise _error(f"a header of {header_bytes} bytes, but only {len(data) - 8} follow")
    try:
        header = str(data[8:start], "utf-8")
    except UnicodeDecodeError:
        raise _error("the header isn't UTF-8") from None
    entries = _entries(header)
    if entries is None:
        rows = _json_rows(header)
    elif (plain := _plain_views(entries, data[start:])) is not None:
        return plain
    else:
        rows = [_row(entry) for entry in entries]
    _check_tiling(rows, len(data) - start)
    views = []
    for name, dtype, shape, begin, end in rows:
        item_bytes = ITEM_BYTES.get(dtype)
        if item_bytes is None:
            raise _error(f"dtype {dtype[:80]!r} isn't one of {', '.join(ITEM_BYTES)}", name)
        if len(shape) > _MAX_DIMENSIONS:
            raise _error(f"{len(shape)} dimensions exceed the limit of {_MAX_DIMENSIONS}", name)
        if prod(shape) * item_bytes != end - begin:
            raise _error(f"{end - begin} bytes don't hold a {dtype} of {list(shape)!s:.80}", name)
        # Strides are computed of empty tensors too, and must not overflow.
        if begin == end and prod(filter(None, shape)) > _MAX_EMPTY_ELEMENTS:
            raise _error(f"shape {list(shape)!s:.80} is beyond what a tensor may have", name)
        views.append((name, TensorView(dtype, shape, data[start + begin : start + end])))
    return views


def write(tensors: Iterable[tuple[str, TensorView]]) -> list[bytes | memoryview]:
    """Write a safetensors file, as pieces to be joined.

    The order (dtype, then name), the spelling of the JSON and its padding to 8 bytes are those of
    the format's own writer, so that equal tensors give equal bytes.

    Raises:
        TrxpError: A name isn't valid Unicode.
    """
    entries = list(tensors)
    names = tuple([name for name, _ in entries])
    dtypes = tuple([view.dtype for _, view in entries])
    is_small = len(names) <= _MAX_KEPT_TENSORS and sum(map(len, names)) <= _MAX_KEPT_CHARS
    order, template = (_kept_layout if is_small else _layout)(names, dtypes)
    pieces: list[bytes | memoryview] = [b"", b""]
    numbers: list[object] = []
    end = 0
    for place in order:
        view = entries[place][1]
        shape, begin = view.shape, end
        end += len(view.data)
        numbers += (shape[0] if len(shape) == 1 else ",".join(map(str, shape)), begin, end)
        pieces.append(view.data)
    try:
        header = (template % tuple(numbers)).encode()
    except UnicodeEncodeError:
        raise _error("a tensor's name holds half of a surrogate pair; rename it") from None
    padded_bytes = -(-len(header) // 8) * 8
    pieces[0] = padded_bytes.to_bytes(8, "little")
    pieces[1] = header.ljust(padded_bytes)
    return pieces


def _layout(names: tuple[str, ...], dtypes: tuple[str, ...]) -> tuple[list[int], str]:
    """In which order tensors are written, and the header: their shapes and ranges are to be put in."""
    order = sorted(range(len(names)), key=lambda place: (_RANKS[dtypes[place]], names[place]))
    lines = []
    for place in order:
        name = names[place]
        quoted = f'"{name}"' if _is_bare(name) else json.dumps(name, ensure_ascii=False)
        lines.append(
            f'{quoted.replace("%", "%%")}:{{"dtype":"{dtypes[place]}","shape":[%s],'
            '"data_offsets":[%s,%s]}'
        )
    return order, f"{{{','.join(lines)}}}"


_kept_layout = lru_cache(maxsize=128)(_layout)
"""Most tables have the names and dtypes of one before. What is kept is a few megabytes at most."""


def _is_bare(name: str) -> bool:
    """Whether a name needs no escaping in JSON."""
    return name.isprintable() and '"' not in name and "\\" not in name


def _entries(header: str) -> list[_Entry] | None:
    """Take apart a header as the format's own writer spells it; None if it's spelled otherwise."""
    body = header.rstrip(" ")
    if body == "{}":
        return []
    found: list[_Entry] = _ENTRY.findall(body)
    if sum(map(len, map("".join, found))) + _ENTRY_CHARS * len(found) + 1 != len(body):
        return None
    return found if body[0] == "{" and body[-1] == "}" else None


def _row(entry: _Entry) -> _Row:
    name, dtype, shape, begin, end = entry
    return name, dtype, _sizes(shape), int(begin), int(end)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


def _plain_views(entries: list[_Entry], data: memoryview) -> list[tuple[str, TensorView]] | None:
    """Read a table whose tensors follow one another; None for one to be looked at row by row.

    So are all that the format's own writer makes. They are checked as they are read.
    """
    views = []
    begin, begin_text = 0, "0"
    for name, dtype, shape_text, first, last in entries:
        shape = (int(shape_text),) if shape_text.isdigit() else _sizes(shape_text)
        item_bytes, end = ITEM_BYTES.get(dtype), int(last)
        if first != begin_text or item_bytes is None or prod(shape) * item_bytes != end - begin:
            return None
        if len(shape) > 1 and (begin == end or len(shape) > _MAX_DIMENSIONS):
            return None
        views.append((name, TensorView(dtype, shape, data[begin:end])))
        begin, begin_text = end, last
    return views if begin == len(data) else None


def _json_rows(header: str) -> list[_Row]:
    """Read any JSON header that says what a table of tensors says, each key once."""
    try:
        table = json.loads(header, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError):
        raise _error("the header isn't JSON") from None
    if not isinstance(table, _Pairs):
        raise _error("the header isn't a JSON object")
    rows: list[_Row] = []
    for name, entry in table.pairs:
        fields = dict(entry.pairs) if isinstance(entry, _Pairs) else {}
        if not isinstance(entry, _Pairs) or len(entry.pairs) != 3 or fields.keys() != _FIELDS:
            raise _error("an entry has dtype, shape and data_offsets, each once", name)
        dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
        if not isinstance(dtype, str) or not _is_sizes(shape) or not _is_sizes(offsets):
            raise _error("dtype isn't text, or shape or data_offsets no list of sizes", name)
        if len(offsets) != 2:
            raise _error("data_offsets isn't a pair", name)
        rows.append((name, dtype, tuple(shape), offsets[0], offsets[1]))
    return rows


_FIELDS: Final = {"dtype", "shape", "data_offsets"}


class _Pairs:
    """A JSON object that still knows a key that was given twice."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        self.pairs = pairs


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        type(size) is int and 0 <= size < 2**63 for size in value
    )


def _check_tiling(rows: list[_Row], data_bytes: int) -> None:
    """Check that the ranges follow one another without hole or overlap, and end with the data."""
    expected = 0
    for name, _, _, begin, end in sorted(rows, key=_range):
        if begin != expected or end < begin:
            raise _error(f"data at [{begin}, {end}], but {expected} comes next", name)
        expected = end
    if expected != data_bytes:
        raise _error(f"the tensors take {expected} bytes of {data_bytes}")


def _error(message: str, name: str | None = None) -> TrxpError:
    return trxp_error(message, where=_WHERE if name is None else f"{_WHERE} {name[:200]!r}")

"""The safetensors byte format: a checked table of tensors, and its canonical writing.

Bytes and shapes only; names are opaque here, and torch is not needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import Final, NamedTuple, TypeAlias, TypeGuard

from experience_buffer._codec.codec_error import trxp_error
from experience_buffer._codec.tensor_layout import ITEM_BYTES as ITEM_BYTES
from experience_buffer._codec.tensor_layout import keep_layout, kept_layout, known_layouts, layout
from experience_buffer._show import line, sparse
from experience_buffer.errors import TrxpError

MAX_DIMENSIONS: Final = 64
_MAX_EMPTY_ELEMENTS: Final = 2**48
_MAX_KEPT_TENSORS: Final = 64
_MAX_KEPT_CHARS: Final = 4096
_WHERE: Final = "tensor table"
_NUMBER: Final = "(?:0|[1-9][0-9]{0,17})"
_ENTRY: Final = re.compile(
    r'(?:\A\{|,)"([^"\\\x00-\x1f]*)":\{"dtype":"([A-Z0-9_]+)"'
    rf',"shape":\[((?:{_NUMBER}(?:,{_NUMBER})*)?)\]'
    rf',"data_offsets":\[({_NUMBER}),({_NUMBER})\]\}}'
)
"""An entry as the format's writer writes it, with the brace or comma before it."""
_SIZE: Final = re.compile(rb'"shape":\[(\d{1,18})\]')
_ENTRY_CHARS: Final = len('{"":{"dtype":"","shape":[],"data_offsets":[,]}')

_range = itemgetter(3, 4)

_Entry: TypeAlias = tuple[str, str, str, str, str]
"""Name, dtype code, shape, and where the data begins and ends, as spelled."""
_Row: TypeAlias = tuple[str, str, tuple[int, ...], int, int]
"""The same as values."""


@dataclass(slots=True, eq=False)
class TensorView:
    """A tensor as it lies in a payload: no copy, no torch. Reading it is thread-safe.

    Attributes:
        dtype: Code of the safetensors format, such as `"F32"`; a key of `ITEM_BYTES`.
        shape: Sizes of the dimensions; `()` for a scalar.
        data: The elements, little endian, row-major: `prod(shape) * ITEM_BYTES[dtype]` bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __repr__(self) -> str:
        return line(sparse(self))

    def __reduce__(self) -> tuple[object, ...]:
        """Travel with a copy of the elements, in memory that can be written to."""
        return _unpickled, (self.dtype, tuple(self.shape), bytearray(self.data))


def _unpickled(dtype: str, shape: tuple[int, ...], data: bytearray) -> TensorView:
    return TensorView(dtype, shape, memoryview(data))


class Table(NamedTuple):
    """The tensors of a file, in the order of its header."""

    names: tuple[str, ...]
    """One may occur more than once."""
    views: list[TensorView]


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
    table = read_table(data, max_header_bytes=max_header_bytes)
    return list(zip(table.names, table.views, strict=True))


def read_table(data: memoryview, *, max_header_bytes: int) -> Table:
    """Do what `read` does."""
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
    spelled = bytes(data[8:start])
    if (known := _known_table(spelled, data[start:])) is not None:
        return known
    try:
        header = spelled.decode()
    except UnicodeDecodeError:
        raise _error("the header isn't UTF-8") from None
    entries = _entries(header)
    if entries is None:
        rows = _json_rows(header)
    elif (plain := _plain_views(entries, data[start:])) is not None:
        names = tuple([entry[0] for entry in entries])
        if all(len(view.shape) == 1 for view in plain):
            keep_layout(spelled, names, tuple([view.dtype for view in plain]))
        return Table(names, plain)
    else:
        rows = [_row(entry) for entry in entries]
    views = _checked_views(rows, data[start:])
    return Table(tuple([row[0] for row in rows]), views)


def _checked_views(rows: list[_Row], data: memoryview) -> list[TensorView]:
    _check_tiling(rows, len(data))
    views = []
    for name, dtype, shape, begin, end in rows:
        item_bytes = ITEM_BYTES.get(dtype)
        if item_bytes is None:
            raise _error(f"dtype {dtype[:80]!r} isn't one of {', '.join(ITEM_BYTES)}", name)
        if len(shape) > MAX_DIMENSIONS:
            raise _error(too_large(shape), name)
        if prod(shape) * item_bytes != end - begin:
            raise _error(f"{end - begin} bytes don't hold a {dtype} of {list(shape)!s:.80}", name)
        if begin == end and (reason := too_large(shape)):
            raise _error(reason, name)
        views.append(TensorView(dtype, shape, data[begin:end]))
    return views


def _known_table(spelled: bytes, data: memoryview) -> Table | None:
    """Read a table of a known layout; None unless it is what `write` makes, padding apart.

    What it must be follows from its sizes alone.
    """
    for known in known_layouts(spelled):
        views: list[TensorView] = []
        numbers: list[int] = []
        end = 0
        kinds = zip(known.dtypes, known.item_bytes, _SIZE.findall(spelled), strict=False)
        for dtype, item_bytes, digits in kinds:
            size, begin = int(digits), end
            end += size * item_bytes
            numbers += (size, begin, end)
            views.append(TensorView(dtype, (size,), data[begin:end]))
        if len(views) != len(known.names) or end != len(data):
            continue
        header = (known.template % tuple(numbers)).encode()
        if spelled.startswith(header) and not spelled[len(header) :].strip(b" "):
            return Table(known.names, views)
    return None


def too_large(shape: Sequence[int]) -> str:
    """Why a tensor can't have that shape, whatever its bytes; empty if it can."""
    if len(shape) > MAX_DIMENSIONS:
        return f"{len(shape)} dimensions exceed the limit of {MAX_DIMENSIONS}"
    # Strides are computed of empty tensors too, and must not overflow.
    if 0 in shape and prod(filter(None, shape)) > _MAX_EMPTY_ELEMENTS:
        return f"shape {list(shape)!s:.80} is beyond what a tensor may have"
    return ""


def write(tensors: Iterable[tuple[str, TensorView]]) -> list[bytes | memoryview]:
    """Write a safetensors file, as pieces to be joined.

    The order (dtype, then name), the spelling of the JSON and its padding to 8 bytes are those of
    the format's own writer, so that equal tensors give equal bytes.

    Raises:
        TrxpError: A name isn't valid Unicode.
    """
    entries = list(tensors)
    names, views = tuple([name for name, _ in entries]), [view for _, view in entries]
    return write_fields(names, views)


def write_fields(
    names: tuple[str, ...], views: Sequence[TensorView], *, prefix: str = ""
) -> list[bytes | memoryview]:
    """Do what `write` does, with the prefix before each name."""
    dtypes = tuple([view.dtype for view in views])
    is_small = len(names) <= _MAX_KEPT_TENSORS and sum(map(len, names)) <= _MAX_KEPT_CHARS
    order, template = (kept_layout if is_small else layout)(names, dtypes, prefix)
    numbers: list[object] = []
    pieces: list[bytes | memoryview] = []
    end = 0
    for place in order:
        view = views[place]
        shape, data, begin = view.shape, view.data, end
        end += len(data)
        numbers += (shape[0] if len(shape) == 1 else ",".join(map(str, shape)), begin, end)
        pieces.append(data)
    try:
        header = (template % tuple(numbers)).encode()
    except UnicodeEncodeError:
        raise _error("a tensor's name holds half of a surrogate pair; rename it") from None
    padded_bytes = -(-len(header) // 8) * 8
    return [padded_bytes.to_bytes(8, "little"), header.ljust(padded_bytes), *pieces]


def _entries(header: str) -> list[_Entry] | None:
    """Take apart a header as the format's own writer spells it; None if it's spelled otherwise."""
    body = header.rstrip(" ")
    if body == "{}":
        return []
    found: list[_Entry] = _ENTRY.findall(body)
    if sum(map(len, map("".join, found))) + _ENTRY_CHARS * len(found) + 1 != len(body):
        return None
    # One character is in no entry: the last one, since entries end otherwise.
    return found if body[0] == "{" and body.endswith("]}}") else None


def _row(entry: _Entry) -> _Row:
    name, dtype, shape, begin, end = entry
    return name, dtype, _sizes(shape), int(begin), int(end)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


def _plain_views(entries: list[_Entry], data: memoryview) -> list[TensorView] | None:
    """Read a table whose tensors follow one another; None for one to be looked at row by row.

    So are all that the format's own writer makes. They are checked as they are read.
    """
    views = []
    begin, begin_text = 0, "0"
    for _, dtype, shape_text, first, last in entries:
        if shape_text.isdigit():
            shape: tuple[int, ...] = (int(shape_text),)
        elif shape_text.count(",") < MAX_DIMENSIONS:
            shape = _sizes(shape_text)
        else:  # The product of that many sizes would take long.
            return None
        item_bytes, end = ITEM_BYTES.get(dtype), int(last)
        if first != begin_text or item_bytes is None or prod(shape) * item_bytes != end - begin:
            return None
        if len(shape) > 1 and begin == end:
            return None
        views.append(TensorView(dtype, shape, data[begin:end]))
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

"""Tensor tables that differ in nothing but lengths: one pattern reads them all.

What lies in a store was written in one spelling, and most experiences of a batch have the same
fields. Matching takes a third of what reading a table takes. A pattern matches no table that
`safetensors.read` reads otherwise; whatever it doesn't match is to be read by that.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from math import prod
from operator import add, mul, sub
from typing import Final, NamedTuple, TypeAlias

from experience_buffer._codec.frame import FRAME_BYTES, boundary_of
from experience_buffer._codec.limits import DEFAULT_LIMITS
from experience_buffer._codec.safetensors import ITEM_BYTES, TensorView

_MAX_TENSORS: Final = 16
_MAX_NAME_CHARS: Final = 100
_MAX_HEADER_BYTES: Final = 8192
_MAX_TRAILING: Final = 2**32
_MAX_KEPT: Final = 64
_SPECIAL: Final = re.compile(r'["\\\x00-\x1f\ud800-\udfff]')
"""What a name can't hold as it is: JSON escapes it, or it has no UTF-8."""
_NUMBER: Final = r"(0|[1-9]\d{0,17})"
"""As JSON spells it: no zero leads."""

_Tensor: TypeAlias = tuple[str, str, tuple[int, ...]]
"""Field, dtype and trailing sizes."""
_header_bytes: Final = struct.Struct("<Q").unpack_from


class Column(NamedTuple):
    """One tensor of each of some payloads."""

    lengths: Sequence[int]
    """How many rows it has."""
    begins: Sequence[int]
    """Where in the payload its data begins."""
    ends: Sequence[int]
    """Where that ends."""


class Run(NamedTuple):
    """Payloads whose tables have the same layout."""

    payloads: list[memoryview]
    metadata: list[memoryview]
    """Views on the payloads."""
    columns: list[Column] | None
    """Of each of the layout's tensors, none without payloads; None if the numbers of one table don't
    go together. Reading one table after the other will tell what is wrong."""


class Layout(NamedTuple):
    """What tables have in common: names, dtypes and all sizes but the first, in their order."""

    tensors: tuple[_Tensor, ...]
    """One of them is `tokens`."""
    row_bytes: tuple[int, ...]
    """What a row of each takes, above 0."""
    pattern: re.Pattern[bytes]
    """Matches the header. It has seen to it that each tensor begins where the last one ends."""

    def run_of(self, payloads: Iterable[bytes | memoryview]) -> Run:
        """Take payloads of this layout, from the first up to one of another.

        One whose frame or header is damaged ends it, too.
        """
        views, metadata, starts, numbers = [], [], [], []
        match = self.pattern.fullmatch
        for payload in payloads:
            boundary = boundary_of(payload, DEFAULT_LIMITS)
            if not boundary or boundary + 8 > len(payload):
                break
            (header_bytes,) = _header_bytes(payload, boundary)
            start = boundary + 8 + header_bytes
            if header_bytes > _MAX_HEADER_BYTES or start > len(payload):
                break
            found = match(payload, boundary + 8, start)
            if found is None:
                break
            view = memoryview(payload)
            views.append(view)
            metadata.append(view[FRAME_BYTES:boundary])
            starts.append(start)
            numbers.append(found.groups())
        columns = self._columns(views, starts, numbers) if views else []
        return Run(views, metadata, columns)

    def _columns(
        self,
        views: Sequence[memoryview],
        starts: Sequence[int],
        numbers: Sequence[tuple[bytes, ...]],
    ) -> list[Column] | None:
        """Where each tensor lies, by what the tables spell: its rows, and where its data ends."""
        found = [[*map(int, column)] for column in zip(*numbers, strict=True)]
        columns = []
        begins: Sequence[int] = starts
        named = zip(self.row_bytes, found[::2], found[1::2], strict=True)
        for row_bytes, lengths, offsets in named:
            ends = [*map(add, starts, offsets)]
            if [*map(mul, lengths, repeat(row_bytes))] != [*map(sub, ends, begins)]:
                return None
            columns.append(Column(lengths, begins, ends))
            begins = ends
        return columns if [*begins] == [*map(len, views)] else None


_kept: Final[dict[object, Layout]] = {}


def kept_layout(tensors: Mapping[str, TensorView]) -> Layout | None:
    """The layout of a table, given by field and in its order, if it was made. Thread-safe."""
    return _kept.get(_key(tensors)) if len(tensors) <= _MAX_TENSORS else None


def make_layout(tensors: Mapping[str, TensorView]) -> Layout | None:
    """Make the layout of a table, which takes a millisecond, and keep it. Thread-safe.

    Returns:
        None for a table with scalars, odd names, many tensors, or without `tokens`.
    """
    if len(tensors) > _MAX_TENSORS or "tokens" not in tensors:
        return None
    if not all(_is_plain(name, view) for name, view in tensors.items()):
        return None
    key = _key(tensors)
    layout = Layout(
        key,
        tuple([prod(trailing) * ITEM_BYTES[dtype] for _, dtype, trailing in key]),
        _pattern(tensors),
    )
    if len(_kept) >= _MAX_KEPT:
        _kept.clear()
    _kept[key] = layout
    return layout


def _key(tensors: Mapping[str, TensorView]) -> tuple[_Tensor, ...]:
    return tuple([(name, view.dtype, view.shape[1:]) for name, view in tensors.items()])


def _is_plain(name: str, view: TensorView) -> bool:
    is_named = len(name) <= _MAX_NAME_CHARS and not _SPECIAL.search(name)
    return is_named and bool(view.shape) and 0 < prod(view.shape[1:]) <= _MAX_TRAILING


def _pattern(tensors: Mapping[str, TensorView]) -> re.Pattern[bytes]:
    entries = []
    begin = "0"
    for place, (name, view) in enumerate(tensors.items()):
        trailing = "".join(f",{size}" for size in view.shape[1:])
        entries.append(
            re.escape(f'"0:{name}":{{"dtype":"{view.dtype}","shape":[')
            + rf'{_NUMBER}{trailing}\],"data_offsets":\[{begin},{_NUMBER}\]\}}'
        )
        begin = rf"\{2 * place + 2}"
    return re.compile(rf"\{{{','.join(entries)}\}} *".encode())

"""Tensor tables that differ in nothing but lengths: one pattern reads them all.

What lies in a store was written in one spelling, and most experiences of a batch have the same
fields. Matching takes a third of what reading a table takes. A pattern matches no table that
`_safetensors.read` reads otherwise; whatever it doesn't match is to be read by that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Final, NamedTuple, TypeAlias

from experience_buffer._safetensors import ITEM_BYTES, TensorView

_MAX_TENSORS: Final = 16
_MAX_NAME_CHARS: Final = 100
_MAX_HEADER_BYTES: Final = 8192
_MAX_TRAILING: Final = 2**32
_MAX_KEPT: Final = 64
_SPECIAL: Final = re.compile(r'["\\\x00-\x1f\ud800-\udfff]')
"""What a name can't hold as it is: JSON escapes it, or it has no UTF-8."""
_NUMBER: Final = r"(0|[1-9]\d{0,17})"
"""As JSON spells it: no zero leads."""

Numbers: TypeAlias = tuple[bytes, ...]
"""Of each tensor, as spelled: how many rows it has, and where its data ends."""
Match: TypeAlias = tuple[Numbers, memoryview]
"""What a pattern has found, and all data behind it."""


_Tensor: TypeAlias = tuple[str, str, tuple[int, ...]]
"""Field, dtype and trailing sizes."""


class Layout(NamedTuple):
    """What tables have in common: names, dtypes and all sizes but the first, in their order."""

    tensors: tuple[_Tensor, ...]
    """One of them is `tokens`."""
    row_bytes: tuple[int, ...]
    """What a row of each takes, above 0."""
    pattern: re.Pattern[bytes]
    """Matches the header. It has seen to it that each tensor begins where the last one ends."""

    def match(self, section: memoryview) -> Match | None:
        """Look at a safetensors file; None for one of another layout.

        Whether the numbers go together is the caller's to see: the rows of each tensor have to
        take what lies between its ends, and the last has to end with the data.
        """
        start = 8 + int.from_bytes(section[:8], "little")
        if start > min(len(section), _MAX_HEADER_BYTES):
            return None
        found = self.pattern.fullmatch(section, 8, start)
        return None if found is None else (found.groups(), section[start:])


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

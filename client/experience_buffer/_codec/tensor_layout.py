"""How the safetensors format's own writer lays out a table: its order, and its header but for the numbers.

Layouts are remembered: most tables have the names and dtypes of one before.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Final, NamedTuple

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

_MAX_KNOWN: Final = 64
_MAX_ALIKE: Final = 4
_MAX_TENSORS: Final = 256
_MAX_CHARS: Final = 16_384
_DIGITS_AND_SPACE: Final = b"0123456789 "


class Layout(NamedTuple):
    """Of a table in the writer's own order, all of whose tensors have one dimension."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    item_bytes: tuple[int, ...]
    template: str
    """The header, with a place for the size, begin and end of each tensor."""


_known: dict[bytes, tuple[Layout, ...]] = {}
"""By what a header is without its digits and spaces."""


def known_layouts(header: bytes) -> tuple[Layout, ...]:
    """Those that a header may have."""
    if len(header) > _MAX_CHARS:
        return ()
    return _known.get(header.translate(None, _DIGITS_AND_SPACE), ())


def keep_layout(header: bytes, names: tuple[str, ...], dtypes: tuple[str, ...]) -> None:
    """Remember the layout of a table that was read, if it is in the writer's order.

    Args:
        header: It may be spelled in any way.
        names: Of the tensors, in its order.
        dtypes: Of the tensors, each of one dimension.
    """
    if not 0 < len(names) <= _MAX_TENSORS or len(header) > _MAX_CHARS:
        return
    order, template = layout(names, dtypes)
    if order != list(range(len(names))):
        return
    item_bytes = tuple([ITEM_BYTES[dtype] for dtype in dtypes])
    found = Layout(names, dtypes, item_bytes, template)
    key = header.translate(None, _DIGITS_AND_SPACE)
    alike = _known.get(key, ())
    if len(_known) >= _MAX_KNOWN and not alike:
        _known.clear()
    if found not in alike:
        _known[key] = (found, *alike)[:_MAX_ALIKE]


def layout(
    names: tuple[str, ...], dtypes: tuple[str, ...], prefix: str = ""
) -> tuple[list[int], str]:
    """In which order tensors are written, and the header: their shapes and ranges are to be put in.

    The prefix, plain ASCII, is written before each name.
    """
    order = sorted(range(len(names)), key=lambda place: (_RANKS[dtypes[place]], names[place]))
    lines = []
    for place in order:
        name = prefix + names[place]
        quoted = f'"{name}"' if _is_bare(name) else json.dumps(name, ensure_ascii=False)
        lines.append(
            f'{quoted.replace("%", "%%")}:{{"dtype":"{dtypes[place]}","shape":[%s],'
            '"data_offsets":[%s,%s]}'
        )
    return order, f"{{{','.join(lines)}}}"


kept_layout = lru_cache(maxsize=128)(layout)
"""`layout`, remembered; for few and short names. What is kept is a few megabytes at most."""


def _is_bare(name: str) -> bool:
    """Whether a name needs no escaping in JSON."""
    return name.isprintable() and '"' not in name and "\\" not in name

"""How values show themselves: in a line or two, as tables, and as plain data. Pure.

A repr leaves out what says nothing: defaults, None, what is empty; long texts and lists are cut in it.
"""

from __future__ import annotations

import dataclasses
import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, Final, TypeVar

T = TypeVar("T")
Cells = Sequence[object]

_MOST_CHARS: Final = 60
_MOST_WHOLE: Final = 2**53 - 1
_MOST_ENTRIES: Final = 4
_MOST_LINE: Final = 200
_UNITS: Final = (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1))
_DTYPES: Final = {"BF": "bfloat", "F": "float", "I": "int", "U": "uint", "C": "complex"}


class Shown:
    """A dataclass whose repr says what differs from its defaults, and which becomes plain data."""

    __slots__ = ()

    def __repr__(self) -> str:
        return sparse(self)

    def to_dict(self) -> dict[str, Any]:
        """Describe it as plain data that JSON can hold.

        Numbers that JSON hasn't become the texts "NaN", "Infinity" and "-Infinity", whole numbers
        beyond 2**53 - 1, which JavaScript would round, texts of their digits; payloads are left out.
        """
        kind: Any = type(self)
        return {name: plain(getattr(self, name)) for name in _names(kind)}


class Rows(tuple[T, ...]):
    """Several values, as a tuple; a notebook shows a table of them."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return html_of_values(self)


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    """Names of the fields that a repr shows: no payloads."""
    return tuple(field.name for field in dataclasses.fields(kind) if field.repr)


def _fields(value: Any) -> list[tuple[str, Any, dataclasses.Field[Any]]]:
    """Name, value and field of what a repr shows: no payloads."""
    shown = (field for field in dataclasses.fields(value) if field.repr)
    return [(field.name, getattr(value, field.name), field) for field in shown]


def sparse(value: Any, defaults: Mapping[str, Any] | None = None) -> str:
    """A dataclass's repr without its defaults, nor what is None or empty.

    Args:
        value: The value.
        defaults: Other values, by field, that say nothing.
    """
    parts, is_positional = [], True
    for name, each, field in _fields(value):
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        else:
            default = field.default
        is_said = (
            each != default if default is not dataclasses.MISSING else each not in (None, (), "")
        )
        if not is_said or (defaults and name in defaults and each == defaults[name]):
            is_positional = False
            continue
        is_positional = is_positional and not field.kw_only
        parts.append(short(each) if is_positional else f"{name}={short(each)}")
    return f"{type(value).__name__}({', '.join(parts)})"


def short(value: object) -> str:
    """A value's repr, cut where it is long; arrays and tensors by dtype and shape."""
    if isinstance(value, str):
        return repr(cut(value, _MOST_CHARS))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"<{len(value)} bytes>"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{_dtype(value.dtype)}{list(value.shape)}"
    if isinstance(value, Mapping):
        entries = [
            f"{short(key)}: {short(each)}" for key, each in islice(value.items(), _MOST_ENTRIES)
        ]
        return "{" + _joined(entries, len(value)) + "}"
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple, Rows):
        text = _joined([short(each) for each in value[:_MOST_ENTRIES]], len(value))
        if isinstance(value, list):
            return f"[{text}]"
        return f"({text},)" if len(value) == 1 else f"({text})"
    return repr(value)


def cut(text: str, most_chars: int) -> str:
    """A text, with the end left out where it is long."""
    return text if len(text) <= most_chars else f"{text[: most_chars - 1]}…"


def line(text: str) -> str:
    """A repr that takes two lines at most, whatever is in it: nothing that moves a cursor."""
    text = text if len(text) <= _MOST_LINE else f"{text[: _MOST_LINE - 2]}…{text[-1]}"
    return printable(text)


def printable(text: str) -> str:
    """A text in which what can't be seen, or moves a cursor, is written out."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _joined(entries: list[str], num_all: int) -> str:
    if num_all > len(entries):
        entries = [*entries, f"… {num_all - len(entries):,} more"]
    return ", ".join(entries)


def _dtype(dtype: object) -> str:
    """torch.float32, float32 of NumPy and F32 of a payload, as float32."""
    name = str(dtype).rpartition(".")[2]
    if found := re.fullmatch(r"([A-Z]+)(\d.*)", name):
        return f"{_DTYPES.get(found[1], found[1].lower())}{found[2].lower()}"
    return name.lower()


def plain(value: Any) -> Any:
    """A value as plain data that JSON can hold, and that JavaScript doesn't round."""
    if value is None or type(value) in (str, bool):
        return value  # As most are.
    if isinstance(value, int) and abs(value) > _MOST_WHOLE:
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, (int, float)):
        return value
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def counted(number: int, singular: str, plural: str = "") -> str:
    """A number of things: "1 group", "2,000 groups"."""
    return f"{number:,} {singular if number == 1 else plural or f'{singular}s'}"


def size(num_bytes: float) -> str:
    """A number of bytes in a unit that suits it: "412 B", "1.2 MB"."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        num_bytes /= 1000
        if num_bytes < 999.95:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1000:,.1f} TB"


def duration(seconds: float) -> str:
    """A number of seconds in the two units that suit it: "3 h 5 min"."""
    whole = round(seconds)
    for large, small, in_large, in_small in _UNITS:
        if whole >= in_large:
            return f"{whole // in_large} {large} {whole % in_large // in_small} {small}"
    return f"{whole} s"


def table(header: Sequence[str], rows: Iterable[Cells]) -> str:
    """A table for a terminal: numbers to the right, texts to the left."""
    body = [list(row) for row in rows]
    texts = [[_cell(cell) for cell in row] for row in body]
    widths = [
        max(len(row[column]) for row in [list(header), *texts]) for column in range(len(header))
    ]
    is_text = [any(isinstance(row[column], str) for row in body) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(row, widths, is_text, strict=True)
        ).rstrip()
        for row in [list(header), *texts]
    ]
    return "\n".join(lines)


def html_table(header: Sequence[str], rows: Iterable[Cells]) -> str:
    """The same for a notebook; whatever the cells say is text there."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td style="text-align:{"left" if isinstance(cell, str) else "right"}">'
            f"{html.escape(cut(_cell(cell), 200))}</td>"
            for cell in row
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_lines(lines: Iterable[str]) -> str:
    """Lines of text for a notebook."""
    return "".join(f"<div>{html.escape(line)}</div>" for line in lines)


def html_of_values(values: Sequence[Any], *, most_rows: int = 100) -> str:
    """A table of dataclasses of one kind, a column for each field that says something."""
    if not values:
        return html_lines(["nothing"])
    shown = list(values[:most_rows])
    names = [
        field.name
        for field in dataclasses.fields(shown[0])
        if field.repr and any(getattr(value, field.name) not in (None, (), "") for value in shown)
    ]
    made = html_table(names, ([getattr(value, name) for name in names] for value in shown))
    more = len(values) - len(shown)
    return made + (html_lines([f"… {more:,} more"]) if more else "")


def _cell(cell: object) -> str:
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        return f"{cell:g}"
    return printable(" ".join(cell.split())) if isinstance(cell, str) else repr(cell)

"""Reads the packed format: a checked table of fields, columns and bytes. No torch.

After `read_table` every offset is known to be in order and within its data, and every column to be
as long as the batch; nothing is allocated but what the received bytes account for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from experience_buffer._codec import safetensors
from experience_buffer._codec.codec_error import trxp_error
from experience_buffer._codec.limits import DEFAULT_LIMITS
from experience_buffer._codec.safetensors import TensorView
from experience_buffer._packed.writer import FORMAT_VERSION
from experience_buffer.errors import TrxpError

COLUMNS: Final = {
    "prompt_length": "I64",
    "response_length": "I64",
    "run": "I64",
    "step": "I64",
    "num_deliveries": "I64",
    "staleness": "I64",
    "times_sampled": "I64",
    "generation": "I64",
    "reward": "F64",
    "probability": "F64",
    "truncate_status": "U8",
    "has_reward": "BOOL",
    "has_staleness": "BOOL",
}
"""Columns that every batch has, and their dtypes."""
_BYTES: Final = ("uid", "group", "flags", "meta")
_NAME: Final = re.compile(
    r"(?:(?P<kind>columns|bytes|byte_offsets)|(?P<form>fields|scalars|offsets|present)"
    r"(?:\.(?P<number>[1-9]\d{0,4}))?)/(?P<name>.*)",
    re.DOTALL | re.ASCII,
)


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """Tensors of one field that agree in dtype and in all sizes but the first, concatenated."""

    view: TensorView
    """All of them, shape [N, ...]."""
    offsets: list[int]
    """Where each experience's begins, then where the last one ends; B + 1 of them."""
    offsets_view: TensorView
    """The same, as it lies in the file."""
    present: bytes
    """1 for each experience that has the field in this form, else 0."""
    is_scalar: bool
    """Whether each is a scalar, shape (), so that the concatenation has one element for each."""

    def of(self, index: int) -> TensorView:
        """The tensor of one experience, which has it."""
        begin, end = self.offsets[index : index + 2]
        view = self.view
        row_bytes = len(view.data) // view.shape[0] if view.shape[0] else 0
        shape = () if self.is_scalar else (end - begin, *view.shape[1:])
        return TensorView(view.dtype, shape, view.data[begin * row_bytes : end * row_bytes])


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A batch as it lies in the received bytes. Reading it is thread-safe."""

    num_rows: int
    """B, the number of experiences."""
    fields: dict[str, list[Form]]
    """Tensors by field; more than one form where dtypes or shapes differ."""
    columns: dict[str, TensorView]
    """One value per experience, shape [B]."""
    values: dict[str, list[memoryview]]
    """Bytes of each experience: `uid`, `group`, `flags`, `meta`."""

    def column(self, name: str) -> TensorView:
        """What is known of each experience under a name.

        Raises:
            KeyError: There is no such column.
        """
        view = self.columns.get(name)
        if view is None:
            raise KeyError(f"no column {name!r}; there are {', '.join(sorted(self.columns))}")
        return view

    def only_form(self, name: str) -> Form:
        """The form of a field that has one.

        Raises:
            KeyError: No experience has the field.
            ValueError: It has several.
        """
        forms = self.fields.get(name)
        if not forms:
            raise KeyError(f"no field {name!r}; there are {', '.join(sorted(self.fields))}")
        if len(forms) > 1:
            texts = ", ".join(f"{f.view.dtype} {['*', *f.view.shape[1:]]}" for f in forms)
            raise ValueError(
                f"{name} differs between experiences: {texts}; take `padded`, `varlen` or `of`"
            )
        return forms[0]

    def tensors_of(self, index: int) -> dict[str, TensorView]:
        """All tensors of one experience by field."""
        return {
            name: form.of(index)
            for name, forms in self.fields.items()
            for form in forms
            if form.present[index]
        }


def read_table(data: memoryview) -> Table:
    """Read and check a packed batch.

    Raises:
        TrxpError: It is damaged, of a newer version, or no packed batch at all.
    """
    entries: dict[str, TensorView] = {}
    for name, view in safetensors.read(data, max_header_bytes=DEFAULT_LIMITS.max_header_bytes):
        if name in entries:
            raise _error("the name occurs twice", name)
        entries[name] = view
    num_rows = _num_rows(entries.pop("format", None))
    columns: dict[str, TensorView] = {}
    blobs: dict[str, dict[str, TensorView]] = {"bytes": {}, "byte_offsets": {}}
    parts: dict[str, dict[int, dict[str, TensorView]]] = {}
    for name, view in entries.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise _error("of an unknown kind; update the client if the server is newer", name)
        kind, form, number, rest = match.groups()
        if form is not None:
            parts.setdefault(rest, {}).setdefault(int(number or 0), {})[form] = view
        elif kind == "columns":
            columns[rest] = view
        else:
            blobs[kind][rest] = view
    _check_columns(columns, num_rows)
    values = {name: _values(name, blobs, num_rows) for name in _BYTES}
    for name in ("uid", "group", "flags"):
        _check_text(name, values[name])
    fields = {name: _forms(name, numbered, num_rows) for name, numbered in parts.items()}
    return Table(num_rows, fields, columns, values)


def _num_rows(view: TensorView | None) -> int:
    if view is None or (view.dtype, view.shape) != ("I64", (2,)):
        raise _error("missing, or not two I64; the bytes aren't a packed batch", "format")
    version, num_rows = view.data.cast("q")
    if version != FORMAT_VERSION:
        raise _error(f"version {version}; this reader knows {FORMAT_VERSION}", "format")
    if not 0 <= num_rows <= DEFAULT_LIMITS.max_items:
        raise _error(
            f"{num_rows} experiences; a batch has at most {DEFAULT_LIMITS.max_items}", "format"
        )
    return int(num_rows)


def _check_columns(columns: dict[str, TensorView], num_rows: int) -> None:
    for name, view in columns.items():
        if view.shape != (num_rows,):
            raise _error(f"shape {list(view.shape)!s:.80}, not [{num_rows}]", f"columns/{name}")
        if view.dtype == "BOOL":
            _check_bool(view, f"columns/{name}")
    for name, dtype in COLUMNS.items():
        if name not in columns or columns[name].dtype != dtype:
            raise _error(f"missing, or not {dtype}", f"columns/{name}")


def _check_bool(view: TensorView, name: str) -> bytes:
    data = bytes(view.data)
    if data.strip(b"\0\1"):
        raise _error("a byte is neither 0 nor 1", name)
    return data


def _offsets(view: TensorView | None, name: str, *, num_rows: int, end: int) -> list[int]:
    if view is None or (view.dtype, view.shape) != ("I64", (num_rows + 1,)):
        raise _error(f"missing, or not I64 of shape [{num_rows + 1}]", name)
    offsets: list[int] = view.data.cast("q").tolist()
    if offsets[0] != 0 or offsets[-1] != end or offsets != sorted(offsets):
        raise _error(f"not ascending from 0 to {end}", name)
    return offsets


def _values(name: str, blobs: dict[str, dict[str, TensorView]], num_rows: int) -> list[memoryview]:
    view = blobs["bytes"].get(name)
    if view is None or view.dtype != "U8" or len(view.shape) != 1:
        raise _error("missing, or not U8 of one dimension", f"bytes/{name}")
    offsets = _offsets(
        blobs["byte_offsets"].get(name),
        f"byte_offsets/{name}",
        num_rows=num_rows,
        end=view.shape[0],
    )
    return [view.data[begin:end] for begin, end in pairwise(offsets)]


def _check_text(name: str, values: list[memoryview]) -> None:
    if b"".join(values).isascii():
        return
    try:
        for value in values:
            str(value, "utf-8")
    except UnicodeDecodeError:
        raise _error("not UTF-8", f"bytes/{name}") from None


def _forms(name: str, numbered: dict[int, dict[str, TensorView]], num_rows: int) -> list[Form]:
    forms = []
    for expected, number in enumerate(sorted(numbered)):
        if number != expected:
            raise _error(f"form {number} follows {expected - 1}", f"fields/{name}")
        forms.append(_form(name, number, numbered[number], num_rows))
    presences = [form.present for form in forms]
    if len(forms) > 1 and any(sum(row) > 1 for row in zip(*presences, strict=True)):
        raise _error("an experience has it in two forms", f"fields/{name}")
    return forms


def _form(name: str, number: int, views: dict[str, TensorView], num_rows: int) -> Form:
    tail = f".{number}/{name}" if number else f"/{name}"
    is_scalar = "scalars" in views
    kind = "scalars" if is_scalar else "fields"
    view = views.get(kind)
    if view is None or (is_scalar and "fields" in views):
        raise _error("fields and scalars: one of the two is expected", f"fields{tail}")
    if not view.shape or (is_scalar and len(view.shape) > 1):
        raise _error(f"{len(view.shape)} dimensions", f"{kind}{tail}")
    offsets_view = views.get("offsets")
    offsets = _offsets(offsets_view, f"offsets{tail}", num_rows=num_rows, end=view.shape[0])
    assert offsets_view is not None
    present = bytes([1]) * num_rows
    if "present" in views:
        given = views["present"]
        if (given.dtype, given.shape) != ("BOOL", (num_rows,)):
            raise _error(f"not BOOL of shape [{num_rows}]", f"present{tail}")
        present = _check_bool(given, f"present{tail}")
    if is_scalar or not all(present):
        for is_present, (begin, end) in zip(present, pairwise(offsets), strict=True):
            if (end > begin and not is_present) or (is_scalar and end - begin != is_present):
                raise _error("spans and presence disagree", f"offsets{tail}")
    return Form(view, offsets, offsets_view, present, is_scalar)


def _error(message: str, name: str) -> TrxpError:
    return trxp_error(message, where=f"packed batch {name[:200]!r}")

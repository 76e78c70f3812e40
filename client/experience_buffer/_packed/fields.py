"""The fields of a packed batch in the making: tensors of many experiences, behind one another.

Neighbours whose tables have the same layout are taken together, field by field, which takes half of
the time that one experience after the other takes. Bytes only, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from experience_buffer._codec.safetensors import TensorView
from experience_buffer._packed.layout import Column, Layout, kept_layout, make_layout
from experience_buffer._packed.row import FormKey, PackedRow, form_of, read_row
from experience_buffer.errors import DataLossError, InvalidRequestError

MAX_OFFSETS: Final = 2**22
"""Offsets that a file may hold: a reader and a writer spend some 30 bytes on each."""
_MAX_LAYOUTS: Final = 4
"""Layouts of a batch that are tried before a table is read."""


class Form:
    """Tensors of one field that agree in dtype and in all sizes but the first."""

    __slots__ = ("dtype", "is_scalar", "lengths", "name", "parts", "present", "trailing")

    def __init__(self, key: FormKey, num_rows: int) -> None:
        self.name, self.dtype, trailing, _ = key
        self.is_scalar = trailing is None
        self.trailing = trailing or ()
        self.lengths = [0] * num_rows
        """Rows of each experience."""
        self.present = bytearray(num_rows)
        """1 for each experience that has it."""
        self.parts: list[memoryview] = []
        """The data of those that have it."""


class Read(NamedTuple):
    """What a batch's payloads hold."""

    forms: list[Form]
    """In the order in which they came."""
    num_tokens: list[int]
    """Of each experience."""
    metadata: list[memoryview]
    """Of each experience, as it lies in its payload."""


class Fields:
    """Gathers the tensors of a batch's experiences."""

    def __init__(self, rows: Sequence[PackedRow]) -> None:
        self._rows = rows
        self._forms: dict[object, Form] = {}
        self._num_tokens: list[int] = []
        """Of each experience that was added."""
        self._metadata: list[memoryview] = []
        self._layouts: list[Layout] = []
        """Of this batch, the last one first."""
        self._may_make_layout = True
        """One may be new in each batch: so sending many different ones costs nobody much."""

    def read(self) -> Read:
        """Read all payloads; to be called once.

        Raises:
            DataLossError: One is damaged; text and `subject` name its uid.
            InvalidRequestError: The fields are too many for one file.
        """
        while len(self._num_tokens) < len(self._rows):
            self._add_next()
        return Read(list(self._forms.values()), self._num_tokens, self._metadata)

    def _add_next(self) -> None:
        """Add the next experience, and with it those behind it that have the same fields."""
        for layout in self._layouts:
            if self._add_run(layout):
                return
        row = self._rows[len(self._num_tokens)]
        metadata, tensors = read_row(row)
        known = kept_layout(tensors)
        if known is None and self._may_make_layout:
            known = make_layout(tensors)
            self._may_make_layout = known is None
        if known is not None and self._add_run(known):
            self._layouts = [known, *self._layouts[: _MAX_LAYOUTS - 1]]
        else:
            self._add_row(row, metadata, tensors)

    def _add_run(self, layout: Layout) -> bool:
        """Add those of the next experiences that have this layout; False if there are none."""
        first = len(self._num_tokens)
        payloads, metadata, columns = layout.run_of(self._neighbours(first))
        rows = self._rows[first : first + len(payloads)]
        if columns is None:
            # One of them is refused here.
            for row in rows:
                self._add_row(row, *read_row(row))
        elif rows:
            self._metadata += metadata
            self._num_tokens += self._add_columns(layout, first, payloads, columns)
        return bool(rows)

    def _neighbours(self, first: int) -> Iterator[bytes | memoryview]:
        """Payloads for which the same fields were computed."""
        computed = self._rows[first].tensors.keys()
        for index in range(first, len(self._rows)):
            row = self._rows[index]
            if row.tensors.keys() != computed:
                return
            yield row.payload

    def _add_columns(
        self,
        layout: Layout,
        first: int,
        payloads: Sequence[memoryview],
        columns: Sequence[Column],
    ) -> Sequence[int]:
        """Add neighbours, and what was computed for them; how many tokens they have."""
        rows = self._rows[first : first + len(payloads)]
        computed = rows[0].tensors.keys()
        num_tokens: Sequence[int] = []
        for (name, dtype, trailing), column in zip(layout.tensors, columns, strict=True):
            if name not in computed:
                form = self._form((name, dtype, trailing, False), first)
                form.lengths[first : first + len(rows)] = column.lengths
                form.present[first : first + len(rows)] = bytes([1]) * len(rows)
                form.parts += [
                    payload[begin:end]
                    for payload, begin, end in zip(
                        payloads, column.begins, column.ends, strict=True
                    )
                ]
            if name == "tokens":
                num_tokens = column.lengths
        for index, row in enumerate(rows, first) if computed else ():
            for name, view in row.tensors.items():
                self._add_tensor(index, name, view)
        if "tokens" in computed:
            return [row.tensors["tokens"].shape[0] for row in rows]
        return num_tokens

    def _add_row(
        self, row: PackedRow, metadata: memoryview, tensors: dict[str, TensorView]
    ) -> None:
        """Add the next experience by itself."""
        tensors |= row.tensors
        for name, view in tensors.items():
            self._add_tensor(len(self._num_tokens), name, view)
        self._metadata.append(metadata)
        self._num_tokens.append(tensors["tokens"].shape[0])

    def _add_tensor(self, index: int, name: str, view: TensorView) -> None:
        form = self._form(form_of(name, view), index)
        form.lengths[index] = view.shape[0] if view.shape else 1
        form.present[index] = 1
        form.parts.append(view.data)

    def _form(self, key: FormKey, index: int) -> Form:
        """The form with this key; what is too odd to be concatenated has one by itself."""
        is_odd = key[3]
        form = None if is_odd else self._forms.get(key)
        if form is None:
            self._check_form(key[0], index)
            form = self._forms[(key, index) if is_odd else key] = Form(key, len(self._rows))
        return form

    def _check_form(self, name: str, index: int) -> None:
        """Check, before a form is added, that its offsets have room and its name can be written."""
        uid, num_rows, num_forms = self._rows[index].uid, len(self._rows), len(self._forms)
        if (num_forms + 1) * (num_rows + 1) > MAX_OFFSETS:
            raise InvalidRequestError(
                f"{uid!r} brings a batch of {num_rows} to more than {num_forms} fields, and their "
                f"offsets to more than {MAX_OFFSETS:,}; ask for TRXP payloads, or smaller batches",
                subject=uid,
            )
        try:
            name.encode()
        except UnicodeEncodeError:
            raise DataLossError(
                f"the stored payload of {uid!r} is damaged: a tensor's name holds half of a "
                "surrogate pair; delete the experience",
                subject=uid,
            ) from None

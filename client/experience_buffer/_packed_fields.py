"""The fields of a packed batch in the making: tensors of many experiences, behind one another.

Neighbours whose tables have the same layout are taken together, field by field, which takes half of
the time that one experience after the other takes. Bytes only, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import mul, sub
from typing import Final

from experience_buffer._packed_layout import Layout, Match, Numbers, kept_layout, make_layout
from experience_buffer._packed_row import FormKey, PackedRow, form_of, read_tensors
from experience_buffer._safetensors import TensorView
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


class _Run:
    """Neighbours that aren't added yet: of one layout, and with the same fields computed."""

    __slots__ = ("computed", "data", "layout", "numbers", "sections")

    def __init__(self, layout: Layout, computed: set[str]) -> None:
        self.layout = layout
        self.computed = computed
        self.sections: list[memoryview] = []
        self.numbers: list[Numbers] = []
        self.data: list[memoryview] = []


class Fields:
    """Gathers the tensors of a batch's experiences, which are added in their order."""

    def __init__(self, rows: Sequence[PackedRow]) -> None:
        self._rows = rows
        self._forms: dict[object, Form] = {}
        self._num_tokens: list[int] = []
        """Of each experience that was added."""
        self._run: _Run | None = None
        self._layouts: list[Layout] = []
        """Of this batch, the last one first."""
        self._may_make_layout = True
        """One may be new in each batch: so sending many different ones costs nobody much."""

    def add(self, row: PackedRow, section: memoryview) -> None:
        """Add the next experience, whose tensors are `section`.

        Raises:
            DataLossError: The tensors of one can't be read; text and `subject` name its uid.
            InvalidRequestError: The fields are too many for one file.
        """
        run = self._run
        found = None if run is None else run.layout.match(section)
        if run is None or found is None or run.computed != row.tensors.keys():
            self._flush()
            matched = self._match(row, section)
            if matched is None:
                return
            layout, found = matched
            run = self._run = _Run(layout, set(row.tensors))
        run.sections.append(section)
        run.numbers.append(found[0])
        run.data.append(found[1])

    def finish(self) -> tuple[list[Form], list[int]]:
        """The forms, in the order in which they came, and how many tokens each experience has."""
        self._flush()
        return list(self._forms.values()), self._num_tokens

    def _match(self, row: PackedRow, section: memoryview) -> tuple[Layout, Match] | None:
        """The experience by its layout; None if it has none, and was added."""
        for layout in self._layouts:
            if (found := layout.match(section)) is not None:
                return layout, found
        tensors = read_tensors(row, section)
        known = kept_layout(tensors)
        if known is None and self._may_make_layout:
            known = make_layout(tensors)
            self._may_make_layout = known is None
        found = None if known is None else known.match(section)
        if known is None or found is None:
            self._add_tensors({**tensors, **row.tensors})
            return None
        self._layouts = [known, *self._layouts[: _MAX_LAYOUTS - 1]]
        return known, found

    def _flush(self) -> None:
        """Add the neighbours that aren't yet."""
        run, self._run = self._run, None
        if run is None:
            return
        first = len(self._num_tokens)
        rows = self._rows[first : first + len(run.data)]
        columns = _columns(run)
        if columns is None:
            for row, section in zip(rows, run.sections, strict=True):
                self._add_tensors({**read_tensors(row, section), **row.tensors})
            return
        for (name, dtype, trailing), (lengths, begins, ends) in zip(
            run.layout.tensors, columns, strict=True
        ):
            if name not in run.computed:
                form = self._form((name, dtype, trailing, False), first)
                form.lengths[first : first + len(rows)] = lengths
                form.present[first : first + len(rows)] = bytes([1]) * len(rows)
                form.parts += [
                    data[begin:end] for data, begin, end in zip(run.data, begins, ends, strict=True)
                ]
            if name == "tokens":
                num_tokens = lengths
        for index, row in enumerate(rows, first) if run.computed else ():
            for name, view in row.tensors.items():
                self._add_tensor(index, name, view)
        if "tokens" in run.computed:
            num_tokens = [row.tensors["tokens"].shape[0] for row in rows]
        self._num_tokens += num_tokens

    def _add_tensors(self, tensors: Mapping[str, TensorView]) -> None:
        """Add the next experience by itself."""
        for name, view in tensors.items():
            self._add_tensor(len(self._num_tokens), name, view)
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


def _columns(run: _Run) -> list[tuple[list[int], list[int], list[int]]] | None:
    """Of each tensor: how many rows each experience has, where they begin, and where they end.

    None if that doesn't go together: reading one after the other will tell what is wrong.
    """
    numbers = [[*map(int, column)] for column in zip(*run.numbers, strict=True)]
    columns = []
    begins = [0] * len(run.data)
    for row_bytes, lengths, ends in zip(
        run.layout.row_bytes, numbers[::2], numbers[1::2], strict=True
    ):
        if [*map(mul, lengths, repeat(row_bytes))] != [*map(sub, ends, begins)]:
            return None
        columns.append((lengths, begins, ends))
        begins = ends
    return columns if begins == [*map(len, run.data)] else None

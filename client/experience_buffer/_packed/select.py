"""Some experiences of a packed batch as a batch of their own. No torch."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate

from experience_buffer._codec.safetensors import ITEM_BYTES, TensorView
from experience_buffer._packed.table import Form, Table


def select(table: Table, indices: Sequence[int]) -> Table:
    """Copy the rows with these indices, in their order.

    Args:
        table: The batch; it stays as it is.
        indices: Of rows, from 0; nothing is checked but by indexing.

    Returns:
        A batch of `len(indices)` rows, without the fields that none of them has. It shares no
        tensors with `table`, only read bytes such as uids.
    """
    return Table(
        len(indices),
        {
            name: forms
            for name, found in table.fields.items()
            if (forms := [_form(each, indices) for each in found if _any(each, indices)])
        },
        {name: _column(view, indices) for name, view in table.columns.items()},
        {name: [values[index] for index in indices] for name, values in table.values.items()},
    )


def _any(form: Form, indices: Sequence[int]) -> bool:
    return any(form.present[index] for index in indices)


def _form(form: Form, indices: Sequence[int]) -> Form:
    view, offsets = form.view, form.offsets
    row_bytes = len(view.data) // view.shape[0] if view.shape[0] else 0
    spans = [(offsets[index], offsets[index + 1]) for index in indices]
    chosen = [0, *accumulate(end - begin for begin, end in spans)]
    parts = (view.data[begin * row_bytes : end * row_bytes] for begin, end in spans)
    return Form(
        TensorView(view.dtype, (chosen[-1], *view.shape[1:]), _joined(parts)),
        chosen,
        TensorView("I64", (len(chosen),), memoryview(bytearray(array("q", chosen).tobytes()))),
        bytes(form.present[index] for index in indices),
        form.is_scalar,
    )


def _column(view: TensorView, indices: Sequence[int]) -> TensorView:
    size = ITEM_BYTES[view.dtype]
    parts = (view.data[index * size : (index + 1) * size] for index in indices)
    return TensorView(view.dtype, (len(indices),), _joined(parts))


def _joined(parts: Iterable[memoryview]) -> memoryview:
    """One copy in all, writable, so that tensors can be views on it."""
    return memoryview(bytearray().join(parts))

"""Columns of lists, made of tensors where they lie: joined by the batch, not element by element."""

from __future__ import annotations

from typing import Any, Final

from experience_buffer._codec.safetensors import TensorView
from experience_buffer._codec.tensor_layout import ITEM_BYTES
from experience_buffer._tables.schema import IDS, MASK, NUMBERS, arrow, arrow_type

_CODES: Final = {IDS: "I32", NUMBERS: "F32", MASK: "BOOL"}
"""What tensors lie as already, by the column's kind."""
_DTYPES: Final = {IDS: "<i4", NUMBERS: "<f4", MASK: "?"}
_READ: Final = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BOOL": "u1"},
    **{"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1"},
    **{"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"},
}
_MOST_ID: Final = 2**31


class Lists:
    """One column of lists. Not thread-safe.

    Args:
        kind: Of the column.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._pieces: list[Any] = []
        self._lengths: list[int] = []
        self._missing: list[int] = []
        """Places of rows that have none."""

    def add(self, view: TensorView | None, begin: int = 0, end: int | None = None) -> None:
        """Add a row: a tensor's elements from one to before another; none where it isn't a list of these."""
        if view is None or len(view.shape) != 1:
            self._add_none()
            return
        item_bytes = ITEM_BYTES[view.dtype]
        data = view.data[begin * item_bytes : None if end is None else end * item_bytes]
        if view.dtype == _CODES[self._kind]:
            self._pieces.append(data)
            self._lengths.append(len(data) // item_bytes)
            return
        values = _converted(view.dtype, data, self._kind)
        if values is None:
            self._add_none()
            return
        self._pieces.append(values.data.cast("B") if len(values) else b"")
        self._lengths.append(len(values))

    def add_zeros(self, length: int) -> None:
        """Add a row of as many zeros."""
        self._pieces.append(bytes(length * ITEM_BYTES[_CODES[self._kind]]))
        self._lengths.append(length)

    def _add_none(self) -> None:
        self._missing.append(len(self._lengths))
        self._lengths.append(0)

    def lengths(self) -> Any:
        """Elements of each row, int64; 0 where it has none."""
        import numpy as np

        return np.array(self._lengths, np.int64)

    def values(self) -> Any:
        """The elements of all rows."""
        import numpy as np

        return np.frombuffer(b"".join(self._pieces), _DTYPES[self._kind])

    def array(self, values: Any = None) -> Any:
        """The column as a `pyarrow.ListArray`.

        Args:
            values: What `values` returned, where it was asked before.
        """
        import numpy as np

        pa = arrow()
        offsets = np.zeros(len(self._lengths) + 1, np.int32)
        np.cumsum(self._lengths, out=offsets[1:])
        mask = None
        if self._missing:
            mask = np.zeros(len(self._lengths), bool)
            mask[self._missing] = True
            mask = pa.array(mask)
        made = pa.array(self.values() if values is None else values)
        return pa.ListArray.from_arrays(offsets, made, type=arrow_type(self._kind), mask=mask)


def _converted(code: str, data: memoryview, kind: str) -> Any:
    """The elements in the column's dtype; None where it can't hold them."""
    import numpy as np

    if code == "BF16":
        raw = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        values: Any = raw.view(np.float32)
    elif code in _READ:
        values = np.frombuffer(data, _READ[code])
    else:
        return None
    if kind == MASK:
        return values != 0
    if kind == IDS and (
        values.dtype.kind == "f"
        or (len(values) and not -_MOST_ID <= int(values.min()) <= int(values.max()) < _MOST_ID)
    ):
        return None
    with np.errstate(over="ignore"):
        return values.astype(_DTYPES[kind])


def masked_means(numbers: Lists, mask: Lists, values: Any) -> list[float | None]:
    """Of each row the mean of its numbers where its mask is set; None where nothing is.

    Args:
        numbers: float32.
        mask: A mask of as many elements; where it has another number, all elements count.
        values: What `numbers.values()` returned.
    """
    import numpy as np

    lengths = numbers.lengths()
    weights = np.ones(len(values))
    starts = np.cumsum(lengths) - lengths
    of_mask, marks = mask.lengths(), mask.values()
    if np.array_equal(of_mask, lengths):
        weights = marks.astype(np.float64)
    else:
        begin = np.cumsum(of_mask) - of_mask
        for row in np.flatnonzero((of_mask == lengths) & (lengths > 0)):
            into = slice(starts[row], starts[row] + lengths[row])
            weights[into] = marks[begin[row] : begin[row] + lengths[row]]
    means = np.full(len(lengths), np.nan)
    some = np.flatnonzero(lengths)
    if len(some):
        # What the mask leaves out may be anything, NaN too.
        sums = np.add.reduceat(np.where(weights > 0, values, 0.0), starts[some], dtype=np.float64)
        counts = np.add.reduceat(weights, starts[some])
        means[some] = np.divide(sums, counts, out=np.full(len(some), np.nan), where=counts > 0)
        empty = np.ones(len(lengths), bool)
        empty[some] = counts == 0
    else:
        empty = np.ones(len(lengths), bool)
    return [
        None if is_empty else mean
        for mean, is_empty in zip(means.tolist(), empty.tolist(), strict=True)
    ]

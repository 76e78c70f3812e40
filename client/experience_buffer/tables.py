"""Experiences as tables: a row each, under one fixed Arrow schema, in Parquet, Arrow and JSONL files.

The schema never depends on the rows, holds no maps and no columns without a type: pandas, polars and
`datasets.load_dataset("parquet")` read it, and files of different buffers or days are one table. Beside
the columns to look at, a row keeps the payload byte for byte as it was pushed, so what is imported is
what was exported.

Needs pyarrow (`experience-buffer[arrow]`), which is imported when it is used. All functions are
thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from experience_buffer._messages.batch_data import BatchData
from experience_buffer._tables import rows as _rows
from experience_buffer._tables.columns import Columns
from experience_buffer._tables.files import TableReader, TableWriter
from experience_buffer._tables.formats import Format
from experience_buffer._tables.rows import TableRow
from experience_buffer._tables.schema import arrow, arrow_schema
from experience_buffer._tables.sources import scanned_of
from experience_buffer.errors import InvalidRequestError
from experience_buffer.experience import Experience
from experience_buffer.scanned import ScannedExperience

__all__ = [
    "Format",
    "TableReader",
    "TableRow",
    "TableWriter",
    "from_table",
    "scanned_of",
    "schema",
    "to_table",
]
__dir__ = __all__.copy

_PART_BYTES = 256 << 20
"""A column of Arrow's holds two gigabytes of lists in one piece at most."""


def schema() -> Any:
    """The columns of every table, as a `pyarrow.Schema`.

    Raises:
        UnsupportedError: pyarrow isn't installed.
    """
    return arrow_schema()


def to_table(
    experiences: Iterable[Experience | ScannedExperience] | BatchData,
    *,
    with_payloads: bool = True,
    with_tokens: bool = True,
) -> Any:
    """Make a `pyarrow.Table`, a row per experience, in order.

    `to_table(batch).to_pandas()` is a batch as pandas has it; `.to_pylist()` are dicts.

    Args:
        experiences: A batch, experiences, or what `scan` brings, in any number.
        with_payloads: Whether the column `payload` is filled: `from_table` makes exactly the same
            experiences of it.
        with_tokens: Whether the lists of tokens, masks, logprobs and advantages are filled.

    Raises:
        InvalidRequestError: An experience can't be a row; `subject` is its uid.
        TrxpError: An experience can't be written as a payload.
        UnsupportedError: pyarrow isn't installed.
    """
    options = {"with_payloads": with_payloads, "with_tokens": with_tokens}
    batches, columns = [], Columns(**options)
    for row in scanned_of(experiences):
        if problem := columns.add(row):
            uid = row.summary.uid
            raise InvalidRequestError(f"experience {uid!r}: {problem}", subject=uid)
        if columns.num_bytes >= _PART_BYTES:
            batches.append(columns.batch())
            columns = Columns(**options)
    return arrow().Table.from_batches([*batches, columns.batch()], schema=arrow_schema())


def from_table(table: Any) -> list[Experience]:
    """Make experiences of a table's rows, computed advantages in place; tombstones are left out.

    Of a row with a payload exactly the one that it was made of. Of one without, what its columns say:
    batch and task are numbers where their texts are those of numbers, lists become tensors as in the
    constructor, and tensors that have no column are gone.

    Args:
        table: A `pyarrow.Table` with columns of `schema()`; others are left out.

    Raises:
        InvalidRequestError: A row isn't an experience; the text names it.
    """
    return [made for row in _scanned(table) if (made := row.experience) is not None]


def _scanned(table: Any) -> Iterator[ScannedExperience]:
    pa, number = arrow(), 0
    names = [name for name in arrow_schema().names if name in table.column_names]
    try:
        known = table.select(names).cast(pa.schema([arrow_schema().field(name) for name in names]))
    except (pa.ArrowException, ValueError) as error:
        raise InvalidRequestError(f"the table has other columns: {error}") from error
    for batch in known.to_batches(max_chunksize=1024):
        for values in _rows.rows_of(batch):
            try:
                yield _rows.scanned(values)
            except InvalidRequestError as error:
                raise InvalidRequestError(
                    f"row {number}: {error}", subject=error.subject
                ) from error
            number += 1

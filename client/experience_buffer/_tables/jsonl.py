"""Tables as lines of JSON: the same columns, each row an object; JSON columns are values, payloads base64."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any, Final

from experience_buffer._tables.rows import TableRow, table_row
from experience_buffer._tables.schema import BYTES, JSON, KINDS, NUMBERS, TEXT, TEXTS, arrow

MOST_LINE_BYTES: Final = 256 << 20
"""Of one line: a payload of 64 MiB in base64, and its columns."""
_STRING: Final = json.JSONEncoder(ensure_ascii=False).encode
_WORDS: Final = {"nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"'}


def lines(batch: Any) -> bytes:
    """The rows of a `pyarrow.RecordBatch`; null where a row has nothing."""
    columns = [
        [f"{_STRING(name)}:{text or 'null'}" for text in _texts(batch.column(name), KINDS[name])]
        for name in batch.schema.names
    ]
    return "".join([f"{{{','.join(row)}}}\n" for row in zip(*columns, strict=True)]).encode()


def _texts(column: Any, kind: str) -> list[str | None]:
    """A column's values as JSON; None for null."""
    if kind == BYTES:
        return [
            None if each is None else f'"{base64.b64encode(each).decode()}"'
            for each in column.to_pylist()
        ]
    if kind == JSON:
        return [each or None for each in column.to_pylist()]
    if kind == TEXT:
        return [None if each is None else _STRING(each) for each in column.to_pylist()]
    if kind == TEXTS:
        return [None if each is None else _STRING(each) for each in column.to_pylist()]
    if kind.startswith("list<"):
        return _lists(column, kind)
    return _scalars(column)


def _scalars(column: Any) -> list[str | None]:
    import pyarrow as pa

    if column.type == pa.bool_():
        return [None if each is None else str(each).lower() for each in column.to_pylist()]
    texts = [None if each is None else repr(each) for each in column.to_pylist()]
    return [None if text is None else _WORDS.get(text, text) for text in texts]


def _lists(column: Any, kind: str) -> list[str | None]:
    """Lists of numbers, written by Arrow: there are thousands of elements in each."""
    import pyarrow as pa
    import pyarrow.compute as pc

    texts = pc.cast(column.flatten(), pa.string())
    if kind == NUMBERS:
        for word, spoken in _WORDS.items():
            texts = pc.if_else(pc.equal(texts, word), spoken, texts)
    # Flattened, without what nulls hide.
    lengths = pc.fill_null(pc.list_value_length(column), 0)
    offsets = pa.concat_arrays(
        [pa.array([0], pa.int64()), pc.cumulative_sum(lengths.cast("int64"))]
    )
    joined = pc.binary_join(pa.ListArray.from_arrays(offsets.cast("int32"), texts), ",")
    return [
        f"[{text or ''}]" if is_valid else None
        for text, is_valid in zip(joined.to_pylist(), column.is_valid().to_pylist(), strict=True)
    ]


def read_lines(stream: Any) -> Iterator[TableRow]:
    """The rows of a stream of bytes that has `readline`; what isn't one says so."""
    number = 0
    while line := stream.readline(MOST_LINE_BYTES):
        if len(line) == MOST_LINE_BYTES and not line.endswith(b"\n"):
            problem = f"its line is longer than {MOST_LINE_BYTES} bytes"
            yield TableRow(number=number, problem=problem)
            while line and not line.endswith(b"\n"):
                line = stream.readline(MOST_LINE_BYTES)
        elif line.strip():
            yield _row(line, number)
        else:
            continue
        number += 1


def _row(line: bytes, number: int) -> TableRow:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        return TableRow(number=number, problem=f"its line isn't JSON: {str(error)[:200]}")
    if not isinstance(values, dict):
        return TableRow(number=number, problem="its line isn't a JSON object")
    return table_row(values, number)


def stream_of(path: Any, *, compression: str | None, is_to_write: bool) -> Any:
    """A file of lines, compressed or not."""
    pa = arrow()
    if is_to_write:
        return pa.output_stream(path, compression=compression)
    if compression is None:
        return open(path, "rb")
    import io

    return io.BufferedReader(pa.input_stream(path, compression=compression))

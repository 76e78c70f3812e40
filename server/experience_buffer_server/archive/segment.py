"""One file of an archive: written whole or not at all, read by row group and column."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from experience_buffer_server.archive.layout import Index, SegmentName, private, sync_folder
from experience_buffer_server.archive.rows import schema, steps_of

GROUP_ROWS: Final = 512
"""In a row group: reading one experience reads as much."""
GROUP_BYTES: Final = 4 << 20
"""Payload bytes in a row group, about."""
FORMAT_VERSION: Final = 1
_METADATA_KEY: Final = b"experience_buffer.archive"
_EQUAL_TEXTS: Final = (
    *("group", "batch", "task", "state", "truncated", "prompt", "computation"),
    *("flags.list.element", "departure_reason", "departure_message", "acked_by.list.element"),
)
"""Columns of which many values are equal: Parquet writes each once."""


class SegmentError(Exception):
    """A file can't be read: it is damaged, cut short, or something else."""


def write(
    folder: Path,
    name: SegmentName,
    batches: Iterable[Any],
    *,
    buffer: str,
    arrow_schema: Any = None,
) -> Index:
    """Write a segment and its index; they have their names once all of both is on the disk.

    Args:
        folder: Of the buffer's archive.
        name: Of the segment; one that is there is replaced.
        batches: `pyarrow.RecordBatch`es, a row group each; at least one row in all.
        buffer: The buffer's name, for who reads the file alone.
        arrow_schema: Of the batches; None: that of what has left.

    Raises:
        OSError: It can't be written; nothing is left of it.
    """
    import pyarrow.parquet as pq

    wanted = schema() if arrow_schema is None else arrow_schema
    said = json.dumps({"version": FORMAT_VERSION, "buffer": buffer}).encode()
    partial = folder / f".{name.file}.partial"
    partial_index = folder / f".{name.index_file}.partial"
    uids: list[str] = []
    seqs: list[int] = []
    times: list[float] = []
    groups: list[int] = []
    acks: list[tuple[Sequence[str], Sequence[int | None]]] = []
    try:
        dictionary = [n for n in _EQUAL_TEXTS if n.split(".")[0] in wanted.names]
        with open(partial, "wb", opener=private) as file:
            with pq.ParquetWriter(
                file,
                wanted.with_metadata({_METADATA_KEY: said}),
                compression="zstd",
                compression_level=1,
                use_dictionary=dictionary,
                write_page_index=False,
            ) as writer:
                for batch in batches:
                    groups.append(len(uids))
                    uids += batch.column("uid").to_pylist()
                    seqs += batch.column("seq").to_pylist()
                    times += batch.column("departure_time").to_pylist()
                    if "acked_by" in wanted.names:
                        consumers = batch.column("acked_by").to_pylist()
                        steps = batch.column("acked_steps").to_pylist()
                        acks += zip(consumers, steps, strict=True)
                    writer.write_batch(batch, row_group_size=max(batch.num_rows, 1))
                    # A little at a time: what is pushed meanwhile waits for the same disk.
                    file.flush()
                    os.fdatasync(file.fileno())
            file.flush()
            os.fsync(file.fileno())
        index = Index.of(uids, seqs, times, groups, steps_of(acks))
        index.write(partial_index)
        # The index first: a segment without one can be read, but its index has to be made again.
        partial_index.replace(folder / name.index_file)
        partial.replace(folder / name.file)
        sync_folder(folder)
    except BaseException:
        for left in (partial, partial_index):
            with contextlib.suppress(OSError):
                left.unlink(missing_ok=True)
        raise
    return index


class Segment:
    """A segment, open to be read. Not thread-safe.

    Raises:
        SegmentError: It is damaged.
        FileNotFoundError: It was merged or removed meanwhile.
    """

    def __init__(self, folder: Path, name: SegmentName) -> None:
        self.name = name
        self.path = folder / name.file
        stat = self.path.stat()
        self.identity = (stat.st_ino, stat.st_mtime_ns)
        """Changes when it is replaced."""
        self.num_bytes = stat.st_size
        try:
            self.index = Index.read(folder / name.index_file)
        except (OSError, ValueError):
            self.index = self._made_index()
        self._file: Any = None

    def _made_index(self) -> Index:
        """The index, from the file itself."""
        table = self.read(("uid", "seq", "departure_time", "acked_by", "acked_steps"))
        metadata, starts, start = self._opened().metadata, [], 0
        for group in range(metadata.num_row_groups):
            starts.append(start)
            start += metadata.row_group(group).num_rows
        columns = {name: table.column(name).to_pylist() for name in table.column_names}
        none: list[Any] = [[]] * table.num_rows
        acks = zip(columns.get("acked_by", none), columns.get("acked_steps", none), strict=True)
        if not table.num_rows:
            raise SegmentError(f"{self.path} has no rows")
        return Index.of(
            columns["uid"], columns["seq"], columns["departure_time"], starts, steps_of(acks)
        )

    def _opened(self) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if getattr(self, "_file", None) is None:
            try:
                self._file = pq.ParquetFile(str(self.path), memory_map=True)
            except (pa.ArrowException, ValueError) as error:
                raise SegmentError(f"{self.path} can't be read: {error}") from error
        return self._file

    @property
    def schema(self) -> Any:
        """Its columns, as a `pyarrow.Schema` without what the file says of itself.

        Raises:
            SegmentError: It is damaged.
        """
        return self._opened().schema_arrow.remove_metadata()

    def release(self) -> None:
        """Close the file until it is read again."""
        if getattr(self, "_file", None) is not None:
            self._file.close()
            self._file = None

    def read(self, columns: Sequence[str], groups: Sequence[int] | None = None) -> Any:
        """Columns that it has, of some row groups or of all, as a `pyarrow.Table`.

        Raises:
            SegmentError: It is damaged.
        """
        import pyarrow as pa

        file = self._opened()
        names = [name for name in columns if name in file.schema_arrow.names]
        try:
            if groups is None:
                return file.read(columns=names, use_threads=False)
            return file.read_row_groups(list(groups), columns=names, use_threads=False)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise SegmentError(f"{self.path} can't be read: {error}") from error

    def rows(self, rows: Sequence[int], columns: Sequence[str]) -> list[dict[str, Any]]:
        """Some of its rows, in the order asked, by column; lists of numbers as arrays of numpy.

        Raises:
            SegmentError: It is damaged.
        """
        groups = sorted({self.index.group_of(row) for row in rows})
        starts, place, offsets = self.index.about.groups, 0, {}
        ends = [*starts[1:], self.index.about.num_rows]
        for group in groups:
            offsets[group] = place - starts[group]
            place += ends[group] - starts[group]
        table = self.read(columns, groups)
        found = table.take([row + offsets[self.index.group_of(row)] for row in rows])
        values = {name: _values(found.column(name)) for name in found.column_names}
        return [
            {name: values[name][place] if name in values else None for name in columns}
            for place in range(len(rows))
        ]


def _values(column: Any) -> list[Any]:
    """The values of a column; those of lists of numbers as arrays."""
    import pyarrow as pa

    kind = column.type
    if (
        pa.types.is_list(kind)
        and pa.types.is_floating(kind.value_type)
        and kind.value_type.bit_width == 32
    ):
        return [None if one.values is None else one.values.to_numpy(False) for one in column]
    found: list[Any] = column.to_pylist()
    return found

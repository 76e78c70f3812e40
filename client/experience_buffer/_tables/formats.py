"""Which format a file has, and files of Arrow's own formats: opened, written, and read part by part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from experience_buffer._arguments import refused
from experience_buffer._tables.schema import NAMES, arrow, arrow_schema, arrow_type
from experience_buffer.errors import InvalidRequestError

Format: TypeAlias = Literal["parquet", "arrow", "jsonl"]
"""Parquet; Arrow's own files, also called IPC or Feather; lines of JSON."""
FORMATS: Final = get_args(Format)
_SUFFIXES: Final[dict[str, Format]] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}
_COMPRESSED: Final = {".zst": "zstd", ".gz": "gzip"}
_ROWS: Final = 256
"""Read at once: with the largest payloads, much."""
_TEXTS: Final = ("group", "batch", "task", "state", "truncated", "prompt", "computation", "flags")
"""Columns of which many values are equal: Parquet writes each once."""
_STATISTICS: Final = (
    *("uid", "group", "tid", "rid", "reward", "advantage", "model_version", "push_time"),
    *("response_length", "staleness", "state"),
)
_MOST_THRIFT: Final = 64 << 20
"""Of the parts of a Parquet file's footer."""


class FileKind(NamedTuple):
    """A format, and how the file as a whole is compressed (only lines of JSON are)."""

    format: Format
    compression: str | None


def kind_of(path: Path, format: str | None) -> FileKind:
    """What a file is by its name, unless it is said.

    Raises:
        InvalidRequestError: Neither says it.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = _COMPRESSED.get(suffixes[-1]) if suffixes else None
    if format is None:
        named = suffixes[-2:-1] if compression else suffixes[-1:]
        found = _SUFFIXES.get(named[0]) if named else None
        if found is None or (compression and found != "jsonl"):
            known = ", ".join(_SUFFIXES)
            raise InvalidRequestError(
                f"{path.name!r} doesn't say its format; end it with one of {known} (lines of JSON "
                f"also with .zst or .gz behind it), or say format: {', '.join(FORMATS)}",
                subject="format",
            )
        return FileKind(found, compression)
    if format not in FORMATS:
        raise refused("format", format, f"one of {', '.join(FORMATS)}")
    return FileKind(format, compression if format == "jsonl" else None)  # type: ignore[arg-type]


def open_writer(path: Path, format: Format, *, compression: str, about: dict[bytes, bytes]) -> Any:
    """What writes record batches to a file of Arrow's, by `write_batch` and `close`."""
    pa = arrow()
    schema = arrow_schema().with_metadata(about)
    if format == "arrow":
        options = pa.ipc.IpcWriteOptions(compression=compression)
        return pa.ipc.new_file(str(path), schema, options=options)
    import pyarrow.parquet as pq

    return pq.ParquetWriter(
        str(path),
        schema,
        compression=compression,
        compression_level=1 if compression == "zstd" else None,
        use_dictionary=[_leaf(name) for name in _TEXTS],
        write_statistics=list(_STATISTICS),
        write_page_index=False,
    )


def _leaf(name: str) -> str:
    return "flags.list.element" if name == "flags" else name


class ArrowFile:
    """A file of Arrow's, open to be read, in batches of bounded size. Not thread-safe.

    Args:
        path: The file.
        format: "parquet" or "arrow".

    Raises:
        InvalidRequestError: It is something else, is cut short, or has a column of another type.
    """

    def __init__(self, path: Path, format: Format) -> None:
        pa = arrow()
        self._format = format
        try:
            if format == "parquet":
                import pyarrow.parquet as pq

                self._file = pq.ParquetFile(
                    str(path),
                    thrift_string_size_limit=_MOST_THRIFT,
                    thrift_container_size_limit=_MOST_THRIFT,
                )
                self._schema = self._file.schema_arrow
                self.num_rows: int | None = self._file.metadata.num_rows
            else:
                self._source = pa.memory_map(str(path))
                self._file = pa.ipc.open_file(self._source)
                self._schema = self._file.schema
                self.num_rows = None
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise InvalidRequestError(
                f"{path} isn't a whole {format} file: {error}", subject=str(path)
            ) from error
        self._path = path
        self.names = [name for name in NAMES if name in self._schema.names]
        self._check_types()

    @property
    def about(self) -> dict[bytes, bytes]:
        """What the file says of itself."""
        said = dict(self._schema.metadata or {})
        if self._format == "parquet":
            said |= self._file.metadata.metadata or {}
        return said

    def _check_types(self) -> None:
        pa = arrow()
        for name in self.names:
            field, wanted = self._schema.field(name), arrow_schema().field(name).type
            try:
                pa.array([], field.type).cast(wanted)
            except (pa.ArrowException, ValueError) as error:
                raise InvalidRequestError(
                    f"{self._path}: column {name!r} is of type {field.type}, not {wanted}",
                    subject=name,
                ) from error
        if self._schema.names.count("payload") > 1:
            raise InvalidRequestError(f"{self._path}: column 'payload' is there twice")

    def num_parts(self) -> int:
        """Row groups, or record batches."""
        if self._format == "parquet":
            return int(self._file.num_row_groups)
        return int(self._file.num_record_batches)

    def batches(self, part: int, names: list[str]) -> Iterator[Any]:
        """Record batches of a part, of the columns' own types; each at most a few hundred rows.

        Raises:
            InvalidRequestError: The part is damaged.
        """
        pa = arrow()
        try:
            if self._format == "parquet":
                found = self._file.iter_batches(_ROWS, row_groups=[part], columns=names)
            else:
                whole = self._file.get_batch(part).select(names)
                found = (whole.slice(at, _ROWS) for at in range(0, whole.num_rows, _ROWS))
            for batch in found:
                yield _cast(batch, names)
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
            raise InvalidRequestError(
                f"{self._path}: part {part} is damaged: {error}", subject=str(self._path)
            ) from error

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._format == "parquet":
            self._file.close()
        else:
            self._source.close()


def _cast(batch: Any, names: list[str]) -> Any:
    from experience_buffer._tables.schema import KINDS

    pa = arrow()
    arrays = [batch.column(name).cast(arrow_type(KINDS[name])) for name in names]
    return pa.RecordBatch.from_arrays(arrays, names)

"""Files of experiences: written row by row and read row by row, in bounded memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from experience_buffer._tables import formats, jsonl
from experience_buffer._tables.columns import Columns
from experience_buffer._tables.rows import HEAD, TableRow, delivered_row, rows_of, table_row
from experience_buffer._tables.schema import END_KEY, FORMAT_VERSION, METADATA_KEY, arrow
from experience_buffer.errors import InvalidRequestError
from experience_buffer.scanned import ScannedExperience

_PART_BYTES: Final = 32 << 20
"""About as much as a row group has, and a writer keeps in memory."""
_PART_ROWS: Final = 16_384
_MOST_ABOUT: Final = 16 << 20


class TableWriter:
    """Writes experiences to a file. Not thread-safe; use it as a context manager.

    The file has its name once it is closed; until then, and where the block fails, there is none.
    Memory stays bounded, however many are written. What can't be written, as where the disk is full, is
    an OSError of a later call, `close` at the latest.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        format: formats.Format | None = None,
        with_payloads: bool = True,
        with_tokens: bool = True,
        about: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        compression: str = "zstd",
    ) -> None:
        """Begin a file.

        Args:
            path: Ends with .parquet, .arrow, .feather or .jsonl, unless `format` is given; lines of
                JSON are compressed where .zst or .gz follows.
            format: "parquet", "arrow" or "jsonl"; None: by the name.
            with_payloads: Whether the payload of each experience goes in, from which `from_table` and
                `import` make exactly the same one.
            with_tokens: Whether the lists of tokens, masks, logprobs and advantages go in.
            about: Plain data that the file says of itself; not in lines of JSON.
            overwrite: Whether a file of this name may be replaced.
            compression: Of Parquet and Arrow files: "zstd", "lz4" or "none".

        Raises:
            InvalidRequestError: The format is none of the three.
            FileExistsError: There is a file of this name.
            UnsupportedError: pyarrow isn't installed.
        """
        arrow()
        self.path = Path(path)
        self._num_rows = 0
        self._problems: list[tuple[str, str]] = []
        kind = formats.kind_of(self.path, format)
        if self.path.exists() and not overwrite:
            raise FileExistsError(f"{self.path} is there already; take another name or overwrite")
        self._partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
        self._options = {"with_payloads": with_payloads, "with_tokens": with_tokens}
        self._columns = Columns(**self._options)
        self._format = kind.format
        self._file: Any = None
        # Arrow encodes and compresses without the interpreter: beside it, the next part is filled.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="table-writer")
        self._writing: Future[None] | None = None
        if kind.format == "jsonl":
            self._file = jsonl.stream_of(
                str(self._partial), compression=kind.compression, is_to_write=True
            )
        else:
            self._file = formats.open_writer(
                self._partial,
                kind.format,
                compression=compression,
                about={METADATA_KEY: _said({"format": FORMAT_VERSION, **(about or {})})},
            )

    @property
    def num_rows(self) -> int:
        """Rows written so far; those of the part that is being filled aren't counted yet."""
        return self._num_rows

    @property
    def problems(self) -> list[tuple[str, str]]:
        """Uid and reason of each experience that could not become a row."""
        return self._problems

    def write(self, experiences: Iterable[ScannedExperience]) -> None:
        """Add experiences; one that can't become a row is among `problems`, the others go in.

        Args:
            experiences: What `scan` brings, or `scanned_of` makes of others.
        """
        for experience in experiences:
            if problem := self._columns.add(experience):
                self._problems.append((experience.summary.uid, problem))
            elif self._columns.num_bytes >= _PART_BYTES or self._columns.num_rows >= _PART_ROWS:
                self._write_part()

    def _write_part(self) -> None:
        columns, self._columns = self._columns, Columns(**self._options)
        self.write_batch(columns.batch())

    def write_batch(self, batch: Any) -> None:
        """Add rows that are columns already.

        Args:
            batch: A `pyarrow.RecordBatch` of `schema()`.
        """
        if batch.num_rows:
            self._until_written()
            self._writing = self._thread.submit(self._put, batch)
            self._num_rows += batch.num_rows

    def _put(self, batch: Any) -> None:
        if self._format == "jsonl":
            self._file.write(jsonl.lines(batch))
        else:
            self._file.write_batch(batch)

    def _until_written(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self, **about: Any) -> None:
        """Write the rest, and give the file its name. Idempotent.

        Args:
            about: More that the file says of itself; of Parquet alone, others say it at their
                beginning.
        """
        if self._file is None:
            return
        try:
            if self._columns.num_rows:
                self._write_part()
            self._until_written()
            if about and self._format == "parquet":
                self._file.add_key_value_metadata({END_KEY: _said(about)})
            self._file.close()
            os.replace(self._partial, self.path)
        except BaseException:
            self.abort()
            raise
        self._file = None
        self._thread.shutdown()

    def abort(self) -> None:
        """Leave no file. Idempotent."""
        if self._file is not None:
            file, self._file = self._file, None
            self._thread.shutdown()
            with suppress(OSError):
                file.close()
            self._partial.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class TableReader:
    """Reads the rows of a file, in bounded memory. Not thread-safe; use it as a context manager.

    Iterating brings a `TableRow` for each row, in the file's order; one that can't be pushed says why.
    Columns of other names are left out. Nothing in a file can run code.
    """

    def __init__(self, path: str | Path, *, format: formats.Format | None = None) -> None:
        """Open a file.

        Args:
            path: A file that `TableWriter` wrote, or another one with such columns.
            format: "parquet", "arrow" or "jsonl"; None: by the name.

        Raises:
            InvalidRequestError: It isn't a whole file of that format, or holds no experiences.
            FileNotFoundError: There is none.
            UnsupportedError: pyarrow isn't installed.
        """
        arrow()
        self.path = Path(path)
        kind = formats.kind_of(self.path, format)
        self._about: dict[str, Any] = {}
        self._lines: Any = None
        self._file: formats.ArrowFile | None = None
        if kind.format == "jsonl":
            self._lines = jsonl.stream_of(
                str(self.path), compression=kind.compression, is_to_write=False
            )
            return
        self._file = formats.ArrowFile(self.path, kind.format)
        if not {"payload", "prompt_ids"} & {*self._file.names}:
            raise InvalidRequestError(
                f"{self.path} holds no experiences: it has no column payload, nor prompt_ids and "
                "completion_ids",
                subject=str(self.path),
            )
        self._about = _about(self._file.about)

    @property
    def about(self) -> dict[str, Any]:
        """What the file says of itself; empty where it says nothing."""
        return self._about

    @property
    def num_rows(self) -> int | None:
        """Rows of the file; None where its format doesn't say."""
        return None if self._file is None else self._file.num_rows

    def __iter__(self) -> Iterator[TableRow]:
        """Iterate over the rows.

        Raises:
            InvalidRequestError: A part of the file is damaged.
        """
        if self._file is None:
            yield from jsonl.read_lines(self._lines)
            return
        number = 0
        for part in range(self._file.num_parts()):
            for values in self._values(part):
                yield table_row(values, number)
                number += 1

    def delivered(self) -> Iterator[TableRow]:
        """Iterate over the rows with payloads as trainers got them, computed advantages in place.

        Raises:
            InvalidRequestError: A part of the file is damaged.
        """
        if self._file is None:
            yield from self
            return
        number = 0
        for part in range(self._file.num_parts()):
            for batch in self._file.batches(part, self._file.names):
                for values in rows_of(batch, tuple(self._file.names)):
                    yield delivered_row(values, number)
                    number += 1

    def _values(self, part: int) -> Iterator[dict[str, Any]]:
        """Rows by column; all columns only where some row has no payload."""
        assert self._file is not None
        head = [name for name in self._file.names if name in HEAD]
        # Both come in batches of the same rows; the second is read as far as it is needed.
        wholes = enumerate(self._file.batches(part, self._file.names))
        for number, batch in enumerate(self._file.batches(part, head)):
            if _says_all(batch):
                yield from rows_of(batch, tuple(head))
            else:
                whole = next(each for place, each in wholes if place == number)
                yield from rows_of(whole, tuple(self._file.names))

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
        elif self._lines is not None:
            self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _says_all(batch: Any) -> bool:
    """Whether each row has a payload, or is a tombstone."""
    names = batch.schema.names
    if "payload" not in names:
        return False
    has_payload = batch.column("payload").is_valid().to_pylist()
    tombstones = batch.column("tombstone").to_pylist() if "tombstone" in names else []
    return all(has_payload) or all(
        has or (place < len(tombstones) and tombstones[place])
        for place, has in enumerate(has_payload)
    )


def _said(about: Mapping[str, Any]) -> bytes:
    return json.dumps(about, ensure_ascii=False).encode()


def _about(metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in (METADATA_KEY, END_KEY):
        text = metadata.get(key, b"")
        try:
            said = json.loads(text) if 0 < len(text) <= _MOST_ABOUT else {}
        except (ValueError, RecursionError):
            continue
        found |= said if isinstance(said, dict) else {}
    return found

"""The segments of one buffer's archive: which there are, what is too old, what is merged. Blocks."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from experience_buffer_server.archive import segment as segments
from experience_buffer_server.archive.layout import SegmentName, sync_folder, uid_hash
from experience_buffer_server.archive.segment import Segment, SegmentError

_log = logging.getLogger(__name__)
MERGED: Final = 8
"""So many segments of about the same size become one."""
MOST_ROWS: Final = 16_384
"""In a segment that was merged."""
MOST_BYTES: Final = 64 << 20
"""Of its file."""
_SMALL_ROWS: Final = 256
_SMALL_BYTES: Final = 1 << 20
_MOST_OPEN: Final = 64
_TICK_NANOSECONDS: Final = 100_000_000
"""Longer than any file system's clock takes from one time to the next."""


class Folder:
    """One folder. Not thread-safe; others may change it meanwhile, one of them at a time.

    Args:
        path: The folder; there needn't be one.
        is_later: Of later findings, in place of what has left.
    """

    def __init__(self, path: Path, *, is_later: bool = False) -> None:
        self.path = path
        self._is_later = is_later
        self._known: dict[SegmentName, Segment] = {}
        self._changed: int = -1
        self.damaged: dict[str, str] = {}
        """By name, files that can't be read, and why."""

    def refresh(self, *, always: bool = False) -> list[Segment]:
        """Its segments now, by the order of their writes."""
        try:
            changed = self.path.stat().st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            self._known = {}
            return []
        if changed != self._changed or always:
            try:
                self._look()
            except NotADirectoryError:
                self._known = {}
                return []
            # Another change of the same tick of the clock wouldn't be seen.
            is_settled = time.time_ns() - changed > _TICK_NANOSECONDS
            self._changed = changed if is_settled else -1
        return list(self._known.values())

    def _look(self) -> None:
        names = []
        for file in self.path.iterdir():
            name = SegmentName.parse(file.name)
            if name is not None and name.is_later == self._is_later:
                names.append(name)
        names = sorted(n for n in names if not any(other.covers(n) for other in names))
        known = {}
        self.damaged = {}
        for name in names:
            try:
                known[name] = self._opened(name)
            except FileNotFoundError:
                continue  # Merged or removed just now.
            except (SegmentError, OSError) as error:
                if name.file not in self.damaged:
                    _log.error("left out of the archive: %s", error)
                self.damaged[name.file] = str(error)
        for name, one in self._known.items():
            if known.get(name) is not one:
                one.release()
        self._known = known

    def _opened(self, name: SegmentName) -> Segment:
        old = self._known.get(name)
        if old is not None:
            stat = (self.path / name.file).stat()
            if old.identity == (stat.st_ino, stat.st_mtime_ns):
                return old
        return Segment(self.path, name)

    def close_some(self) -> None:
        """Keep few files open."""
        for one in list(self._known.values())[:-_MOST_OPEN]:
            one.release()

    @property
    def num_bytes(self) -> int:
        """Of its files."""
        return sum(one.num_bytes for one in self._known.values())

    @property
    def next_number(self) -> int:
        """Of the next write."""
        return max((name.last for name in self._known), default=0) + 1

    def find(self, uid: str) -> Iterator[tuple[Segment, int]]:
        """Rows that may be of a uid, the newest segment first."""
        for one in sorted(self._known.values(), key=lambda s: -s.index.about.max_time):
            for row in reversed(one.index.rows_of(uid)):
                yield one, row

    def archived(self, seqs: Sequence[int]) -> set[int]:
        """Which of these numbers it has."""
        found: set[int] = set()
        if not seqs:
            return found
        wanted = np.asarray(seqs, "<u8")
        low, high = int(wanted.min()), int(wanted.max())
        for one in self._known.values():
            about = one.index.about
            if about.min_seq <= high and low <= about.max_seq:
                found.update(int(seq) for seq in wanted[np.isin(wanted, one.index.seqs)])
        return found

    # --- for who writes

    def tidy(self) -> None:
        """Remove what a crash has left: what was being written, or was merged."""
        if not self.path.exists():
            return
        for file in self.path.iterdir():
            name = file.name
            if name.startswith(".") and name.endswith(".partial"):
                file.unlink(missing_ok=True)
                continue
            found = SegmentName.parse(name)
            is_covered = found is not None and any(other.covers(found) for other in self._known)
            is_lone = name.endswith(".index") and not file.with_suffix(".parquet").exists()
            if is_lone or is_covered:
                file.unlink(missing_ok=True)
                file.with_suffix(".index").unlink(missing_ok=True)

    def remove(self, names: Iterable[SegmentName]) -> None:
        """Remove segments.

        Raises:
            OSError: The disk fails.
        """
        gone = list(names)
        for name in gone:
            with contextlib.suppress(FileNotFoundError):
                (self.path / name.file).unlink()
            with contextlib.suppress(FileNotFoundError):
                (self.path / name.index_file).unlink()
        if gone:
            sync_folder(self.path)

    def expire(self, *, now: float, max_age_seconds: float, max_bytes: int) -> int:
        """Remove the oldest, as far as they are too old or too much; how many rows went."""
        going: list[Segment] = []
        num_bytes = self.num_bytes
        for one in sorted(self._known.values(), key=lambda s: s.index.about.max_time):
            is_old = max_age_seconds > 0 and one.index.about.max_time < now - max_age_seconds
            if not is_old and num_bytes <= max_bytes:
                break
            going.append(one)
            num_bytes -= one.num_bytes
        self.remove(one.name for one in going)
        if going:
            self.refresh(always=True)
        return sum(one.index.about.num_rows for one in going)

    def to_merge(self, *, max_span_seconds: float) -> list[Segment]:
        """The newest segments that are to become one; none: it isn't time yet."""
        run: list[Segment] = []
        for one in reversed(self._known.values()):
            if run and _level(one) != _level(run[-1]):
                run = []
            run.append(one)
            if len(run) == MERGED:
                rows = sum(s.index.about.num_rows for s in run)
                times = [t for s in run for t in (s.index.about.min_time, s.index.about.max_time)]
                is_small = rows <= MOST_ROWS and sum(s.num_bytes for s in run) <= MOST_BYTES
                if is_small and max(times) - min(times) <= max_span_seconds:
                    return run[::-1]
                run = []
        return []

    def merge(self, parts: Sequence[Segment], *, buffer: str) -> None:
        """Make one segment of several that follow one another.

        Raises:
            OSError: It can't be written; they stay.
            SegmentError: One of them is damaged; they stay.
        """
        name = SegmentName(parts[0].name.first, parts[-1].name.last, self._is_later)
        batches = _regrouped(_distinct(parts))
        arrow_schema = parts[0].schema
        segments.write(self.path, name, batches, buffer=buffer, arrow_schema=arrow_schema)
        self.remove(one.name for one in parts)
        self.refresh(always=True)

    def without(self, one: Segment, uids: Iterable[str], *, buffer: str) -> None:
        """Write a segment again without what has these uids.

        Raises:
            OSError: It can't be written; it stays as it is.
            SegmentError: It is damaged; the same.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        gone = pa.array(list(uids), pa.string())
        tables = []
        for group in range(len(one.index.about.groups)):
            table = one.read(one.schema.names, [group])
            table = table.filter(pc.invert(pc.is_in(table.column("uid"), value_set=gone)))
            tables += [table] if table.num_rows else []
        if tables:
            batches = _regrouped(tables)
            segments.write(self.path, one.name, batches, buffer=buffer, arrow_schema=one.schema)
        else:
            self.remove([one.name])
        self.refresh(always=True)


def _level(one: Segment) -> int:
    """About how large it is: in steps of `MERGED`."""
    size = max(one.index.about.num_rows / _SMALL_ROWS, one.num_bytes / _SMALL_BYTES, 1.0)
    return int(math.log(size, MERGED))


def _distinct(parts: Sequence[Segment]) -> Iterator[Any]:
    """The row groups of segments as tables, without what is in them twice."""
    import pyarrow as pa

    seen: set[tuple[int, int]] = set()
    for part in parts:
        for group in range(len(part.index.about.groups)):
            table = part.read(part.schema.names, [group])
            uids, seqs = table.column("uid").to_pylist(), table.column("seq").to_pylist()
            fresh = []
            for uid, seq in zip(uids, seqs, strict=True):
                key = (seq, uid_hash(uid))
                fresh.append(not seq or key not in seen)
                seen.add(key)
            yield table if all(fresh) else table.filter(pa.array(fresh))


def _regrouped(tables: Iterable[Any]) -> Iterator[Any]:
    """Tables as record batches of about the size of a row group."""
    import pyarrow as pa

    waiting: list[Any] = []
    num_rows = num_bytes = 0
    for table in tables:
        size = _payload_bytes(table)
        if waiting and (
            num_rows + table.num_rows > segments.GROUP_ROWS
            or num_bytes + size > segments.GROUP_BYTES
        ):
            yield pa.concat_tables(waiting).combine_chunks().to_batches()[0]
            waiting, num_rows, num_bytes = [], 0, 0
        if table.num_rows:
            waiting.append(table)
            num_rows, num_bytes = num_rows + table.num_rows, num_bytes + size
    if waiting:
        yield pa.concat_tables(waiting).combine_chunks().to_batches()[0]


def _payload_bytes(table: Any) -> int:
    if "payload" not in table.column_names:
        return 0
    num_bytes: int = table.column("payload").nbytes
    return num_bytes

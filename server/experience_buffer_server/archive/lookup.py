"""Finding what has left: by uid, page by page, by content. In files, and in the store meanwhile. Blocks.

Pages are ordered by when an experience has left, the newest first, whatever becomes of the files
between one page and the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from experience_buffer_server.archive import later
from experience_buffer_server.archive.folder import Folder
from experience_buffer_server.archive.rows import SUMMARY, WHOLE, Rows, plain
from experience_buffer_server.archive.search import Wanted
from experience_buffer_server.archive.segment import Segment
from experience_buffer_server.store.interface import DepartedRow, StoreReader

MOST_LOOKS: Final = 20_000
"""Experiences that are looked at for one page."""


class Place(NamedTuple):
    """Where a page ends: it goes on with what comes after, which has left earlier."""

    time: float
    """Seconds since the Unix epoch."""
    seq: int


class _Source(NamedTuple):
    """One segment, or what waits in the store: when each of it has left."""

    times: Any
    seqs: Any
    segment: Segment | None
    waiting: Sequence[DepartedRow]


class Lookup:
    """Looks into the archive of one buffer. Not thread-safe.

    Args:
        path: Its folder; there needn't be one.
        buffer_id: The buffer's.
        reader: Reads the store; None: what waits there isn't found.
    """

    def __init__(self, path: Path, buffer_id: int, reader: StoreReader | None) -> None:
        self._folder = Folder(path)
        self._later = Folder(path, is_later=True)
        self._id = buffer_id
        self._reader = reader

    def get(self, uid: str, waiting: int | None = None) -> dict[str, Any] | None:
        """What has left last under a uid, by column, with `later`: findings of it. None: nothing has.

        Args:
            uid: Its name.
            waiting: Its number, where it waits in the store.
        """
        row = None
        if waiting is not None and self._reader is not None:
            row = self._waiting(waiting)
        if row is None:
            # After the store was read: what isn't there any more is in a file.
            self._folder.refresh()
            row = next(self._rows_of(uid), None)
        if row is not None:
            self._later.refresh()
            row["later"] = list(later.read(self._later, uid))
        self._folder.close_some()
        return row

    def _waiting(self, seq: int) -> dict[str, Any] | None:
        assert self._reader is not None
        for departed in self._reader.departed(self._id, [seq]):
            rows = Rows()
            rows.add(departed)
            batch = rows.batch()
            found = {name: batch.column(name)[0].as_py() for name in WHOLE}
            for name in ("advantages", "returns"):
                found[name] = _floats(found[name])
            return found
        return None

    def _rows_of(self, uid: str) -> Iterator[dict[str, Any]]:
        for one, row in self._folder.find(uid):
            (found,) = one.rows([row], WHOLE)
            if found["uid"] == uid:
                for name in ("advantages", "returns"):
                    found[name] = _floats(found[name])
                yield found

    def page(
        self, wanted: Wanted, size: int, before: Place | None = None
    ) -> tuple[list[dict[str, Any]], Place | None]:
        """What has left and matches, the newest first.

        Returns:
            At most `size` of it, by column, perhaps none; and where the next page begins, None: there
            is nothing more.
        """
        before = before or Place(math.inf, 2**63)
        found: list[dict[str, Any]] = []
        num_looks = 0
        for places in self._slices(before, wanted):
            looked = places[: MOST_LOOKS - num_looks]
            num_looks += len(looked)
            rows, last = _matching(looked, wanted, size - len(found))
            found += rows
            if len(found) >= size and last is not None:
                return found, last
            if num_looks >= MOST_LOOKS:
                time, seq, _, _ = looked[-1]
                return found, Place(time, seq)
        self._folder.close_some()
        return found, None

    def _slices(
        self, before: Place, wanted: Wanted
    ) -> Iterator[list[tuple[float, int, _Source, int]]]:
        """All that has left before, the newest first, in parts: time, number, where it is, its row."""
        waiting: list[DepartedRow] = []
        if self._reader is not None:
            rows = self._reader.departed_rows(self._id)
            waiting = [row for _, row in rows if isinstance(row, DepartedRow)]
        self._folder.refresh()
        sources = [
            _Source(one.index.times, one.index.seqs, one, ())
            for one in self._folder.refresh()
            if one.index.about.min_time <= before.time and wanted.may_be_in(one.index.about)
        ]
        if waiting:
            noted = [plain(row)["departure_time"] for row in waiting]
            seqs = np.asarray([row.record.seq for row in waiting], "<u8")
            sources.append(_Source(np.asarray(noted), seqs, None, waiting))
        ends = {id(source): float(source.times.max()) for source in sources}
        sources.sort(key=lambda source: -ends[id(source)])
        pool: list[tuple[float, int, _Source, int]] = []
        seen: set[int] = set()
        for place, source in enumerate(sources):
            pool += _places(source, before)
            pool.sort(key=lambda one: (-one[0], -one[1]))
            following = ends[id(sources[place + 1])] if place + 1 < len(sources) else -math.inf
            final = [one for one in pool if one[0] > following]
            pool = pool[len(final) :]
            # While it is moved from the store to a file, it may be in both.
            fresh = []
            for one in final:
                if not one[1] or one[1] not in seen:
                    seen.add(one[1])
                    fresh.append(one)
            if fresh:
                yield fresh


def _places(source: _Source, before: Place) -> list[tuple[float, int, _Source, int]]:
    times, seqs = np.asarray(source.times), np.asarray(source.seqs)
    earlier = (times < before.time) | ((times == before.time) & (seqs < before.seq))
    rows = np.flatnonzero(earlier)
    return [
        (time, seq, source, row)
        for time, seq, row in zip(
            times[rows].tolist(), seqs[rows].tolist(), rows.tolist(), strict=True
        )
    ]


def _matching(
    places: Sequence[tuple[float, int, _Source, int]], wanted: Wanted, most: int
) -> tuple[list[dict[str, Any]], Place | None]:
    """The first of these that match, and where the last of them is if there are as many as asked for."""
    masks: dict[int, Any] = {}
    chosen: list[tuple[float, int, _Source, int]] = []
    for one in places:
        source, row = one[2], one[3]
        if id(source) not in masks:
            masks[id(source)] = (
                wanted.matches(source.segment)
                if source.segment is not None
                else [wanted.matches_row(plain(each)) for each in source.waiting]
            )
        mask = masks[id(source)]
        if mask is None or mask[row]:
            chosen.append(one)
            if len(chosen) == most:
                break
    rows_of: dict[int, tuple[_Source, list[int]]] = {}
    for _, _, source, row in chosen:
        rows_of.setdefault(id(source), (source, []))[1].append(row)
    read: dict[tuple[int, int], dict[str, Any]] = {}
    for key, (source, rows) in rows_of.items():
        values = (
            source.segment.rows(rows, SUMMARY)
            if source.segment is not None
            else [plain(source.waiting[row]) for row in rows]
        )
        read |= {(key, row): value for row, value in zip(rows, values, strict=True)}
    found = [read[id(source), row] for _, _, source, row in chosen]
    last = Place(chosen[-1][0], chosen[-1][1]) if len(chosen) == most else None
    return found, last


def _floats(values: Any) -> bytes | None:
    return None if values is None else np.asarray(values, "<f4").tobytes()

"""Taking a deleted buffer off the disk: in parts, since everybody's commits wait for each of them.

A row without a name says that its buffer was deleted. It comes first: whoever finds it after a crash,
with whatever is left, goes on. What is left fits together at any time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import TypeVar

from experience_buffer_server.runtime.tuning import TUNING
from experience_buffer_server.store.interface import BufferRow, Record, Store, WriteBatch

_T = TypeVar("_T")


class Deletion:
    """Removes everything of one buffer, which nobody changes any more. Belongs to one event loop.

    Args:
        store: Where it is.
        row: The buffer's.
    """

    def __init__(self, store: Store, row: BufferRow) -> None:
        self._store = store
        self._row = row

    async def run(
        self,
        records: Sequence[Record],
        group_ids: Sequence[int],
        stop: asyncio.Event,
        *,
        departed: Sequence[tuple[int, str]] = (),
    ) -> bool:
        """Do it; a small buffer goes in one commit. It can be repeated where it was refused.

        Args:
            records: Of all experiences and tombstones.
            group_ids: Of all groups.
            departed: Number and uid of all that has left and isn't archived.
            stop: Set when the server stops: what is left goes when it starts again.

        Returns:
            Whether everything is removed.

        Raises:
            StoreFullError: No room to do so.
        """
        if max(len(records), len(group_ids), len(departed)) > TUNING.dropped_at_once:
            await self._make_certain()
        # Then it is on disk that the buffer was deleted, whatever happens now.
        if self._row.is_deleted:
            parts = chain(
                _parts(records, self._remove_records),
                _parts(group_ids, self._remove_groups),
                _parts(departed, self._remove_departed),
            )
            for remove in parts:
                if stop.is_set():
                    return False
                await self._commit(remove)
            while (
                await self._store.prune(self._row.id, math.inf, limit=TUNING.dropped_at_once)
                == TUNING.dropped_at_once
            ):
                if stop.is_set():
                    return False
        await self._commit(lambda batch: batch.delete_buffer(self._row.id))
        return True

    async def _make_certain(self) -> None:
        if not self._row.is_deleted:
            row = dataclasses.replace(self._row, name="")
            await self._commit(lambda batch: batch.put_buffer(row))
            self._row = row

    def _remove_records(self, records: Iterable[Record], batch: WriteBatch) -> None:
        for record in records:
            batch.remove(self._row.id, record)

    def _remove_groups(self, group_ids: Iterable[int], batch: WriteBatch) -> None:
        for group_id in group_ids:
            batch.delete_group(self._row.id, group_id)

    def _remove_departed(self, departed: Iterable[tuple[int, str]], batch: WriteBatch) -> None:
        for seq, uid in departed:
            batch.archived(self._row.id, seq, uid)

    async def _commit(self, fill: Callable[[WriteBatch], None]) -> None:
        batch = self._store.batch()
        fill(batch)
        await self._store.commit(batch)


def _parts(
    items: Iterable[_T], remove: Callable[[Iterable[_T], WriteBatch], None]
) -> Iterator[Callable[[WriteBatch], None]]:
    rest = iter(items)
    while part := list(islice(rest, TUNING.dropped_at_once)):
        yield partial(remove, part)

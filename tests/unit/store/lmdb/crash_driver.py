"""Commits numbered batches for `test_crash` until it is killed; prints what was acknowledged.

Batch n appends SIZE experiences, remembers one value, puts a group and removes batch n - 10. At the
start it prints the writer's process id.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path

from experience_buffer_server.store.interface import (
    BufferRow,
    GroupRow,
    Record,
    StoreFailedError,
    cut_of,
)
from experience_buffer_server.store.lmdb.store import LmdbStore

SIZE = 7
KEPT = 10


def record(number: int, index: int) -> Record:
    """Member `index` of batch `number`."""
    return Record(
        seq=number * SIZE + index,
        uid=f"{number}/t/{index}/0/",
        cut=cut_of(str(number), "t"),
        digest_number=0,
        group_id=number,
        tombstone=False,
        reward=None,
        response_tokens=index,
        payload_bytes=0,
        min_version=None,
        max_version=None,
        push_time=0.0,
    )


def payload(number: int, index: int) -> bytes:
    """The payload that belongs to it; of several sizes, so that pages are used in several ways."""
    return f"{number}/{index};".encode() * (1 + (number * 131 + index * 977) % 1500)


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def _main(path: Path, first: int) -> None:
    store = await LmdbStore.open(path, initial_map_bytes=1 << 20)
    _tell((path / "writer.lock").read_text().split()[0])
    batch = store.batch()
    batch.put_buffer(BufferRow(id=1, name="b", config="", policy_version=None, create_time=0.0))
    await store.commit(batch)

    numbers = itertools.count(first)

    async def commit_on() -> None:
        for number in numbers:
            batch = store.batch()
            for index in range(SIZE):
                batch.append(1, record(number, index), payload(number, index))
            batch.put_group(1, GroupRow(id=number, key=str(number), size=SIZE, open_time=0.0))
            batch.remember(1, "uid", str(number), b"digest", float(number))
            if number > KEPT:
                for index in range(SIZE):
                    batch.remove(1, record(number - KEPT, index))
                batch.delete_group(1, number - KEPT)
            await store.commit(batch)
            _tell(str(number))

    await asyncio.gather(*(commit_on() for _ in range(4)))


if __name__ == "__main__":
    try:
        asyncio.run(_main(Path(sys.argv[1]), int(sys.argv[2])))
    except StoreFailedError:
        sys.exit(3)

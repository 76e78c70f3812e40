"""The process that reads a store at rest: `python -m experience_buffer_server.store.lmdb.rest.rest_process`.

A damaged page may end it. It says what it has read in frames on its standard output; `rest_scan` reads
them, and starts it again behind what has ended it. Not for use by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, BinaryIO, Final

import lmdb

from experience_buffer.v1 import service_pb2
from experience_buffer_server.store.interface import StoreError, StoreFailedError, StoreFormatError
from experience_buffer_server.store.lmdb.rest.rest_rows import (
    CHUNK_ROWS,
    Part,
    RestReader,
    RestRows,
)

HEAD_BYTES: Final = 5
"""A letter and four bytes of length before each frame."""


class Frames:
    """Writes frames: J says something as JSON, P brings a part."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def say(self, **what: Any) -> None:
        """Say something."""
        self._write(b"J", json.dumps(what).encode())

    def part(self, part: Part) -> None:
        """Bring a part."""
        for what, reason in part.problems:
            self.say(problem=[what, reason])
        message = service_pb2.ScanResponse(experiences=part.experiences)
        self._write(b"P", message.SerializeToString())

    def _write(self, letter: bytes, data: bytes) -> None:
        self._stream.write(letter + len(data).to_bytes(4, "big"))
        self._stream.write(data)
        self._stream.flush()


def run(asked: dict[str, Any], frames: Frames) -> None:
    """Read what is asked for.

    Raises:
        StoreError: The store can't be opened.
    """
    with RestReader(Path(asked["path"])) as reader:
        buffers, problems = reader.buffers()
        if asked["buffer"] is None:
            for what, reason in problems:
                frames.say(problem=[what, reason])
            frames.say(
                buffers={
                    name: {
                        "id": row.id,
                        "config": row.config,
                        "policy_version": row.policy_version,
                        "create_time": row.create_time,
                        "last_seq": reader.last_seq(row.id),
                    }
                    for name, row in buffers.items()
                }
            )
            return
        row = buffers[asked["buffer"]]
        where = service_pb2.Filter.FromString(bytes.fromhex(asked["where"]))
        rows = RestRows(reader, row, where, with_payloads=asked["with_payloads"])
        if asked["delivered"]:
            for part in rows.delivered(*asked["delivered"]):
                frames.part(part)
            return
        if asked["orphans"]:
            for part in rows.orphans():
                frames.part(part)
            return
        after, last = asked["after"], max(reader.last_seq(row.id), asked["after"])
        careful = asked["careful"]
        while after < last:
            found = rows.part(after, last, limit=1 if careful else CHUNK_ROWS)
            if found is None:
                break
            after, careful = found.last_seq, max(careful - 1, 0)
            frames.part(found)
            frames.say(after=after, last=last, lost=rows.num_lost)
        frames.say(after=last, last=last, lost=rows.num_lost)


def main() -> None:
    """Read, and say how it ended."""
    frames = Frames(sys.stdout.buffer)
    try:
        run(json.loads(sys.argv[1]), frames)
        frames.say(end=True)
    except StoreFormatError as error:
        frames.say(refused=str(error))
    except (StoreFailedError, StoreError, lmdb.Error, OSError) as error:
        frames.say(failed=str(error))


if __name__ == "__main__":
    main()

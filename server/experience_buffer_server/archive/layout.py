"""Names of the files of an archive, and the index beside each segment. No Arrow.

A segment `0000000003-0000000010.parquet` holds what the writes 3 to 10 have archived. One that covers
others was merged from them, and is in their place: after a crash both may be there for a while. Its
index, of the same name, says which rows have which uid, and when each has left; it can be made again.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
import xxhash

_NAME: Final = re.compile(r"(later-)?([0-9]{10})-([0-9]{10})\.parquet")
_MAGIC: Final = b"EBINDEX1"
_HEAD: Final = struct.Struct("<8sQ8s")
"""Magic, bytes of what follows as JSON, and its checksum."""
_ALIGNMENT: Final = 8


class SegmentName(NamedTuple):
    """Which writes a segment holds."""

    first: int
    last: int
    is_later: bool = False
    """It holds later findings of what is in others."""

    @classmethod
    def parse(cls, name: str) -> SegmentName | None:
        """Read a file's name; None where it isn't a segment's."""
        match = _NAME.fullmatch(name)
        return None if match is None else cls(int(match[2]), int(match[3]), bool(match[1]))

    @property
    def file(self) -> str:
        """The name of its file."""
        prefix = "later-" if self.is_later else ""
        return f"{prefix}{self.first:010d}-{self.last:010d}.parquet"

    @property
    def index_file(self) -> str:
        """The name of its index."""
        return self.file.removesuffix(".parquet") + ".index"

    def covers(self, other: SegmentName) -> bool:
        """Whether the other was merged into it."""
        return (
            self != other
            and self.is_later == other.is_later
            and self.first <= other.first
            and other.last <= self.last
        )


def folder_name(buffer_id: int, create_time: float) -> str:
    """The folder of a buffer's archive: none of another store whose files are still there has it."""
    return f"{buffer_id}-{int(create_time * 1000)}"


def uid_hash(uid: str) -> int:
    """Of 8 bytes: what an index has in place of a uid."""
    return xxhash.xxh3_64_intdigest(uid.encode("utf-8", "surrogatepass"))


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What is known of a segment without looking into it."""

    num_rows: int
    min_time: float
    """When the first and the last of it have left, seconds since the Unix epoch."""
    max_time: float
    min_seq: int
    max_seq: int
    groups: list[int]
    """Where each row group begins."""
    steps: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By consumer, its lowest and highest training step."""


class Index:
    """Rows of a segment by uid, by number, by time. Arrays of numpy, as they lie in the file."""

    def __init__(self, about: About, seqs: Any, times: Any, hashes: Any, order: Any) -> None:
        self.about = about
        self.seqs = seqs
        """uint64, by row."""
        self.times = times
        """float64, by row: when each has left."""
        self.hashes = hashes
        """uint64, ascending: of the uids."""
        self.order = order
        """uint32: the row of each of `hashes`."""

    @classmethod
    def of(
        cls,
        uids: Sequence[str],
        seqs: Sequence[int],
        times: Sequence[float],
        groups: list[int],
        steps: dict[str, tuple[int, int]],
    ) -> Self:
        """Make one, of at least one row."""
        hashes = np.fromiter(map(uid_hash, uids), "<u8", len(uids))
        order = np.argsort(hashes, kind="stable").astype("<u4")
        about = About(
            num_rows=len(uids),
            min_time=min(times),
            max_time=max(times),
            min_seq=min(seqs),
            max_seq=max(seqs),
            groups=groups,
            steps=steps,
        )
        return cls(about, np.asarray(seqs, "<u8"), np.asarray(times, "<f8"), hashes[order], order)

    def rows_of(self, uid: str) -> list[int]:
        """Rows that may have a uid: those of its hash, in their order."""
        value = np.uint64(uid_hash(uid))
        start = int(np.searchsorted(self.hashes, value, "left"))
        end = int(np.searchsorted(self.hashes, value, "right"))
        return sorted(int(row) for row in self.order[start:end])

    def group_of(self, row: int) -> int:
        """The row group of a row."""
        return int(np.searchsorted(np.asarray(self.about.groups), row, "right")) - 1

    def write(self, path: Path) -> None:
        """Write it, and have it on the disk.

        Raises:
            OSError: It can't be written.
        """
        said = json.dumps(asdict(self.about)).encode()
        said += b" " * (-len(said) % _ALIGNMENT)
        with open(path, "wb", opener=private) as file:
            file.write(_HEAD.pack(_MAGIC, len(said), xxhash.xxh3_64_digest(said)))
            file.write(said)
            for array in (self.seqs, self.times, self.hashes, self.order):
                file.write(np.ascontiguousarray(array).tobytes())
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Open one; its arrays stay on the disk until they are looked at.

        Raises:
            ValueError: It isn't one, or is damaged.
            OSError: It can't be read.
        """
        with path.open("rb") as file:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                raise ValueError(f"{path} is no index")
            magic, length, checksum = _HEAD.unpack(head)
            said = file.read(length) if magic == _MAGIC and length < 1 << 30 else b""
        if not said or xxhash.xxh3_64_digest(said) != checksum:
            raise ValueError(f"{path} is no index, or damaged")
        values = json.loads(said)
        steps = {name: (low, high) for name, (low, high) in values.pop("steps").items()}
        about = About(**values, steps=steps)
        start, n = _HEAD.size + length, about.num_rows
        if path.stat().st_size != start + n * (8 + 8 + 8 + 4):
            raise ValueError(f"{path} is cut short")

        def array(kind: str, offset: int) -> Any:
            return np.memmap(path, kind, "r", start + offset * n, (n,))

        return cls(about, array("<u8", 0), array("<f8", 8), array("<u8", 16), array("<u4", 24))


def private(path: str, flags: int) -> int:
    """Opens a new file for this user alone, as the store's are."""
    return os.open(path, flags, 0o600)


def sync_folder(path: Path) -> None:
    """Have on the disk which files a folder has.

    Raises:
        OSError: The disk fails.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

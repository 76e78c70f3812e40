"""How payloads fit to records: what is missing, of nobody, there twice, or not what was pushed.

A payload is a row of table PAYLOADS or, if it is large, one of EXTENTS. No I/O of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import xxhash

from experience_buffer_server.store.interface import OTHER_DIGEST, Record
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.format import Table
from experience_buffer_server.store.lmdb.verify.report import Kind

PAYLOAD_TABLES: Final = (Table.PAYLOADS, Table.EXTENTS)
Add = Callable[[Kind, Table, bytes, str], None]


class Known(NamedTuple):
    """What is kept of a record: of millions of them, little."""

    payload_bytes: int
    digest: bytes
    """Empty where it isn't of the present payload."""


def known_of(record: Record) -> Known:
    """What is kept of a record."""
    return Known(record.payload_bytes, b"" if record.fields & OTHER_DIGEST else record.digest)


class PayloadLinks:
    """Takes payloads once all records are known, and says which don't fit to them.

    Args:
        records: By buffer and seq, a live view; None: a tombstone.
        damaged: By table, keys of damaged rows, a live view: what depends on them isn't said again.
        add: Told of what is wrong.
    """

    def __init__(
        self,
        records: Mapping[int, Mapping[int, Known | None]],
        damaged: Mapping[Table, set[bytes]],
        add: Add,
    ) -> None:
        self._records = records
        self._damaged = damaged
        self._add = add
        self._seqs: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """By buffer and hash of the payload's key, the seq; negative once its payload was seen."""

    def expect(self, buffer_id: int, record: Record) -> None:
        """There is to be a payload for a record."""
        self._seqs[buffer_id][_hash(disk.payload_key(buffer_id, record.uid))] = record.seq

    def take(self, table: Table, buffer_id: int, key: bytes, payload: memoryview) -> None:
        """There is a payload; `table`, one of `PAYLOAD_TABLES`, has its row."""
        seqs, place = self._seqs[buffer_id], _hash(key)
        seq = seqs.get(place, 0)
        known = self._records[buffer_id].get(seq)
        if known is None:
            message = "the payload of no experience"
            if seq < 0:
                message = "a second payload of its experience: table payloads has one, too"
            self._add(Kind.ORPHAN_PAYLOAD, table, key, message)
            return
        seqs[place] = -seq
        if len(payload) != known.payload_bytes:
            message = f"{len(payload)} bytes, its record says {known.payload_bytes}"
            self._add(Kind.WRONG_SIZE, table, key, message)
        elif known.digest and xxhash.xxh3_128_digest(payload) != known.digest:
            self._add(Kind.WRONG_DIGEST, table, key, "it isn't the payload that was pushed")

    def check(self, uid_of: Callable[[int, int], str]) -> None:
        """Say which payloads are missing, once both tables were read to their ends.

        Args:
            uid_of: The uid of a sound record, by buffer and seq.
        """
        for buffer_id, seqs in self._seqs.items():
            for seq in seqs.values():
                if seq < 0:
                    continue
                key = disk.payload_key(buffer_id, uid_of(buffer_id, seq))
                if not any(key in self._damaged[table] for table in PAYLOAD_TABLES):
                    message = f"experience {seq} has no payload"
                    self._add(Kind.MISSING_PAYLOAD, Table.PAYLOADS, key, message)


def _hash(key: bytes) -> int:
    # Wide enough that no two of any number of keys have the same.
    return xxhash.xxh3_128_intdigest(key)

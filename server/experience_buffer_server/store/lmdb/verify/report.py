"""What a walk through a store has found: counts, and findings with what to do about them."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final

from pydantic import TypeAdapter

from experience_buffer_server.store.lmdb.disk.format import Table, row_label

MAX_FINDINGS: Final = 1000
"""Findings of which a report says more than their number."""


class Kind(StrEnum):
    """What is wrong."""

    DAMAGED_ROW = "damaged_row"
    """A row doesn't match its checksum, or isn't what its table holds; of table `extents`: or the
    payload isn't, that lies where the row says, or it can't be read."""
    DAMAGED_PAGE = "damaged_page"
    """LMDB can't read on in a table; what comes behind wasn't looked at."""
    CRASH = "crash"
    """Reading a table ends the process that reads; the table wasn't looked at."""
    MISSING_COMMIT = "missing_commit"
    """A damaged meta page: what is there isn't of the last commit."""
    MISSING_PAYLOAD = "missing_payload"
    """An experience without its payload."""
    ORPHAN_PAYLOAD = "orphan_payload"
    """A payload without its experience's record, or a second one of it."""
    WRONG_DIGEST = "wrong_digest"
    """A payload that isn't the one that was pushed."""
    WRONG_SIZE = "wrong_size"
    """A payload of another size than its record says."""
    MISSING_GROUP = "missing_group"
    """An experience of a group that has no row."""
    OVERFULL_GROUP = "overfull_group"
    """A whole group with more members than make it whole."""
    MISSING_ADVANTAGES = "missing_advantages"
    """Computed, it says, and nothing is there."""
    ORPHAN_ADVANTAGES = "orphan_advantages"
    """Computed for an experience that has no record, or without saying so."""
    UNKNOWN_BUFFER = "unknown_buffer"
    """A row of a buffer that has no row."""
    SET_ASIDE = "set_aside"
    """An experience or group that the server has set aside because rows of it can't be read back."""
    LEFTOVER = "leftover"
    """What a crash left between two commits: harmless, and tidied up by the server's next start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    kind: Kind
    table: str
    buffer: int
    """Id of the buffer; 0: none."""
    row: str
    """The row's uid, name or number; empty where it is about the table."""
    message: str


@dataclass(slots=True, kw_only=True)
class TableCount:
    """Rows of one table."""

    rows: int = 0
    damaged: int = 0


@dataclass(slots=True, kw_only=True)
class BufferCount:
    """What one buffer holds, as far as it can be read."""

    id: int
    name: str
    num_experiences: int = 0
    num_tombstones: int = 0
    payload_bytes: int = 0
    num_groups: int = 0
    num_open_leases: int = 0
    num_computed: int = 0
    num_set_aside: int = 0
    num_departed: int = 0
    """Left, and not archived yet. What is archived isn't part of the store."""


@dataclass(slots=True, kw_only=True)
class Report:
    """What a check of a store has found."""

    path: str
    format_version: int
    tables: dict[str, TableCount] = field(default_factory=dict)
    """By the table's name."""
    buffers: list[BufferCount] = field(default_factory=list)
    """By id."""
    findings: list[Finding] = field(default_factory=list)
    """The first `MAX_FINDINGS`."""
    totals: Counter[str] = field(default_factory=Counter)
    """All findings, by kind."""
    seconds: float = 0.0

    @property
    def is_clean(self) -> bool:
        """Nothing is wrong; leftovers are not."""
        return not self.num_problems

    @property
    def num_problems(self) -> int:
        """Findings that aren't leftovers."""
        return sum(self.totals.values()) - self.totals[Kind.LEFTOVER]

    @property
    def num_rows(self) -> int:
        """Rows read."""
        return sum(table.rows for table in self.tables.values())

    def add(self, kind: Kind, table: Table, key: bytes, message: str) -> None:
        """Count a finding about a row, or a table where there is no key; keep it while there are few."""
        self.totals[kind] += 1
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(
                Finding(
                    kind=kind,
                    table=table.disk_name.decode(),
                    buffer=0 if table is Table.META else int.from_bytes(key[:4], "big"),
                    row=row_label(table, key),
                    message=message,
                )
            )

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`."""
        return {"is_clean": self.is_clean, **asdict(self), "totals": dict(self.totals)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Report:
        """Read `to_json` back."""
        return TypeAdapter(cls).validate_python(data)

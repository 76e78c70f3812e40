"""What a copy of a store holds: checked row by row, and counted for the manifest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import lmdb

from experience_buffer_server.store import row_codec
from experience_buffer_server.store.interface import DamagedRecordError
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.format import Table, unseal
from experience_buffer_server.store.lmdb.disk.opening import at_rest
from experience_buffer_server.store.lmdb.snapshots.manifest import BufferManifest, ConsumerManifest
from experience_buffer_server.store.lmdb.verify.check import Kind, Report, check

_Row = TypeVar("_Row")
_TOLERATED: Final = (Kind.LEFTOVER, Kind.SET_ASIDE)
"""What the server has found itself and goes on with."""
_SECONDARY: Final = (
    Table.LEASES,
    Table.PROGRESS,
    Table.CONSUMERS,
    Table.MEMORY,
    Table.MEMORY_LOG,
    Table.COUNTERS,
    Table.MAGNITUDES,
    Table.FREED,
    Table.DEPARTED,
)
"""Tables whose damaged rows cost no experience that is still to be delivered: a start goes on without
(`restore_damage`)."""
_TWINS: Final = (Table.BUFFERS, Table.BUFFER_COPIES)
"""Rows that are there twice: damage to one of the tables costs nothing."""
_SHOWN_FINDINGS = 3


def checked_inventory(path: Path) -> tuple[list[BufferManifest], list[str]]:
    """Check a store that nobody else has open, and say what it holds.

    Returns:
        Its buffers, and warnings: damaged rows that no experience depends on.

    Raises:
        DamagedRecordError: The check has found something wrong.
        StoreFormatError: It is no store, or one of another version.
        StoreFailedError: It can't be read.
    """
    report = check(path)
    if problem := problem_of(report):
        raise DamagedRecordError(problem)
    with at_rest(path) as (txn, tables):
        return list(_inventory(txn, tables, report)), _warnings(report)


def problem_of(report: Report) -> str:
    """What is wrong with a store, in words; empty when it can be served as it is."""
    count = sum(report.totals.values()) - sum(report.totals[kind] for kind in _TOLERATED)
    count -= sum(_secondary(report).values())
    if not count:
        return ""
    bad = [finding for finding in report.findings if finding.kind not in _TOLERATED]
    shown = [f for f in bad if f.kind is not Kind.DAMAGED_ROW or f.table not in _secondary(report)]
    examples = "; ".join(
        f"{finding.table} {finding.row}: {finding.message}" for finding in shown[:_SHOWN_FINDINGS]
    )
    return f"{count} findings of its check, such as: {examples}"


def _secondary(report: Report) -> dict[str, int]:
    """By table, damaged rows that no experience depends on."""
    damaged = {name: table.damaged for name, table in report.tables.items() if table.damaged}
    secondary = [table.disk_name.decode() for table in _SECONDARY]
    twins = [table.disk_name.decode() for table in _TWINS]
    if not all(name in damaged for name in twins):
        secondary += twins
    return {name: count for name, count in damaged.items() if name in secondary}


def _warnings(report: Report) -> list[str]:
    return [
        f"{count} damaged row{'s' * (count > 1)} of table {name} went into the copy: no experience "
        "depends on it; `experience-buffer verify` says which"
        for name, count in _secondary(report).items()
    ]


def _inventory(
    txn: lmdb.Transaction[memoryview], tables: list[lmdb._Database], report: Report
) -> Iterator[BufferManifest]:
    def rows(table: Table, prefix: bytes, decode: Callable[[memoryview], _Row]) -> Iterator[_Row]:
        with txn.cursor(tables[table]) as cursor:
            found = cursor.set_range(prefix)
            while found and (key := bytes(cursor.key())).startswith(prefix):
                with suppress(DamagedRecordError):
                    yield decode(unseal(table, key, cursor.value()))
                found = cursor.next()

    counts = {buffer.id: buffer for buffer in report.buffers}
    # Where one of the two is damaged, the other counts.
    twins = (Table.BUFFER_COPIES, Table.BUFFERS)
    found = [row for table in twins for row in rows(table, b"", row_codec.decode_buffer)]
    for _, row in sorted({row.id: row for row in found}.items()):
        if row.is_deleted:
            continue
        count = counts[row.id]
        prefix = disk.buffer_key(row.id)
        yield BufferManifest(
            name=row.name,
            num_experiences=count.num_experiences,
            num_tombstones=count.num_tombstones,
            num_bytes=count.payload_bytes,
            num_groups=count.num_groups,
            num_open_leases=count.num_open_leases,
            policy_version=row.policy_version,
            consumers=tuple(
                ConsumerManifest(
                    name=consumer.name, last_step=consumer.last_step, safe_step=consumer.safe_step
                )
                for consumer in rows(Table.CONSUMERS, prefix, row_codec.decode_consumer)
            ),
            config=json.loads(row.config),
        )

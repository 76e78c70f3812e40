"""What has left is found: by uid, page by page, by content; whatever becomes of the files meanwhile."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from experience_buffer_server.archive import lookup as lookups
from experience_buffer_server.archive import segment
from experience_buffer_server.archive.layout import Index, SegmentName
from experience_buffer_server.archive.lookup import Lookup, Place
from experience_buffer_server.archive.note import Note
from experience_buffer_server.archive.rows import Rows, schema
from experience_buffer_server.archive.search import Wanted
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.store.interface import Departed, DepartedRow, Record, cut_of
from tests.unit.archive.conftest import Archive, consume
from tests.unit.builders import payload, push, uid


async def left(archive: Archive, runs: range, *, written: bool = True) -> Buffer:
    """A buffer that one after the other of these runs has left."""
    buffer = await archive.create()
    for run in runs:
        await buffer.push(push((1, run)))
        await consume(buffer, 1)
        if written:
            await archive.write(buffer)
    return buffer


def uids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["uid"] for row in rows]


async def test_pages_follow_one_another_while_files_are_merged(archive: Archive) -> None:
    buffer = await left(archive, range(7))
    lookup = archive.lookup(buffer)
    rows, before = lookup.page(Wanted(), 3)
    assert uids(rows) == [uid(1, 6), uid(1, 5), uid(1, 4)]
    await buffer.push(push((1, 7)))
    await consume(buffer, 1)
    assert (await archive.write(buffer))["files"]["num_segments"] == 1
    rows, before = lookup.page(Wanted(), 3, before)
    assert uids(rows) == [uid(1, 3), uid(1, 2), uid(1, 1)]
    rows, before = lookup.page(Wanted(), 3, before)
    assert (uids(rows), before) == ([uid(1, 0)], None)


async def test_what_waits_in_the_store_is_found_with_the_rest(archive: Archive) -> None:
    buffer = await left(archive, range(3))
    await buffer.push(push((1, 3)))
    await consume(buffer, 1)
    lookup = archive.lookup(buffer)
    rows, _ = lookup.page(Wanted(), 9)
    assert uids(rows) == [uid(1, run) for run in (3, 2, 1, 0)]
    waiting = buffer.state.outbox.waits(uid(1, 3))
    found = lookup.get(uid(1, 3), waiting)
    assert found is not None
    assert found["payload"] == payload((1, 3))
    # It is in both for a moment.
    archive.writer.handle(
        {"kind": "write", "buffer": buffer.id, "name": buffer.name, "seqs": [waiting]}
        | {"refused": [], "max_age_seconds": 0.0, "max_bytes": 1 << 40, "now": 1.0}
    )
    assert len(lookup.page(Wanted(), 9)[0]) == 4


@pytest.mark.parametrize("written", [True, False], ids=["in files", "waiting"])
async def test_filters_mean_the_same_in_files_and_in_the_store(
    archive: Archive, written: bool
) -> None:
    buffer = await left(archive, range(6), written=written)
    lookup = archive.lookup(buffer)

    def found(**wanted: Any) -> list[int]:
        rows, _ = lookup.page(Wanted(**wanted), 9)
        return sorted(int(row["uid"].split("/")[2]) for row in rows)

    assert found(min_reward=0.3, max_reward=0.85) == [2, 3, 4]
    assert found(rid="2/1/5") == [5]
    assert found(sid="2/1/0", tid="2/1") == [0, 1, 2, 3, 4, 5]
    assert found(uid_prefix="2/1/3/") == [3]
    assert found(text="/4/0/") == [4]
    assert found(min_policy_version=0) == []
    assert found(min_response_tokens=8) == []
    assert found(consumer="trainer") == [0, 1, 2, 3, 4, 5]
    assert found(consumer="critic") == []
    assert found(step=3) == []
    assert found(departure_reason="evicted") == []


async def test_a_page_looks_at_a_bounded_number(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await left(archive, range(7))
    monkeypatch.setattr(lookups, "MOST_LOOKS", 3)
    lookup, before = archive.lookup(buffer), None
    pages = []
    while True:
        rows, before = lookup.page(Wanted(rid="2/1/1"), 9, before)
        pages.append(uids(rows))
        if before is None:
            break
    assert pages == [[], [uid(1, 1)], []]


async def test_a_segment_that_holds_no_such_step_is_not_opened(archive: Archive) -> None:
    buffer = await archive.create()
    for step in (5, 6):
        await buffer.push(push((1, step)))
        await consume(buffer, 1, step=step)
        await buffer.declare_safe("trainer", step)
        await buffer.drain()
        await archive.write(buffer)
    (first, second) = sorted((archive.root / str(buffer.id)).glob("*.index"))
    assert Index.read(first).about.steps == {"trainer": (5, 5)}
    second.with_suffix(".parquet").write_bytes(b"not to be opened")
    rows, _ = archive.lookup(buffer).page(Wanted(step=5), 9)
    assert uids(rows) == [uid(1, 5)]


def many(path: Path, num_segments: int, num_rows: int) -> None:
    """Segments of rows that differ in uid, number and time."""
    rows = Rows()
    note = Note("consumed", "", 1.0, "trainer", 5, "task", 3).encode()
    record = Record(
        seq=1, uid=uid(1, 0), cut=cut_of("2", "1"), digest_number=1, group_id=0, tombstone=False,
        reward=0.5, response_tokens=7, payload_bytes=1, min_version=1, max_version=2, push_time=1.0,
    )  # fmt: skip
    for _ in range(segment.GROUP_ROWS):
        rows.add(Departed(DepartedRow(record, None, note, False), payload((1, 0)), None))
    made = rows.batch()
    path.mkdir(parents=True)
    names = schema().names
    for number in range(num_segments):
        batches = []
        for start in range(0, num_rows, segment.GROUP_ROWS):
            seqs = range(number * num_rows + start, number * num_rows + start + made.num_rows)
            arrays = list(made.columns)
            arrays[names.index("uid")] = pa.array([f"2/{seq}/0/0/x" for seq in seqs])
            arrays[names.index("seq")] = pa.array(seqs, pa.int64())
            arrays[names.index("departure_time")] = pa.array(map(float, seqs), pa.float64())
            batches.append(pa.RecordBatch.from_arrays(arrays, schema=schema()))
        segment.write(path, SegmentName(number + 1, number + 1), batches, buffer="math")


@pytest.mark.timeout(120)
def test_one_of_a_hundred_thousand_is_found_at_once(tmp_path: Path) -> None:
    many(tmp_path / "1", 50, 2048)
    lookup = Lookup(tmp_path / "1", 1, None)
    assert lookup.get("2/0/0/0/x") is not None
    took = []
    for seq in range(997, 102_400, 5077):
        started = time.perf_counter()
        found = lookup.get(f"2/{seq}/0/0/x")
        took.append(time.perf_counter() - started)
        assert (found or {})["seq"] == seq
    assert lookup.get("2/102400/0/0/x") is None
    took.sort()
    # By the processor's time on a busy machine: half of them.
    assert took[len(took) // 2] < 0.05
    started = time.perf_counter()
    rows, before = lookup.page(Wanted(), 100)
    assert time.perf_counter() - started < 0.5
    assert [row["seq"] for row in rows] == list(range(102_399, 102_299, -1))
    assert before == Place(102_300.0, 102_300)

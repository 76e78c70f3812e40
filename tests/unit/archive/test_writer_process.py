"""What the writer puts into files: all of it, once, whatever has happened before."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from experience_buffer_server.archive.layout import Index
from experience_buffer_server.archive.outbox import Refused
from experience_buffer_server.archive.search import Wanted
from tests.unit.archive.conftest import Archive, consume
from tests.unit.builders import payload, push, settle, uid


def wanted(**values: Any) -> Wanted:
    return Wanted(**values)


async def test_a_segment_is_a_table_that_others_read(archive: Archive) -> None:
    buffer = await archive.create(advantage="reinforce")
    archive.world.computer.start()
    await buffer.push(push((1, 3)))
    await settle(buffer)
    await consume(buffer, 1, step=11)
    await buffer.declare_safe("trainer", 11)
    await buffer.drain()
    answer = await archive.write(buffer)
    assert answer["files"]["num_rows"] == 1
    (file,) = (archive.root / str(buffer.id)).glob("*.parquet")
    assert file.stat().st_mode & 0o077 == 0
    assert archive.root.stat().st_mode & 0o077 == 0
    (row,) = pq.read_table(file).to_pylist()
    assert (row["uid"], row["reward"], row["payload"]) == (uid(1, 3), 0.6, payload((1, 3)))
    assert row["completion_ids"] == [42, 43, 44, 45, 46, 47, 48]
    assert row["advantages"] == pytest.approx([0.6] * 7)
    assert '"estimator": "reinforce"' in row["computation"]
    assert (row["departure_reason"], row["seq"]) == ("consumed", 1)
    assert (row["acked_by"], row["acked_steps"]) == (["trainer"], [11])
    assert row["acked_times"][0] <= row["departure_time"]


async def test_what_is_written_twice_is_archived_once(archive: Archive) -> None:
    """As after a crash between the file and the commit that removes what is in it."""
    buffer = await archive.create()
    await buffer.push(push((1, 0), (1, 1), (1, 2)))
    await consume(buffer, 2)
    request = {"kind": "write", "buffer": buffer.id, "name": buffer.name, "refused": []}
    request |= {"max_age_seconds": 0.0, "max_bytes": 1 << 40, "now": 1.0}
    assert archive.writer.handle(request | {"seqs": [1, 2]})["files"]["num_rows"] == 2
    await consume(buffer, 1)
    assert archive.writer.handle(request | {"seqs": [1, 2, 3]})["files"]["num_rows"] == 3
    fresh = Archive(archive.world, archive.root)
    answer = await fresh.write(buffer)
    assert (answer["files"]["num_rows"], answer["files"]["num_segments"]) == (3, 2)
    assert len(buffer.state.outbox) == 0


async def test_a_full_disk_leaves_nothing_behind_and_is_said(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await archive.create()
    await buffer.push(push((1, 0)))
    await consume(buffer, 1)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Index, "write", full)
        answer = await archive.write(buffer)
    assert "No space left" in answer["error"]
    assert archive.files(buffer) == []
    assert len(buffer.state.outbox) == 1
    await archive.write(buffer)
    assert len(archive.files(buffer)) == 2
    assert len(buffer.state.outbox) == 0


async def test_small_segments_become_one(archive: Archive) -> None:
    buffer = await archive.create()
    for run in range(17):
        await buffer.push(push((1, run)))
        await consume(buffer, 1)
        answer = await archive.write(buffer)
    assert answer["files"]["num_segments"] == 3
    assert answer["files"]["num_rows"] == 17
    rows, _ = archive.lookup(buffer).page(wanted(), 100)
    assert [row["uid"] for row in rows] == [uid(1, run) for run in reversed(range(17))]


async def test_a_crash_while_merging_leaves_nothing_twice(archive: Archive) -> None:
    buffer = await archive.create()
    kept: dict[str, bytes] = {}
    folder = archive.root / str(buffer.id)
    for run in range(8):
        await buffer.push(push((1, run)))
        await consume(buffer, 1)
        if run == 7:
            kept = {file.name: file.read_bytes() for file in folder.iterdir()}
        await archive.write(buffer)
    assert len(archive.files(buffer)) == 2
    for name, content in kept.items():
        (folder / name).write_bytes(content)
    (folder / ".0000000009-0000000009.parquet.partial").write_bytes(b"half")
    (folder / "0000000010-0000000010.index").write_bytes(b"lone")
    rows, _ = archive.lookup(buffer).page(wanted(), 100)
    assert len(rows) == 8
    await Archive(archive.world, archive.root).write(buffer)
    assert len(archive.files(buffer)) == 2


async def test_the_oldest_go_by_age_and_by_bytes(archive: Archive) -> None:
    buffer = await archive.create()
    for run in range(3):
        await buffer.push(push((1, run)))
        await consume(buffer, 1)
        await archive.write(buffer)
    sizes = [file.stat().st_size for file in sorted(archive.root.rglob("*.parquet"))]
    answer = await archive.write(buffer, max_bytes=sum(sizes[1:]))
    assert answer["files"]["num_rows"] == 2
    oldest = answer["files"]["oldest_time"]
    answer = await archive.write(buffer, max_age_seconds=5.0, now=oldest + 4.0)
    assert answer["files"]["num_rows"] == 2
    answer = await archive.write(buffer, max_age_seconds=5.0, now=oldest + 60.0)
    assert (answer["files"]["num_rows"], archive.files(buffer)) == (0, [])


async def test_what_was_refused_is_kept_whatever_it_is(archive: Archive) -> None:
    buffer = await archive.create()
    junk = b"\0junk\x1b[31m"
    buffer.state.outbox.refused = [
        Refused(uid(1, 0), "invalid", "reward is NaN", 5.0, payload((1, 0)), 0),
        Refused("2/1/0/0/b\x07", "invalid", "no payload", 6.0, junk, 0),
    ]
    await archive.write(buffer)
    found = archive.lookup(buffer).get("2/1/0/0/b\x07")
    assert found is not None
    assert (found["payload"], found["departure_reason"]) == (junk, "refused")
    assert found["departure_message"] == "invalid: no payload"
    rows, _ = archive.lookup(buffer).page(wanted(departure_reason="refused"), 9)
    assert [row["uid"] for row in rows] == ["2/1/0/0/b\x07", uid(1, 0)]


async def test_what_is_deleted_is_gone_for_good(archive: Archive, tmp_path: Path) -> None:
    buffer = await archive.create()
    await buffer.push(push((1, 0), (1, 1)))
    await consume(buffer, 2)
    await archive.write(buffer)
    request = {"kind": "delete", "buffer": buffer.id, "name": buffer.name}
    answer = archive.writer.handle(request | {"uids": [uid(1, 0), "unknown"]})
    assert answer["deleted"] == [uid(1, 0)]
    assert archive.lookup(buffer).get(uid(1, 0)) is None
    assert archive.lookup(buffer).get(uid(1, 1)) is not None
    for file in tmp_path.rglob("*.parquet"):
        assert pq.read_table(file).column("payload").to_pylist() == [payload((1, 1))]
    assert archive.writer.handle(request | {"uids": [uid(1, 1)]})["files"]["num_rows"] == 0
    assert archive.files(buffer) == []


async def test_a_damaged_index_is_made_again(archive: Archive) -> None:
    buffer = await archive.create()
    await buffer.push(push((1, 0), (1, 1)))
    await consume(buffer, 2)
    await archive.write(buffer)
    (index,) = (archive.root / str(buffer.id)).glob("*.index")
    index.write_bytes(index.read_bytes()[:50])
    assert (archive.lookup(buffer).get(uid(1, 1)) or {})["uid"] == uid(1, 1)
    index.unlink()
    assert (archive.lookup(buffer).get(uid(1, 0)) or {})["uid"] == uid(1, 0)


async def test_a_damaged_segment_is_left_out_and_said(archive: Archive) -> None:
    buffer = await archive.create()
    for run in (0, 1):
        await buffer.push(push((1, run)))
        await consume(buffer, 1)
        await archive.write(buffer)
    first = min((archive.root / str(buffer.id)).glob("*.parquet"))
    first.write_bytes(b"PAR1" + b"\0" * 50)
    first.with_suffix(".index").unlink()
    answer = await Archive(archive.world, archive.root).write(buffer)
    assert first.name in answer["files"]["trouble"]
    assert archive.lookup(buffer).get(uid(1, 1)) is not None

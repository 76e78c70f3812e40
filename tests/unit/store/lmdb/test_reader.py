"""Payloads as they lie in the map, beside what was computed: the same as read one by one."""

from __future__ import annotations

import itertools
from pathlib import Path

import lmdb
import pytest

from experience_buffer_server.store.interface import AdvantageRow, DamagedRecordError, Found
from experience_buffer_server.store.lmdb import reader as lmdb_reader
from experience_buffer_server.store.lmdb.reader import LmdbReader
from tests.unit.store.conftest import MakeRecord, OpenStore


def computed(seq: int) -> AdvantageRow:
    return AdvantageRow(seq=seq, advantages=b"1234", returns=b"5678", details={})


@pytest.fixture
async def uids(path: Path, open_store: OpenStore, make_record: MakeRecord) -> list[str]:
    """Three experiences, the second without advantages."""
    store = await open_store()
    uids = [f"3/math/5/7/{seq}" for seq in (1, 2, 3)]
    batch = store.batch()
    for seq, uid in enumerate(uids, 1):
        batch.append(1, make_record(seq, uid=uid), content(seq))
        if seq != 2:
            batch.put_advantages(1, computed(seq))
    await store.commit(batch)
    await store.close()
    return uids


def content(seq: int) -> bytes:
    return f"payload {seq}".encode() * 999


def test_views_hold_what_payloads_returns(path: Path, uids: list[str]) -> None:
    with LmdbReader(path) as reader:
        asked = [uids[2], "not there", uids[1], uids[0]]
        with reader.stored(1, asked, [3, 4, 2, 1]) as (views, rows):
            assert copied(views) == reader_bytes(asked)
            assert all(view is None or isinstance(view, memoryview) for view in views)
        assert rows == [computed(3), None, None, computed(1)]
        assert reader.payloads(1, asked) == reader_bytes(asked)
        assert rows == reader.advantages(1, [3, 4, 2, 1])


def copied(views: list[Found[memoryview]]) -> list[bytes | None]:
    assert not any(isinstance(view, DamagedRecordError) for view in views)
    return [bytes(view) if isinstance(view, memoryview) else None for view in views]


def reader_bytes(asked: list[str]) -> list[bytes | None]:
    known = {f"3/math/5/7/{seq}": content(seq) for seq in (1, 2, 3)}
    return [known.get(uid) for uid in asked]


def test_a_changed_row_is_named_and_its_neighbours_are_read(path: Path, uids: list[str]) -> None:
    data = bytearray((path / "data.mdb").read_bytes())
    place = data.index(b"payload 2payload 2")
    data[place + 5] ^= 1
    (path / "data.mdb").write_bytes(data)
    with LmdbReader(path) as reader, reader.stored(1, uids, [1, 2, 3]) as (views, _):
        first, second, third = views
        assert (first, third) == tuple(reader_bytes([uids[0], uids[2]]))
        assert isinstance(second, DamagedRecordError)
        assert str(second) == str(reader.payloads(1, uids)[1])


def test_a_page_that_cannot_be_read_ends_only_the_first_attempt(
    path: Path, uids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB ends the transaction with it: each row is read again by itself."""

    attempts = itertools.count()

    def refuse_first(value: memoryview) -> memoryview:
        if next(attempts) == 0:
            raise lmdb.CorruptedError("page 3 is damaged")
        return value

    monkeypatch.setattr(lmdb_reader, "_as_it_lies", refuse_first)
    with LmdbReader(path) as reader, reader.stored(1, uids, [1, 2, 3]) as (views, rows):
        assert copied(views) == reader_bytes(uids)
        assert rows == [computed(1), None, computed(3)]


def test_an_error_of_the_block_is_its_own(path: Path, uids: list[str]) -> None:
    with LmdbReader(path) as reader:
        with pytest.raises(ZeroDivisionError), reader.stored(1, uids, [1, 2, 3]):
            raise ZeroDivisionError
        with pytest.raises(ValueError, match="bytes"), reader.stored(1, ["x" * 600], [1]):
            pass

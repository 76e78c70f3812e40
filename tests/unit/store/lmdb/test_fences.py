"""The writer's side of ownership: what a transaction that fails leaves, and who hears of a refusal when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from experience_buffer_server.store.lmdb.disk.format import Table, buffer_key, numbered_key
from experience_buffer_server.store.lmdb.engine import Engine
from experience_buffer_server.store.lmdb.writer_protocol import (
    CLAIM,
    INSERT_RECORD,
    Operation,
    Request,
    Result,
    Stamp,
    Status,
)
from tests.unit.store.conftest import MEBI


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    opened = Engine(tmp_path, sync=False, initial_map_bytes=16 * MEBI, max_map_bytes=16 * MEBI)
    yield opened
    opened.close()


def insert(number: int, seq: int, *stamps: Stamp) -> Request:
    return Request(number, 100, [(INSERT_RECORD, numbered_key(1, seq), b"record")], stamps)


def lease(number: int, *stamps: Stamp) -> Request:
    return Request(number, 0, [(Table.LEASES, numbered_key(1, number), b"lease")], stamps)


def claim(number: int, buffer_id: int = 1) -> Request:
    return Request(number, 0, [(CLAIM, buffer_key(buffer_id), b"")])


def statuses(results: list[Result]) -> list[int]:
    return [result.status for result in results]


def test_after_a_refusal_nothing_is_stored_before_the_owner_could_hear_of_it(
    engine: Engine,
) -> None:
    """Else the number of the last stored commit would say of the refused one that it is stored."""
    requests = [insert(1, 1), insert(2, 1), lease(3)]
    results, work = engine.write(requests)
    assert statuses(results) == [Status.OK, Status.REFUSED]
    assert work.num_batches == 2
    results, _ = engine.write(requests[len(results) :])
    assert (statuses(results), results[0].number) == ([Status.OK], 3)


def test_after_appends_without_room_removals_wait_for_the_next_turn(engine: Engine) -> None:
    row: Operation = (INSERT_RECORD, numbered_key(1, 9), b"record")
    huge = [Request(number, 99 * MEBI, [row]) for number in (2, 3)]
    results, _ = engine.write([lease(1), *huge, lease(4)])
    assert statuses(results) == [Status.OK, Status.FULL, Status.FULL]


def test_epochs_and_numbers_of_a_transaction_that_fails_are_void(engine: Engine) -> None:
    assert [result.answer for result in engine.write([claim(1), claim(2), claim(3, 2)])[0]] == [
        *(1, 2, 1)
    ]
    stamps = Stamp(1, 2, 7), Stamp(2, 1, 5)
    assert statuses(engine.write([insert(4, 1, *stamps)])[0]) == [Status.OK]
    taken = Stamp(1, 2, 9)
    assert statuses(engine.write([insert(5, 1, taken)])[0]) == [Status.REFUSED]
    assert statuses(engine.write([insert(6, 2, Stamp(1, 2, 8))])[0]) == [Status.OK]
    for wrong in (Stamp(1, 1, 10), Stamp(1, 3, 10), Stamp(1, 2, 8), Stamp(2, 1, 5)):
        assert statuses(engine.write([lease(7, wrong)])[0]) == [Status.FENCED], wrong
    assert statuses(engine.write([lease(8, taken, Stamp(2, 1, 6))])[0]) == [Status.OK]


def test_a_fenced_batch_fails_alone(engine: Engine) -> None:
    engine.write([claim(1), claim(2)])
    results, _ = engine.write([lease(3, Stamp(1, 2, 1)), lease(4, Stamp(1, 1, 2))])
    assert statuses(results) == [Status.OK, Status.FENCED]
    assert "its epoch is 2, this commit is of epoch 1" in results[1].message
    assert not engine.failed

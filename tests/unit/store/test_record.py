"""What a record says of its identity, which it keeps as one text; and what records share."""

from __future__ import annotations

import itertools
import sys
from copy import copy
from typing import Any

import msgpack
import pytest

from experience_buffer import EID
from experience_buffer_server.store.interface import GroupRow, Record, cut_of
from experience_buffer_server.store.record import Interner
from experience_buffer_server.store.row_codec import decode_record, encode_record
from experience_buffer_server.store.rows import share_with_group
from tests.unit.store.conftest import make_record

TEXTS = ("", "3", "a/b", "/", "//7/", "0/eval_gsm8k", "é/ß", "a%2Fb", "%25", "%2F/")
NUMBERS = (0, 7, -(2**63), 2**63 - 1)


@pytest.mark.parametrize(("batch", "task"), list(itertools.product(TEXTS, TEXTS)))
def test_the_parts_are_those_of_the_identity(batch: str, task: str) -> None:
    """Whatever they hold: a batch, a task and a suffix may hold what separates them."""
    for suffix, run, step in itertools.product(TEXTS, NUMBERS, NUMBERS):
        eid = EID(batch, task, run, step, suffix)
        record = make_record(1, uid=eid.uid, cut=cut_of(batch, task))
        assert record.parts == (batch, task, run, step)
        assert (record.task, record.run, record.step) == record.parts[1:]
        assert (record.tid, record.rid, record.sid) == (eid.tid, eid.rid, eid.sid)


@pytest.mark.parametrize("length", [0, 1, 255, 256, 491])
def test_a_uid_of_any_length_keeps_its_parts(length: int) -> None:
    for batch, task in (("b" * length, ""), ("", "t" * length), ("b" * (length // 2), "t")):
        eid = EID(batch, task, 1, 2, "/")
        record = make_record(1, uid=eid.uid, cut=cut_of(batch, task))
        assert record.parts == (batch, task, 1, 2)
        assert record.tid == eid.tid


def test_it_is_stored_as_it_is() -> None:
    eid = EID("0/eval", "a/b", -5, 2**40, "x/1/2/y")
    digest = bytes([0, *range(1, 15), 0])
    record = make_record(
        7, uid=eid.uid, cut=cut_of("0/eval", "a/b"), digest_number=int.from_bytes(digest, "big")
    )
    stored = encode_record(record, msgpack.packb)
    assert msgpack.unpackb(stored)[:7] == [7, eid.uid, "0/eval", "a/b", -5, 2**40, digest]
    assert decode_record(stored) == record
    assert record.digest == digest


def test_it_takes_no_more_memory_than_planned() -> None:
    record = make_record(1)
    assert sys.getsizeof(record) <= 160
    assert sys.getsizeof(record.digest_number) <= 48


VALUES: dict[str, float] = {
    "cut": 3077, "group_id": 1009, "response_tokens": 1013, "payload_bytes": 1019,
    "min_version": 1021, "max_version": 1031, "push_time": 1033.5, "fields": 1039,
    "reward": 0.625, "priority": 3.5,
}  # fmt: skip


def distinct(seq: int, **changes: Any) -> Record:
    """A record none of whose large values is an object that another one has."""
    fresh = {name: type(value)(str(value)) for name, value in VALUES.items()}
    return make_record(seq, **(fresh | changes))


def test_equal_values_of_neighbours_become_one_object() -> None:
    first, second = distinct(1), distinct(2)
    assert not any(getattr(first, name) is getattr(second, name) for name in VALUES)
    interner = Interner()
    interner.intern(first)
    interner.intern(second)
    assert all(getattr(first, name) is getattr(second, name) for name in VALUES)


def test_the_two_versions_of_one_record_are_shared_too() -> None:
    record = distinct(1, max_version=int("1021"))
    assert record.max_version is not record.min_version
    Interner().intern(record)
    assert record.max_version is record.min_version


def test_members_share_their_groups_numbers() -> None:
    row = GroupRow(id=int("1009"), key="3/math", size=8, open_time=float("1033.5"))
    first, late = distinct(1), distinct(2, push_time=1034.5)
    for record in (first, late):
        share_with_group(record, row)
        assert record.group_id is row.id
    assert first.push_time is row.open_time
    assert late.push_time == 1034.5


def test_no_value_changes() -> None:
    others: dict[str, Any] = dict.fromkeys(VALUES, 0) | {
        "cut": 1026, "payload_bytes": 7, "push_time": 0.5, "priority": 0.0,
        "min_version": None, "max_version": None, "reward": None,
    }  # fmt: skip
    records = [distinct(1)]
    for seq, (name, value) in enumerate(others.items(), 2):
        records += [distinct(seq, **{name: value}), distinct(seq + 100)]
    expected = [copy(record) for record in records]
    interner = Interner()
    for record in records:
        interner.intern(record)
    assert records == expected


def test_the_two_zeros_stay_apart() -> None:
    rewards = [0.0, -0.0, 0.0, -0.0]
    records = [make_record(seq, reward=reward) for seq, reward in enumerate(rewards, 1)]
    interner = Interner()
    for record in records:
        interner.intern(record)
    assert [repr(record.reward) for record in records] == ["0.0", "-0.0", "0.0", "-0.0"]


def test_what_is_remembered_is_bounded() -> None:
    interner = Interner()
    for seq in range(1, 3000):
        interner.intern(make_record(seq, reward=seq + 0.5, priority=seq + 0.25))
    late = [make_record(seq, reward=float("9999.5")) for seq in (4000, 4001)]
    for record in late:
        interner.intern(record)
    assert late[0].reward is not late[1].reward

"""What a buffer holds: entries by arrival, and which groups are open."""

from __future__ import annotations

import random
import sys
from itertools import count, islice
from typing import Any

import pytest

from experience_buffer_server.buffer.state.contents import Arrivals, Contents
from experience_buffer_server.buffer.state.entries import Entry, Group
from experience_buffer_server.buffer.state.group_table import GroupTable
from experience_buffer_server.settings.buffer import BufferSettings
from experience_buffer_server.store.interface import GroupRow, cut_of
from tests.unit.store.conftest import make_record

SETTINGS = BufferSettings(group_size=3)


def entry_of(seq: int, *, durable: bool = False, task: str = "math") -> Entry:
    uid, cut = f"5/{task}/7/11/{seq}", cut_of("5", task)
    return Entry(make_record(seq, uid=uid, cut=cut, payload_bytes=1013), None, durable=durable)


def test_arrivals_are_a_map_in_order_of_arrival() -> None:
    generator = random.Random(19)
    arrivals, model, last = Arrivals(), dict[int, Entry](), 0
    for _ in range(5000):
        if generator.random() < 0.55 or not model:
            last += generator.choice((1, 1, 1, 2, 150))
            model[last] = entry_of(last)
            arrivals.add(last, model[last])
        else:
            seq = generator.choice(list(model))
            assert arrivals.get(seq) is model.pop(seq)
            arrivals.remove(seq)
            assert arrivals.get(seq) is None
        assert len(arrivals) == len(model)
    assert list(arrivals) == list(model.values())
    assert [arrivals.get(seq) for seq in range(last + 200)] == [
        model.get(seq) for seq in range(last + 200)
    ]
    for seq in list(model):
        arrivals.remove(seq)
    assert (len(arrivals), list(arrivals), arrivals._lists) == (0, [], {})


def test_removing_what_is_not_there_is_an_error() -> None:
    arrivals = Arrivals()
    arrivals.add(3, entry_of(3))
    for seq in (2, 3000):
        with pytest.raises(KeyError, match=str(seq)):
            arrivals.remove(seq)
    assert len(arrivals) == 1


def test_pushed_entries_share_equal_values() -> None:
    contents = Contents()
    first, second = entry_of(1, task="task-23"), entry_of(2, task="task-23")
    second.record.payload_bytes = int("1013")
    assert first.record.payload_bytes is not second.record.payload_bytes
    for entry in (first, second):
        contents.add(entry)
    assert first.record.payload_bytes is second.record.payload_bytes
    assert [contents.by_seq(1), contents.by_uid(second.record.uid)] == [first, second]
    contents.remove(first)
    assert (list(contents), contents.by_seqs([1, 2])) == ([second], [second])


def joined(table: GroupTable, key: str) -> Group:
    group = table.join(key, 0, settings=SETTINGS, now=29.5, remembered="")
    assert isinstance(group, Group)
    return group


def test_open_groups_are_those_that_take_members() -> None:
    table = GroupTable()
    whole, sealed, dropped, waiting = (joined(table, key) for key in "abcd")
    for seq in (1, 2, 3):
        assert len(table.open_groups) == 4
        table.add_member(whole, last := entry_of(seq))
    table.close(sealed, "sealed")
    table.close(dropped, "dropped")
    assert list(table.open_groups) == [waiting]
    table.withdraw(whole, last)
    table.reopen(sealed, size=3)
    assert set(table.open_groups) == {waiting, whole, sealed}
    table.remove(waiting)
    table.remove(dropped)
    assert set(table.open_groups) == {whole, sealed} == set(table)
    table.reopen(dropped, size=3)
    assert dropped not in table.open_groups
    again = GroupTable()
    for group in (dropped, sealed):
        again.restore(group.row, SETTINGS)
    table.close(sealed, "deadline")
    again.restore(sealed.row, SETTINGS)
    assert [group.row.key for group in again.open_groups] == ["c", "b"]


def test_groups_that_have_gone_leave_no_deadlines() -> None:
    table = GroupTable()
    settings = SETTINGS.model_copy(update={"group_deadline_seconds": 10.0})
    rows = (GroupRow(id=number, key=str(number), size=3, open_time=1.0) for number in count(1))
    staying = [table.restore(next(rows), settings) for _ in range(3)]
    for row in islice(rows, 1000):
        table.remove(table.restore(row, settings))
        assert len(table.deadlines._heap) <= 2 * 4 + 65
    table.deadlines.postpone(staying[0], 12.0)
    assert table.deadlines.overdue(11.0) == staying[1:]
    assert table.deadlines.overdue(12.0) == staying[:1]


CHANGES: dict[str, Any] = {
    "durable": True,
    "acked": frozenset({"trainer"}),
    "computing": True,
    "counted": True,
    "changing": True,
    "generation": 3,
    "missing": ("reward",),
    "quarantine": "why",
    "available": True,
    "leaving": True,
    "magnitude": 0.5,
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_of_one_entry_changes_of_no_other(name: str) -> None:
    entry, other = entry_of(1), entry_of(2)
    before = {each: getattr(other, each) for each in CHANGES}
    setattr(entry, name, CHANGES[name])
    assert {each: getattr(other, each) for each in CHANGES} == before
    assert {each: getattr(entry, each) for each in CHANGES} == before | {name: CHANGES[name]}
    setattr(entry, name, before[name])
    assert {each: getattr(entry, each) for each in CHANGES} == before


def test_entries_that_are_equally_far_share_their_state() -> None:
    entries = [entry_of(seq) for seq in range(1, 100)]
    for index, entry in enumerate(entries):
        for name, value in CHANGES.items():
            for _ in range(1 + index % 3):
                setattr(entry, name, value)
        entry.acked -= {"trainer"}
    assert len({id(entry._state) for entry in entries}) == 1
    assert sys.getsizeof(entries[0]) <= 88

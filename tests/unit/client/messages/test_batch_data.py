"""Batches as values: their experiences, and what a pickle of them holds."""

from __future__ import annotations

import copy
import math
import pickle
import time
from typing import Any

import pytest

from experience_buffer import PackedBatch, trxp
from experience_buffer._sync.batch import Batch
from experience_buffer.packed import PackedRow
from tests.unit.client.delivered import delivered
from tests.unit.client.packed import packed_rows
from tests.unit.client.packed.packed_rows import SINGLES, view

NAMES = list(SINGLES)[:7]
EXPECTED = [trxp.decode(SINGLES[name])[0].serialize() for name in NAMES]


ROWS = [PackedRow(uid=name, payload=SINGLES[name], tensors={}) for name in NAMES]


def packed() -> PackedBatch:
    return packed_rows.parsed(ROWS)


def batch(format: str, **given: Any) -> Batch:
    return delivered(ROWS, format, **given)


def serialized(experiences: Any) -> list[bytes]:
    return [each.serialize() for each in experiences]


@pytest.mark.parametrize("format", ["trxp", "packed"])
def test_a_batch_has_its_experiences(format: str) -> None:
    ours = batch(format)
    expected = EXPECTED
    assert len(ours) == len(expected)
    assert serialized(ours) == serialized(ours.experiences) == expected
    assert [ours[index].serialize() for index in range(len(ours))] == expected
    assert ours[-1].serialize() == expected[-1]
    assert serialized(ours[1:6:2]) == expected[1:6:2]
    assert isinstance(ours[:2], list)
    assert serialized(reversed(ours)) == expected[::-1]
    for index in (len(ours), -len(ours) - 1):
        with pytest.raises(IndexError):
            ours[index]


def test_a_packed_batch_has_its_experiences_and_parts() -> None:
    ours = packed()
    expected = EXPECTED
    assert serialized(ours) == expected
    assert ours[-2].serialize() == expected[-2]
    part = ours[5:1:-2]
    assert isinstance(part, PackedBatch)
    assert part.uids == NAMES[5:1:-2]
    assert serialized(part) == expected[5:1:-2]
    assert list(ours[3:3]) == []
    with pytest.raises(IndexError):
        ours[len(NAMES)]


def test_a_batch_is_asked_for_what_it_has() -> None:
    tokens = {"tokens": view("I32", (3,))}
    rows = [packed_rows.row(number, tokens) for number in range(3)]
    other = packed_rows.row(5, tokens)
    ours: Any
    for ours in (delivered(rows, "trxp"), delivered(rows, "packed"), packed_rows.parsed(rows)):
        for each in ours:
            assert each in ours
            assert each.eid in ours
            assert each.eid.uid in ours
        assert trxp.decode(other.payload)[0] not in ours
        assert other.uid not in ours
        with pytest.raises(TypeError, match="ask for an Experience, an EID or a uid, not 5"):
            _ = 5 in ours
        for index in ("reward", 1.0, None, (0, 1)):
            with pytest.raises(TypeError, match=r"indexed by position, as in batch\[0\]"):
                ours[index]


@pytest.mark.parametrize("part", [slice(None), slice(1, 5), slice(0, 0)])
def test_packed_batches_travel(part: slice) -> None:
    ours = packed()[part]
    theirs = pickle.loads(pickle.dumps(ours))
    assert theirs.uids == ours.uids
    assert theirs.groups == ours.groups
    assert theirs.flags == ours.flags
    assert theirs.fields == ours.fields
    assert serialized(theirs) == serialized(ours)
    for name in ours.columns:
        assert repr(theirs.column(name)) == repr(ours.column(name))


def test_forms_and_scalars_travel() -> None:
    tokens = {"tokens": view("I32", (3,))}
    others = [{"x": view("F32", (2, 3))}, {"x": view("F32", ())}, {}, {"x": view("BF16", (0, 3))}]
    rows = [packed_rows.row(n, tokens | each) for n, each in enumerate(others)]
    ours = packed_rows.parsed(rows)
    theirs = copy.deepcopy(ours)
    assert [theirs.payload(n) for n in range(4)] == [ours.payload(n) for n in range(4)]
    assert [theirs.payload(n) for n in range(4)] == [row.payload for row in rows]


@pytest.mark.parametrize("format", ["trxp", "packed"])
def test_a_streams_batch_travels_and_leaves_its_stream(format: str) -> None:
    # What a stream hands over can't be pickled.
    stream = (each for each in NAMES)
    ours = batch(format, settle=lambda *_: stream, expire_time=time.monotonic() + 600)
    for theirs in (pickle.loads(pickle.dumps(ours)), copy.copy(ours)):
        assert theirs.settle is None
        assert (theirs.lease_id, theirs.buffer, theirs.num_units) == (11, "math", len(NAMES))
        assert theirs.client.address == ours.client.address
        assert theirs.expire_time == pytest.approx(ours.expire_time, abs=0.5)
        assert serialized(theirs) == serialized(ours)
    nothing = pickle.loads(pickle.dumps(batch(format)))
    assert nothing.expire_time == math.inf


def test_an_ack_that_is_under_way_travels() -> None:
    waiting = batch("trxp", settle=lambda *_: (each for each in NAMES)).begin_ack(3)
    assert waiting.wait is not None
    theirs = pickle.loads(pickle.dumps(waiting))
    assert (theirs.batch.lease_id, theirs.step, theirs.wait) == (11, 3, None)


def test_a_batch_expires_by_the_clock_of_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(batch("trxp", expire_time=time.monotonic() + 600))
    now = time.monotonic()
    # A process on a machine that was started a day later.
    monkeypatch.setattr(time, "monotonic", lambda: now - 86_400)
    left = pickle.loads(data).expire_time - time.monotonic()
    assert left == pytest.approx(600, abs=5)


def test_a_batch_takes_a_line_and_an_empty_one_says_why() -> None:
    assert repr(batch("trxp")) == (
        "<Batch lease 11 of 'trainer' on 'math': 7 experiences, 7 units>"
    )
    nothing = batch("trxp", lease_id=0, shortfall="0 of 2 groups: 1 ready\n" * 30)
    assert repr(nothing).startswith(
        "<Batch of 'trainer' on 'math': nothing; 0 of 2 groups: 1 ready\\n0"
    )
    assert len(repr(nothing)) <= 250

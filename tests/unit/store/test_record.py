"""What a record says of its identity, which it keeps as one text."""

from __future__ import annotations

import itertools
import sys

import msgpack
import pytest

from experience_buffer import EID
from experience_buffer_server.store.interface import cut_of
from experience_buffer_server.store.row_codec import decode_record, encode_record
from tests.unit.store.conftest import make_record

TEXTS = ("", "3", "a/b", "/", "//7/", "0/eval_gsm8k", "é/ß")
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

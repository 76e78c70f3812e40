from __future__ import annotations

import re
from dataclasses import asdict

from experience_buffer.eid import EID


def test_the_four_texts() -> None:
    eid = EID("0/eval_x", 3, 5, 7, "abc")
    assert eid.uid == str(eid) == "0/eval_x/3/5/7/abc"
    assert (eid.tid, eid.rid, eid.sid) == ("0/eval_x/3", "0/eval_x/3/5", "0/eval_x/3/7")


def test_unset_parts() -> None:
    eid = EID()
    assert eid.tid == "/"
    assert re.fullmatch("[0-9a-f]{6}", eid.suffix)
    assert len({EID().suffix for _ in range(50)}) > 45
    assert (eid.run, eid.step) == (0, 0)


def test_numbers_and_texts_share_a_uid_but_are_not_equal() -> None:
    number, text = EID(1, 2, suffix="a"), EID("1", "2", suffix="a")
    assert number.uid == text.uid
    assert number != text


def test_it_can_be_filled_in_later() -> None:
    eid = EID(suffix="x")
    eid.batch, eid.task, eid.run, eid.step = 2, 3, 5, 7
    assert eid.uid == "2/3/5/7/x"
    assert eid.to_dict() == asdict(eid)
    assert list(eid.to_dict()) == ["batch", "task", "run", "step", "suffix"]

from __future__ import annotations

import re
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experience_buffer.eid import EID, text_of_key
from experience_buffer.errors import InvalidRequestError

PARTS = st.text("/%2F5a", max_size=7)


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


def test_a_fixed_one_is_the_same_each_time() -> None:
    eid = EID.fixed(0, 7, 2, 1)
    assert eid == EID.fixed(0, 7, 2, 1)
    assert (eid.batch, eid.task, eid.run, eid.step) == (0, 7, 2, 1)
    assert re.fullmatch("[0-9a-f]{6}", eid.suffix)
    assert eid.uid == EID.fixed("0", "7", 2, 1).uid, "a number is the same as its text"
    assert eid == EID.fixed(np.int64(0), np.int8(7), np.int64(2), np.int8(1))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="batch of an EID is None"):
        EID.fixed(None, 7)  # type: ignore[arg-type]
    others = [EID.fixed(1, 7, 2, 1), EID.fixed(0, 7, 2), EID.fixed(0, 7, 1, 1)]
    assert len({eid.suffix, *(other.suffix for other in others)}) == 4
    assert EID.fixed("0/a", "b").suffix != EID.fixed("0", "a/b").suffix


def test_it_can_be_filled_in_later() -> None:
    eid = EID(suffix="x")
    eid.batch, eid.task, eid.run, eid.step = 2, 3, 5, 7
    assert eid.uid == "2/3/5/7/x"
    assert eid.to_dict() == asdict(eid)
    assert list(eid.to_dict()) == ["batch", "task", "run", "step", "suffix"]


@pytest.mark.parametrize(
    ("task", "tid"),
    [
        (7, "0/7"),
        ("7", "0/7"),
        ("eval/1", "0/eval%2F1"),
        ("100%", "0/100%"),
        ("a%20b", "0/a%20b"),
        ("a%2Fb", "0/a%252Fb"),
        ("a%25", "0/a%2525"),
        ("openai/gsm8k", "0/openai%2Fgsm8k"),
    ],
)
def test_a_task_has_no_slash_in_keys(task: int | str, tid: str) -> None:
    eid = EID(0, task, 3, 5, "a")
    assert (eid.tid, eid.rid, eid.sid) == (tid, f"{tid}/3", f"{tid}/5")
    assert eid.uid == f"0/{task}/3/5/a"
    assert text_of_key(tid) == f"0/{task}"


def test_a_batch_is_in_keys_as_it_is() -> None:
    assert EID("0/eval%2F", 1).tid == "0/eval%2F/1"


@given(batch=PARTS, task=PARTS, other_batch=PARTS, other_task=PARTS)
def test_other_pairs_have_other_keys(
    batch: str, task: str, other_batch: str, other_task: str
) -> None:
    one, other = EID(batch, task), EID(other_batch, other_task)
    assert (one.tid == other.tid) == ((batch, task) == (other_batch, other_task))


@given(text=PARTS)
def test_cutting_one_text_elsewhere_gives_another_key(text: str) -> None:
    cuts = [place for place, char in enumerate(text) if char == "/"]
    keys = [EID(text[:cut], text[cut + 1 :]).tid for cut in cuts]
    assert len(set(keys)) == len(keys)

"""What is content, and so gives a suffix, and what isn't."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from experience_buffer import EID, Experience

FIELDS: dict[str, Any] = {
    "tokens": [5, 6, 7, 8],
    "prompt_length": 2,
    "logprobs": [-0.5, float("nan")],
    "reward": 1.0,
    "messages": [{"role": "user", "content": "é"}, {"role": "user", "content": "again"}],
    "info": {"a": 1, "b": 0.5, "c": [None, True, b"x"], "d": {3, 4}},
}


def suffix(**changes: Any) -> str:
    shared = EID(0, 7, 2)
    one = Experience(eid=shared, **(FIELDS | changes))
    assert one.fix_suffix() is one
    assert (one.eid.batch, one.eid.task, one.eid.run) == (0, 7, 2)
    assert one.eid is not shared, "others may have it"
    return one.eid.suffix


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"messages": json.loads(json.dumps(FIELDS["messages"]))},
        {"info": dict(reversed(FIELDS["info"].items()))},
        {"info": FIELDS["info"] | {"c": (None, True, b"x")}},
        {"info": FIELDS["info"] | {"a": 1.0}},
        {"reward": 1},
        {"metrics": {}, "response_text": None},
        {"tokens": torch.tensor([5, 6, 7, 8], dtype=torch.int32)},
        {"eid": {"batch": 0, "task": 7, "run": 2, "step": 0, "suffix": "other"}},
    ],
)
def test_the_same_content_gives_the_same_suffix(changes: dict[str, Any]) -> None:
    eid = EID(**changes.pop("eid", {"batch": 0, "task": 7, "run": 2}))
    one = Experience(eid=eid, **(FIELDS | changes)).fix_suffix()
    assert one.eid.suffix == suffix() == "80962a3ab5da"
    assert len(one.eid.suffix) == 12


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": [5, 6, 7, 9]},
        {"prompt_length": 1, "logprobs": None},
        {"logprobs": [-0.5, -0.5]},
        {"reward": 1.5},
        {"reward": None},
        {"messages": FIELDS["messages"][:1]},
        {"info": FIELDS["info"] | {"a": True}},
        {"info": FIELDS["info"] | {"a": "1"}},
        {"info": FIELDS["info"] | {"d": {3, 5}}},
        {"info": FIELDS["info"] | {"c": [None, [True, b"x"]]}},
        {"response_text": "x"},
        {"prompt_text": "x"},
        {"values": torch.zeros(2)},
        {"tokens": torch.tensor([5, 6, 7, 8])},
    ],
)
def test_other_content_gives_another(changes: dict[str, Any]) -> None:
    assert suffix(**changes) != suffix()

"""What looks like a slip is said once, and not of what is as it should be."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from experience_buffer import EID, Experience, trxp
from experience_buffer.trxp import DEFAULT_LIMITS
from experience_buffer_server.buffer.intake.admission import admit
from experience_buffer_server.buffer.intake.compiled.candidates import CompiledReader
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.buffer.state.entries import Candidate
from tests.unit.builders import World, settings

READER = CompiledReader(DEFAULT_LIMITS)
SLIPS: list[dict[str, Any]] = [
    {"prompt_length": 1},
    {"prompt_length": 1, "tokens": torch.arange(6)},
    {"prompt_length": 1, "action_mask": [1] * 5},
    {"prompt_length": 1, "action_mask": torch.ones(5, dtype=torch.int64)},
    {"prompt_length": 1, "action_mask": torch.ones(5)},
]
MEANT: list[dict[str, Any]] = [
    {"prompt_length": 2},
    {"prompt_length": 1, "action_mask": [1, 0, 1, 1, 1]},
    {"prompt_length": 1, "action_mask": torch.tensor([0, 0, 1, 1, 1])},
    {"prompt_length": 0, "action_mask": [0, 1, 1, 1, 1, 1]},
    {"chosen": [1, 2], "rejected": [3]},
]


def payload(*eid: Any, **fields: Any) -> bytes:
    content: dict[str, Any] = {"tokens": [5, 6, 7, 8, 9, 10], "reward": 0.5}
    return Experience(eid=EID(*eid), **(content | fields)).serialize()


def without_mask(data: bytes) -> bytes:
    (item,) = trxp.read(data)
    assert isinstance(item, trxp.Item)
    item.tensors.pop("action_mask", None)
    return bytes(item.encode())


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("fields", SLIPS + MEANT, ids=str)
def test_both_readers_know_what_is_trained_on(fields: dict[str, Any]) -> None:
    data = payload(0, 0, **fields)
    for pushed in (data, without_mask(data)) if "action_mask" not in fields else (data,):
        (item,) = trxp.read(pushed)
        assert isinstance(item, trxp.Item)
        candidate = admit(item, settings())
        assert isinstance(candidate, Candidate)
        assert candidate.trains_all == any(fields is slip for slip in SLIPS)
        known = READER.candidates(memoryview(pushed), settings(), published=None)
        assert known is None or known == [candidate]
        assert known is not None or fields.get("prompt_length") != 1


async def test_a_prompt_of_one_token_is_said_once_per_buffer(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    buffer, other = await world.create(1), await world.create(2)
    for task, fields in enumerate(MEANT):
        await buffer.push(Push(payloads=[payload(0, task, **fields)]))
    assert said(caplog) == []
    for task in range(3):
        await buffer.push(Push(payloads=[payload(1, task, prompt_length=1)] * 2))
    (text,) = said(caplog)
    assert text.startswith("buffer 'buffer-1': '1/0/0/0/")
    assert "has prompt_length 1 and no action_mask, or one of ones" in text
    assert "all of its 6 tokens but the first are trained on" in text
    await other.push(Push(payloads=[payload(1, 0, prompt_length=1)]))
    assert len(said(caplog)) == 2


@pytest.mark.parametrize("group_by", ["task", "step", "run", "none"])
async def test_a_batch_without_a_task_is_said_where_it_is_a_group(
    world: World, group_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = await world.create(group_by=group_by)
    await buffer.push(Push(payloads=[payload("", 3, prompt_length=2)]))
    for run in range(3):
        await buffer.push(Push(payloads=[payload(7, "", run, prompt_length=2)]))
    texts = said(caplog)
    assert len(texts) == (group_by in ("task", "step"))
    assert all("'7//0/0/" in text and "set EID(task=...)" in text for text in texts)

"""Payloads whose tensors are still the experience's own memory."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from experience_buffer import EID, Experience, PushOutcome, trxp
from experience_buffer._messages import push_split
from experience_buffer._transport.push_memory import PushMemory
from experience_buffer.options import ClientOptions


def made(tokens: Tensor) -> Experience:
    return Experience(eid=EID(1, 2, 3, 4, "a"), tokens=tokens, prompt_length=3)


def test_what_a_writer_was_given_can_be_changed_afterwards() -> None:
    given = made(torch.arange(7))
    before = trxp.encode([given])
    [found] = push_split.encode_pieces([given], ClientOptions())
    assert not isinstance(found, PushOutcome)
    start, end, pieces = found
    payload = PushMemory(b"", is_wanted=False).place(pieces, pending_bytes=0)
    given.tokens += 1
    given.info["x"] = 1
    assert (start, end, payload) == (0, 1, before)


def test_pieces_outlive_what_they_are_views_of() -> None:
    tokens = torch.arange(300_000)
    expected = trxp.encode([made(tokens)])
    pieces = push_split.encode([made(tokens.clone())])
    gc.collect()
    others = [torch.full((300_000,), number) for number in range(5)]
    assert b"".join(pieces) == expected
    assert len(others) == 5


@pytest.mark.parametrize(
    "given",
    [
        torch.arange(40_000).view(2, -1).T.flatten().view(-1, 2)[:, 1],
        torch.arange(20_000).view(1, -1).expand(5, -1)[1:, ::2],
        torch._neg_view(torch.arange(20_000)),
        torch._neg_view(torch.arange(20_000))[::3],
        torch.tensor([1 + 2j, 3 - 4j] * 7, dtype=torch.complex64).conj(),
        torch.arange(5.0, requires_grad=True),
        torch.arange(20_000)[7:9_999],
        torch.zeros(4, 0),
        torch.nn.Parameter(torch.arange(5.0)),
    ],
    ids=lambda given: "-".join(map(str, given.shape)),
)
def test_a_view_is_written_as_it_reads(given: Tensor) -> None:
    copied = torch.tensor(given.tolist(), dtype=given.dtype).view(given.shape)
    one, other = made(torch.arange(7)), made(torch.arange(7))
    one.extra["x"], other.extra["x"] = given, copied
    assert trxp.encode([one]) == trxp.encode([other])

"""How a batch of payloads is cut: into parts that are read at once, and these into messages."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from experience_buffer_server.rpc.batch_sender import _in_parts, _trxp_parts
from experience_buffer_server.rpc.flow_control import FRAME_BYTES
from experience_buffer_server.sampling.units import Unit

HALF = FRAME_BYTES // 2


def units(sizes: Sequence[int]) -> list[Unit]:
    """What they take in a message counts, computed advantages included, not what is stored."""
    return [
        Unit(key=number, seqs=(number,), num_bytes=7, num_tokens=1, message_bytes=size)
        for number, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], [[]]),
        ([1], [[1]]),
        ([HALF, HALF, 1], [[HALF, HALF], [1]]),
        ([HALF, HALF + 1, HALF], [[HALF], [HALF + 1], [HALF]]),
        ([1, 9 * FRAME_BYTES, 1, 1], [[1], [9 * FRAME_BYTES], [1, 1]]),
        ([FRAME_BYTES, FRAME_BYTES], [[FRAME_BYTES], [FRAME_BYTES]]),
    ],
)
def test_parts_are_as_large_as_a_message_or_one_unit(
    sizes: list[int], expected: list[list[int]]
) -> None:
    batch = units(sizes)
    parts = _trxp_parts(batch, FRAME_BYTES)
    assert [[unit.message_bytes for unit in part] for part in parts] == expected
    assert [unit for part in parts for unit in part] == batch


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], [[]]),
        ([99], [[99]]),
        ([4, 6, 1, 9], [[4, 6], [1, 9]]),
        ([4, 7, 4], [[4], [7], [4]]),
        ([1, 99, 1], [[1], [99], [1]]),
    ],
)
def test_a_message_holds_what_it_may_or_one_experience(
    sizes: list[int], expected: list[list[int]]
) -> None:
    assert _in_parts(sizes, sizes, 10) == expected

"""Large blocks of memory: kept, joined, and seen by batches that refer to their messages."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

from experience_buffer import EID, Experience, _memory, _sample_wire, _sampling, trxp
from experience_buffer._batch_data import BatchData, LazyPacked, LazyPayloads
from experience_buffer._limits import DEFAULT_LIMITS
from experience_buffer._torch import _aligned, tensor
from experience_buffer.v1 import service_pb2, types_pb2

_FAULTS = """
import resource
from experience_buffer import _memory

_memory.keep_large_blocks()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(30):
    blocks = [b"x" * NUM_BYTES for _ in range(NUM_BLOCKS)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(("num_blocks", "num_bytes"), [(4, 1_000_000), (2, 8_500_000)])
def test_large_blocks_are_kept(num_blocks: int, num_bytes: int) -> None:
    code = _FAULTS.replace("NUM_BLOCKS", str(num_blocks)).replace("NUM_BYTES", str(num_bytes))
    num_faults = int(subprocess.check_output([sys.executable, "-c", code]))
    fresh = 30 * num_blocks * num_bytes // 4096
    assert num_faults < fresh / 5, f"{fresh} where each block is had anew"


def test_keeping_large_blocks_touches_none_of_them() -> None:
    code = _FAULTS.replace("range(30)", "()").replace(
        "_memory.keep_large_blocks()\nbefore = resource.getrusage(resource.RUSAGE_SELF).ru_minflt",
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n_memory.keep_large_blocks()",
    )
    assert int(subprocess.check_output([sys.executable, "-c", code])) < 100


@pytest.mark.parametrize("extra_bytes", [-1, 0, 1, 4097])
def test_what_is_joined_is_writable_and_nobody_elses(extra_bytes: int) -> None:
    first = bytes(range(251)) * 4_000
    rest = bytes(_memory.MOST_KEPT_BYTES + extra_bytes - len(first) - 3)
    pieces: list[bytes | memoryview] = [memoryview(first), rest, b"", b"end"]
    whole = _memory.joined(pieces)
    assert len(whole) == _memory.MOST_KEPT_BYTES + extra_bytes
    assert bytes(whole[: len(first)]) == first
    assert bytes(whole[-4:]) == b"\0end"
    whole[:2] = b"xy"
    assert first[:2] == b"\0\1"
    assert bytes(whole[:3]) == b"xy\2"


def test_a_kernel_without_huge_pages_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmap.MADV_HUGEPAGE", 9_999)  # What a kernel doesn't know is an error.
    whole = _memory.joined([bytes(_memory.MOST_KEPT_BYTES), b"end"])
    assert bytes(whole[-4:]) == b"\0end"


def test_nothing_is_joined_to_nothing() -> None:
    assert bytes(_memory.joined([])) == b""
    assert bytes(_memory.joined([b""])) == b""


def rollout(run: int, *, text: str = "") -> Experience:
    return Experience(
        eid=EID(1, 2, run),
        tokens=torch.arange(7_001) + run,
        logprobs=torch.arange(7_001 - 3) / 7,
        prompt_length=3,
        response_text=text,
    )


@pytest.mark.parametrize("num_chars", range(17))
def test_tensors_are_aligned_wherever_their_payload_lies(num_chars: int) -> None:
    payload = trxp.encode([rollout(5, text="x" * num_chars)])
    lying = memoryview(b"y" * num_chars + payload)[num_chars:]
    [found] = trxp.decode(lying)
    assert torch.equal(found.tokens, torch.arange(7_001) + 5)
    [item] = trxp.read(_aligned(lying, DEFAULT_LIMITS))
    assert isinstance(item, trxp.Item)
    for view in item.tensors.values():
        tensor(view)[3] = 1
        assert tensor(view)[3] == 1, "a view: what is misaligned would be copied"


PLAN = _sampling.StreamPlan(
    batch_size=2,
    buffer="b",
    consumer="c",
    prefetch=2,
    max_bytes=0,
    min_batch_size=0,
    timeout_seconds=1,
    first_timeout=1,
    lease_seconds=1,
    rank=None,
    world_size=None,
    format="trxp",
)


def delivered(payloads: list[bytes]) -> BatchData:
    """A batch of one frame, as it comes."""
    pieces = [
        piece
        for payload in payloads
        for piece in _sample_wire.experience_pieces(
            types_pb2.SampledExperience(uid="u", group="g").SerializeToString(), [payload]
        )
    ]
    frame = service_pb2.SampleFrame(last=True, num_units=1, batch_bytes=7)
    received = _sample_wire.read_stream_response(_sample_wire.frame_response(frame, pieces))
    fields = _sampling.FrameAssembler(PLAN).add(received, received_time=1.0)
    assert fields is not None
    return BatchData(**fields)


def test_a_batch_copies_its_payloads_when_asked_for_them() -> None:
    payloads = [trxp.encode([rollout(run)]) for run in range(3)]
    batch = delivered(payloads)
    assert {type(view) for view in batch.content.views} == {memoryview}
    [first, *others] = batch.experiences
    assert torch.equal(first.tokens, torch.arange(7_001))
    assert len(others) == 2
    assert {type(view) for view in batch.content.views} == {memoryview}, "nothing was copied"
    assert batch.payloads == tuple(payloads)
    assert {type(payload) for payload in batch.payloads} == {bytes}
    assert {type(view) for view in batch.content.views} == {bytes}, "the message isn't kept"
    first.tokens[0] = 7
    assert batch.experiences[0].tokens[0] == 0, "experiences are their own"


def test_contents_travel_between_processes() -> None:
    views: list[bytes | memoryview] = [memoryview(b"abc")[1:], b"d"]
    assert pickle.loads(pickle.dumps(LazyPayloads(views))).views == (b"bc", b"d")
    packed = pickle.loads(pickle.dumps(LazyPacked(memoryview(bytearray(b"xyz")))))
    assert packed.__reduce__() == (LazyPacked, (bytearray(b"xyz"),))

"""Large blocks of memory: kept, joined, and seen by batches that refer to their messages."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from experience_buffer import EID, Experience, trxp
from experience_buffer._codec import memory
from experience_buffer._codec.frame import aligned
from experience_buffer._codec.limits import DEFAULT_LIMITS
from experience_buffer._dense.tensors import tensor_of as tensor
from experience_buffer._messages import sample_bytes
from experience_buffer._messages.batch_data import BatchData, LazyPacked, LazyPayloads
from experience_buffer._transport.sample_plan import FrameAssembler
from experience_buffer.errors import TrxpError
from experience_buffer.packed import PackedRow, pack
from experience_buffer.v1 import service_pb2, types_pb2
from tests.unit.client.stream_plans import PLAN

_FAULTS = """
import resource
from experience_buffer._codec import memory as _memory

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
    rest = bytes(memory.MOST_KEPT_BYTES + extra_bytes - len(first) - 3)
    pieces: list[bytes | memoryview] = [memoryview(first), rest, b"", b"end"]
    whole = memory.joined(pieces)
    assert len(whole) == memory.MOST_KEPT_BYTES + extra_bytes
    assert bytes(whole[: len(first)]) == first
    assert bytes(whole[-4:]) == b"\0end"
    whole[:2] = b"xy"
    assert first[:2] == b"\0\1"
    assert bytes(whole[:3]) == b"xy\2"


def test_a_kernel_without_huge_pages_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmap.MADV_HUGEPAGE", 9_999)  # What a kernel doesn't know is an error.
    whole = memory.joined([bytes(memory.MOST_KEPT_BYTES), b"end"])
    assert bytes(whole[-4:]) == b"\0end"


def test_nothing_is_joined_to_nothing() -> None:
    assert bytes(memory.joined([])) == b""
    assert bytes(memory.joined([b""])) == b""


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
    [item] = trxp.read(aligned(lying, DEFAULT_LIMITS))
    assert isinstance(item, trxp.Item)
    for view in item.tensors.values():
        tensor(view)[3] = 1
        assert tensor(view)[3] == 1, "a view: what is misaligned would be copied"


def delivered(payloads: list[bytes]) -> BatchData:
    """A batch of one frame, as it comes."""
    pieces = [
        piece
        for payload in payloads
        for piece in sample_bytes.experience_pieces(
            types_pb2.SampledExperience(uid="u", group="g").SerializeToString(), [payload]
        )
    ]
    frame = service_pb2.SampleFrame(last=True, num_units=1, batch_bytes=7)
    received = sample_bytes.read_stream_response(sample_bytes.frame_response(frame, pieces))
    fields = FrameAssembler(replace(PLAN, format="trxp")).add(received, received_time=1.0)
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
    batch.experiences.clear()
    assert batch.experiences[0] is first, "they are decoded once, and the list is the caller's"
    assert batch.payloads == tuple(payloads)


def test_tensors_are_views_on_payloads_that_nobody_else_has() -> None:
    payloads = [trxp.encode([rollout(run, text="x" * run)]) for run in range(17)]
    own = [aligned(payload, DEFAULT_LIMITS) for payload in payloads]
    content = LazyPayloads(own)
    experiences = content.experiences()
    for payload, view, one in zip(payloads, own, experiences, strict=True):
        assert view == payload
        one.tokens[3] = -5
        assert view != payload, "nothing was copied once more"
    assert pickle.loads(pickle.dumps(content)).experiences()[1].tokens[3] == -5
    assert content.views[1] == bytes(own[1])


def test_what_can_be_written_by_others_is_copied() -> None:
    """Bytes of a message are read-only; a view of them may not become a tensor."""
    payload = trxp.encode([rollout(5)])
    same = bytes(bytearray(payload))
    for lent in (payload, memoryview(payload)):
        [one] = LazyPayloads([lent]).experiences()
        one.tokens[3] = -5
        assert payload == same


@pytest.mark.parametrize("damage", ["cut", "magic", "length"])
def test_damaged_payloads_are_aligned_as_they_are(damage: str) -> None:
    payload = bytearray(trxp.encode([rollout(5)]))
    if damage == "cut":
        del payload[20:]
    payload[0 if damage == "magic" else 12] = 255
    assert aligned(payload, DEFAULT_LIMITS) == payload
    with pytest.raises(TrxpError):
        LazyPayloads([aligned(payload, DEFAULT_LIMITS)]).experiences()


@pytest.mark.parametrize("is_packed", [False, True])
def test_threads_get_the_same_content(is_packed: bool) -> None:
    payloads = [trxp.encode([rollout(run)]) for run in range(20)]
    packed = b"".join(pack([PackedRow(uid="u", payload=each, tensors={}) for each in payloads]))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            for _ in range(20 if is_packed else 1):
                columns, content = LazyPacked(packed), LazyPayloads(payloads)
                start = threading.Barrier(8)

                def read(
                    columns: LazyPacked = columns,
                    content: LazyPayloads = content,
                    start: threading.Barrier = start,
                ) -> object:
                    start.wait(30)
                    return columns.parse() if is_packed else tuple(content.experiences())

                calls = [threads.submit(read) for _ in range(8)]
                assert len({call.result() for call in calls}) == 1, "the very same objects"
    finally:
        sys.setswitchinterval(interval)


def test_contents_travel_between_processes() -> None:
    views: list[bytes | memoryview] = [memoryview(b"abc")[1:], b"d"]
    assert pickle.loads(pickle.dumps(LazyPayloads(views))).views == (b"bc", b"d")
    packed = pickle.loads(pickle.dumps(LazyPacked(memoryview(bytearray(b"xyz")))))
    assert packed.__reduce__() == (LazyPacked, (bytearray(b"xyz"),))

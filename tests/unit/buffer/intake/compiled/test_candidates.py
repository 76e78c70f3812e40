"""The compiled reader makes of a payload what the checked one makes of it, or leaves it to that."""

from __future__ import annotations

import math
import pickle
import struct
from copy import deepcopy
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import xxhash
from hypothesis import strategies as st

from experience_buffer import EID, Experience, trxp
from experience_buffer._codec.frame import head_of
from experience_buffer.trxp import DEFAULT_LIMITS, Limits
from experience_buffer_server.buffer.intake.admission import admit
from experience_buffer_server.buffer.intake.compiled import workspace as ws
from experience_buffer_server.buffer.intake.compiled.candidates import CompiledReader
from experience_buffer_server.buffer.intake.compiled.workspace import KEYS, MAX_ITEMS
from experience_buffer_server.buffer.state.entries import Candidate
from experience_buffer_server.settings.buffer import BufferSettings
from experience_buffer_server.store.interface import LARGE_PAYLOAD_BYTES, Scattered
from tests.fuzz.bombs import BOMBS, frame, many, meta, one, table, top
from tests.unit.builders import hold

DATA = Path(__file__).parents[4] / "data" / "trxp"
READER = CompiledReader(DEFAULT_LIMITS)
SETTINGS = BufferSettings()
LEFT_TO_THE_CHECKED_READER = {
    "custom_fields",
    "dpo",
    "empty_batch",
    "empty_logprobs",
    "legacy_single_pickle",
    "multimodal_inputs",
    "numpy_arrays",
    "numpy_scalars",
    "prompt_truncated_single",
    "python_types_in_info",
}
INTEGERS = (
    *(0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**39 - 1, 2**39, 2**55, 2**63 - 1),
    *(-1, -(2**31), -(2**31) - 1, -(2**39), -(2**39) - 1, -(2**63)),
)
TENSORS = {
    "logprobs": torch.tensor([-0.5, -0.25, -1.0]),
    "action_mask": torch.tensor([True, False, True]),
}


def read(
    payload: bytes,
    *,
    reader: CompiledReader = READER,
    settings: BufferSettings = SETTINGS,
    published: int | None = None,
) -> list[Candidate] | None:
    """What the compiled reader makes of a payload, which has to be what the checked one does."""
    found = reader.candidates(memoryview(payload), settings, published=published)
    lent = reader.candidates(memoryview(payload), settings, published=published, is_lent=True)
    assert lent == found
    if found is not None:
        items = trxp.read(payload)
        assert found == [
            admit(item, settings, published=published)
            for item in items
            if isinstance(item, trxp.Item)
        ]
        assert len(found) == len(items)
    return found


def is_known(payload: bytes | memoryview) -> bool:
    """Whether the compiled reader makes anything of a payload that the other may refuse."""
    return READER.candidates(memoryview(payload), SETTINGS, published=None) is not None


def experience(run: int = 0, **fields: Any) -> Experience:
    """A sound one of five tokens, three of them the response."""
    content: dict[str, Any] = {
        "tokens": torch.arange(5, dtype=torch.int32),
        "prompt_length": 2,
        "reward": 0.5,
    }
    identity = EID("batch", "task", run, 0, f"s{run}")
    return Experience(**{"eid": identity, **content, **TENSORS, **fields})


@pytest.mark.parametrize("path", sorted(DATA.glob("*.bin")), ids=lambda path: path.stem)
def test_real_payloads_are_known_where_they_are_ordinary(path: Path) -> None:
    found = read(path.read_bytes())
    is_left = path.stem in LEFT_TO_THE_CHECKED_READER or path.stem.startswith("neg_")
    assert (found is None) == is_left


@pytest.mark.parametrize("size", [1, 2, 3, 8, 300, MAX_ITEMS])
def test_payloads_of_any_size_are_known(size: int) -> None:
    payload = trxp.encode([experience(run, response_text=f"text {run}") for run in range(size)])
    found = read(payload)
    assert found is not None
    assert [candidate.uid for candidate in found] == [f"batch/task/{n}/0/s{n}" for n in range(size)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "é",
        "ÿ",
        "Ā",
        "ab",
        "x" * 255,
        "x" * 256,
        "é" * 128,
        "日本語" * 40,
        "🐍",
        "\x00",
        "'",
    ],
)
def test_texts_are_known(text: str) -> None:
    experiences = [
        experience(
            run,
            info={"once": text, "again": text, "many": [text, {text + "k": text}]},
            response_text=text,
        )
        for run in range(2)
    ]
    assert read(trxp.encode(experiences)) is not None


def test_lists_and_dicts_that_experiences_share_are_left() -> None:
    messages = [{"role": "user", "content": "hi"}]
    experiences = [experience(run, messages=messages) for run in range(2)]
    assert read(trxp.encode(experiences)) is None
    assert read(trxp.encode(experiences[:1])) is not None


@pytest.mark.parametrize("size", [60_000, 70_000, 300_000])
def test_metadata_of_more_than_one_frame_is_left(size: int) -> None:
    payload = trxp.encode([experience(response_text="x" * size), experience(1)])
    assert (read(payload) is None) == (size > 60_000)


@pytest.mark.parametrize(
    "info",
    [
        {"model_version": 3},
        {"model_version": 3, "version_start": 1, "version_end": 2},
        {"version_start": 1},
        {"version_end": 7, "model_version": 3},
        {"priority": 0.25},
        {"priority": 7},
        {"priority": 1e300},
        {"priority": -0.0},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant"}], "empty": {}},
        {"step": 1, "run": "x", "nested": {"batch": 1, "priority": "none"}},
        {"numbers": list(range(1000)), "none": None, "flags": [True, False], "one": [1]},
        {"version": 1, "items": 2, "num_items": 3},
        {"float": math.inf, "nan": math.nan, "deep": [[[[[[[[[1]]]]]]]]]},
    ],
)
def test_info_is_known(info: dict[str, Any]) -> None:
    found = read(trxp.encode([experience(run, info=deepcopy(info)) for run in range(3)]))
    assert found is not None


@pytest.mark.parametrize(
    "info",
    [
        {"priority": math.nan},
        {"priority": -1},
        {"priority": "high"},
        {"model_version": "three"},
        {"model_version": -1},
        {"version_start": 3, "version_end": 2},
        {"version_start": None},
        {"values": [1.0, 2.0, 3.0]},
        {"baseline_reward": None},
        {"bytes": b"bytes"},
        {"tuple": (1, 2)},
        {1: "a key that is no text"},
        {"numbers": list(range(1001))},
        {str(number): number for number in range(65)},
        {"deep": [[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]},
    ],
)
def test_what_may_be_wrong_or_is_rare_is_left(info: dict[str, Any]) -> None:
    assert read(trxp.encode([experience(info=info)])) is None


@pytest.mark.parametrize(
    ("fields", "known"),
    [
        *(({"eid": EID(number, number, number, number, "s")}, True) for number in INTEGERS),
        *(({"reward": reward}, True) for reward in (None, 0, 1, -7, 0.5, -0.0, 1e38, 2**62)),
        *(({"reward": reward}, False) for reward in (math.nan, math.inf, 1e39, True)),
        ({"info": {"seed": 2**63}}, False),
        ({"info": {"¿": 1, "À": 2}}, True),
        ({"response_text": "\ud800"}, False),
        ({"truncate_status": "response_truncated"}, True),
        ({"truncate_status": "prompt_truncated"}, False),
        ({"logprobs": torch.empty(0)}, True),
        ({"logprobs": torch.zeros(2)}, False),
        ({"action_mask": None}, True),
        ({"action_mask": torch.ones(2, dtype=torch.bool)}, False),
        ({"extra": {"values": torch.zeros(4)}}, True),
        ({"extra": {"values": torch.zeros(5)}}, False),
        ({"extra": {"versions": torch.tensor([4, -1, 3])}}, True),
        ({"extra": {"versions": torch.tensor([1, 2, 3], dtype=torch.uint64)}}, False),
        ({"extra": {"own_thing": torch.zeros(2, 3), "Zeta": torch.zeros(())}}, True),
        ({"extra": {"num_turns": torch.zeros(1)}}, False),
        ({"extra": {"é": torch.zeros(1)}}, False),
        ({"extra": {"empty": torch.zeros(0, 7)}}, False),
        ({"routed_experts": torch.zeros(5, 2, 4, dtype=torch.uint8)}, True),
        ({"teacher_logprobs": torch.zeros(3, dtype=torch.bfloat16)}, True),
        ({"token_level_reward": torch.zeros(3, dtype=torch.float64)}, True),
        ({"prompt_length": 0}, False),
        ({"prompt_length": 5, "action_mask": torch.ones(0), "logprobs": torch.empty(0)}, False),
    ],
)
def test_fields(fields: dict[str, Any], known: bool) -> None:
    payload = trxp.encode([experience(**fields), experience(1)])
    assert (read(payload) is not None) == known


def test_versions_of_another_dtype_are_left() -> None:
    held = experience()
    hold(held, versions=torch.tensor([4.0, 1.0, 3.0]))
    assert read(trxp.encode([held, experience(1)])) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_of_floats_is_known_if_it_is_one(dtype: torch.dtype) -> None:
    mask = torch.tensor([1, 0, 1]).to(dtype)
    assert read(trxp.encode([experience(action_mask=mask)])) is not None
    mask[1] = 0.5
    assert read(trxp.encode([experience(action_mask=mask)])) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"advantage": {"estimator": "grpo"}},
        {"advantage": {"estimator": "gae"}, "on_missing_field": "wait"},
        {"on_future_version": "refuse"},
        {"on_bad_reward": "tombstone"},
        {"consumers": [{"name": "trainer", "staleness": {"max_lag": 2}}]},
    ],
)
@pytest.mark.parametrize("published", [None, 2, 3])
def test_what_the_settings_refuse_is_left(settings: dict[str, Any], published: int | None) -> None:
    kind = BufferSettings.model_validate(settings)
    for one_of in (
        experience(info={"model_version": 3}),
        experience(reward=None),
        experience(reward=math.nan),
        experience(extra={"values": torch.zeros(4)}, info={"version_start": 2}),
        experience(extra={"versions": torch.tensor([3, 3, 2])}),
        experience(extra={"versions": torch.tensor([-1, -1, -1])}),
        experience(info={"model_versoin": 3}),
    ):
        payload = trxp.encode([one_of])
        found = read(payload, settings=kind, published=published)
        (item,) = trxp.read(payload)
        assert isinstance(item, trxp.Item)
        admitted = admit(item, kind, published=published)
        assert (found is not None) == (isinstance(admitted, Candidate) and not admitted.tombstone)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_nodes": 60},
        {"max_depth": 4},
        {"max_items": 7},
        {"max_tensors": 2},
        {"max_header_bytes": 200},
        {"max_metadata_bytes": 500},
    ],
)
def test_payloads_over_a_limit_are_left(limits: dict[str, int]) -> None:
    payload = trxp.encode([experience(run, info={"a": [[[run]]]}) for run in range(8)])
    assert read(payload) is not None
    assert read(payload, reader=CompiledReader(Limits(**limits))) is None


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_read_alike(name: str) -> None:
    payload = BOMBS[name]()
    try:
        trxp.read(payload)
    except trxp.TrxpError:
        assert not is_known(payload)
    else:
        read(payload)


def test_what_is_too_much_for_the_reader_is_left() -> None:
    """A list that Python writes in parts, and texts that are too long together."""
    assert read(trxp.encode([experience(run) for run in range(MAX_ITEMS + 1)])) is None
    text = "x" * 50_000
    assert read(trxp.encode([experience(run, response_text=text) for run in range(100)])) is None


def test_texts_that_all_share_are_spelled_in_each() -> None:
    text = "x" * 3000
    found = read(trxp.encode([experience(run, response_text=text) for run in range(500)]))
    assert found is not None
    assert all(b"x" * 3000 in bytes(candidate.payload) for candidate in found)


def test_the_reader_is_as_good_after_any_payload() -> None:
    good = trxp.encode([experience(run) for run in range(8)])
    for bad in (good[:-1], good[:400], many(8), b"", b"TRXP"):
        assert not is_known(bad)
        assert read(good) is not None


@pytest.mark.parametrize("num_tokens", [LARGE_PAYLOAD_BYTES // 8 - 100, LARGE_PAYLOAD_BYTES // 8])
def test_large_payloads_are_left_in_pieces(num_tokens: int) -> None:
    """Each keeps its own, though the reader writes what it has to write anew in one place for all."""
    payloads = [
        trxp.encode(
            [
                experience(
                    run,
                    tokens=torch.full((num_tokens,), run, dtype=torch.int64),
                    prompt_length=num_tokens - 3,
                    response_text=f"run {run} of {first}" * (run + 1),
                )
                for run in range(first, first + 3)
            ]
        )
        for first in (0, 3)
    ]
    kept: list[Candidate] = []
    for payload in payloads:
        found = read(payload)
        assert found is not None
        kept += found
    expected = [
        admit(item, SETTINGS)
        for payload in payloads
        for item in trxp.read(payload)
        if isinstance(item, trxp.Item)
    ]
    assert kept == expected
    is_large = num_tokens * 8 >= LARGE_PAYLOAD_BYTES
    assert [isinstance(candidate.payload, Scattered) for candidate in kept] == [is_large] * 6


# --- payloads that their sender can still change


def head_bytes(payload: bytes) -> int:
    """What precedes the tensors' bytes."""
    metadata_bytes = int.from_bytes(payload[5:13], "little")
    start = 21 + metadata_bytes
    return start + 8 + int.from_bytes(payload[start : start + 8], "little")


def test_what_says_how_to_read_a_payload_is_copied_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    payload = trxp.encode([experience(run, info={"step": run}) for run in range(8)])
    memory, size = bytearray(payload), head_bytes(payload)
    expected = read(payload)
    real = READER._scanner.scan

    def change_and_scan(*arguments: Any) -> int:
        memory[:size] = bytes(size)
        return real(*arguments)

    monkeypatch.setattr(READER._scanner, "scan", change_and_scan)
    found = READER.candidates(memoryview(memory), SETTINGS, published=None, is_lent=True)
    assert memory[:size] == bytes(size)
    assert found == expected is not None


@pytest.mark.parametrize("size", [10, 40_000])
def test_what_is_hashed_is_what_is_stored(size: int) -> None:
    """Also where its sender goes on writing, up to the commit and beyond."""
    memory = bytearray(
        trxp.encode([experience(0, tokens=torch.arange(size), prompt_length=size - 3)])
    )
    assert (len(memory) >= LARGE_PAYLOAD_BYTES) == (size > 10)
    found = READER.candidates(memoryview(memory), SETTINGS, published=None, is_lent=True)
    assert found is not None
    memory[-8:] = b"\xff" * 8
    (candidate,) = found
    assert xxhash.xxh3_128_digest(bytes(candidate.payload)) == candidate.digest


@pytest.mark.parametrize("change", [0x01, 0x80, 0xFF])
def test_a_head_that_was_changed_while_it_was_copied_reaches_nothing_else(change: int) -> None:
    payload = trxp.encode([experience(run) for run in range(2)])
    head = payload[: head_bytes(payload)]
    for place in range(len(head)):
        changed = bytearray(head)
        changed[place] ^= change
        _scan_head(bytes(changed), len(payload))
        _scan_head(head[:place], len(payload))


def _scan_head(head: bytes, num_bytes: int) -> None:
    """Whatever is made of it, all tensors lie in the payload."""
    num_items, work = READER._scanner.scan(head, num_bytes), READER._work
    if num_items > 0:
        spans = work[ws.SPANS_TABLE : work[ws.SPAN]].tolist()
        assert all(len(head) <= place <= num_bytes for place in spans)


@pytest.mark.parametrize("place", [5, 13])
def test_lengths_that_lie_are_copied_as_far_as_the_limits_allow(place: int) -> None:
    payload = bytearray(SMALL)
    payload[place : place + 8] = b"\xff" * 8
    limits = Limits(max_metadata_bytes=1000, max_header_bytes=500)
    assert len(head_of(memoryview(payload), limits)) <= 21 + 1000 + 8 + 500
    assert READER.candidates(memoryview(payload), SETTINGS, published=None, is_lent=True) is None


@pytest.mark.parametrize("size", [0, 1, 20, 21, 28, 29])
def test_of_a_payload_without_a_whole_head_all_is_copied(size: int) -> None:
    assert head_of(memoryview(SMALL[:size]), DEFAULT_LIMITS) == SMALL[:size]


SMALL = one(info={"model_version": 3, "note": "n", "more": [1, 2.0]})


def test_every_payload_that_is_cut_short_is_left() -> None:
    for size in range(len(SMALL)):
        assert not is_known(SMALL[:size])


@pytest.mark.parametrize("change", [0x01, 0x80, 0xFF, 0x20, 0x07])
def test_every_byte_counts(change: int) -> None:
    for place in range(len(SMALL)):
        data = bytearray(SMALL)
        data[place] ^= change
        _compare(bytes(data))


def _compare(payload: bytes) -> None:
    """Like `read`, for payloads that the checked reader may refuse as a whole."""
    if is_known(payload):
        read(payload)


def spelled(item: bytes) -> bytes:
    """Metadata of one experience whose opcodes are given, in one frame."""
    head = b"}\x94(\x8c\x07version\x94K\x01\x8c\tnum_items\x94K\x01\x8c\x05items\x94]\x94"
    body = head + item + b"au."
    return b"\x80\x05\x95" + struct.pack("<Q", len(body)) + body


EID_OPS = b"\x8c\x03eid\x94}\x94(\x8c\x05batch\x94K\x01\x8c\x04task\x94K\x02\x8c\x03run\x94K\x03\x8c\x04step\x94K\x05\x8c\x06suffix\x94\x8c\x02ab\x94u"


@pytest.mark.parametrize(
    ("ops", "known"),
    [
        (b"}\x94(" + EID_OPS + b"\x8c\x06reward\x94K\x01u", True),
        # One more way to spell each, none of them Python's.
        (b"}\x94(" + EID_OPS + b"X\x06\0\0\0reward\x94K\x01u", False),
        (b"}\x94(" + EID_OPS + b"\x8c\x06rewardK\x01u", False),
        (b"}\x94(" + EID_OPS + b"\x8c\x06reward\x94M\x01\0u", False),
        (b"}\x94(" + EID_OPS + b"\x8c\x06reward\x94J\x01\0\0\0u", False),
        (b"}\x94(" + EID_OPS + b"\x8c\x06reward\x94\x8a\x01\x01u", False),
        (b"}\x94(" + EID_OPS + b"\x8c\x06reward\x94\x8a\x05\x01\0\0\0\0u", False),
        (b"}\x94(" + EID_OPS + b"u", False),
        (b"}\x94" + EID_OPS + b"s", True),
        (b"}(" + EID_OPS + b"\x8c\x06reward\x94K\x01u", False),
        (b"}\x94(" + EID_OPS + b"u\x8c\x06reward\x94K\x01s", False),
        # Keys that come twice, in one spelling or two.
        (b"}\x94(" + EID_OPS + b"\x8c\x06reward\x94K\x01h\x0eK\x01u", False),
        (b"}\x94(" + EID_OPS + b"\x8c\x06reward\x94K\x01\x8c\x06reward\x94K\x02u", False),
        (
            b"}\x94(" + EID_OPS + b"\x8c\x06reward\x94K\x01h\x01K\x02\x8c\x07version\x94K\x03u",
            False,
        ),
        # Texts that Python has one object of.
        (b"}\x94(" + EID_OPS + b"\x8c\x01a\x94\x8c\x01b\x94u", True),
        (b"}\x94(" + EID_OPS + b"\x8c\x01a\x94\x8c\x01a\x94u", False),
        (b"}\x94(" + EID_OPS + b"\x8c\x02\xc3\xa9\x94\x8c\x02\xc3\xa9\x94u", False),
        (b"}\x94(" + EID_OPS + b"\x8c\x02\xc4\xa9\x94\x8c\x02\xc4\xa9\x94u", True),
        (b"}\x94(" + EID_OPS + b"\x8c\x00\x94\x8c\x00\x94u", False),
        (b"}\x94(" + EID_OPS + b"\x8c\x01a\x94h\x0eu", True),
        # What isn't there to be had, or no text.
        (b"}\x94(" + EID_OPS + b"\x8c\x01a\x94h\x63u", False),
        (b"}\x94(" + EID_OPS + b"\x8c\x01a\x94h\x05u", False),
        (b"}\x94(" + EID_OPS + b"\x8c\x01a\x94h\x00u", False),
        (b"}\x94(" + EID_OPS + b"\x8c\x01a\x94j\xff\xff\xff\xffu", False),
        (b"}\x94(" + EID_OPS + b"\x8c\x01a\x94j\x01\0\0\0u", True),
        # Marks and members out of place.
        (b"(}\x94" + EID_OPS + b"u", False),
        (b"}\x94((" + EID_OPS + b"\x8c\x01a\x94K\x01uu", False),
        (b"}\x94(" + EID_OPS + b"\x8c\x01a\x94]\x94(K\x01K\x02eu", True),
        (b"}\x94(" + EID_OPS + b"\x8c\x01a\x94]\x94(K\x01eu", False),
        (b"}\x94(" + EID_OPS + b"\x8c\x01a\x94]\x94K\x01aK\x02au", False),
        (b"}\x94(" + EID_OPS + b"\x8c\x01a\x94]\x94K\x01au", True),
        (b"}\x94(" + EID_OPS + b"\x8c\x01a\x94]\x94(K\x01K\x02uu", False),
        (b"}\x94(" + EID_OPS + b"\x8c\x01au", False),
        (b"}\x94(" + EID_OPS + b"K\x01K\x02u", False),
        (b"}\x94(" + EID_OPS + b"\x8c\x01a\x94}\x94K\x01K\x02su", False),
        (b"}\x94(" + EID_OPS + b"\x8c\x01a\x94}\x94\x8c\x01b\x94K\x02su", True),
        (b"]\x94(" + EID_OPS + b"e", False),
        (EID_OPS, False),
        (b"N", False),
        (b"K\x01", False),
        (b"}\x94", False),
        # What isn't plain data.
        (b"}\x94(" + EID_OPS + b"\x8c\x01a\x94C\x01bu", False),
        (b"}\x94(" + EID_OPS + b"\x8c\x01a\x94)u", False),
        (b"}\x94(" + EID_OPS + b"\x8c\x01a\x94\x8c\x02os\x94\x8c\x06getcwd\x94\x93)Ru", False),
        (b"}\x94(" + EID_OPS + b"\x8c\x01a\x94cos\ngetcwd\n)Ru", False),
        # A frame within, as Python writes one every 64 KiB.
        (b"}\x94(" + EID_OPS + b"\x95\x04\0\0\0\0\0\0\0\x8c\x01a\x94K\x01u", True),
        (b"}\x94(" + EID_OPS + b"\x95\xff\0\0\0\0\0\0\x80\x8c\x01a\x94K\x01u", False),
        (b"}\x94(" + EID_OPS + b"\x95\xff\xff\0\0\0\0\0\0\x8c\x01a\x94K\x01u", False),
    ],
)
def test_pickles_are_known_in_one_spelling(ops: bytes, known: bool) -> None:
    payload = frame(spelled(ops), table(1))
    assert is_known(payload) == known
    _compare(payload)


@pytest.mark.parametrize(
    "metadata",
    [
        top([meta()])[:2] + top([meta()])[11:],
        b"\x80\x04" + top([meta()])[2:],
        b"\x80\x03" + top([meta()])[2:],
        top([meta()], num_items=2),
        top([meta(), meta()], num_items=1),
        top([meta()], version=2),
        top([meta()], more=1),
        top([meta()]) + b".",
        top([]),
        pickle.dumps({"num_items": 1, "version": 1, "items": [meta()]}, 5),
        pickle.dumps([meta()], 5),
    ],
)
def test_what_is_around_experiences_is_read_alike(metadata: bytes) -> None:
    _compare(frame(metadata, table(1)))


HEADER = '{"0:tokens":{"dtype":"I32","shape":[4],"data_offsets":[0,16]}}'


@pytest.mark.parametrize(
    ("header", "num_bytes", "known"),
    [
        (HEADER, 16, True),
        (HEADER + "       ", 16, True),
        (HEADER.replace(":[4]", ": [4]"), 16, False),
        (HEADER.replace("[4]", "[04]"), 16, False),
        (HEADER.replace("[4]", "[4,1]"), 16, False),
        (HEADER.replace("[4]", "[]"), 16, False),
        (HEADER.replace("[4]", "[-4]"), 16, False),
        (HEADER.replace("[4]", "[99999999999999999999]"), 16, False),
        (HEADER.replace("[4]", "[4611686018427387905]"), 16, False),
        (HEADER.replace("I32", "I64"), 16, False),
        (HEADER.replace("I32", "I33"), 16, False),
        (HEADER.replace("I32", ""), 16, False),
        (HEADER.replace("0:tokens", "1:tokens"), 16, False),
        (HEADER.replace("0:tokens", "00:tokens"), 16, False),
        (HEADER.replace("0:tokens", ":tokens"), 16, False),
        (HEADER.replace("0:tokens", "tokens"), 16, False),
        (HEADER.replace("0:tokens", "0:"), 16, False),
        (HEADER.replace("0:tokens", "0:toke\\u006es"), 16, False),
        (HEADER.replace("[0,16]", "[16,0]"), 16, False),
        (HEADER.replace("[0,16]", "[0,17]"), 16, False),
        (HEADER, 15, False),
        (HEADER, 17, False),
        (HEADER[:-1], 16, False),
        (HEADER + "}", 16, False),
        (HEADER[:-1] + ",}", 16, False),
        ("{}", 0, False),
        ("", 0, False),
        (
            HEADER[:-1] + ',"0:tokens":{"dtype":"I32","shape":[1],"data_offsets":[16,20]}}',
            20,
            False,
        ),
        (HEADER[:-1] + ',"0:tokens":{"dtype":"U8","shape":[1],"data_offsets":[16,17]}}', 17, False),
        (HEADER[:-1] + ',"0:other":{"dtype":"U8","shape":[1],"data_offsets":[16,17]}}', 17, True),
        (HEADER[:-1] + ',"0:other":{"dtype":"I32","shape":[1],"data_offsets":[16,20]}}', 20, False),
        (HEADER[:-1] + ',"0:zebra":{"dtype":"I32","shape":[1],"data_offsets":[16,20]}}', 20, True),
        (HEADER[:-1] + ',"0:zebra":{"dtype":"I32","shape":[1],"data_offsets":[12,16]}}', 16, False),
        (HEADER[:-1] + ',"0:zebra":{"dtype":"I32","shape":[1],"data_offsets":[20,24]}}', 24, False),
        (HEADER[:-1] + ';"0:zebra":{"dtype":"I32","shape":[1],"data_offsets":[16,20]}}', 20, False),
        (HEADER[:-1] + ',"0:zebra":{"dtype":"F64","shape":[1],"data_offsets":[16,24]}}', 24, False),
    ],
)
def test_tables_are_known_in_one_spelling(header: str, num_bytes: int, known: bool) -> None:
    section = struct.pack("<Q", len(header)) + header.encode() + bytes(num_bytes)
    payload = frame(top([meta()]), section)
    assert is_known(payload) == known
    _compare(payload)


# Made as Python makes most texts: of each character of Latin-1 there is one object.
TEXTS = st.text(max_size=300).map(lambda text: text.encode().decode())
NAMES = TEXTS.filter(lambda name: name not in KEYS)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | TEXTS,
    lambda values: st.lists(values, max_size=5) | st.dictionaries(TEXTS, values, max_size=5),
    max_leaves=20,
)


@hypothesis.settings(max_examples=100)
@hypothesis.given(
    infos=st.lists(st.dictionaries(NAMES, PLAIN, max_size=6), min_size=1, max_size=5),
    shared=PLAIN,
)
def test_plain_metadata_is_known(infos: list[dict[str, Any]], shared: object) -> None:
    experiences = [
        experience(
            run, info=info | {"shared": shared}, metrics={"accuracy": 0.5}, response_text="text"
        )
        for run, info in enumerate(infos)
    ]
    found = read(trxp.encode(experiences))
    # A container that experiences share is one that only the checked reader knows.
    if len(infos) == 1 or not isinstance(shared, list | dict):
        assert found is not None


def many_keys(num_dicts: int, *, size: int, num_items: int = 1) -> bytes:
    """Dicts of the same 64 keys of one size, which differ in their last characters."""
    keys = ["k" * (size - 3) + f"{number:03d}" for number in range(64)]
    metas = [
        meta(
            eid={"batch": 1, "task": 2, "run": run, "step": 5, "suffix": "ab"},
            info={"dicts": [dict.fromkeys(keys) for _ in range(num_dicts)]},
        )
        for run in range(num_items)
    ]
    return frame(top(metas), table(num_items))


def test_keys_are_compared_within_bounds() -> None:
    assert read(many_keys(1, size=30)) is not None
    assert read(many_keys(150, size=500, num_items=45)) is None
    assert read(many_keys(1, size=30)) is not None


@pytest.mark.parametrize("max_nodes", range(1, 140))
def test_values_are_counted_as_the_checked_reader_counts_them(max_nodes: int) -> None:
    limits = Limits(max_nodes=max_nodes)
    for payload in (SMALL, many_keys(1, size=4), trxp.encode([experience(), experience(1)])):
        if CompiledReader(limits).candidates(memoryview(payload), SETTINGS, published=None):
            assert trxp.read(payload, limits=limits)


def test_nothing_is_kept_of_a_payload_that_ends_too_early() -> None:
    section = struct.pack("<Q", 2**20) + b'{"0:' + b"a" * (2**20 - 4)
    endless = frame(top([meta()]), section)
    unknown = frame(spelled(b"\x8a\x01\x01") + bytes(2**20), table(1))
    for payload in (endless, unknown):
        before = _resident_bytes()
        for _ in range(100):
            copy = memoryview(bytearray(payload)).toreadonly()
            assert not is_known(copy)
        assert _resident_bytes() - before < 40 * 2**20


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


@pytest.mark.parametrize("sizes", ["1137386,16218543285841", "4294967296,4294967296,10,1"])
def test_shapes_whose_product_exceeds_64_bits_are_left(sizes: str) -> None:
    num_bytes = 10 if sizes.startswith("1137386") else 0
    header = (
        HEADER[:-1] + f',"0:x":{{"dtype":"U8","shape":[{sizes}],'
        f'"data_offsets":[16,{16 + num_bytes}]}}}}'
    )
    section = struct.pack("<Q", len(header)) + header.encode() + bytes(16 + num_bytes)
    assert not is_known(frame(top([meta()]), section))


@pytest.mark.parametrize(
    "ops",
    [
        # What an earlier payload left in the memo.
        b"}\x94(" + EID_OPS + b"\x8c\x01a\x94h\x0fu",
        b"}\x94(" + EID_OPS + b"\x8c\x01a\x94h\x04u",
        b"}\x94(" + EID_OPS + b"\x8c\x01x\x94]\x94(au",
        b"}\x94(" + EID_OPS + b"\x8c\x0dprompt_length\x94K\x04u",
        b"}\x94(" + EID_OPS + b"\x8c\x01x\x94\x8c\x04\xf4\x90\x80\x80\x94u",
    ],
)
def test_what_is_not_there_is_not_found(ops: bytes) -> None:
    texts = [f"text {number}" for number in range(100)]
    assert read(trxp.encode([experience(info={"texts": texts})])) is not None
    payload = frame(spelled(ops), table(1))
    assert not is_known(payload)


def _fresh(number: int) -> dict[str, Any]:
    return {"batch": 1, "task": 2, "run": number, "step": 5, "suffix": "ab"}


@pytest.mark.parametrize(
    "payload",
    [
        frame(
            top([meta(eid=_fresh(n), info={f"{n} {k}": 1 for k in range(60)}, metrics={"l": [f"{n}/{k}" for k in range(700)]}) for n in range(40)]),
            table(40),
        ),
        frame(
            top([meta(eid=_fresh(n), info={"lists": [[] for _ in range(700)]}) for n in range(40)]),
            table(40),
        ),
        frame(top([meta(eid=_fresh(1), info={"l": [{"run": 1} for _ in range(20)]})]), table(1)),
        frame(
            spelled(b"}\x94(" + EID_OPS + b"\x8c\x01x\x94" + b"]\x94(" * 7 + b"N" * 6300 + b"e" * 7 + b"u"),
            table(1),
        ),
    ],
    ids=["texts", "lists", "rows", "stack"],
)  # fmt: skip
def test_what_exceeds_the_room_there_is_is_left(payload: bytes) -> None:
    assert not is_known(payload)
    assert read(many(1)) is not None
    assert read(trxp.encode([experience(run) for run in range(8)])) is not None


def test_more_tensors_than_there_is_room_for_are_left() -> None:
    extra = {f"extra_{number}": torch.zeros(1) for number in range(6)}
    experiences = [experience(run, extra=extra) for run in range(1000)]
    assert read(trxp.encode(experiences[:900])) is not None
    assert read(trxp.encode(experiences)) is None


def test_tensors_of_neighbours_are_not_taken_for_one() -> None:
    assert read(frame(top([meta(eid=_fresh(0)), meta(eid=_fresh(1))]), table(2))) is not None


def test_more_experiences_than_a_list_has_in_one_part_are_left() -> None:
    num_items = MAX_ITEMS + 1
    metadata = top([meta(eid=_fresh(run)) for run in range(num_items)])
    # Python writes them in two parts.
    joined = metadata.replace(b"e(}", b"}", 1)
    assert len(joined) < len(metadata)
    payload = frame(joined, table(num_items))
    assert not is_known(payload)

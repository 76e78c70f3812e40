"""Recorded payloads and damaged experiences at the gate."""

from __future__ import annotations

import pickle
import struct
import tracemalloc
from typing import Any

import pytest
import torch

from experience_buffer import trxp
from experience_buffer._dense.tensors import tensor_view
from experience_buffer_server.buffer.intake.admission import admit, entomb
from experience_buffer_server.buffer.state.entries import Candidate, Reason, Refusal, check_uid
from experience_buffer_server.store.interface import OTHER_DIGEST
from tests.unit import odd_payloads
from tests.unit.builders import DATA, NUM_RESPONSE, eid, experience, settings

NOT_PLAIN = ("neg_", "legacy", "numpy_arrays", "python_types_in_info")
LONG_TEXT = "x" * 4_000_000
SOUND = sorted(p.stem for p in DATA.glob("*.bin") if not p.stem.startswith(NOT_PLAIN))


def item_of(data: bytes) -> trxp.Item:
    (item,) = trxp.read(data)
    assert isinstance(item, trxp.Item)
    return item


def candidate_of(item: trxp.Item | trxp.TrxpError, **config: Any) -> Candidate:
    """What becomes of an item that is admitted."""
    assert isinstance(item, trxp.Item)
    candidate = admit(item, settings(**config))
    assert isinstance(candidate, Candidate), candidate
    return candidate


def refusal_of(item: trxp.Item | trxp.TrxpError, **config: Any) -> Refusal:
    """Why an item isn't."""
    assert isinstance(item, trxp.Item)
    refusal = admit(item, settings(**config))
    assert isinstance(refusal, Refusal)
    return refusal


def pushed(**fields: Any) -> trxp.Item:
    """An experience as it was read."""
    return item_of(trxp.encode([experience(1, 2, **fields)]))


@pytest.mark.parametrize("name", SOUND)
def test_recorded_payloads_are_admitted_as_their_canonical_selves(name: str) -> None:
    for item in trxp.read((DATA / f"{name}.bin").read_bytes()):
        assert isinstance(item, trxp.Item)
        candidate = candidate_of(item)
        assert candidate.uid == item.eid.uid
        assert candidate_of(item_of(bytes(candidate.payload))).digest == candidate.digest


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": torch.zeros(5)}, "logprobs has 5 values but the response has 7 tokens"),
        (
            {"prompt_length": 11, "action_mask": torch.ones(7)},
            "prompt_length 11 exceeds the 10 tokens",
        ),
        ({"action_mask": torch.ones(6)}, "action_mask has 6 values .* leave a response of 7"),
        ({"reward": float("inf")}, "reward is inf; send a finite number or a tombstone"),
        ({}, r"values has shape \[9\]"),
        ({"info": {"model_version": "x"}}, r"info\['model_version'\] is 'x'"),
    ],
)
def test_what_does_not_fit_together_is_refused(fields: dict[str, Any], message: str) -> None:
    item = pushed(**fields)
    if not fields:
        item.tensors["values"] = trxp.TensorView("F32", (9,), memoryview(bytes(36)))
    refusal = refusal_of(item)
    assert refusal.reason is Reason.INVALID
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(refusal.message)


def test_bad_rewards_become_tombstones_if_asked() -> None:
    config: dict[str, Any] = {"on_bad_reward": "tombstone", "advantage": {"estimator": "rloo"}}
    for reward in (float("nan"), None):
        candidate = candidate_of(pushed(reward=reward), **config)
        assert candidate.tombstone
        assert "reward" in candidate.note
    refusal = refusal_of(pushed(reward=None), advantage={"estimator": "rloo"})
    assert refusal.reason is Reason.MISSING_FIELD


def test_policy_versions_span_what_is_known() -> None:
    candidate = candidate_of(pushed(info={"version_start": 5, "version_end": 3}))
    assert (candidate.min_version, candidate.max_version) == (3, 5)
    unknown = candidate_of(pushed(info={"model_version": -1}))
    assert (unknown.min_version, unknown.max_version) == (None, None)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_versions_of_tokens_span_what_is_known(dtype: torch.dtype) -> None:
    lowest = -1 if dtype.is_signed else 2
    for few in ([7, 5, 6], [lowest, 5, 9], [100, 100, 100], [lowest, lowest, lowest]):
        versions = [*few, *[few[-1]] * (NUM_RESPONSE - 3)]
        candidate = candidate_of(pushed(extra={"versions": torch.tensor(versions, dtype=dtype)}))
        known = [version for version in versions if version >= 0]
        expected = (min(known), max(known)) if known else (None, None)
        assert (candidate.min_version, candidate.max_version) == expected


@pytest.mark.parametrize("value", [0.5, 2.0, -1.0, float("nan")])
def test_a_mask_is_one_also_where_nobody_computes_with_it(value: float) -> None:
    mask = torch.ones(NUM_RESPONSE)
    assert candidate_of(pushed(action_mask=mask)).response_tokens == NUM_RESPONSE
    mask[2] = value
    refusal = refusal_of(pushed(action_mask=mask))
    assert refusal.message.startswith(f"action_mask is {value} at response token 2; send 1 where")


def test_versions_are_whole_numbers() -> None:
    floats = {"versions": tensor_view(torch.ones(NUM_RESPONSE))}
    payload = trxp.with_tensors(trxp.encode([experience(1, 2)]), floats)
    refusal = refusal_of(item_of(payload))
    assert "versions has dtype F32; an integer dtype is expected" in refusal.message


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda numbers: set(numbers),
        lambda numbers: [{"a": (1, frozenset(numbers))}] * 2,
        lambda numbers: {"b": {*map(float, numbers), None, "c", (1, "d")}},
    ],
)
def test_the_order_of_a_set_does_not_make_another_experience(wrapped: Any) -> None:
    """Numbers that fall on one place of the table come in the order in which they were put there."""
    one, other, third = (
        candidate_of(pushed(info={"a": wrapped(numbers)}))
        for numbers in ([0, 1 << 20, 2 << 20], [2 << 20, 1 << 20, 0], [0, 1 << 20, 3 << 20])
    )
    assert one.payload != other.payload
    assert one.digest == other.digest != third.digest
    assert one.fields == other.fields
    assert one.fields & OTHER_DIGEST
    plain = candidate_of(pushed(info={"a": [0, 8, 16]}))
    assert not plain.fields & OTHER_DIGEST


def test_uids_must_be_keys() -> None:
    assert check_uid("é" * 250) == ""
    assert "uid of 502 bytes is over the limit of 500" in check_uid("é" * 251)
    assert "not valid Unicode" in check_uid("a\ud800")
    tombstone = entomb(eid(1, 2), "r" * 2000)
    assert isinstance(tombstone, Candidate)
    assert len(tombstone.note) == 1024


def test_what_could_not_be_read_once_stored_is_refused_for_itself() -> None:
    """Pickled without a memo it has as many opcodes as are read; stored it would have twice as many."""
    metas = [odd_payloads.meta(run) for run in range(2)]
    metas[1]["info"] = {"a": 201}
    top = {"version": 1, "num_items": 2, "items": metas}
    values = b"](" + b"C\x02ab" * 600_000 + b"e"
    small = pickle.dumps(top, protocol=2)
    assert small.count(b"K\xc9s") == 1
    pickled = small.replace(b"K\xc9s", values + b"s")
    tensors = odd_payloads.section(odd_payloads.table(0) | odd_payloads.table(1))
    frame = struct.pack("<4sBQQ", b"TRXP", 1, len(pickled), len(tensors))
    first, second = trxp.read(frame + pickled + tensors)
    candidate_of(first)
    refusal = refusal_of(second)
    assert refusal.reason is Reason.INVALID
    assert "max_metadata_nodes" in refusal.message


@pytest.mark.parametrize(
    "value",
    [
        [{(number << 8000) for number in range(1, 257)}] * 1500,
        {(LONG_TEXT, number) for number in range(256)},
    ],
    ids=["a set that is shared", "a text that is shared"],
)
def test_ordering_sets_copies_nothing(value: Any) -> None:
    item = pushed(info={"a": value})
    tracemalloc.start()
    try:
        candidate_of(item)
        assert tracemalloc.get_traced_memory()[1] < 64_000_000
    finally:
        tracemalloc.stop()

"""Bad input gets a clear answer, its neighbours are stored, and the server goes on."""

from __future__ import annotations

import datetime
import os
import pickle
import re
import struct
from typing import Any

import pytest
import torch

from experience_buffer import Client, TrxpError, trxp
from experience_buffer.v1 import config_pb2, types_pb2
from tests.integration.plain import (
    DUPLICATE,
    NONE,
    NUM_RESPONSE,
    REFUSED,
    STORED,
    create,
    error_of,
    experience,
    group,
    push,
    sample,
    states,
    statuses,
    uids,
)
from tests.integration.server import Server, Stub

INVALID = types_pb2.REFUSAL_REASON_INVALID
MISSING = types_pb2.REFUSAL_REASON_MISSING_FIELD


def frame(metadata: bytes, section: bytes = b"\x02\0\0\0\0\0\0\0{}") -> bytes:
    return b"TRXP\x01" + struct.pack("<QQ", len(metadata), len(section)) + metadata + section


def metadata(*items: object, num_items: int | None = None) -> bytes:
    count = len(items) if num_items is None else num_items
    return pickle.dumps({"version": 1, "num_items": count, "items": list(items)}, 5)


def nested(depth: int) -> list[Any]:
    """A list in a list in a list."""
    return [nested(depth - 1)] if depth else []


GOOD = trxp.encode(group("good", 3))
PAYLOADS: dict[str, tuple[bytes, str]] = {
    "no magic": (b"PK\x03\x04" + GOOD[4:], "doesn't begin with `TRXP`"),
    "a frame cut in its header": (GOOD[:13], "too few"),
    "a frame cut in its metadata": (GOOD[:100], "the payload has 100"),
    "a frame cut in its tensors": (GOOD[:-5], f"the payload has {len(GOOD) - 5}"),
    "unknown version": (GOOD[:4] + b"\x03" + GOOD[5:], "version 3"),
    "legacy pickle": (pickle.dumps({"tokens": [1, 2]}, 5), "legacy pickles are never loaded"),
    "metadata length lies": (GOOD[:5] + b"\xff" * 8 + GOOD[13:], "exceeds the limit"),
    "num_items lies": (frame(metadata(num_items=3)), "num_items"),
    "a pickle bomb": (frame(bytes.fromhex("80044b0172ffffff0f2e")), "offset"),
    "metadata is no dict": (frame(pickle.dumps([1], 5)), "not a dict"),
    "a tensor table that lies": (
        GOOD.replace(b'"shape":[13]', b'"shape":[99]', 1),
        "tensor table",
    ),
}


@pytest.mark.parametrize("what", PAYLOADS)
def test_a_damaged_payload_is_refused_as_a_whole(
    shared_server: Server, stub: Stub, name: str, what: str
) -> None:
    create(stub, name, group_by=NONE)
    payload, text = PAYLOADS[what]
    code, message, details = error_of(lambda: push(stub, name, payload))
    assert code == "INVALID_ARGUMENT"
    assert text in message
    assert details["BadRequest"].field_violations[0].description == message
    with (
        Client(shared_server.address) as client,
        pytest.raises(TrxpError, match=re.escape(text)),
    ):
        client.push(payload, buffer=name)
    assert statuses(push(stub, name, GOOD)) == [STORED] * 3, "the server goes on"


def bad_members() -> dict[str, tuple[Any, int, str]]:
    """Experiences that are refused alone: what, the reason, a part of the message.

    What else the gate refuses is in the tests of `admission`.
    """
    nan = float("nan")
    return {
        "a uid too long": (
            experience(1, 1, suffix="x" * 600),
            INVALID,
            "over the limit of 500 bytes",
        ),
        "a uid that isn't Unicode": (experience(1, 1, suffix="\ud800"), INVALID, "surrogate"),
        "advantages too long": (
            experience(1, 1, advantages=torch.zeros(NUM_RESPONSE + 2)),
            INVALID,
            "advantages has 13 values",
        ),
        "a reward of NaN": (experience(1, 1, reward=nan), INVALID, "reward is nan"),
        "no reward": (experience(1, 1, reward=None), MISSING, "reward is missing"),
    }


@pytest.mark.parametrize("what", bad_members())
def test_a_bad_member_is_refused_alone(stub: Stub, name: str, what: str) -> None:
    create(stub, name, group_size=2, estimator="grpo")
    bad, reason, text = bad_members()[what]
    outcomes = push(stub, name, [experience(1, 0), bad, experience(1, 2)])
    assert statuses(outcomes) == [STORED, REFUSED, STORED]
    assert outcomes[1].reason == reason
    assert text in outcomes[1].message
    assert uids(sample(stub, name, 2)) == [experience(1, run).eid.uid for run in (0, 2)]


@pytest.mark.parametrize(
    "value", [os.system, datetime.datetime(2026, 1, 2), torch.zeros(3).numpy(), Client, nested(97)]
)
def test_a_member_whose_metadata_is_no_plain_data_is_refused_alone(
    stub: Stub, name: str, value: object
) -> None:
    create(stub, name)
    good = trxp.encode([experience(1, 0), experience(1, 2)])
    (length,) = struct.unpack_from("<Q", good, 5)
    items = pickle.loads(good[21 : 21 + length])["items"]
    eid = {"batch": 7, "task": 1, "run": 1, "step": 0, "suffix": "x"}
    items.insert(1, {"eid": eid, "info": {"when": value}})
    payload = frame(metadata(*items), good[21 + length :].replace(b'"1:', b'"2:'))
    outcomes = push(stub, name, payload)
    assert statuses(outcomes) == [STORED, REFUSED, STORED]
    assert outcomes[1].reason == INVALID
    assert "items[1].info.when" in outcomes[1].message


def test_what_an_estimator_needs_is_named(stub: Stub, name: str) -> None:
    create(stub, name, estimator="gae")
    values = torch.zeros(NUM_RESPONSE)
    outcomes = push(stub, name, [experience(1, 0), experience(1, 1, extra={"values": values})])
    assert statuses(outcomes) == [REFUSED, STORED]
    assert outcomes[0].reason == MISSING
    assert "values is missing; the estimator 'gae' needs it" in outcomes[0].message
    short = push(stub, name, [experience(1, 2, extra={"values": torch.zeros(3)})])
    assert (short[0].reason, "values has shape" in short[0].message) == (INVALID, True)


def test_bad_rewards_can_count_as_failed_rollouts(stub: Stub, name: str) -> None:
    policy = config_pb2.BAD_REWARD_POLICY_TOMBSTONE
    create(stub, name, group_size=3, estimator="grpo", on_bad_reward=policy)
    pushed = [experience(1, 0), experience(1, 1, reward=float("nan")), experience(1, 2)]
    assert statuses(push(stub, name, pushed)) == [STORED] * 3
    assert states(stub, name).count("tombstone") == 1
    assert len(sample(stub, name, 2).experiences) == 2
    assert statuses(push(stub, name, pushed)) == [DUPLICATE] * 3


def test_empty_pushes_are_fine(stub: Stub, name: str) -> None:
    create(stub, name)
    assert push(stub, name, b"") == []
    assert push(stub, name, trxp.encode([])) == []


def test_an_unknown_buffer_is_named(shared_server: Server, stub: Stub) -> None:
    code, message, details = error_of(lambda: push(stub, "no-such", group(0, 1)))
    assert (code, details["ResourceInfo"].resource_name) == ("NOT_FOUND", "no-such")
    assert "create it with create_buffer" in message

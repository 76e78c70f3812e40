"""What an estimator can't read is refused when it is pushed; whatever is stored, it reads exactly."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from experience_buffer import trxp
from experience_buffer._dense.tensors import tensor_view
from experience_buffer.trxp import DEFAULT_LIMITS
from experience_buffer_server.buffer.intake.admission import admit
from experience_buffer_server.buffer.intake.annotation import Annotation
from experience_buffer_server.buffer.intake.compiled.candidates import CompiledReader
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.buffer.state.entries import Candidate, Reason, Refusal
from experience_buffer_server.settings.buffer import BufferSettings
from tests.unit.builders import World, experience, settings, settle, uid

READER = CompiledReader(DEFAULT_LIMITS)
NUMBERS = {
    "token_level_reward": "reinforce",
    "values": "gae",
    "logprobs": "kl",
    "ref_logprobs": "kl",
    "teacher_logprobs": "on_policy_distill",
}
"""Inputs with a number per token, and who reads them."""
WHOLE = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ODD = [torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
T = 4


def reading(estimator: str, **changes: Any) -> BufferSettings:
    """Settings of a buffer in which this estimator reads."""
    if estimator == "kl":
        return reading("reinforce", kl_coef=0.5)
    return settings(advantage={"estimator": estimator, **changes}, group_size=2)


def rollout(number: Any = 0, **fields: Any) -> bytes:
    """The payload of one with all that any estimator reads.

    Tensors are in it as they are given, whatever the client would say to them.
    """
    member = experience(
        0,
        number,
        tokens=torch.arange(6),
        prompt_length=2,
        logprobs=torch.zeros(T),
        teacher_logprobs=torch.zeros(T),
        values=torch.zeros(T),
        ref_logprobs=torch.zeros(T),
        reward=float(number),
    )
    tensors = {}
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = tensor_view(value)
        else:
            setattr(member, name, value)
    return bytes(trxp.with_tensors(member.serialize(), tensors))


def admitted(config: BufferSettings, payload: bytes) -> Candidate | Refusal:
    """By the checked reader; the compiled one says the same, or nothing."""
    (item,) = trxp.read(payload)
    assert isinstance(item, trxp.Item)
    found = admit(item, config)
    known = READER.candidates(memoryview(payload), config, published=None)
    if isinstance(found, Refusal):
        assert known is None
    elif known is not None:
        assert known == [found]
    return found


def refused(config: BufferSettings, payload: bytes) -> str:
    found = admitted(config, payload)
    assert isinstance(found, Refusal)
    assert found.reason is Reason.INVALID
    return found.message


@pytest.mark.parametrize("dtype", [*WHOLE, *FLOATS], ids=str)
def test_masks_of_any_numbers_are_read(dtype: torch.dtype) -> None:
    mask = torch.tensor([1, 0, 0, 1]).to(dtype)
    assert isinstance(admitted(reading("grpo"), rollout(action_mask=mask)), Candidate)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mark", [0.5, 2.0, -1.0, math.nan, math.inf])
def test_a_mask_says_yes_or_no(dtype: torch.dtype, mark: float) -> None:
    mask = torch.tensor([1.0, 0.0, mark, 1.0]).to(dtype)
    message = refused(reading("grpo"), rollout(action_mask=mask))
    assert message.startswith(f"action_mask is {mark} at response token 2; send 1 where")


@pytest.mark.parametrize("dtype", WHOLE[1:], ids=str)
@pytest.mark.parametrize("mark", [2, 127, -1, -100])
def test_a_mask_is_no_label(dtype: torch.dtype, mark: int) -> None:
    """As of labels, of which -100 is not trained on."""
    marks = torch.tensor([1, 0, mark, 1]).to(dtype)
    for config in (reading("grpo"), settings()):
        message = refused(config, rollout(action_mask=marks))
        assert message.startswith(f"action_mask is {int(marks[2])} at response token 2; send 1")


@pytest.mark.parametrize("dtype", ODD, ids=str)
@pytest.mark.parametrize("name", ["action_mask", *NUMBERS])
def test_other_dtypes_are_refused_by_name(name: str, dtype: torch.dtype) -> None:
    config = reading(NUMBERS.get(name, "grpo"))
    message = refused(config, rollout(**{name: torch.zeros(T).to(dtype)}))
    assert f"{name} has dtype" in message
    assert "; send one of " in message
    if name != "action_mask":
        assert isinstance(admitted(reading("grpo"), rollout(**{name: torch.zeros(T)})), Candidate)


@pytest.mark.parametrize("dtype", [*WHOLE, *FLOATS], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_any_kind_are_read(name: str, dtype: torch.dtype) -> None:
    numbers = torch.tensor([0, 1, 1, 0]).to(dtype)
    assert isinstance(admitted(reading(NUMBERS[name]), rollout(**{name: numbers})), Candidate)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e39])
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("in_info", [False, True])
def test_numbers_are_finite_where_they_count(name: str, bad: float, in_info: bool) -> None:
    config = reading(NUMBERS[name])
    numbers = [0.0, bad, 0.0, 0.0]
    where = {name: torch.tensor(numbers, dtype=torch.float64)}
    if in_info:
        where = {name: None, "info": {name: numbers}}  # type: ignore[dict-item]
    message = refused(config, rollout(**where))
    label = f"info[{name!r}]" if in_info else name
    assert message.startswith(f"{label} is {bad!r} at response token 1, which isn't finite")
    masked = rollout(**where, action_mask=torch.tensor([1, 0, 1, 1]))
    assert isinstance(admitted(config, masked), Candidate)
    assert isinstance(admitted(reading("grpo"), rollout(**where)), Candidate)
    assert isinstance(admitted(settings(), rollout(**where)), Candidate)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_float_dtype_is_looked_at(dtype: torch.dtype) -> None:
    numbers = torch.tensor([0.0, 0.0, math.nan, 0.0]).to(dtype)
    assert "values is nan at response token 2" in refused(reading("gae"), rollout(values=numbers))


@pytest.mark.parametrize("status", [None, "response_truncated"])
def test_a_bootstrap_value_is_finite_where_it_counts(status: str | None) -> None:
    member = rollout(values=torch.tensor([0.0] * T + [math.nan]), truncate_status=status)
    found = admitted(reading("gae"), member)
    if status is None:
        assert isinstance(found, Candidate)
    else:
        assert isinstance(found, Refusal)
        assert "values is nan at response token 4" in found.message


@pytest.mark.parametrize("shape", [(T - 1,), (T + 1,), (1, T), (T, 1), (), (T + 2,)])
@pytest.mark.parametrize("name", [*NUMBERS, "action_mask", "versions", "advantages", "returns"])
def test_lengths_are_those_of_the_response(name: str, shape: tuple[int, ...]) -> None:
    member = rollout(**{name: torch.zeros(shape, dtype=torch.int64)})
    if name == "values" and shape == (T + 1,):
        assert isinstance(admitted(reading("gae"), member), Candidate)
        return
    for config in (reading(NUMBERS.get(name, "grpo")), settings()):
        assert name in refused(config, member)


@pytest.mark.parametrize(
    ("shape", "is_sound"),
    [((5, 2, 3), True), ((6, 2), True), ((5,), True), ((0, 2), True), ((7, 2, 3), False),
     ((1 << 20,), False), ((), False)],
)  # fmt: skip
def test_routes_are_of_the_tokens(shape: tuple[int, ...], is_sound: bool) -> None:
    found = admitted(settings(), rollout(routed_experts=torch.zeros(shape, dtype=torch.uint8)))
    assert isinstance(found, Candidate) == is_sound
    if not is_sound:
        assert isinstance(found, Refusal)
        assert f"routed_experts has shape {list(shape)} for 6 tokens" in found.message


@pytest.mark.parametrize("dtype", [*WHOLE, *FLOATS, *ODD, torch.uint32, torch.uint64], ids=str)
def test_routes_are_whole_numbers(dtype: torch.dtype) -> None:
    found = admitted(settings(), rollout(routed_experts=torch.ones(5, 2, 3).to(dtype)))
    is_whole = not (dtype in (*FLOATS, *ODD) or dtype == torch.bool)
    assert isinstance(found, Candidate) == is_whole
    if not is_whole:
        assert isinstance(found, Refusal)
        assert "routed_experts has dtype " in found.message
        assert "experts are whole numbers: send one of U8, I8" in found.message


@pytest.mark.parametrize("status", ["truncated", "stop", "length", "response_truncated "])
def test_what_was_cut_off_is_spelled_right(status: str) -> None:
    message = refused(settings(), rollout(truncate_status=status))
    assert f"truncate_status is {status!r}; None, 'prompt_truncated' or 'response" in message


@pytest.mark.parametrize("name", [name for name in NUMBERS if name != "values"])
def test_lists_in_info_are_as_long(name: str) -> None:
    for length in (T - 1, T + 1):
        member = rollout(**{name: None}, info={name: [0.0] * length})
        assert f"info[{name!r}] has {length} numbers" in refused(reading(NUMBERS[name]), member)


@pytest.mark.parametrize("reward", [1, True, 0.5, -3, 2**60])
def test_rewards_of_any_kind_are_read(reward: Any) -> None:
    found = admitted(reading("grpo"), rollout(reward=reward))
    assert isinstance(found, Candidate)
    assert found.reward == float(reward)


@pytest.mark.parametrize("fields", [
    {"action_mask": torch.tensor([1.0, 0.0, 1.0, 1.0])},
    {"action_mask": torch.tensor([1, 0, 1, 1], dtype=torch.bfloat16)},
    {"token_level_reward": torch.tensor([0, 1, 2, -3])},
    {"token_level_reward": torch.tensor([False, True, True, False])},
    {"values": torch.tensor([0, 1, 2, -3])},
    {"values": torch.tensor([0, 1, 2, 3, 7], dtype=torch.uint16)},
    {"reward": True},
    {"reward": 3},
])  # fmt: skip
@pytest.mark.parametrize("estimator", ["grpo", "reinforce", "gae"])
async def test_what_is_stored_is_computed_as_its_floats_are(
    world: World, estimator: str, fields: dict[str, Any]
) -> None:
    floats = {
        name: value.bool() if name == "action_mask" else value.float()
        for name, value in fields.items()
        if isinstance(value, torch.Tensor)
    }
    world.computer.start()
    computed = []
    for number, own in enumerate((fields, floats | {"reward": float(fields.get("reward", 1.0))})):
        buffer = await world.create(
            number + 1, group_size=2, advantage={"estimator": estimator, "gamma": 0.5}
        )
        members = [rollout(0), rollout(1, **own)]
        await buffer.push(Push(payloads=members))
        await settle(buffer)
        entries = [buffer.find(uid(0, run)) for run in range(2)]
        assert [entry.quarantine for entry in entries if entry] == ["", ""]
        computed.append([entry.magnitude for entry in entries if entry])
    assert computed[0] == computed[1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"values": torch.tensor([0.0, math.nan, 0.0, 0.0])}, "values is nan at response token 1"),
        ({"values": torch.zeros(T, dtype=torch.complex64)}, "values has dtype C64; send one of"),
        ({"values": torch.zeros(T - 1)}, "values has shape [3]"),
        ({"versions": torch.zeros(T - 1, dtype=torch.int64)}, "versions has 3 values"),
        ({"versions": torch.zeros(1, T, dtype=torch.int64)}, "versions has shape [1, 4]"),
    ],
)
async def test_annotations_are_held_to_the_same(
    world: World, fields: dict[str, torch.Tensor], words: str
) -> None:
    buffer = await world.create(
        group_size=2, advantage={"estimator": "gae"}, on_missing_field="wait"
    )
    await buffer.push(Push(payloads=[rollout(values=None)]))
    (item,) = trxp.read(rollout(**fields))
    assert isinstance(item, trxp.Item)
    tensors = {name: item.tensors[name] for name in fields}
    (outcome,) = await buffer.annotate([Annotation(uid=uid(0, 0), tensors=tensors)])
    assert words in outcome.message

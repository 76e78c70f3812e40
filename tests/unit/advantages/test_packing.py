"""Packing against plain Python: bytes of every dtype, lengths, runs, numbers that can't be used."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experience_buffer_server.advantages import Column, ExperienceInput, plan
from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.values import (
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    MASK_DTYPES,
    GroupError,
)
from experience_buffer_server.advantages.checks import check_group, reads_of
from experience_buffer_server.advantages.packing import pack
from experience_buffer_server.advantages.plan.specs import COLUMNS

CODES = {
    "BOOL": "?", "U8": "B", "I8": "b", "U16": "H", "I16": "h", "U32": "I", "I32": "i", "U64": "Q",
    "I64": "q", "F16": "e", "F32": "f", "F64": "d",
}  # fmt: skip
EXACT = [0.0, 1.0, -0.5, 0.25, 3.0, -2.0]
"""Numbers that every float dtype holds."""


def column(dtype: str, numbers: Sequence[float]) -> Column:
    if dtype == "BF16":
        return Column(dtype, b"".join(struct.pack("<f", number)[2:] for number in numbers))
    return Column(dtype, struct.pack(f"<{len(numbers)}{CODES[dtype]}", *numbers))


def packed(
    groups: Sequence[Sequence[ExperienceInput]],
    name: str = "grpo",
    parameters: Mapping[str, Any] | None = None,
    *,
    batches: Sequence[int] | None = None,
) -> Batch:
    chosen = plan(name, parameters or {})
    for group in groups:
        check_group(group, reads=reads_of(chosen))
    return pack(groups, chosen, batches=batches)


def experience(reward: float | None = 1.0, tokens: int = 2, **fields: Any) -> ExperienceInput:
    return ExperienceInput(reward=reward, **{"mask": column("BOOL", [True] * tokens), **fields})


def tokens_of(batch: Batch, numbers: np.ndarray[Any, Any]) -> list[list[float]]:
    return [numbers[start:stop].tolist() for start, stop in itertools.pairwise(batch.offsets)]


@st.composite
def members(draw: st.DrawFn) -> tuple[ExperienceInput, dict[str, Any]]:
    """An experience with everything, and what it was made of."""
    num_tokens = draw(st.integers(0, 7))
    numbers = st.lists(st.sampled_from(EXACT), min_size=num_tokens, max_size=num_tokens)
    plain: dict[str, Any] = {name: draw(numbers) for name in COLUMNS}
    plain["mask"] = draw(
        st.lists(st.sampled_from([0, 1]), min_size=num_tokens, max_size=num_tokens)
    )
    plain["extra"] = draw(st.sampled_from([None, 0.75, -8.0]))
    plain["truncated"] = draw(st.booleans())
    plain["reward"] = draw(st.floats(-10, 10, width=32))
    values = [*plain["values"], *([] if plain["extra"] is None else [plain["extra"]])]
    floats = st.sampled_from(sorted(FLOAT_DTYPES))
    columns: dict[str, Any] = {
        name: column(draw(floats), values if name == "values" else plain[name]) for name in COLUMNS
    }
    if draw(st.booleans()):
        plain["token_level_reward"] = columns["token_level_reward"] = None
    mask = column(draw(st.sampled_from(sorted(MASK_DTYPES))), plain["mask"])
    return ExperienceInput(
        reward=plain["reward"], mask=mask, truncated=plain["truncated"], **columns
    ), plain


@settings(max_examples=150)
@given(st.lists(st.lists(members(), max_size=4), max_size=4))
def test_every_column_is_what_was_pushed(
    groups: list[list[tuple[ExperienceInput, dict[str, Any]]]],
) -> None:
    batch = packed([[given for given, _ in group] for group in groups], "gae", {"kl_coef": 0.5})
    plain = [made for group in groups for _, made in group]
    assert batch.problems == {}
    assert np.diff(batch.group_offsets).tolist() == [len(group) for group in groups]
    assert batch.mask.dtype == np.uint8
    assert tokens_of(batch, batch.mask) == [made["mask"] for made in plain]
    assert batch.num_valid.tolist() == [sum(made["mask"]) for made in plain]
    own = [made["token_level_reward"] is not None for made in plain]
    assert batch.has_token_rewards.tolist() == own
    assert batch.rewards.tolist() == [
        0.0 if has else made["reward"] for has, made in zip(own, plain, strict=True)
    ]
    used = [made["truncated"] and made["extra"] is not None for made in plain]
    assert batch.bootstrapped.tolist() == used
    assert batch.bootstraps.tolist() == [
        made["extra"] if use else 0.0 for use, made in zip(used, plain, strict=True)
    ]
    # A column is there if anyone has it, and in an empty launch.
    assert set(batch.columns) == {
        name for name in COLUMNS[:4] if not plain or any(made[name] is not None for made in plain)
    }
    for name, numbers in batch.columns.items():
        expected = [
            made[name] if made[name] is not None else [0] * len(made["mask"]) for made in plain
        ]
        assert tokens_of(batch, numbers) == expected
        assert numbers.flags.writeable


@pytest.mark.parametrize("dtype", sorted(FLOAT_DTYPES))
def test_float_dtypes_keep_every_bit(dtype: str) -> None:
    size = FLOAT_DTYPES[dtype]
    patterns = list(range(2**16)) if size == 2 else [0x3F800001, 0x00000001, 0x7F7FFFFF, 0xC2C80000]
    data = b"".join(number.to_bytes(size, "little") for number in patterns)
    if dtype == "F64":
        data = struct.pack("<4d", 0.1, 5e-324, -1e300, 1 / 3)
        patterns = patterns[:4]
    mask = Column("U8", bytes(len(patterns)))
    batch = packed([[ExperienceInput(reward=1.0, mask=mask, values=Column(dtype, data))]], "gae")
    if dtype == "BF16":
        expected = [
            struct.unpack("<f", bytes(2) + data[at : at + 2])[0] for at in range(0, len(data), 2)
        ]
    else:
        expected = list(struct.unpack(f"<{len(patterns)}{CODES[dtype]}", data))
    assert batch.columns["values"].dtype == (np.float64 if dtype == "F64" else np.float32)
    np.testing.assert_array_equal(batch.columns["values"], expected)


def test_a_column_is_float64_where_any_member_is() -> None:
    group = [
        experience(values=column("F64", [0.1, 0.2])),
        experience(values=column("BF16", [0.5, -3.0])),
        experience(values=column("F16", [0.25, 2.0, 7.0])),
    ]
    values = packed([group], "gae").columns["values"]
    assert values.dtype == np.float64
    assert values.tolist() == [0.1, 0.2, 0.5, -3.0, 0.25, 2.0]


@pytest.mark.parametrize("dtype", sorted(INTEGER_DTYPES))
def test_any_nonzero_element_of_a_mask_is_valid(dtype: str) -> None:
    size = INTEGER_DTYPES[dtype]
    data = b"".join(bytes(size - 1) + bytes([top]) for top in (128, 0, 2))
    given = ExperienceInput(reward=2.0, mask=Column(dtype, memoryview(data)))
    assert packed([[given]]).mask.tolist() == [1, 0, 1]


@pytest.mark.parametrize("dtype", sorted(FLOAT_DTYPES))
def test_a_mask_may_be_of_floats(dtype: str) -> None:
    given = ExperienceInput(reward=2.0, mask=column(dtype, [1.0, 0.0, -0.0, 1.0]))
    assert packed([[given]]).mask.tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("dtype", sorted(INTEGER_DTYPES))
def test_whole_numbers_are_numbers(dtype: str) -> None:
    numbers = [0, 1] if dtype == "BOOL" else [0, 100]
    numbers = [0, -100] if dtype[0] == "I" else numbers
    values = column(dtype, numbers)
    batch = packed([[ExperienceInput(reward=2.0, mask=column("U8", [1, 1]), values=values)]], "gae")
    assert batch.columns["values"].dtype == np.float64
    assert batch.columns["values"].tolist() == numbers


def test_data_may_be_an_unaligned_view_of_any_format() -> None:
    data = b"x" + bytes(column("F32", [1.0, 0.5]).data)
    for view in (memoryview(data)[1:], memoryview(data[1:]).cast("i")):
        batch = packed([[experience(values=Column("F32", view))]], "gae")
        assert batch.columns["values"].tolist() == [1.0, 0.5]


def test_only_what_the_plan_needs_is_read() -> None:
    odd = Column("I64", b"xyz")
    given = experience(
        values=odd, logprobs=odd, ref_logprobs=odd, teacher_logprobs=odd, token_level_reward=odd,
        baseline_reward=math.nan, num_turns=-1, env_state_hash="s",
    )  # fmt: skip
    batch = packed([[given]], "grpo")
    assert (batch.columns, batch.states) == ({}, ("",))
    assert (batch.num_turns.tolist(), batch.baselines.tolist()) == ([1], [0.0])
    only_teacher = experience(
        None, teacher_logprobs=column("F32", [1, 2]), logprobs=column("F32", [3, 4])
    )
    batch = packed([[only_teacher]], "on_policy_distill")
    assert set(batch.columns) == {"teacher_logprobs", "logprobs"}
    assert batch.rewards.tolist() == [0.0]


def test_scalars_are_rounded_to_float32_and_have_no_negative_zero() -> None:
    group = [experience(0.1, baseline_reward=-0.0), experience(-0.0, baseline_reward=0.3)]
    batch = packed([group], "remax")
    assert batch.rewards.tolist() == [float(np.float32(0.1)), 0.0]
    assert batch.baselines.tolist() == [0.0, float(np.float32(0.3))]
    assert not np.signbit(batch.rewards).any()
    assert not np.signbit(batch.baselines).any()


@given(st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=6))
def test_turns_of_any_mask(masks: list[list[int]]) -> None:
    group = [experience(mask=column("I32", mask)) for mask in masks]
    group.append(experience(mask=column("U8", [1, 0, 1]), num_turns=7))
    turns = packed([group], "grpo", {"turn_rewards": "concatenated"}).num_turns.tolist()
    assert turns == [*(max(1, sum(k for k, _ in itertools.groupby(mask))) for mask in masks), 7]
    assert packed([group], "grpo").num_turns.tolist() == [1] * len(group)


def test_garbage_in_masked_slots_is_no_problem_and_at_valid_ones_is() -> None:
    masked = experience(mask=column("U8", [1, 0]), values=column("F32", [1.0, math.nan]))
    good = experience(values=column("F32", [1.0, 2.0, math.inf]))
    bad = experience(mask=column("U8", [0, 1]), values=column("F16", [0.0, math.inf]))
    large = experience(values=column("F64", [1.0, 1e300]))
    lost = experience(values=column("F32", [1.0, 2.0, math.nan]), truncated=True)
    batch = packed([[masked, good], [good, bad, large], [], [lost]], "gae")
    assert batch.problems == {
        3: "experience 1 of the group: values at a valid token is NaN, infinite or beyond float32; "
        "push finite numbers",
        4: "experience 2 of the group: values at a valid token is NaN, infinite or beyond float32; "
        "push finite numbers",
        5: "experience 0 of the group: bootstrap value (the last of values) is NaN, infinite or "
        "beyond float32; push finite numbers",
    }


def test_batches_are_numbered_without_gaps() -> None:
    groups = [[experience()]] * 5
    assert packed(groups, batches=[2, 2, 5, 9, 9]).batches.tolist() == [0, 0, 1, 2, 2]
    assert packed(groups).batches.tolist() == [0] * 5
    assert packed([], batches=[]).batches.tolist() == []


def test_where_nothing_compares_members_runs_do_not_matter() -> None:
    members = [experience(float(step), run="a", step=step) for step in range(5)]
    batch = packed([members], "reinforce")
    assert batch.voters.tolist() == batch.first_steps.tolist() == [0, 1, 2, 3, 4]
    assert batch.next_steps.tolist() == [-1] * 5


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 3)), unique=True, max_size=10),
    st.integers(0, 3),
)
def test_runs_against_plain_python(steps: list[tuple[str, int]], lone: int) -> None:
    group = [experience(float(at), run=run, step=step) for at, (run, step) in enumerate(steps)]
    group += [experience()] * lone
    batch = packed([[experience(run="a")], group], "rloo")
    for at, (run, step) in enumerate(steps):
        own = sorted((s, other) for other, (r, s) in enumerate(steps) if r == run)
        after = [other for s, other in own if s > step]
        assert batch.voters[at + 1] == own[-1][1] + 1
        assert batch.first_steps[at + 1] == own[0][1] + 1
        assert batch.next_steps[at + 1] == (after[0] + 1 if after else -1)
    assert batch.voters[len(steps) + 1 :].tolist() == list(range(len(steps) + 1, len(group) + 1))


def test_members_at_one_step_are_spoken_for_by_one_whatever_their_order() -> None:
    group = [
        experience(1.0, 3, run="a", step=1),
        experience(1.0, 2, run="a", step=1),
        experience(5.0, run="a", step=0),
        experience(5.0, run="a", step=0),
    ]
    for order in itertools.permutations(range(4)):
        batch = packed([[group[at] for at in order]], "grpo")
        (voter,) = set(batch.voters.tolist())
        # The shorter response stands for both.
        assert order[voter] == 1
        (first,) = set(batch.first_steps.tolist())
        assert order[first] in (2, 3)
        following = {order[at]: batch.next_steps[at] for at in range(4)}
        assert following == {0: -1, 1: -1, 2: voter, 3: voter}
    assert batch.problems == {}


def test_a_vote_that_is_not_defined_is_a_problem() -> None:
    last = [experience(1.0, run="a"), experience(3.0, run="a"), experience(2.0, run="b")]
    message = (
        "experiences 0 and 1 of the group share run 'a' and step 0 but have rewards 1.0 and 3.0; "
        "give each rollout its own run, or each step its own number"
    )
    assert packed([[experience()], last]).problems == {2: message}
    earlier = [*last, experience(4.0, run="a", step=1)]
    assert packed([earlier]).problems == {}
    assert packed([earlier], "grpo", {"turn_rewards": "steps"}).problems == {1: message}
    assert packed([earlier], "step_wise_grpo").problems == {1: message}
    assert packed([last], "reinforce").problems == {}
    token_level = [
        experience(None, run="a", token_level_reward=column("F32", numbers))
        for numbers in ([1.0, 2.0], [2.0, 1.0], [4.0, 4.0])
    ]
    steps = packed([token_level], "reinforce", {"turn_rewards": "steps"})
    assert list(steps.problems) == [2]


GOOD = {
    "token_level_reward": column("F32", [0, 1, 2]), "values": column("F32", [0, 1, 2]),
    "logprobs": column("F32", [0, 1, 2]), "ref_logprobs": column("F32", [0, 1, 2]),
    "teacher_logprobs": column("F32", [0, 1, 2]), "baseline_reward": 1.0, "env_state_hash": "s",
    "num_turns": 1, "mask": column("BOOL", [1, 0, 1]), "reward": 1.0,
}  # fmt: skip
WORDS = {"turn_rewards": "concatenated"}


@pytest.mark.parametrize(
    ("name", "parameters", "change", "message"),
    [
        ("grpo", {}, {"reward": None}, "reward of experience 1 of the group is missing; push it"),
        ("rloo", {}, {"reward": 2.0**128 - 2.0**103}, "not finite in float32"),
        ("grpo", {}, {"step": 1 << 63}, "step of experience 1 of the group is 9223372036854775808"),
        ("grpo", WORDS, {"num_turns": 0}, "num_turns of experience 1 of the group is 0; send 1 or"),
        (
            "reinforce",
            {},
            {"reward": None, "token_level_reward": None},
            r"reward of experience 1 of the group is missing \(and so is token_level_reward",
        ),
        ("gae", {}, {"values": None}, "values of experience 1 .* missing; send it .* of 3 numbers"),
        (
            "grpo",
            {"kl_coef": 0.1},
            {"ref_logprobs": None},
            "ref_logprobs of experience 1 .* missing",
        ),
        ("grpo", {"kl_coef": 0.1}, {"logprobs": column("F16", [1])}, "logprobs .* has 1 elements"),
        ("remax", {}, {"baseline_reward": None}, "baseline_reward .* is missing; send the reward"),
        ("gigpo", {}, {"env_state_hash": ""}, "env_state_hash .* is missing; send the hash"),
    ],
)
def test_what_cannot_be_packed_is_refused(
    name: str, parameters: Mapping[str, Any], change: Mapping[str, Any], message: str
) -> None:
    reads = reads_of(plan(name, parameters))
    good = ExperienceInput(**GOOD)  # type: ignore[arg-type]
    check_group([good, good], reads=reads)
    with pytest.raises(GroupError, match=message):
        check_group([good, ExperienceInput(**{**GOOD, **change})], reads=reads)


def test_the_largest_reward_that_rounds_to_a_finite_one_is_taken() -> None:
    largest = math.nextafter(2.0**128 - 2.0**103, 0.0)
    assert packed([[experience(largest)]]).rewards.tolist() == [float(np.finfo(np.float32).max)]

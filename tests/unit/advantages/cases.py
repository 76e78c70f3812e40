"""Random launches: the same experiences as lists for the reference and as bytes for `compute`.

All numbers come from one seeded generator, so that drawing them costs next to nothing.
"""

from __future__ import annotations

import dataclasses
import math
import random
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from experience_buffer_server.advantages import ExperienceInput
from experience_buffer_server.advantages.arrays.values import FLOAT_DTYPES, MASK_DTYPES

from .builders import column
from .reference_rewards import Member

GARBAGE = (math.nan, math.inf, -math.inf, 3e38)
LENGTHS = (0, 1, 1, 2, 3, 5, 8, 31, 32, 33, 67)
REWARDS = (0.0, 1.0, 0.1, 0.3, 0.7, -0.2)


@dataclass(frozen=True, slots=True)
class Case:
    """One launch."""

    members: list[list[Member]]
    inputs: list[list[ExperienceInput]]
    batches: list[int]


def representable(x: float, dtype: str) -> float:
    """The nearest number that the dtype holds, or one next to it."""
    if dtype == "F64":
        return x
    if dtype == "BF16":
        (bits,) = struct.unpack("<I", struct.pack("<f", x))
        return float(struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0])
    code = "<e" if dtype == "F16" else "<f"
    return float(struct.unpack(code, struct.pack(code, x))[0])


class Drawer:
    """Draws the experiences of a launch.

    `fields` are those that every experience carries, `long` allows thousands of tokens, and
    `constant` is the share of groups whose rewards are all equal.
    """

    def __init__(
        self, seed: int, *, fields: frozenset[str], long: bool = False, constant: float = 0.2
    ) -> None:
        self.rng = random.Random(seed)
        self.fields = fields
        self.long = long
        self.constant = constant

    def case(self, num_groups: int) -> Case:
        pairs = [self.group(g) for g in range(num_groups)]
        batches, batch = [], 0
        for _ in range(num_groups):
            batches.append(batch)
            batch += self.rng.random() < 0.4
        return Case(
            [[member for member, _ in group] for group in pairs],
            [[given for _, given in group] for group in pairs],
            batches,
        )

    def group(self, number: int) -> list[tuple[Member, ExperienceInput]]:
        """Runs of one or several steps, in any order; sometimes all rewards are equal."""
        rng = self.rng
        equal = rng.random() < self.constant
        constant = rng.choice((*REWARDS, rng.uniform(-9, 9))) if equal else None
        steps: list[tuple[str, int]] = []
        for run in range(rng.choice((0, 1, 1, 2, 3, 4, 5))):
            length = rng.choice((1, 1, 1, 2, 3))
            first = rng.randint(0, 3)
            named = length > 1 or rng.random() < 0.5
            steps += [(f"r{run}" if named else "", first + 2 * k) for k in range(length)]
        rng.shuffle(steps)
        # All steps of a run have token-level rewards, or none has.
        dense = {run for run, _ in steps if rng.random() < 0.5}
        return [self.experience(r, s, constant, dense=r in dense) for r, s in steps]

    def numbers(self, mask: list[bool], low: float, high: float) -> tuple[list[float], str]:
        dtype = self.rng.choice(list(FLOAT_DTYPES))
        garbage = GARBAGE if dtype != "F16" else GARBAGE[:3]
        return [
            representable(self.rng.uniform(low, high), dtype) if m else self.rng.choice(garbage)
            for m in mask
        ], dtype

    def experience(
        self, run: str, step: int, constant: float | None, *, dense: bool = False
    ) -> tuple[Member, ExperienceInput]:
        rng = self.rng
        length = rng.choice(LENGTHS)
        if self.long and rng.random() < 0.15:
            length = rng.randint(500, 5000)
        density = rng.choice((0.0, 0.3, 0.9, 1.0, 1.0))
        mask = [rng.random() < density for _ in range(length)]
        code = rng.choice(list(MASK_DTYPES))
        marks = [rng.randint(1, 1 if code == "BOOL" else 100) if m else 0 for m in mask]
        reward = constant if constant is not None else rng.choice((*REWARDS, rng.uniform(-4, 4)))
        member: dict[str, Any] = {"run": run, "step": step, "mask": mask}
        member["reward"] = representable(reward, "F32")
        given: dict[str, Any] = {"run": run, "step": step, "mask": column(marks, code)}
        given["reward"] = reward
        for name in ("values", "logprobs", "ref_logprobs", "teacher_logprobs"):
            if name in self.fields:
                low, high = (-3.0, 3.0) if name == "values" else (-4.0, 0.0)
                self.add(name, member, given, low, high)
        if "token_level_reward" in self.fields and dense:
            self.add("token_level_reward", member, given, -2.0, 2.0)
        if "baseline_reward" in self.fields:
            given["baseline_reward"] = rng.uniform(-1, 1)
            member["baseline"] = representable(given["baseline_reward"], "F32")
        if "env_state_hash" in self.fields:
            given["env_state_hash"] = member["state"] = rng.choice(("a", "b", "c"))
        if rng.random() < 0.3:
            given["num_turns"] = member["num_turns"] = rng.randint(1, 4)
        return Member(**member), ExperienceInput(**given)

    def add(
        self, name: str, member: dict[str, Any], given: dict[str, Any], low: float, high: float
    ) -> None:
        numbers, dtype = self.numbers(member["mask"], low, high)
        member["token_rewards" if name == "token_level_reward" else name] = numbers
        if name == "values":
            given["truncated"] = self.rng.random() < 0.5
            if self.rng.random() < 0.6:
                last = representable(self.rng.uniform(low, high), dtype)
                if given["truncated"]:
                    member["bootstrap"] = last
                given[name] = column([*numbers, last if given["truncated"] else math.nan], dtype)
                return
        given[name] = column(numbers, dtype)


def full(member: ExperienceInput) -> ExperienceInput:
    """With everything that any estimator needs, zeros where it isn't given."""
    length = member.mask.num_bytes // MASK_DTYPES.get(member.mask.dtype, 4)
    zeros = column([0.0] * length, "F32")
    return dataclasses.replace(
        member,
        values=member.values or zeros,
        logprobs=member.logprobs or zeros,
        ref_logprobs=member.ref_logprobs or zeros,
        teacher_logprobs=member.teacher_logprobs or zeros,
        baseline_reward=member.baseline_reward or 0.0,
        env_state_hash=member.env_state_hash or "s",
    )


Draw = Callable[[random.Random], Any]


def level(rng: random.Random) -> str:
    return rng.choice(("none", "group", "batch"))


RANGES: dict[str, Draw] = {
    "gamma": lambda rng: rng.choice((0.0, 0.5, 0.97, 0.999)),
    "lam": lambda rng: rng.choice((0.0, 0.5, 0.95)),
    "mask_mode": lambda rng: rng.choice(("count", "skip")),
    "kl_coef": lambda rng: rng.choice((0.03, 0.2, 1.0)),
    "kl_estimator": lambda rng: rng.choice(("k1", "k2", "k3")),
    "kl_clip": lambda rng: rng.choice((0.5, 2.0)),
    "reward_bias": lambda rng: rng.uniform(-1, 1),
    "reward_bias_sign": lambda rng: rng.choice(("subtract", "add")),
    "reward_scale": lambda rng: rng.choice((0.5, 3.0, -1.7)),
    "turn_rewards": lambda rng: rng.choice(("steps", "concatenated")),
    "turn_discount": lambda rng: rng.choice((0.0, 0.9, 0.5)),
    "running_norm": lambda rng: rng.choice(("std", "mean_std")),
    "reward_clip": lambda rng: rng.uniform(0.1, 1.5),
    "reward_norm_mean": level,
    "reward_norm_std": level,
    "reward_norm_leave_one_out": lambda rng: True,
    "reward_norm_ddof": lambda rng: 0,
    "reward_norm_eps": lambda rng: rng.choice((0.25, 1e-3)),
    "advantage_norm_mean": level,
    "advantage_norm_std": level,
    "advantage_norm_leave_one_out": lambda rng: True,
    "advantage_norm_ddof": lambda rng: 0,
    "advantage_norm_eps": lambda rng: rng.choice((0.25, 1e-5)),
    "advantage_clip": lambda rng: rng.uniform(0.05, 1.5),
    "cross_batch": lambda rng: rng.choice(("none", "mean", "mean_std")),
    "eps": lambda rng: rng.choice((0.5, 1e-9)),
    "baseline": lambda rng: "logavgexp",
    "tau": lambda rng: rng.choice((0.5, 2.0)),
    "shift": lambda rng: rng.uniform(-1, 1),
    "divide_by_steps": lambda rng: True,
    "step_weight": lambda rng: rng.choice((0.0, 0.5)),
    "step_discount": lambda rng: rng.choice((0.0, 1.0)),
    "use_std": lambda rng: False,
    "weight": lambda rng: rng.choice(("none", "std", "clip_filter")),
    "max_weight": lambda rng: rng.choice((1.2, 1.6)),
    "coefficient": lambda rng: rng.choice((-2.0, 0.3)),
}
"""For each parameter a draw of something else than its default, mostly."""


def draw_parameters(kind: type, seed: int, *, likely: float) -> Mapping[str, Any]:
    """Some of a parameter class's fields, each with the given likelihood."""
    rng = random.Random(seed)
    names = {field.name for field in dataclasses.fields(kind)}
    drawn = {
        name: draw(rng) for name, draw in RANGES.items() if name in names and rng.random() < likely
    }
    if "overlong_penalty" in names and rng.random() < likely:
        buffer = rng.randint(1, 9)
        drawn["overlong_penalty"] = rng.choice((0.5, 1.0))
        drawn["overlong_buffer"] = buffer
        drawn["max_response_tokens"] = buffer + rng.randint(0, 40)
    return without_idle(kind, drawn)


def without_idle(kind: type, drawn: Mapping[str, Any]) -> dict[str, Any]:
    """Those parameters that the others leave an effect: they are refused without."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values = {**{name: field.default for name, field in fields.items()}, **drawn}
    switches = {name: field.metadata["only_with"] for name, field in fields.items()}
    return {
        name: value
        for name, value in drawn.items()
        if not switches[name]
        or any(values[key] not in ("none", 0.0, "mean") for key in switches[name])
    }

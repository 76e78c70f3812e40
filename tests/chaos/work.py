"""What the workers of a run push: any operation again from its number alone, by worker and checker."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import torch

from experience_buffer import EID, Experience, trxp
from experience_buffer.v1 import config_pb2

GROUP_SIZE: Final = 4
NUM_VARIANTS: Final = 9
LARGE_REPEATS: Final = {7: 5_400, 8: 32_000}
"""By variant, how often the task is in a payload that is large: 70 to 140, and 420 to 490 KB."""
BATCH: Final = 7
SUFFIX: Final = "5eed"
LEASE_SECONDS: Final = 3.0
REPLAY_ITEMS: Final = 150
QUEUE_ITEMS: Final = 12
"""So few that pushes wait in line behind what a trainer has forgotten."""
FRESH_SECONDS: Final = 5.0
"""What is older leaves the buffer with `retention`."""
REPEATED_BACK: Final = 40
"""A repeated push is one of the newest so many operations of the worker."""
_TASK: Final = "@@@@@@@@"
RUNS: Final = {"single": (0,), "half": (0, 2), "other": (1, 3), "whole": (0, 1, 2, 3)}

Kind = Literal[
    "queue", "delete", "whole", "halves", "sealed", "dropped", "replay", "steps", "fresh"
]


class _Plan(NamedTuple):
    weight: int
    """How often it comes, compared with the others."""
    buffer: str
    parts: tuple[str, ...]
    """What is pushed, in order."""
    end: Literal["", "delete", "seal", "drop"] = ""


_PLANS: Final[dict[Kind, _Plan]] = {
    "queue": _Plan(26, "queue", ("half",)),
    "delete": _Plan(6, "queue", ("single",), "delete"),
    "whole": _Plan(18, "groups", ("whole",)),
    "halves": _Plan(14, "groups", ("half", "other")),
    "sealed": _Plan(7, "groups", ("half",), "seal"),
    "dropped": _Plan(7, "groups", ("half",), "drop"),
    "replay": _Plan(16, "replay", ("single",)),
    "steps": _Plan(8, "steps", ("whole",)),
    "fresh": _Plan(12, "fresh", ("single",)),
}


@dataclass(frozen=True, slots=True)
class Call:
    verb: Literal["push", "delete", "seal", "drop"]
    buffer: str
    task: str
    variant: int = 0
    part: str = ""

    @property
    def runs(self) -> Sequence[int]:
        """The members that it is about."""
        return RUNS[self.part] if self.part else ()

    @property
    def uids(self) -> list[str]:
        return [uid(self.task, run) for run in self.runs]


@dataclass(frozen=True, slots=True)
class Operation:
    """Calls that one worker makes one after the other."""

    kind: Kind
    task: str
    variant: int
    repeats: int
    """The operation whose first push is made once more at the end; -1: none."""

    @property
    def buffer(self) -> str:
        """Where its experiences go."""
        return _PLANS[self.kind].buffer

    @property
    def key(self) -> str:
        return f"{BATCH}/{self.task}"

    @property
    def runs(self) -> list[int]:
        """All members pushed."""
        return [run for part in _PLANS[self.kind].parts for run in RUNS[part]]

    def calls(self) -> Iterator[Call]:
        plan = _PLANS[self.kind]
        for part in plan.parts:
            yield Call("push", self.buffer, self.task, self.variant, part)
        if plan.end:
            part = plan.parts[0] if plan.end == "delete" else ""
            yield Call(plan.end, self.buffer, self.task, self.variant, part)


@functools.lru_cache(maxsize=100_000)
def operation(seed: int, worker: int, index: int) -> Operation:
    chance = random.Random(f"{seed} {worker} {index}")
    [kind] = chance.choices(list(_PLANS), [plan.weight for plan in _PLANS.values()])
    back = chance.randint(1, REPEATED_BACK)
    repeats = index - back if index >= back and chance.random() < 0.15 else -1
    # What was deleted can be pushed anew, and would then be new.
    if repeats >= 0 and operation(seed, worker, repeats).kind == "delete":
        repeats = -1
    return Operation(kind, f"{worker:02}{index:06}", chance.randrange(NUM_VARIANTS), repeats)


def uid(task: str, run: int) -> str:
    return f"{BATCH}/{task}/{run}/0/{SUFFIX}"


def reward(variant: int, run: int) -> float:
    """A member's reward; those of a group are all different."""
    return ((variant * 31 + run * 17) % 11) / 3.0


def payload(call: Call) -> bytes:
    """What a push carries."""
    return _filled(_template(call.variant, call.part), call.task)


def member(task: str, variant: int, run: int) -> bytes:
    """What is stored of one experience."""
    return _filled(trxp.split(_template(variant, "whole"))[run], task)


def _filled(template: bytes, task: str) -> bytes:
    return template.replace(_TASK.encode(), task.encode())


@functools.cache
def _template(variant: int, part: str) -> bytes:
    """The payload of a task whose name isn't filled in yet."""
    return trxp.encode(
        [
            Experience(
                eid=EID(batch=BATCH, task=_TASK, run=run, step=0, suffix=SUFFIX),
                tokens=torch.arange(5 + (variant * 7 + run) % 19, dtype=torch.int32),
                prompt_length=2,
                reward=reward(variant, run),
                response_text=_text(variant, run),
            )
            for run in RUNS[part]
        ]
    )


def _text(variant: int, run: int) -> str:
    """A member's response; a large one says all through whose it is, so that no part can be another's."""
    if variant not in LARGE_REPEATS:
        return f"{variant} {run} " * (1 + 97 * variant)
    return f"{variant} {run} {_TASK} " * (LARGE_REPEATS[variant] + 1800 * run)


def is_large(variant: int) -> bool:
    """Whether payloads of this variant lie in a file of their own."""
    return variant in LARGE_REPEATS


def buffers() -> list[config_pb2.BufferConfig]:
    queue = config_pb2.BufferConfig(
        name="queue",
        group_by=config_pb2.GROUP_BY_NONE,
        max_items=QUEUE_ITEMS,
        on_full=config_pb2.FULL_POLICY_BLOCK,
        full_timeout_seconds=3.0,
    )
    queue.consumers.add(name="trainer")
    groups = config_pb2.BufferConfig(name="groups", group_size=GROUP_SIZE)
    groups.consumers.add(name="actor", unit=config_pb2.UNIT_GROUP)
    groups.consumers.add(name="critic")
    groups.advantage.estimator = "grpo"
    replay = config_pb2.BufferConfig(
        name="replay",
        group_by=config_pb2.GROUP_BY_NONE,
        max_items=REPLAY_ITEMS,
        on_full=config_pb2.FULL_POLICY_EVICT,
    )
    sampler = replay.consumers.add(name="sampler", replay=True)
    sampler.selector.kind = config_pb2.SELECTOR_KIND_UNIFORM
    steps = config_pb2.BufferConfig(name="steps", group_size=GROUP_SIZE)
    steps.consumers.add(name="learner", unit=config_pb2.UNIT_GROUP)
    fresh = config_pb2.BufferConfig(name="fresh", group_by=config_pb2.GROUP_BY_NONE)
    fresh.retention.max_age_seconds = FRESH_SECONDS
    reader = fresh.consumers.add(name="sampler", replay=True)
    reader.selector.kind = config_pb2.SELECTOR_KIND_UNIFORM
    return [queue, groups, replay, steps, fresh]

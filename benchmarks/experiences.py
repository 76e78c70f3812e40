"""The workload as this project's own experiences."""

from __future__ import annotations

from functools import cache

import torch

from benchmarks.workload import POOL_GROUPS, Received, Rollout, Size, pool
from experience_buffer import EID, Experience

_IMAGE_KEY = "pixel_values"


@cache
def contents(size: Size) -> list[list[Rollout]]:
    """The groups' contents, made once."""
    return pool(size)


def eid(writer: int, number: int, run: int) -> EID:
    """The identity of one member of a group."""
    return EID(batch=writer, task=number, run=run, step=0, suffix=f"{run:06x}")


def group(size: Size, writer: int, number: int) -> list[Experience]:
    """One group of experiences with uids of its own; tensors share memory with the workload."""
    return [
        experience(rollout, eid(writer, number, run))
        for run, rollout in enumerate(contents(size)[number % POOL_GROUPS])
    ]


class Groups:
    """The groups of one writer's pool, each under one identity after the other."""

    def __init__(self, size: Size, writer: int) -> None:
        self._writer = writer
        self._groups = [group(size, writer, number) for number in range(POOL_GROUPS)]

    def named(self, number: int) -> list[Experience]:
        """The group of this number; it is renamed when its content comes up again."""
        found = self._groups[number % POOL_GROUPS]
        for run, one in enumerate(found):
            one.eid = eid(self._writer, number, run)
        return found


def experience(rollout: Rollout, identity: EID) -> Experience:
    """One experience; its tensors are views on the rollout's arrays."""
    image = rollout.image
    return Experience(
        eid=identity,
        tokens=torch.from_numpy(rollout.tokens),
        logprobs=torch.from_numpy(rollout.logprobs),
        action_mask=torch.from_numpy(rollout.mask),
        prompt_length=len(rollout.tokens) - len(rollout.logprobs),
        reward=rollout.reward,
        response_text=rollout.text,
        info=dict(rollout.metadata),
        multi_modal_inputs=None if image is None else {_IMAGE_KEY: torch.from_numpy(image)},
    )


def received(found: Experience) -> Received:
    """What came back, for `workload.check`.

    Raises:
        ValueError: A tensor, the text or the reward is missing.
    """
    images = found.multi_modal_inputs
    if found.logprobs is None or found.action_mask is None or found.response_text is None:
        raise ValueError(f"experience {found.eid.uid} came back without its tensors or text")
    if found.reward is None:
        raise ValueError(f"experience {found.eid.uid} came back without its reward")
    return Received(
        writer=int(found.eid.batch),
        number=int(found.eid.task),
        run=found.eid.run,
        rollout=Rollout(
            tokens=found.tokens.numpy(),
            logprobs=found.logprobs.numpy(),
            mask=found.action_mask.numpy(),
            reward=found.reward,
            metadata=found.info,
            text=found.response_text,
            image=None if images is None else images[_IMAGE_KEY].numpy(),
        ),
    )

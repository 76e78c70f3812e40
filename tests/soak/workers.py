"""The soak's workers: they push at a steady rate, and write down what was acknowledged."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch

from experience_buffer import EID, Experience, PolicyVersions, PushResult
from tests.journal import Journal
from tests.soak.plan import GROUP_SIZE, QUEUE, Plan, paced

ABANDONED_EVERY: Final = 19
"""One group in so many never gets its last members: its deadline closes it."""
_TEXT: Final = "The quick brown fox jumps over the lazy dog. " * 45


SIZES: Final = {"S": (128, 384), "M": (512, 1536)}
"""Tokens of one experience, in its prompt and in its response."""


@dataclass(slots=True)
class Version:
    """The policy version that a worker has heard of last."""

    number: int = 0

    def follow(self, versions: PolicyVersions) -> None:
        """Listen, in a thread that ends when they are closed."""
        threading.Thread(target=self._listen, args=(versions,), daemon=True).start()

    def _listen(self, versions: PolicyVersions) -> None:
        for version in versions:
            self.number = version or 0


def members(
    size: str, batch: str, task: int, runs: Iterable[int], version: int | None = None
) -> list[Experience]:
    info = {} if version is None else {"model_version": version}
    num_prompt, num_response = SIZES[size]
    return [
        Experience(
            eid=EID(batch=batch, task=task, run=run, step=0, suffix=f"{run:06x}"),
            tokens=torch.full((num_prompt + num_response,), task % 32000),
            logprobs=torch.full((num_response,), -0.5),
            action_mask=torch.ones(num_response, dtype=torch.bool),
            prompt_length=num_prompt,
            reward=float((task + run) % 3),
            response_text=_TEXT,
            info=dict(info),
        )
        for run in runs
    ]


def push_groups(plan: Plan, role: str, *, size: str, buffer: str, per_second: float) -> None:
    """Push groups until told to stop; in the queue in two halves, of which the second may not come.

    Each life pushes under a batch name of its own: what the last one left unfinished stays so.
    """
    torch.set_num_threads(1)
    journal = plan.journal(role)
    halves = (range(5), range(5, GROUP_SIZE)) if buffer == QUEUE else (range(GROUP_SIZE),)
    version = Version()
    with plan.client() as client, client.watch_policy_version(buffer) as versions:
        version.follow(versions)
        batch = f"{role}.{time.monotonic_ns():x}"
        for number, due in enumerate(paced(per_second * len(halves))):
            if not plan.is_pushing:
                break
            task, half = divmod(number, len(halves))
            if half and task % ABANDONED_EVERY == 0:
                continue
            pushed = members(size, batch, task, halves[half], version.number)
            journal.write("pushing", uids=[one.eid.uid for one in pushed])
            result = client.push(pushed, buffer=buffer, raise_on_refused=False)
            _note(journal, result, time.monotonic() - due)


def _note(journal: Journal, result: PushResult, seconds: float) -> None:
    refused = [one.reason for one in result.refused]
    stored = [one.uid for one in result.outcomes if one.status != "refused"]
    journal.write("pushed", uids=stored, refused=refused, seconds=seconds)

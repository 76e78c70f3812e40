"""A rollout process: samples answers with the newest policy, rewards them, pushes them.

It knows the server and the weights' file; it never talks to the trainer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from multiprocessing.synchronize import Event

import torch

from examples.demo import task
from examples.demo.journal import Journal
from examples.demo.model import Policy, generate, pad_prompts
from examples.demo.settings import BUFFER, CLIENT_OPTIONS, DemoSettings
from examples.demo.watch import PolicyWatch
from examples.demo.weights import Follower
from experience_buffer import EID, Client, Experience, PushResult
from experience_buffer.errors import DeadlineExceededError, ResourceExhaustedError, UnavailableError

CALL_TIMEOUT_SECONDS = 60.0
"""A call is repeated for this long; long enough for a server or a trainer to be restarted."""
MAX_WAIT_SECONDS = 0.1
"""Before places are asked for again: they are free a moment after a policy is published."""
PUSH_TIMEOUT_SECONDS = 5.0
"""Of a push that finds no room, before it looks whether training has ended."""


def run(settings: DemoSettings, index: int, stop: Event) -> None:
    """Push whole groups until told to stop, as many as the buffer's pacing admits.

    Args:
        settings: The run's.
        index: Which worker this is, from 0.
        stop: Set when training has ended.
    """
    torch.set_num_threads(1)
    roller = Roller(settings, index)
    follower = Follower(settings.weights_path)
    round_number = 0
    with (
        Client(settings.address, timeout=CALL_TIMEOUT_SECONDS, options=CLIENT_OPTIONS) as client,
        Journal(settings.acked_path(index)) as journal,
        PolicyWatch(client) as watch,
    ):
        while not stop.is_set():
            wanted = {group.tid: group for group in groups_of(settings, index, round_number)}
            granted = client.reserve_groups(list(wanted), buffer=BUFFER).granted
            # After the places: they are free because a policy was published.
            version = follower.refresh()
            if version < 0 or not granted:
                # A new policy means that the batch that made it is acknowledged next.
                watch.wait(MAX_WAIT_SECONDS)
                continue
            begun = [wanted[key] for key in granted]
            experiences = roller.roll(follower.policy, version=version, groups=begun)
            result = push(client, experiences, stop)
            if result is not None:
                journal.append(outcome.uid for outcome in result.outcomes)
            round_number += 1


def push(client: Client, experiences: Sequence[Experience], stop: Event) -> PushResult | None:
    """Push a round; None if training ends before it is stored.

    A server that was restarted has forgotten which places were reserved: then the round needs others.
    """
    while not stop.is_set():
        try:
            return client.push(experiences, buffer=BUFFER, timeout=PUSH_TIMEOUT_SECONDS)
        except (ResourceExhaustedError, UnavailableError, DeadlineExceededError) as error:
            if isinstance(error, ResourceExhaustedError) and error.retry_delay_seconds is None:
                raise  # It never fits.
    return None


def groups_of(settings: DemoSettings, index: int, round_number: int) -> list[EID]:
    """Name the groups of a worker's round, each by the identity of its first run."""
    numbers = range(settings.groups_per_round)
    return [EID.fixed(round_number, f"{index}-{number}") for number in numbers]


class Roller:
    """Draws problems and lets a policy answer each of them `group_size` times."""

    def __init__(self, settings: DemoSettings, index: int) -> None:
        self._size = settings.group_size
        seed = settings.seed * 1000 + index
        self._problems = random.Random(seed)
        self._samples = torch.Generator().manual_seed(seed)

    def roll(self, policy: Policy, *, version: int, groups: Sequence[EID]) -> list[Experience]:
        """Make experiences: whole groups, each the answers to one problem.

        Args:
            policy: Answers.
            version: Its version.
            groups: Which groups these are; batch and task count.
        """
        size = self._size
        drawn = task.training_problems(len(groups), generator=self._problems)
        problems = [problem for problem in drawn for _ in range(size)]
        responses, logprobs = generate(policy, pad_prompts(problems), generator=self._samples)
        rows = zip(problems, responses.tolist(), logprobs.tolist(), strict=True)
        return [
            self._experience(
                # Without chance: made again, it is the same one.
                EID.fixed(groups[row // size].batch, groups[row // size].task, run=row % size),
                problem,
                tuple(response[: len(problem)]),
                logprobs=chosen_logprobs[: len(problem)],
                version=version,
            )
            for row, (problem, response, chosen_logprobs) in enumerate(rows)
        ]

    def _experience(
        self,
        eid: EID,
        problem: task.Problem,
        response: task.Problem,
        *,
        logprobs: list[float],
        version: int,
    ) -> Experience:
        return Experience(
            eid=eid,
            prompt=task.prompt_tokens(problem),
            response=response,
            logprobs=logprobs,
            reward=task.reward(problem, response),
            info={"model_version": version},
            prompt_text=task.text(problem),
            response_text=task.text(response),
        )

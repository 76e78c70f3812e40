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
MAX_WAIT_SECONDS = 1.0
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
            wanted = group_keys(settings, index, round_number=round_number)
            admitted = client.reserve_groups(wanted, buffer=BUFFER).granted
            version = follower.refresh()
            if version < 0 or not admitted:
                # A new policy means that the trainer has consumed a batch: there is room again.
                watch.wait(MAX_WAIT_SECONDS)
                continue
            experiences = roller.roll(follower.policy, version=version, groups=admitted)
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


def group_keys(settings: DemoSettings, index: int, *, round_number: int) -> list[str]:
    """Name the groups of a worker's round: "round/worker-number"."""
    return [f"{round_number}/{index}-{number}" for number in range(settings.groups_per_round)]


class Roller:
    """Draws problems and lets a policy answer each of them `group_size` times."""

    def __init__(self, settings: DemoSettings, index: int) -> None:
        self._size = settings.group_size
        seed = settings.seed * 1000 + index
        self._problems = random.Random(seed)
        self._samples = torch.Generator().manual_seed(seed)

    def roll(self, policy: Policy, *, version: int, groups: Sequence[str]) -> list[Experience]:
        """Make experiences: whole groups, each the answers to one problem.

        Args:
            policy: Answers.
            version: Its version.
            groups: The groups' keys, "batch/task".
        """
        size = self._size
        drawn = task.training_problems(len(groups), generator=self._problems)
        problems = [problem for problem in drawn for _ in range(size)]
        responses, logprobs = generate(policy, pad_prompts(problems), generator=self._samples)
        rows = zip(problems, responses.tolist(), logprobs.tolist(), strict=True)
        return [
            self._experience(
                _identity(groups[row // size], run=row % size),
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
        prompt = task.prompt_tokens(problem)
        return Experience(
            eid=eid,
            tokens=[*prompt, *response],
            prompt_length=len(prompt),
            logprobs=logprobs,
            reward=task.reward(problem, response),
            info={"model_version": version},
            prompt_text=task.text(problem),
            response_text=task.text(response),
        )


def _identity(group: str, *, run: int) -> EID:
    batch, _, name = group.partition("/")
    return EID(int(batch), name, run=run, suffix="0")

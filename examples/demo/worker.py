"""A rollout process: samples answers with the newest policy, rewards them, pushes them.

It knows the server and the weights' file; it never talks to the trainer.
"""

from __future__ import annotations

import random
import signal
from multiprocessing.synchronize import Event

import torch

from examples.demo import task
from examples.demo.journal import Journal
from examples.demo.model import Policy, generate, pad_prompts
from examples.demo.settings import BUFFER, DemoSettings
from examples.demo.weights import Follower
from experience_buffer import EID, Client, Experience

PUSH_TIMEOUT_SECONDS = 60.0
"""A push is repeated for this long; long enough for a server to be restarted."""
POLL_SECONDS = 0.01


def run(settings: DemoSettings, index: int, stop: Event) -> None:
    """Push rounds of whole groups until told to stop.

    A worker begins round r only when version r - `max_rounds_ahead` is out. A version consumes as
    much as one round of all workers, so experiences stay about that many versions behind.

    Args:
        settings: The run's.
        index: Which worker this is, from 0.
        stop: Set when training has ended.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    roller = Roller(settings, index)
    follower = Follower(settings.weights_path)
    num_rounds = 0
    with Client(settings.address) as client, Journal(settings.acked_path(index)) as journal:
        while not stop.is_set():
            version = follower.refresh()
            if version < 0 or num_rounds > version + settings.max_rounds_ahead:
                stop.wait(POLL_SECONDS)
                continue
            experiences = roller.roll(follower.policy, version=version, round_number=num_rounds)
            result = client.push(experiences, buffer=BUFFER, timeout=PUSH_TIMEOUT_SECONDS)
            journal.append(outcome.uid for outcome in result.outcomes)
            num_rounds += 1


class Roller:
    """Draws problems and lets a policy answer each of them `group_size` times."""

    def __init__(self, settings: DemoSettings, index: int) -> None:
        self._settings = settings
        self._index = index
        seed = settings.seed * 1000 + index
        self._problems = random.Random(seed)
        self._samples = torch.Generator().manual_seed(seed)

    def roll(self, policy: Policy, *, version: int, round_number: int) -> list[Experience]:
        """Make one round of experiences: whole groups, each the answers to one problem."""
        size = self._settings.group_size
        drawn = task.training_problems(self._settings.groups_per_round, generator=self._problems)
        problems = [problem for problem in drawn for _ in range(size)]
        responses, logprobs = generate(policy, pad_prompts(problems), generator=self._samples)
        rows = zip(problems, responses.tolist(), logprobs.tolist(), strict=True)
        return [
            self._experience(
                EID(round_number, f"{self._index}-{row // size}", run=row % size, suffix="0"),
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

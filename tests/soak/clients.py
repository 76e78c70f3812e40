"""The soak's client processes: started, killed at random, and started again."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from tests.integration.server import eventually
from tests.lives import Lives
from tests.soak import chores, consumers, workers
from tests.soak.plan import LATE, QUEUE, REPLAY, Plan

END_SECONDS: Final = 60.0
_BETWEEN_KILLS: Final = (3.0, 7.0)
_AWAY: Final = (0.2, 1.5)

WORKERS: Final[Mapping[str, Callable[..., None]]] = {
    "worker S": partial(workers.push_groups, size="S", buffer=QUEUE, per_second=10.0),
    "worker M": partial(workers.push_groups, size="M", buffer=QUEUE, per_second=4.0),
    "replay worker": partial(workers.push_groups, size="S", buffer=REPLAY, per_second=5.0),
    "late worker": partial(workers.push_groups, size="S", buffer=LATE, per_second=3.0),
}
CONSUMERS: Final[Mapping[str, Callable[..., None]]] = {
    "trainer": consumers.train,
    "logger": consumers.log_items,
    "learner": consumers.replay,
    "critic": consumers.criticise,
}
OPERATOR: Final[Mapping[str, Callable[..., None]]] = {"operator": chores.operate}


@dataclass(frozen=True, slots=True)
class Kill:
    time: float
    """By `time.monotonic`."""
    role: str


class Clients:
    """All client processes of a soak. Not thread-safe; a context manager."""

    def __init__(self, plan: Plan, chance: random.Random) -> None:
        self._plan = plan
        self._chance = chance
        self._lives: dict[str, Lives] = {}
        self._kill_time = math.inf
        self._returns: dict[str, float] = {}
        """When those come back that were killed."""
        self.kills: list[Kill] = []

    def __enter__(self) -> Clients:
        for role, run in {**WORKERS, **CONSUMERS, **OPERATOR}.items():
            self._lives[role] = Lives(role, self._plan.folder, run, self._plan, role)
        return self

    def __exit__(self, *_: object) -> None:
        for lives in self._lives.values():
            lives.kill()

    def wait_until_pushing(self) -> None:
        """Wait until every worker has pushed: what the first imports take isn't load.

        Raises:
            AssertionError: One hasn't in time.
        """
        for role in WORKERS:
            eventually(partial(self._has_pushed, role), f"the {role} to push", seconds=END_SECONDS)
        self._kill_time = time.monotonic() + self._chance.uniform(*_BETWEEN_KILLS)

    def _has_pushed(self, role: str) -> bool:
        return any(one["event"] == "pushed" for one in self._plan.events(role))

    def check(self) -> None:
        """Fail if one has ended that wasn't killed.

        Raises:
            AssertionError: One has; the text has its traceback.
        """
        for role, lives in self._lives.items():
            code = lives.process.exitcode
            ended = code is not None and role not in self._returns
            assert not ended, f"the {role} ended with {code}: {lives.complaint}"

    def tick(self) -> None:
        """Kill, and bring back, what is due."""
        now = time.monotonic()
        if now >= self._kill_time:
            self._kill_time = now + self._chance.uniform(*_BETWEEN_KILLS)
            victims = [role for role in (*WORKERS, *CONSUMERS) if role not in self._returns]
            role = self._chance.choice(victims)
            self._lives[role].kill()
            self.kills.append(Kill(time.monotonic(), role))
            self._returns[role] = time.monotonic() + self._chance.uniform(*_AWAY)
        self._bring_back(now)

    def _bring_back(self, now: float) -> None:
        for role, return_time in list(self._returns.items()):
            if now >= return_time:
                del self._returns[role]
                self._lives[role].start()

    def finish_pushing(self) -> None:
        """Kill nobody any more, and let workers and operator end.

        Raises:
            AssertionError: One is stuck, or failed.
        """
        self._bring_back(math.inf)
        self._plan.stop_pushing()
        for role in (*WORKERS, *OPERATOR):
            # One that is stuck is killed with the rest.
            self._lives[role].end(END_SECONDS)
            del self._lives[role]

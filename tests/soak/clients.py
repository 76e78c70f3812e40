"""The soak's client processes: started, killed at random, and started again."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, Final

from tests import journal
from tests.integration.server import eventually
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
    """The death of one process."""

    time: float
    """By `time.monotonic`."""
    role: str


@dataclass(slots=True)
class _Due:
    """What is killed, or comes back, when."""

    kill_time: float = float("inf")
    returns: dict[str, float] = field(default_factory=dict)


class Clients:
    """All client processes of a soak. Not thread-safe; a context manager.

    They are forks of a process that has imported everything and opened nothing: a life begins at
    once, without the second of processor time that imports take.
    """

    def __init__(self, plan: Plan, chance: random.Random) -> None:
        self._plan = plan
        self._chance = chance
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._roles = {**WORKERS, **CONSUMERS, **OPERATOR}
        self._processes: dict[str, BaseProcess] = {}
        self._due = _Due()
        self.kills: list[Kill] = []

    def __enter__(self) -> Clients:
        for role in self._roles:
            self._start(role)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()

    def _start(self, role: str) -> None:
        process = self._context.Process(
            target=self._roles[role], args=(self._plan, role), name=role, daemon=True
        )
        process.start()
        self._processes[role] = process

    def wait_until_pushing(self) -> None:
        """Wait until every worker has pushed: what the first imports take isn't load.

        Raises:
            AssertionError: One hasn't in time.
        """
        for role in WORKERS:
            eventually(partial(self._has_pushed, role), f"the {role} to push", seconds=END_SECONDS)
        self._due.kill_time = time.monotonic() + self._chance.uniform(*_BETWEEN_KILLS)

    def _has_pushed(self, role: str) -> bool:
        return any(one["event"] == "pushed" for one in events(self._plan, role))

    def check(self) -> None:
        """Fail if one has ended that wasn't killed.

        Raises:
            RuntimeError: One has; its traceback is on stderr.
        """
        for role, process in self._processes.items():
            if process.exitcode is not None and role not in self._due.returns:
                raise RuntimeError(f"the {role} ended with exit status {process.exitcode}")

    def tick(self) -> None:
        """Kill, and bring back, what is due."""
        now, due = time.monotonic(), self._due
        if now >= due.kill_time:
            due.kill_time = now + self._chance.uniform(*_BETWEEN_KILLS)
            victims = [role for role in (*WORKERS, *CONSUMERS) if role not in due.returns]
            self._kill(self._chance.choice(victims))
        self._bring_back(now)

    def _kill(self, role: str) -> None:
        process = self._processes[role]
        process.kill()
        process.join()
        self.kills.append(Kill(time.monotonic(), role))
        self._due.returns[role] = time.monotonic() + self._chance.uniform(*_AWAY)

    def _bring_back(self, now: float) -> None:
        for role, return_time in list(self._due.returns.items()):
            if now >= return_time:
                del self._due.returns[role]
                self._start(role)

    def finish_pushing(self) -> None:
        """Kill nobody any more, and let workers and operator end.

        Raises:
            RuntimeError: One is stuck, or failed.
        """
        self._bring_back(float("inf"))
        self._plan.stop_pushing()
        for role in (*WORKERS, *OPERATOR):
            process = self._processes.pop(role)
            process.join(END_SECONDS)
            if process.exitcode != 0:
                process.kill()
                raise RuntimeError(f"the {role} didn't end, or failed: {process.exitcode}")


def events(plan: Plan, role: str) -> list[dict[str, Any]]:
    """What the lives of a role have written down."""
    return list(journal.events(plan.journal_path(role)))

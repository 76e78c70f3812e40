"""Schedules the computation of advantages: which groups share a launch, and what becomes of them.

The arithmetic runs in a process of its own (`compute_worker.py`): torch never shares an
interpreter with the event loop, and a crash of the device takes nothing else down.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from experience_buffer_server.channel import Child, ChildGoneError
from experience_buffer_server.config import ComputeSection
from experience_buffer_server.groups import Entry
from experience_buffer_server.metrics import Metrics
from experience_buffer_server.store.base import AdvantageRow

_log = logging.getLogger(__name__)

_MAX_IN_FLIGHT = 2
"""Launches sent to the worker at once: it reads the next one while we commit the last."""
_RESTART_SECONDS = 1.0
"""Between attempts to start a worker that can't start."""
_MAX_ATTEMPTS = 2
"""A job that was alone in a launch that killed the worker this often is quarantined."""


class Owner(Protocol):
    """The buffer that a job belongs to."""

    @property
    def id(self) -> int:
        """Its id in the store."""

    @property
    def name(self) -> str:
        """Its name."""

    def computed(self, job: Job, rows: Sequence[AdvantageRow]) -> None:
        """The job's advantages are there; they are not stored yet."""

    def not_computed(self, job: Job, reason: str) -> None:
        """The job can't be computed, now or ever."""


@dataclass(slots=True, eq=False)
class Job:
    """Experiences whose advantages depend on one another: a whole group, or one experience."""

    owner: Owner
    entries: list[Entry]
    estimator: str
    parameters: Mapping[str, Any]
    runs: list[str]
    """Per entry, the run that votes once in the group's statistics; empty: a run of its own."""
    attempts: int = 0


class Computer:
    """Sends jobs to the worker, several per launch. Not thread-safe; belongs to the event loop."""

    def __init__(self, settings: ComputeSection, store_path: Path, metrics: Metrics) -> None:
        self._settings = settings
        self._store_path = store_path
        self._metrics = metrics
        self._waiting: deque[Job] = deque()
        self._arrival = asyncio.Event()
        self._slots = asyncio.Semaphore(_MAX_IN_FLIGHT)
        self._in_flight: set[asyncio.Task[None]] = set()
        self._child: Child | None = None
        self._starting = asyncio.Lock()
        self._runner: asyncio.Task[None] | None = None
        self._warming: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to compute. The worker process starts with the first job, or by `warm_up`."""
        self._runner = asyncio.get_running_loop().create_task(self._run())

    def warm_up(self) -> None:
        """Start the worker process now: loading torch takes seconds that no group should wait."""
        if not self._warming and self._runner is not None:
            self._warming = asyncio.get_running_loop().create_task(self._warm_up())

    def submit(self, job: Job) -> None:
        """Queue a job; its owner hears of the result."""
        self._waiting.append(job)
        self._arrival.set()

    async def close(self) -> None:
        """Stop. Jobs that aren't done are computed after the next start. Idempotent."""
        for own in (self._runner, self._warming):
            if own is not None:
                own.cancel()
        for task in list(self._in_flight):
            task.cancel()
        if self._child is not None:
            await self._child.close()

    async def _run(self) -> None:
        while True:
            await self._arrival.wait()
            await self._slots.acquire()
            if self._settings.max_latency_seconds and not self._in_flight:
                # Groups that become whole together share a launch.
                await asyncio.sleep(self._settings.max_latency_seconds)
            launch = self._next_launch()
            if not self._waiting:
                self._arrival.clear()
            task = asyncio.get_running_loop().create_task(self._launch(launch))
            self._in_flight.add(task)
            task.add_done_callback(self._launched)

    def _next_launch(self) -> list[Job]:
        """The oldest jobs that can share a launch: same estimator, same parameters."""
        first = self._waiting[0]
        launch: list[Job] = []
        while self._waiting and len(launch) < self._settings.max_batch_groups:
            job = self._waiting[0]
            if job.estimator != first.estimator or job.parameters != first.parameters:
                break
            if job.attempts and launch:
                break
            launch.append(self._waiting.popleft())
            if job.attempts:
                break
        return launch

    def _launched(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        self._slots.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a launch was lost: %r", error, exc_info=error)

    async def _launch(self, launch: list[Job]) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        request = {
            "estimator": launch[0].estimator,
            "parameters": dict(launch[0].parameters),
            "groups": [
                [
                    job.owner.id,
                    [(e.record.uid, run) for e, run in zip(job.entries, job.runs, strict=True)],
                ]
                for job in launch
            ],
        }
        try:
            child = await self._worker()
            answers = await child.request(request)
        except ChildGoneError as error:
            self._retry(launch, error)
            return
        self._metrics.computed(launch[0].estimator, loop.time() - started)
        for job, answer in zip(launch, answers, strict=True):
            self._deliver(job, answer)

    def _deliver(self, job: Job, answer: Mapping[str, Any]) -> None:
        error = answer.get("error")
        outcome = "failed" if error else "computed"
        self._metrics.groups_computed(job.owner.name, job.estimator, outcome)
        if error:
            job.owner.not_computed(job, error)
            return
        rows = [
            AdvantageRow(
                seq=entry.record.seq,
                advantages=advantages,
                returns=returns,
                details=answer["details"] | flags,
            )
            for entry, (advantages, returns, flags) in zip(
                job.entries, answer["items"], strict=True
            )
        ]
        job.owner.computed(job, rows)

    def _retry(self, launch: list[Job], error: ChildGoneError) -> None:
        """The worker died: try each job alone, so that only the one that kills it is given up."""
        _log.error("the advantage worker died with %d jobs: %s", len(launch), error)
        for job in reversed(launch):
            job.attempts += error.was_running
            if len(launch) == 1 and job.attempts > _MAX_ATTEMPTS:
                reason = f"computing it ends the advantage worker ({error})"
                self._metrics.groups_computed(job.owner.name, job.estimator, "failed")
                job.owner.not_computed(job, reason)
            else:
                self._waiting.appendleft(job)
        if self._waiting:
            self._arrival.set()

    async def _warm_up(self) -> None:
        with contextlib.suppress(ChildGoneError):
            await self._worker()

    async def _worker(self) -> Child:
        async with self._starting:
            if self._child is None or self._child.gone:
                self._child = await self._start_worker()
            return self._child

    async def _start_worker(self) -> Child:
        """A worker that is ready; one that can't start is no fault of the jobs that wait for it."""
        try:
            return await Child.start(
                "experience_buffer_server.compute_worker",
                str(self._store_path),
                self._settings.device,
                str(self._settings.threads),
            )
        except (OSError, ChildGoneError) as error:
            _log.error("the advantage worker can't start, whole groups wait: %s", error)
            await asyncio.sleep(_RESTART_SECONDS)
            raise ChildGoneError(str(error), was_running=False) from error

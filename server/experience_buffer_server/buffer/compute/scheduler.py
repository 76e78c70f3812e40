"""Schedules the computation of advantages: which groups share a launch, and what becomes of them.

The arithmetic runs in a process of its own (`worker.py`): it never shares an interpreter
with the event loop, and a crash of the device takes nothing else down.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experience_buffer_server.buffer.compute.jobs import (
    Job,
    Result,
    Work,
    request_of,
    sent_payloads,
)
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.runtime.child_process import Child, ChildGoneError, ChildRefusedError
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.settings.estimators import EstimatorSettings
from experience_buffer_server.settings.server import ComputeSection, ConfigurationError
from experience_buffer_server.store.interface import AdvantageRow, Found

_log = logging.getLogger(__name__)

_MAX_IN_FLIGHT = 2
"""Launches sent to the worker at once: it reads the next one while we commit the last."""
_READ_AT_ONCE = 256
"""Experiences whose results are read at a time: about a millisecond."""
_RESTART_SECONDS = 1.0
"""Between attempts to start a worker that can't start."""
_COMPILING_SECONDS = 30.0
"""For so long a launch isn't taken for one that never ends where its loops are being compiled."""
_NO_WORKER = "the advantage worker can't start, whole groups wait: %s"
_MAX_ATTEMPTS = 2
"""A job that was alone in a launch that killed the worker this often is quarantined."""


class Computer:
    """Sends work to the worker, much of it per launch. Not thread-safe; belongs to the event loop.

    Args:
        settings: Of the worker.
        reader_spec: With which it reads the store, see `Store.reader_spec`.
        metrics: Where launches are counted.
        payloads: Reads what is sent along with the work; None: the worker reads it.
        estimators: The operator's own.
    """

    def __init__(
        self,
        settings: ComputeSection,
        reader_spec: str | None,
        metrics: Metrics,
        *,
        payloads: Callable[[int, Sequence[str]], Sequence[Found[bytes]]] | None = None,
        estimators: Mapping[str, EstimatorSettings] | None = None,
    ) -> None:
        self._settings = settings
        self._estimators = dict(estimators or {})
        self._reader_spec = reader_spec
        self._payloads = payloads
        self._metrics = metrics
        self._lanes: dict[tuple[object, ...], deque[Work]] = {}
        self._held: set[int] = set()
        """Buffers whose running moments are being computed or stored."""
        self._numbers = itertools.count()
        self._arrival = asyncio.Event()
        self._slots = asyncio.Semaphore(_MAX_IN_FLIGHT)
        self._in_flight: set[asyncio.Task[None]] = set()
        self._child: Child | None = None
        self._starting = asyncio.Lock()
        self._runner: asyncio.Task[None] | None = None
        self._warming: asyncio.Task[None] | None = None
        self._start_time: float | None = None
        """Since when the worker has been starting, by the monotonic clock; None when it isn't."""
        self._trouble = ""
        """Why its last start failed; empty when it didn't."""

    def start(self) -> None:
        """Begin to compute. The worker process starts with the first work, or by `warm_up`."""
        self._runner = asyncio.get_running_loop().create_task(self._run())

    def warm_up(self) -> None:
        """Start the worker process now: its start takes seconds that no group should wait."""
        if not self._warming and self._runner is not None:
            self._warming = asyncio.get_running_loop().create_task(self._warm_up())

    async def check(self) -> None:
        """Start the worker process now, to learn whether it can: by its estimators and its device.

        A reason that may pass is no fault of the configuration: it is logged, and groups wait, as at
        any later time.

        Raises:
            ConfigurationError: It can't start for good; the message names the key.
        """
        async with self._starting:
            try:
                self._child = await self._spawn_and_tell()
            except (OSError, ChildGoneError) as error:
                if isinstance(error, ChildRefusedError) and error.for_good:
                    raise ConfigurationError(str(error)) from error
                _log.error(_NO_WORKER, error)

    def describe(self) -> str:
        """What keeps the worker from being at work, in words; empty when nothing does."""
        if self._trouble:
            return f"the process that computes can't start, and is tried again: {self._trouble}"
        if self._start_time is None:
            return ""
        seconds = time.monotonic() - self._start_time
        return f"the process that computes has been starting for {seconds:.1f} s"

    def submit(self, work: Work) -> None:
        """Queue work; it is told of its results."""
        work.number = next(self._numbers)
        self._lanes.setdefault(work.lane, deque()).append(work)
        self._arrival.set()

    def withdraw(self, state: BufferState) -> list[Work]:
        """Give back what waits for a buffer that was deleted: others needn't wait behind it."""
        withdrawn: list[Work] = []
        for lane, waiting in list(self._lanes.items()):
            withdrawn += [work for work in waiting if work.state is state]
            self._lanes[lane] = deque(work for work in waiting if work.state is not state)
            if not self._lanes[lane]:
                del self._lanes[lane]
        return withdrawn

    async def close(self) -> None:
        """Stop. Work that isn't done is computed after the next start. Idempotent."""
        own = [task for task in (self._runner, self._warming) if task is not None]
        ending = [*own, *self._in_flight]
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)
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
            if not launch:
                self._arrival.clear()
                self._slots.release()
                continue
            task = asyncio.get_running_loop().create_task(self._launch(launch))
            self._in_flight.add(task)
            task.add_done_callback(functools.partial(self._launched, launch))

    def _next_launch(self) -> list[Work]:
        """The oldest work that may go, and what can share its launch."""
        open_lanes = [
            lane
            for lane, waiting in self._lanes.items()
            if not (waiting[0].uses_moments and waiting[0].state.id in self._held)
        ]
        if not open_lanes:
            return []
        lane = min(open_lanes, key=lambda lane: self._lanes[lane][0].number)
        waiting = self._lanes[lane]
        launch: list[Work] = []
        num_jobs = num_tokens = 0
        settings = self._settings
        while (
            waiting
            and num_jobs < settings.max_batch_groups
            and num_tokens < settings.max_batch_tokens
        ):
            if waiting[0].attempts and launch:
                break
            work = waiting.popleft()
            launch.append(work)
            num_jobs += len(work.jobs)
            num_tokens += work.num_tokens
            if work.attempts:
                break
        if not waiting:
            del self._lanes[lane]
        if launch[0].uses_moments:
            self._held.add(launch[0].state.id)
        return launch

    def _launched(self, launch: Sequence[Work], task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        self._slots.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a launch was lost: %r", error, exc_info=error)
            for work in launch:
                self._release(work)
                self._give_up(work, f"its launch was lost ({error!r}); see the server's log")

    async def _launch(self, launch: list[Work]) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            child = await self._worker()
            if launch[0].uses_moments:
                launch[0].take_moments()
            request = request_of(launch)
            if self._payloads is not None:
                request["payloads"] = sent_payloads(request, self._payloads)
            answer = await child.request(request)
        except ChildGoneError as error:
            self._retry(launch, error)
            return
        self._metrics.computed(launch[0].estimator, loop.time() - started)
        results = await self._results(launch, answer["groups"])
        # Until the results are stored, so that what waits for it stays bounded.
        if launch[0].uses_moments:
            together = [result for _, of_work in results for result in of_work]
            await launch[0].computed(launch[0], together, answer["moments"])
            self._release(launch[0])
        else:
            stored = [work.computed(work, of_work, None) for work, of_work in results]
            await asyncio.gather(*stored)

    async def _results(
        self, launch: Sequence[Work], answers: Sequence[Mapping[str, Any]]
    ) -> list[tuple[Work, list[Result]]]:
        """What became of each work, read so that others have their turn between."""
        results: list[tuple[Work, list[Result]]] = [(work, []) for work in launch]
        jobs = [(work, of_work, job) for work, of_work in results for job in work.jobs]
        num_read = 0
        for (work, of_work, job), answer in zip(jobs, answers, strict=True):
            of_work.append(self._result(work, job, answer))
            num_read += len(job.entries)
            if num_read >= _READ_AT_ONCE:
                num_read = 0
                await asyncio.sleep(0)
        return results

    def _release(self, work: Work) -> None:
        """Let the next work of a buffer with running moments go."""
        if work.uses_moments:
            self._held.discard(work.state.id)
            self._arrival.set()

    def _result(self, work: Work, job: Job, answer: Mapping[str, Any]) -> Result:
        error = answer.get("error", "")
        self._count(work, "failed" if error else "computed")
        if error:
            damaged = answer.get("damaged", {})
            seqs = {entry.record.uid: entry.record.seq for entry in job.entries}
            return Result(
                job, error=error, damaged={seqs[uid]: why for uid, why in damaged.items()}
            )
        rows = [
            AdvantageRow(
                seq=entry.record.seq,
                advantages=advantages,
                returns=advantages if returns is None else returns,
                details=answer["details"] | flags,
            )
            for entry, (advantages, returns, flags) in zip(
                job.entries, answer["items"], strict=True
            )
        ]
        return Result(job, rows)

    def _retry(self, launch: list[Work], error: ChildGoneError) -> None:
        """The worker died: try each work alone, so that only what kills it is given up."""
        _log.error("the advantage worker died with %d jobs: %s", len(launch), error)
        for work in reversed(launch):
            self._release(work)
            work.attempts += error.was_running
            if len(launch) > 1 or work.attempts < _MAX_ATTEMPTS:
                self._put_back(work)
            elif len(work.jobs) > 1:
                # Which of the batch's groups it is shows when they are computed apart.
                middle = len(work.jobs) // 2
                for jobs in (work.jobs[middle:], work.jobs[:middle]):
                    half = dataclasses.replace(work, jobs=jobs, attempts=1, moments="")
                    self._put_back(half)
            else:
                self._give_up(work, f"computing it ends the advantage worker ({error})")
        if self._lanes:
            self._arrival.set()

    def _put_back(self, work: Work) -> None:
        self._lanes.setdefault(work.lane, deque()).appendleft(work)

    def _give_up(self, work: Work, reason: str) -> None:
        results = [Result(job, error=reason) for job in work.jobs]
        for _ in work.jobs:
            self._count(work, "failed")
        work.computed(work, results, None)

    def _count(self, work: Work, outcome: str) -> None:
        # The series of a buffer that was deleted have ended.
        if not work.state.closed:
            self._metrics.groups_computed(work.state.name, work.estimator, outcome)

    async def _warm_up(self) -> None:
        with contextlib.suppress(ChildGoneError):
            await self._worker()

    async def _worker(self) -> Child:
        async with self._starting:
            if self._child is None or self._child.gone:
                self._child = await self._start_worker()
            return self._child

    async def _start_worker(self) -> Child:
        """A worker that is ready; one that can't start is no fault of the work that waits for it."""
        try:
            return await self._spawn_and_tell()
        except (OSError, ChildGoneError) as error:
            _log.error(_NO_WORKER, error)
            await asyncio.sleep(_RESTART_SECONDS)
            raise ChildGoneError(str(error), was_running=False) from error

    async def _spawn_and_tell(self) -> Child:
        self._start_time = begun = time.monotonic()
        try:
            child = await self._spawn()
        except (OSError, ChildGoneError) as error:
            self._trouble = str(error)
            raise
        finally:
            self._start_time = None
        self._trouble = ""
        said = child.greeting
        if said["is_compiling"]:
            child.be_patient(_COMPILING_SECONDS)
        seconds = round(time.monotonic() - begun, 1)
        _log.info("computing advantages", extra={"device": said["name"], "seconds": seconds})
        if said["note"]:
            _log.info("advantages are computed on the CPU: %s", said["note"])
        return child

    async def _spawn(self) -> Child:
        declared = {name: section.model_dump() for name, section in self._estimators.items()}
        return await Child.start(
            "experience_buffer_server.buffer.compute.worker",
            self._reader_spec or "",
            self._settings.device,
            str(self._settings.threads),
            json.dumps(declared),
            limit_seconds=self._settings.max_launch_seconds,
        )

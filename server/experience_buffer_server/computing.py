"""Advantages of one buffer: what is submitted for computation, and what becomes of the results.

Which groups are ready for it is decided by the buffer; launches are the business of `compute`.
Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from experience_buffer_server.compute import Computer, Job, Result, Work
from experience_buffer_server.config import BufferSettings
from experience_buffer_server.groups import Entry, Group
from experience_buffer_server.metrics import Metrics
from experience_buffer_server.store.base import AdvantageRow, BufferRow, Store, StoreError
from experience_buffer_server.tasks import Tasks

_RETRY_SECONDS = 1.0
"""Between attempts to store advantages that found no room."""


_PART_BYTES = 256 * 1024
"""Advantages and returns that are stored with one commit, about."""


@dataclass(slots=True)
class _Computed:
    """What became of jobs of one work; `moments` are stored with it."""

    work: Work
    results: list[Result]
    moments: str | None

    @property
    def num_bytes(self) -> int:
        return sum(len(row.advantages) for result in self.results for row in result.rows)


class Owner(Protocol):
    """The buffer that is computed for."""

    settings: BufferSettings
    row: BufferRow
    closed: bool

    @property
    def name(self) -> str:
        """Its name."""

    def advance(self, entries: Sequence[Entry]) -> None:
        """Bring durable entries and their groups as far as they can go."""

    def make_available(self, entries: Sequence[Entry]) -> None:
        """Let consumers sample the entries."""

    def withhold(self, group: Group) -> None:
        """Discard a group whose rewards are all equal."""


class Computing:
    """Submits entries and stores their advantages. Not thread-safe."""

    def __init__(
        self, owner: Owner, store: Store, computer: Computer, metrics: Metrics, tasks: Tasks
    ) -> None:
        self.num_jobs = 0
        """Submitted, and not stored or failed yet."""
        self._owner = owner
        self._store = store
        self._computer = computer
        self._metrics = metrics
        self._tasks = tasks
        self._gathered: list[Job] = []
        """Jobs of the statistics batch that isn't full yet."""
        self._gather_time = 0.0
        """When the first of them came, seconds since the Unix epoch."""
        self._computed: deque[_Computed] = deque()
        """What the worker has answered and isn't stored yet, oldest first."""
        self._is_storing = False
        self._next_retry = 0.0

    @property
    def id(self) -> int:
        """The buffer's id in the store."""
        return self._owner.row.id

    @property
    def name(self) -> str:
        """The buffer's name."""
        return self._owner.name

    @property
    def moments(self) -> str:
        """The buffer's running moments of now."""
        return self._owner.row.moments

    # --- on the way to the worker

    def submit(self, entries: Sequence[Entry]) -> None:
        """Compute entries together, by the buffer's settings of this moment."""
        plan = self._owner.settings.advantage.plan
        assert plan is not None
        for entry in entries:
            entry.computing = True
        self.num_jobs += 1
        job = Job(
            entries=list(entries),
            runs=run_labels(entries, self._owner.settings),
            generations=[entry.generation for entry in entries],
            counts=not any(entry.counted for entry in entries),
        )
        if not plan.parameters.uses_batch:
            self._send([job])
            return
        if not self._gathered:
            self._gather_time = time.time()
        self._gathered.append(job)
        if len(self._gathered) >= plan.parameters.batch_size:
            self._send_gathered()

    def _send_gathered(self) -> None:
        jobs, self._gathered = self._gathered, []
        sound = [job for job in jobs if self._still_holds(job)]
        if sound:
            self._send(sound)

    def _send(self, jobs: list[Job]) -> None:
        advantage = self._owner.settings.advantage
        assert advantage.plan is not None
        self._computer.submit(
            Work(
                owner=self,
                jobs=jobs,
                estimator=advantage.estimator,
                parameters=advantage.parameters,
                uses_moments=advantage.plan.parameters.uses_running_moments,
            )
        )

    def settings_changed(self) -> None:
        """What was gathered for other settings is looked at again."""
        jobs, self._gathered = self._gathered, []
        for job in jobs:
            self._release(job)

    def tick(self, now: float) -> None:
        """Do what time asks for: send a batch that doesn't fill, store what found no room."""
        plan = self._owner.settings.advantage.plan
        wait = plan.parameters.batch_wait_seconds if plan is not None else 0.0
        if self._gathered and wait and now >= self._gather_time + wait:
            self._send_gathered()
        if now >= self._next_retry:
            self._next_retry = now + _RETRY_SECONDS
            self._store_computed()

    def describe(self) -> str:
        """What the computation waits for, in words; empty when it waits for nothing."""
        plan = self._owner.settings.advantage.plan
        if not self._gathered or plan is None:
            return ""
        age = max(time.time() - self._gather_time, 0.0)
        return (
            f"{len(self._gathered)} of {plan.parameters.batch_size} for a batch with common "
            f"statistics after {age:.1f} s (batch_wait_seconds = "
            f"{plan.parameters.batch_wait_seconds:g})"
        )

    # --- on the way back

    def computed(self, work: Work, results: Sequence[Result], moments: str | None) -> None:
        """Store the advantages; then the entries can be sampled."""
        self._computed.append(_Computed(work, list(results), moments))
        self._store_computed()

    def _store_computed(self) -> None:
        if self._computed and not self._is_storing:
            self._is_storing = True
            self._tasks.spawn(self._store_parts())

    async def _store_parts(self) -> None:
        """Part by part, so that pushes never wait long behind what was computed."""
        try:
            while self._computed:
                await self._store_part()
                await asyncio.sleep(0)
        finally:
            self._is_storing = False

    async def _store_part(self) -> None:
        part = self._next_part()
        sound = [result for of_one in part for result in of_one.results if self._judge(result)]
        moments, work = part[-1].moments, part[-1].work
        if moments is not None and work.estimator != self._owner.settings.advantage.estimator:
            moments = self.moments  # Those of another estimator are another quantity's.
        if self._owner.closed:
            moments = None
        if sound or moments is not None:
            try:
                await self._commit(sound, moments)
            except StoreError:
                part[-1].results = sound
                self._computed.appendleft(part[-1])
                for of_one in part[:-1]:
                    of_one.results = []
                raise
        if part[-1].moments is not None:
            self._computer.release(work)
        for result in sound:
            self._stored(result, counted=moments is not None)

    def _next_part(self) -> list[_Computed]:
        """What is stored with the next commit; running moments go with all their results."""
        part: list[_Computed] = []
        num_bytes = 0
        while self._computed and num_bytes < _PART_BYTES:
            if part and self._computed[0].moments is not None:
                break
            part.append(self._computed.popleft())
            num_bytes += part[-1].num_bytes
            if part[-1].moments is not None:
                break
        return part

    def _judge(self, result: Result) -> bool:
        """Whether a result is to be stored; see to it if it isn't."""
        if not self._still_holds(result.job):
            return False
        if result.error:
            self._quarantine(result)
        elif result.rows[0].details.get("withheld"):
            self._withhold(result)
        else:
            return True
        return False

    def _quarantine(self, result: Result) -> None:
        """What can't be computed stays visible; it can be deleted or annotated."""
        entries = result.job.entries
        self._release(result.job)
        for entry in entries:
            entry.quarantine = result.error
        self._metrics.quarantined(self.name, entries[0].record.uid, len(entries), result.error)

    def _withhold(self, result: Result) -> None:
        self._note_flags(result.rows)
        self._release(result.job)
        group = result.job.entries[0].group
        assert group is not None
        self._owner.withhold(group)

    def _still_holds(self, job: Job) -> bool:
        """False if members have left or were annotated since: the rest is looked at again."""
        if not self._owner.closed and len(_current(job)) == len(job.entries):
            return True
        self._release(job)
        if not self._owner.closed:
            self._owner.advance([entry for entry in job.entries if entry.is_staying])
        return False

    async def _commit(self, results: Sequence[Result], moments: str | None) -> None:
        batch = self._store.batch()
        for result in results:
            for row in result.rows:
                batch.put_advantages(self.id, row)
        buffer_row, before = self._owner.row, self._owner.row.moments
        if moments is not None:
            # At once, so that no other change of the row brings the old ones back.
            buffer_row.moments = moments
            batch.put_buffer(buffer_row)
        try:
            await self._store.commit(batch)
        except StoreError:
            buffer_row.moments = before
            raise

    def _stored(self, result: Result, *, counted: bool) -> None:
        self._release(result.job)
        self._note_flags(result.rows)
        current = _current(result.job)
        for entry in result.job.entries:
            entry.counted = entry.counted or counted
        self._owner.make_available(current)
        if len(current) < len(result.job.entries):
            self._owner.advance([entry for entry in result.job.entries if entry.is_staying])

    def _note_flags(self, rows: Sequence[AdvantageRow]) -> None:
        self._metrics.advantages(self.name, [row.details for row in rows])

    def _release(self, job: Job) -> None:
        self.num_jobs -= 1
        for entry in job.entries:
            entry.computing = False


def _current(job: Job) -> list[Entry]:
    """The entries for which the job's results hold."""
    return [
        entry
        for entry, generation in zip(job.entries, job.generations, strict=True)
        if entry.is_staying and entry.generation == generation
    ]


def run_labels(entries: Sequence[Entry], settings: BufferSettings) -> list[str]:
    """Which entries are the steps of one run, and so have one vote together; empty: alone.

    Only in groups by task (by run, where rewards are discounted over its steps), and only where
    the run's steps differ: equal steps under one run are separate samples whose run was never set.
    """
    plan = settings.advantage.plan
    over_steps = plan is not None and getattr(plan.parameters, "turn_rewards", "none") == "steps"
    if not (settings.group_by == "task" or (settings.group_by == "run" and over_steps)):
        return [""] * len(entries)
    steps: dict[str, list[int]] = {}
    for entry in entries:
        steps.setdefault(entry.record.rid, []).append(entry.record.step)
    return [
        rid if len(set(steps[rid])) == len(steps[rid]) else ""
        for rid in (entry.record.rid for entry in entries)
    ]

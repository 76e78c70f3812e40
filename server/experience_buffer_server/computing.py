"""Advantages of one buffer: what is submitted for computation, and what becomes of the results.

Which groups are ready for it is decided by the buffer; launches are the business of `compute`.
Belongs to one buffer and its event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from experience_buffer_server.compute import Computer, Job
from experience_buffer_server.config import BufferSettings
from experience_buffer_server.groups import Entry
from experience_buffer_server.metrics import Metrics
from experience_buffer_server.store.base import AdvantageRow, Store, StoreError
from experience_buffer_server.tasks import Tasks

_RETRY_SECONDS = 1.0
"""Between attempts to store advantages that found no room."""


class Owner(Protocol):
    """The buffer that is computed for."""

    settings: BufferSettings
    closed: bool

    @property
    def id(self) -> int:
        """Its id in the store."""

    @property
    def name(self) -> str:
        """Its name."""

    def advance(self, entries: Sequence[Entry]) -> None:
        """Bring durable entries and their groups as far as they can go."""

    def make_available(self, entries: Sequence[Entry]) -> None:
        """Let consumers sample the entries."""


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
        self._unstored: list[tuple[Job, Sequence[AdvantageRow]]] = []
        self._next_retry = 0.0

    @property
    def id(self) -> int:
        """The buffer's id in the store."""
        return self._owner.id

    @property
    def name(self) -> str:
        """The buffer's name."""
        return self._owner.name

    def submit(self, entries: Sequence[Entry]) -> None:
        """Compute entries together, by the buffer's settings of this moment."""
        settings = self._owner.settings
        for entry in entries:
            entry.computing = True
        self.num_jobs += 1
        self._computer.submit(
            Job(
                owner=self,
                entries=list(entries),
                estimator=settings.advantage.estimator,
                parameters=settings.advantage.parameters,
                runs=run_labels(entries, settings.group_by),
            )
        )

    def computed(self, job: Job, rows: Sequence[AdvantageRow]) -> None:
        """Store the advantages; then the entries can be sampled."""
        if self._still_holds(job):
            self._tasks.spawn(self._keep(job, rows))

    def not_computed(self, job: Job, reason: str) -> None:
        """Quarantine what can't be computed; it stays visible and can be deleted."""
        if not self._still_holds(job):
            return
        self._release(job)
        for entry in job.entries:
            entry.quarantine = reason
        self._metrics.quarantined(self.name, job.entries[0].record.uid, len(job.entries), reason)

    def retry(self, now: float) -> None:
        """Try again to store what found no room."""
        if self._unstored and now >= self._next_retry:
            self._next_retry = now + _RETRY_SECONDS
            unstored, self._unstored = self._unstored, []
            for job, rows in unstored:
                self.computed(job, rows)

    def _still_holds(self, job: Job) -> bool:
        """False if members have left since it was submitted: the rest is looked at again."""
        if all(entry.is_staying for entry in job.entries) and not self._owner.closed:
            return True
        self._release(job)
        if not self._owner.closed:
            self._owner.advance([entry for entry in job.entries if entry.is_staying])
        return False

    async def _keep(self, job: Job, rows: Sequence[AdvantageRow]) -> None:
        batch = self._store.batch()
        for entry, row in zip(job.entries, rows, strict=True):
            if entry.is_staying:
                batch.put_advantages(self.id, row)
        try:
            await self._store.commit(batch)
        except StoreError:
            self._unstored.append((job, rows))
            raise
        self._release(job)
        self._owner.make_available([entry for entry in job.entries if entry.is_staying])

    def _release(self, job: Job) -> None:
        self.num_jobs -= 1
        for entry in job.entries:
            entry.computing = False


def run_labels(entries: Sequence[Entry], group_by: str) -> list[str]:
    """Which entries are the steps of one run, and so have one vote together; empty: alone.

    Only in groups by task, and only where the run's steps differ: equal steps under one run are
    separate samples whose run was never set.
    """
    if group_by != "task":
        return [""] * len(entries)
    steps: dict[str, list[int]] = {}
    for entry in entries:
        steps.setdefault(entry.record.rid, []).append(entry.record.step)
    return [
        rid if len(set(steps[rid])) == len(steps[rid]) else ""
        for rid in (entry.record.rid for entry in entries)
    ]

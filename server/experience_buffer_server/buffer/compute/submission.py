"""Advantages of one buffer: what is submitted for computation, and what becomes of the results.

Which groups are ready for it is decided by the buffer; launches are the business of `scheduler`.
Belongs to one buffer and its event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from experience_buffer_server.buffer.compute.jobs import Job, Result, Work
from experience_buffer_server.buffer.compute.results import Results
from experience_buffer_server.buffer.compute.scheduler import Computer
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.group_table import Entry
from experience_buffer_server.runtime import clock
from experience_buffer_server.settings.buffer import BufferSettings


class Computing:
    """Submits entries and stores their advantages. Not thread-safe."""

    def __init__(self, state: BufferState, computer: Computer) -> None:
        self.num_jobs = 0
        """Submitted, and not stored or failed yet."""
        self._state = state
        self._computer = computer
        self._gathered: list[Job] = []
        """Jobs of the statistics batch that isn't full yet."""
        self._gather_time = 0.0
        """When the first of them came, seconds since the Unix epoch."""
        self._results = Results(state, self._release)

    @property
    def id(self) -> int:
        """The buffer's id in the store."""
        return self._state.row.id

    @property
    def name(self) -> str:
        """The buffer's name."""
        return self._state.name

    @property
    def closed(self) -> bool:
        """The buffer was deleted."""
        return self._state.closed

    def moments(self, estimator: str) -> str:
        """The buffer's running moments of an estimator's scores; those of another are void."""
        is_current = estimator == self._state.settings.advantage.estimator
        return self._state.row.moments if is_current else ""

    # --- on the way to the worker

    def submit(self, entries: Sequence[Entry]) -> None:
        """Compute entries together, by the buffer's settings of this moment."""
        plan = self._state.settings.advantage.plan
        assert plan is not None
        for entry in entries:
            entry.computing = True
        self.num_jobs += 1
        job = Job(
            entries=list(entries),
            runs=run_labels(entries, self._state.settings),
            generations=[entry.generation for entry in entries],
            counts=not any(entry.counted for entry in entries),
        )
        if not plan.parameters.uses_batch:
            self._send([job])
            return
        if not self._gathered:
            self._gather_time = clock.now()
        self._gathered.append(job)
        if len(self._gathered) >= plan.parameters.batch_size:
            self._gather_anew()
        if len(self._gathered) >= plan.parameters.batch_size:
            self._send_gathered()

    def _gather_anew(self) -> None:
        """Let go what was gathered and is void by now; what is annotated comes back as it is."""
        since, jobs = self._gather_time, self._gathered
        self._gathered = []
        sound = [job for job in jobs if self._results.still_holds(job)]
        self._gathered[:0] = sound
        self._gather_time = since

    def _send_gathered(self) -> None:
        jobs, self._gathered = self._gathered, []
        self._send(jobs)

    def _send(self, jobs: list[Job]) -> None:
        advantage = self._state.settings.advantage
        assert advantage.plan is not None
        self._computer.submit(
            Work(
                owner=self,
                jobs=jobs,
                estimator=advantage.estimator,
                parameters=advantage.checked_parameters,
                uses_moments=advantage.plan.parameters.uses_running_moments,
            )
        )

    def settings_changed(self) -> None:
        """What was gathered for other settings is looked at again."""
        jobs, self._gathered = self._gathered, []
        for job in jobs:
            self._release(job)

    def tick(self, now: float) -> None:
        """Do what time asks for: send a batch that doesn't fill."""
        plan = self._state.settings.advantage.plan
        wait = plan.parameters.batch_wait_seconds if plan is not None else 0.0
        if self._gathered and wait and now >= self._gather_time + wait:
            self._gather_anew()
            if self._gathered:
                self._send_gathered()

    def describe(self) -> str:
        """What the computation waits for, in words; empty when it waits for nothing."""
        plan = self._state.settings.advantage.plan
        # What was annotated comes back, and so does what is left of a group.
        num_gathered = sum(any(e.is_staying for e in job.entries) for job in self._gathered)
        if not num_gathered or plan is None:
            return ""
        age = max(clock.now() - self._gather_time, 0.0)
        return (
            f"{num_gathered} of {plan.parameters.batch_size} for a batch with common "
            f"statistics after {age:.1f} s (batch_wait_seconds = "
            f"{plan.parameters.batch_wait_seconds:g})"
        )

    # --- on the way back

    def computed(
        self, work: Work, results: Sequence[Result], moments: str | None
    ) -> Awaitable[None]:
        """Store the advantages; then the entries can be sampled. Ends when it is done with."""
        return self._results.add(work, results, moments)

    def close(self) -> None:
        """The buffer was deleted: nothing of it is computed or stored any more."""
        self.settings_changed()
        for work in self._computer.withdraw(self):
            for job in work.jobs:
                self._release(job)
        self._results.close()

    def _release(self, job: Job) -> None:
        self.num_jobs -= 1
        for entry in job.entries:
            entry.computing = False


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

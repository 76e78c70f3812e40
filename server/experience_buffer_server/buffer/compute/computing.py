"""Advantages of one buffer: what is submitted for computation, and what becomes of the results.

Which groups are ready for it is decided by the buffer; launches are the business of `scheduler`. Results
are judged, stored part by part, and made available. Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from experience_buffer_server.buffer.compute.jobs import Job, Result, Work
from experience_buffer_server.buffer.compute.scheduler import Computer
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.entries import Entry
from experience_buffer_server.runtime import clock
from experience_buffer_server.runtime.tuning import TUNING
from experience_buffer_server.settings.buffer import BufferSettings
from experience_buffer_server.store.interface import AdvantageRow, StoreError, WriteBatch

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Computed:
    """What became of jobs of one work; `moments` are stored with it."""

    work: Work
    results: list[Result]
    moments: str | None
    done: asyncio.Future[None] | None
    """Ended with it; None where more of its work follows."""

    @property
    def num_bytes(self) -> int:
        return sum(map(_num_bytes, self.results))


class Computing:
    """Submits entries and stores their advantages. Not thread-safe."""

    def __init__(self, state: BufferState, computer: Computer) -> None:
        self._state = state
        self._events = state.events
        self.computer = computer
        self._gathered: list[Job] = []
        """Jobs of the statistics batch that isn't full yet."""
        self._gather_time = 0.0
        """When the first of them came, seconds since the Unix epoch."""
        self._waiting: deque[_Computed] = deque()
        """Results that aren't stored yet."""
        self._is_storing = False

    @property
    def num_jobs(self) -> int:
        """Submitted, and not stored or failed yet."""
        return self._state.num_jobs

    # --- on the way to the worker

    def submit(self, entries: Sequence[Entry]) -> None:
        """Compute entries together, by the buffer's settings of this moment."""
        plan = self._state.settings.advantage.plan
        assert plan is not None
        for entry in entries:
            entry.computing = True
        self._state.num_jobs += 1
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
        sound = [job for job in jobs if self._still_holds(job)]
        self._gathered[:0] = sound
        self._gather_time = since

    def _send_gathered(self) -> None:
        jobs, self._gathered = self._gathered, []
        self._send(jobs)

    def _send(self, jobs: list[Job]) -> None:
        advantage = self._state.settings.advantage
        assert advantage.plan is not None
        self.computer.submit(
            Work(
                state=self._state,
                computed=self._computed,
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
        """What the computation waits for or is at work on, in words; empty when there is none."""
        # What was annotated comes back, and so does what is left of a group.
        num_gathered = sum(any(e.is_staying for e in job.entries) for job in self._gathered)
        waits = (self._describe_gathered(num_gathered), self._describe_sent())
        return "; ".join(wait for wait in waits if wait)

    def _describe_gathered(self, count: int) -> str:
        plan = self._state.settings.advantage.plan
        if not count or plan is None:
            return ""
        age = max(clock.now() - self._gather_time, 0.0)
        return (
            f"{count} of {plan.parameters.batch_size} for a batch with common "
            f"statistics after {age:.1f} s (batch_wait_seconds = "
            f"{plan.parameters.batch_wait_seconds:g})"
        )

    def _describe_sent(self) -> str:
        num_computed = sum(len(of_one.results) for of_one in self._waiting)
        count = self.num_jobs - len(self._gathered) - num_computed
        if count <= 0:
            return ""
        what = "group" if self._state.settings.needs_groups else "experience"
        words = f"the advantages of {count} {what}{'s' if count > 1 else ''} are being computed"
        why = self.computer.describe()
        return f"{words} ({why})" if why else words

    # --- on the way back

    def _computed(
        self, work: Work, results: Sequence[Result], moments: str | None
    ) -> asyncio.Future[None]:
        """Store results as soon as their turn comes; the future ends when they are done with."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        parts = [list(results)] if moments is not None else _parts(results)
        self._waiting.extend(_Computed(work, part, moments, None) for part in parts)
        self._waiting[-1].done = done
        self._begin()
        return done

    def close(self) -> None:
        """The buffer was deleted: nothing of it is computed or stored any more."""
        self.settings_changed()
        for work in self.computer.withdraw(self._state):
            for job in work.jobs:
                self._release(job)
        # Lets go of what found no room.
        self._begin()

    def _release(self, job: Job) -> None:
        self._state.num_jobs -= 1
        for entry in job.entries:
            entry.computing = False

    def _begin(self, _: Sequence[object] = ()) -> None:
        if self._waiting and not self._is_storing:
            self._is_storing = True
            self._state.tasks.spawn(self._store_all())

    async def _store_all(self) -> None:
        """Part by part, with pushes where there are any: those never wait long behind it."""
        try:
            while self._waiting:
                started = time.monotonic()
                await self._store_part()
                rest = TUNING.rest if self._state.store.is_taking_in else 0.0
                await asyncio.sleep(rest * (time.monotonic() - started))
        finally:
            self._is_storing = False
            if self._waiting:
                self._state.changes.owe_again(self._begin, [None])

    async def _store_part(self) -> None:
        part = self._next_part()
        first = part[0]
        if first.moments is not None and self._counts_what_is_void(first):
            # All is computed again, from the moments that hold.
            self._start_over(first)
            return
        batch = self._state.changes.batch()
        for of_one in part:
            of_one.results = [r for r in of_one.results if self._judge(r, of_one.work, batch)]
        sound = [result for of_one in part for result in of_one.results]
        if (sound or first.moments is not None) and not self._state.closed:
            try:
                await self._commit(batch, part, sound)
            except StoreError:
                if self._state.closed:
                    return  # Deleted meanwhile: nothing of it is stored any more, or tried again.
                raise
        else:
            self._end(part)

    def _counts_what_is_void(self, of_one: _Computed) -> bool:
        """Whether running moments count experiences that have changed, or ones of settings before."""
        if not all(result.job.holds for result in of_one.results):
            return True
        is_current = of_one.work.estimator == self._state.settings.advantage.estimator
        return is_current and of_one.work.moments != self._state.row.moments

    def _start_over(self, of_one: _Computed) -> None:
        for result in of_one.results:
            self._release(result.job)
        self._end([of_one])
        if not self._state.closed:
            entries = [entry for result in of_one.results for entry in result.job.entries]
            self._events.advance([entry for entry in entries if entry.is_staying])

    @staticmethod
    def _end(part: Sequence[_Computed]) -> None:
        for of_one in part:
            if of_one.done is not None and not of_one.done.done():
                of_one.done.set_result(None)

    def _next_part(self) -> list[_Computed]:
        """What is stored with the next commit; running moments go alone with all their results."""
        part = [self._waiting.popleft()]
        num_bytes = part[0].num_bytes
        while self._waiting and num_bytes < TUNING.stored_at_once_bytes:
            if part[0].moments is not None or self._waiting[0].moments is not None:
                break
            part.append(self._waiting.popleft())
            num_bytes += part[-1].num_bytes
        return part

    def _judge(self, result: Result, work: Work, batch: WriteBatch) -> bool:
        """Whether a result is to be stored; see to it if it isn't."""
        if not self._still_holds(result.job):
            return False
        if result.error and not self._is_current(work):
            # Settings that hold since then may do without what it failed for.
            self._release(result.job)
            self._events.advance(result.job.entries)
        elif result.error:
            self._quarantine(result)
        elif result.is_withheld:
            self._withhold(result, batch)
        else:
            return True
        return False

    def _still_holds(self, job: Job) -> bool:
        """False if members have left or were annotated since: the rest is looked at again."""
        if not self._state.closed and job.holds:
            return True
        self._release(job)
        if not self._state.closed:
            self._events.advance([entry for entry in job.entries if entry.is_staying])
        return False

    def _is_current(self, work: Work) -> bool:
        """Whether the buffer would compute the same now."""
        advantage = self._state.settings.advantage
        return (work.estimator, work.parameters) == (advantage.estimator, advantage.parameters)

    def _quarantine(self, result: Result) -> None:
        """What can't be computed stays visible; it can be deleted or annotated."""
        entries = result.job.entries
        self._release(result.job)
        for entry in entries:
            self._state.contents.set_quarantine(entry, result.error)
        self._events.set_aside(result.damaged)
        _log.warning(
            "quarantined %d experiences of buffer %r, the first is %r: %s",
            len(entries), self._state.name, entries[0].record.uid, result.error,
        )  # fmt: skip

    def _withhold(self, result: Result, batch: WriteBatch) -> None:
        self._note_flags(result.rows)
        self._release(result.job)
        group = result.job.entries[0].group
        assert group is not None
        # That it is closed is on disk with the moments that count it: else a crash in between would
        # have it counted again.
        self._events.withhold(group, batch)

    def _commit(
        self, batch: WriteBatch, part: Sequence[_Computed], results: Sequence[Result]
    ) -> Awaitable[None]:
        row, first = self._state.row, part[0]
        for result in results:
            for advantages in result.rows:
                magnitude = advantages.details["mean_magnitude"]
                batch.put_advantages(row.id, advantages, magnitude=magnitude)
        moments, before, fresh = first.moments, row.moments, list[Entry]()
        if first.work.estimator != self._state.settings.advantage.estimator:
            moments = None  # Of another estimator they are another quantity's.
        if moments is not None:
            row.moments = moments
            batch.put_buffer(row)
            # At once: an annotation that comes while this is under way has to know it.
            entries = [entry for result in results for entry in result.job.entries]
            fresh = [entry for entry in entries if not entry.counted]
            for entry in fresh:
                entry.counted = True

        def stored() -> None:
            for result in results:
                self._stored(result)
            self._end(part)

        def failed(error: BaseException) -> None:
            self._waiting.extendleft(reversed(part))
            if moments is None:
                return
            if row.moments is moments:
                # Else another estimator was set, and they are void.
                row.moments = before
            # Whoever has stored the row meanwhile has stored them with it.
            self._state.store_row_again()
            for entry in fresh:
                entry.counted = False

        return self._state.changes.submit(batch, stored, failed, rides=True)

    def _stored(self, result: Result) -> None:
        self._release(result.job)
        self._note_flags(result.rows)
        current = result.job.current
        details = {row.seq: row.details for row in result.rows}
        for entry in current:
            of_one = details[entry.record.seq]
            entry.magnitude, mean = of_one["mean_magnitude"], of_one["mean_advantage"]
            # One number where they are equal: a million of them stay.
            entry.advantage = entry.magnitude if mean == entry.magnitude else mean
            # Of an estimator that was set meanwhile: what can be sampled waits for no field.
            self._state.contents.set_missing(entry, ())
        self._events.make_available(current)
        if len(current) < len(result.job.entries):
            self._events.advance([entry for entry in result.job.entries if entry.is_staying])

    def _note_flags(self, rows: Sequence[AdvantageRow]) -> None:
        self._state.telemetry.trends.computed([row.details["mean_advantage"] for row in rows])
        self._state.metrics.advantages(self._state.name, [row.details for row in rows])


def _num_bytes(result: Result) -> int:
    return sum(len(row.advantages) for row in result.rows)


def _parts(results: Sequence[Result]) -> list[list[Result]]:
    """So many at a time that a push doesn't wait for long behind them; at least one part."""
    parts: list[list[Result]] = [[]]
    num_bytes = 0
    for result in results:
        if num_bytes >= TUNING.stored_at_once_bytes:
            parts.append([])
            num_bytes = 0
        parts[-1].append(result)
        num_bytes += _num_bytes(result)
    return parts


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

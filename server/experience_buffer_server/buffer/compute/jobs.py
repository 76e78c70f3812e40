"""What is computed together: jobs, the work that holds them, and what becomes of them.

Plain values; scheduling is in `scheduler`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.entries import Entry
from experience_buffer_server.store.interface import AdvantageRow, Found


@dataclass(slots=True, eq=False)
class Job:
    """Experiences whose advantages depend on one another: a whole group, or one experience."""

    entries: list[Entry]
    runs: list[str]
    """Per entry, the run that votes once in the group's statistics; empty: a run of its own."""
    generations: list[int]
    """Of the entries when it was submitted: one that was annotated since makes it void."""
    counts: bool = True
    """Its votes enter the running moments; False for one that is computed again."""

    @property
    def current(self) -> list[Entry]:
        """The entries for which its results hold: there, and as they were when it was submitted."""
        return [
            entry
            for entry, generation in zip(self.entries, self.generations, strict=True)
            if entry.is_staying and entry.generation == generation
        ]

    @property
    def holds(self) -> bool:
        """Whether its results hold for all of its entries."""
        return len(self.current) == len(self.entries)


@dataclass(slots=True, eq=False)
class Result:
    """What became of one job."""

    job: Job
    rows: list[AdvantageRow] = field(default_factory=list)
    error: str = ""
    """Why it can't be computed, now or ever."""
    damaged: Mapping[int, str] = field(default_factory=dict)
    """By seq, what of its experiences can't be read back."""

    @property
    def is_withheld(self) -> bool:
        """Its group has nothing to teach, and isn't to be delivered."""
        return not self.error and bool(self.rows[0].details.get("withheld"))


@dataclass(slots=True, eq=False)
class Work:
    """Jobs of one buffer that share a launch: one, or a batch with statistics in common."""

    state: BufferState
    """Of the buffer that it belongs to."""
    computed: Callable[[Work, Sequence[Result], str | None], Awaitable[None]]
    """Takes what became of some of its jobs, to be stored with running moments if not None.

    The awaitable ends when they are stored or of no use any more."""
    jobs: list[Job]
    estimator: str
    parameters: Mapping[str, Any]
    uses_moments: bool = False
    attempts: int = 0
    number: int = 0
    """Order of submission."""
    moments: str = ""
    """The buffer's running moments that it was computed from, where it uses any."""

    @property
    def num_tokens(self) -> int:
        """Response tokens of all its experiences."""
        return sum(entry.record.response_tokens for job in self.jobs for entry in job.entries)

    def take_moments(self) -> None:
        """It is about to be computed: from the moments of its estimator's scores; others are void."""
        is_current = self.estimator == self.state.settings.advantage.estimator
        self.moments = self.state.row.moments if is_current else ""

    @property
    def lane(self) -> tuple[object, ...]:
        """What can share a launch; with running moments only the work of one buffer."""
        buffer_id = self.state.id if self.uses_moments else 0
        return (self.estimator, tuple(sorted(self.parameters.items())), buffer_id)


def request_of(launch: Sequence[Work]) -> dict[str, Any]:
    """What the worker is asked; its answers follow the order of the groups."""
    first = launch[0]
    jobs = [(place, work, job) for place, work in enumerate(launch) for job in work.jobs]
    return {
        "estimator": first.estimator,
        "parameters": dict(first.parameters),
        "groups": [
            [
                work.state.id,
                [(e.record.uid, run) for e, run in zip(job.entries, job.runs, strict=True)],
            ]
            for _, work, job in jobs
        ],
        "batches": [place for place, _, _ in jobs],
        "counted": [job.counts for _, _, job in jobs],
        "moments": first.moments if first.uses_moments else None,
    }


def sent_payloads(
    request: Mapping[str, Any], read: Callable[[int, Sequence[str]], Sequence[Found[bytes]]]
) -> list[list[bytes | None]]:
    """What a worker that can't read the store gets along with a request: payloads, by group."""
    return [
        [
            payload if isinstance(payload, bytes) else None
            for payload in read(buffer_id, [uid for uid, _ in members])
        ]
        for buffer_id, members in request["groups"]
    ]

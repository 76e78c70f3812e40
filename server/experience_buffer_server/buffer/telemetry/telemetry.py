"""What has happened in one buffer, as its rooms tell it: the one place that they tell.

All of it is in memory, bounded, and begins anew with the server, but for what is kept for a rewind.
What a room tells costs next to nothing there: it is noted, and counted with many others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from experience_buffer.history import Acknowledgement
from experience_buffer_server.buffer.telemetry.departure_log import DepartureLog
from experience_buffer_server.buffer.telemetry.learning import Learning
from experience_buffer_server.buffer.telemetry.push_log import PushLog
from experience_buffer_server.buffer.telemetry.seen import Depth, Seen
from experience_buffer_server.buffer.telemetry.step_log import StepLog
from experience_buffer_server.buffer.telemetry.trend_log import INTERVAL_SECONDS, TrendLog

_MOST_ACKS: Final = 8
"""Of one experience, the last ones: a consumer may replay it a thousand times."""
_MOST_ANNOTATED: Final = 10_000
_NUM_OFFSETS: Final = 50


class Telemetry:
    """What has happened in one buffer. Not thread-safe; belongs to its event loop.

    Args:
        now: Seconds since the Unix epoch.
        number: The buffer's id: buffers make their points at different times.
    """

    def __init__(self, now: float, number: int = 0) -> None:
        self.begin_time = now
        """Since when it is told, seconds since the Unix epoch."""
        self.learning = Learning()
        offset = INTERVAL_SECONDS * (number % _NUM_OFFSETS + 1) / _NUM_OFFSETS
        self.trends = TrendLog(now, self.learning, offset)
        self.steps = StepLog()
        self.departures = DepartureLog()
        self.pushes = PushLog()
        self.annotated: dict[int, tuple[float, str]] = {}
        """By seq, when an experience was annotated last, and in words with what; the newest are last."""
        self._acks: dict[int, tuple[Acknowledgement, ...]] = {}
        """By seq, of what is stored, the acknowledgements that hold."""

    # --- on the way in

    def completed(self, members: Iterable[Seen]) -> None:
        """A group became whole: those of its members that are experiences."""
        rewards = [entry.record.reward for entry in members]
        known = [reward for reward in rewards if reward is not None]
        if len(known) > 1:
            self.trends.completed(is_zero_variance=self.learning.completed(known))

    def note_annotated(self, seq: int, words: str, now: float) -> None:
        """An experience was annotated."""
        self.annotated.pop(seq, None)
        self.annotated[seq] = now, words
        if len(self.annotated) > _MOST_ANNOTATED:
            del self.annotated[next(iter(self.annotated))]

    # --- delivered and acknowledged

    def acked(
        self,
        consumer: str,
        entries: Sequence[Seen],
        *,
        step: int | None,
        version: int | None,
        is_raw: bool,
        now: float,
    ) -> None:
        """A lease was acknowledged; `version` is the policy version when it was granted."""
        self.trends.acked(consumer, len(entries), is_raw=is_raw)
        if step is not None:
            self.steps.acked(consumer, step, entries, version, now)
        self._note_acks(entries, Acknowledgement(consumer=consumer, step=step, time=now))

    def restore(
        self, consumer: str, step: int, entries: Sequence[Seen], times: Collection[float]
    ) -> None:
        """Experiences are kept for a rewind, which a step acknowledged before the start.

        Args:
            consumer: Whose step.
            step: The training step.
            entries: The experiences.
            times: Of its acknowledgements, as far as they are known.
        """
        self.steps.restore(consumer, step, entries, times)
        time = max(times, default=None)
        self._note_acks(entries, Acknowledgement(consumer=consumer, step=step, time=time))

    def _note_acks(self, entries: Sequence[Seen], ack: Acknowledgement) -> None:
        alone, acks = (ack,), self._acks
        for entry in entries:
            seq = entry.record.seq
            before = acks.get(seq)
            acks[seq] = alone if before is None else (*before[1 - _MOST_ACKS :], ack)

    def rewound(self, consumer: str, step: int, seqs: Iterable[int]) -> None:
        """A consumer's acknowledgements after a step were undone; `seqs` are those of what they were."""
        self.steps.rewound(consumer, step)
        for seq in seqs:
            rest = tuple(
                ack
                for ack in self._acks.pop(seq, ())
                if ack.consumer != consumer or ack.step is None or ack.step <= step
            )
            if rest:
                self._acks[seq] = rest

    def acks(self, seq: int) -> tuple[Acknowledgement, ...]:
        """The acknowledgements of a stored experience, the last few, the first one first."""
        return self._acks.get(seq, ())

    # --- on the way out

    def left(
        self,
        entries: Sequence[Seen],
        *,
        reason: str,
        message: str,
        unused: Collection[int],
        is_archived: bool,
        now: float,
    ) -> None:
        """Experiences, or failed rollouts, left; see `DepartureLog.left`."""
        gone = [entry for entry in entries if not entry.record.tombstone]
        if not gone:
            return
        pop = self._acks.pop
        acks = [pop(entry.record.seq, ()) for entry in gone]
        self.departures.left(
            gone,
            acks,
            reason=reason,
            message=message,
            unused=unused,
            is_archived=is_archived,
            now=now,
        )
        if unused:
            self.trends.left(len(unused))

    # --- time

    def sample(self, now: float, depth: Depth) -> None:
        """Make the next point of the trends."""
        self.trends.sample(now, depth)
        self.steps.count()

    def clear(self) -> None:
        """The buffer was deleted: let go of its experiences."""
        self.__init__(self.begin_time)  # type: ignore[misc]

"""The training timeline of a buffer's consumers made durable: rewind, and what is safe.

What is retained at which step is in `sampling.timeline`; leases are the leasing's business. Belongs
to one buffer and its event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from experience_buffer import errors
from experience_buffer_server.buffer.delivery.acks import Acks
from experience_buffer_server.buffer.delivery.leasing import Leasing
from experience_buffer_server.buffer.delivery.offers import Offers
from experience_buffer_server.buffer.state import departure
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.entries import Entry, key_of


class Rewound(NamedTuple):
    """What a rewind undid: the acks of so many experiences, and leases that it returned."""

    num_experiences: int
    num_leases: int


class Released(NamedTuple):
    """What a safe step ends: so many acks can't be rewound any more."""

    num_experiences: int
    safe_step: int | None
    """The last one that was declared safe, or that an ack had reached then."""


class Timelines:
    """Rewinds and releases. Not thread-safe."""

    def __init__(self, state: BufferState, offers: Offers, leasing: Leasing, acks: Acks) -> None:
        self._state = state
        self._offers = offers
        self._progress = state.progress
        self._leasing = leasing
        self._acks = acks
        self._changes = state.changes

    # --- back

    async def rewind(self, consumer: Consumer, step: int) -> Rewound:
        """Undo a consumer's acks after a step and return its open leases. Idempotent.

        Raises:
            InvalidRequestError: The step is below -1, which stands for before the first.
            WrongStateError: The step is before the safe one.
            StoreFullError: It can't be stored; the acks stand.
        """
        if step < -1:
            raise errors.InvalidRequestError(
                f"training step {step} must be at least 0, or -1 for before the first",
                subject="step",
            )
        # An ack that is on its way to the disk belongs to the timeline that is cut.
        await self._acks.settle(consumer.name)
        safe_step = consumer.timeline.safe_step
        if safe_step is not None and step < safe_step:
            raise errors.WrongStateError(
                f"consumer {consumer.name!r} of buffer {self._state.name!r} can't be rewound to training "
                f"step {step}: step {safe_step} was declared safe, what was acknowledged up to it isn't "
                f"kept; rewind to {safe_step} or later",
                subject="step",
            )
        return await self._rewind(consumer, step)

    def _rewind(self, consumer: Consumer, step: int) -> asyncio.Future[Rewound]:
        """Submitted here and now: no ack or lease can come in between."""
        batch = self._changes.batch()
        undone = consumer.timeline.rewind(step)
        entries = self._entries(undone)
        acks = [(entries[seq], acked_step) for seq, acked_step in undone if seq in entries]
        for entry, acked_step in acks:
            self._progress.undo_ack(entry, consumer.name, acked_step)
        undone_times = _times(consumer, undone, entries).items()
        past = {key for key, times in undone_times if consumer.tally.rewound(key, times)}
        for entry in entries.values():
            self._progress.put(batch, entry)
        self._progress.put_consumer(batch, consumer)
        leases = self._leasing.note_returns(batch, consumer.name)

        def stored() -> Rewound:
            self._state.telemetry.rewound(consumer.name, step, entries)
            self._offers.offer_again(entries.values())
            return Rewound(len(entries), len(leases))

        def failed(error: BaseException) -> None:
            consumer.timeline.restore(undone)
            for entry, acked_step in acks:
                self._progress.note_acks([entry], consumer.name, acked_step, forgives=False)
            for key, times in _times(consumer, undone, entries).items():
                consumer.tally.sampled(key, times)
            for key in past:
                consumer.tally.take_off(key)
            for entry in entries.values():
                if key_of(consumer.settings, entry) in past:
                    self._progress.take_off(entry, consumer.name)
            self._progress.note_behind(entries)
            # By settings that are newer than an ack, it needn't have been enough.
            self._offers.offer_again(entries.values())

        return self._leasing.submit_ends(batch, leases, stored, failed)

    # --- safe

    async def declare_safe(self, consumer: Consumer, step: int) -> Released:
        """Keep a consumer's acks up to a step no longer. Idempotent.

        A step that no ack has reached yet stands for the last one: later acks can be rewound.

        Raises:
            InvalidRequestError: The step is negative.
            StoreFullError: It can't be stored; they are kept.
        """
        if step < 0:
            raise errors.InvalidRequestError(
                f"training step {step} must be at least 0", subject="step"
            )
        last_step = consumer.timeline.last_step
        if last_step is None:
            return Released(0, consumer.timeline.safe_step)
        count = await self._release(consumer, min(step, last_step))
        return Released(count, consumer.timeline.safe_step)

    def keep_newest(self, consumer: Consumer) -> None:
        """After an ack: release the steps that the consumer's settings don't retain."""
        last, retain = consumer.timeline.last_step, consumer.settings.retain_steps
        if last is not None and retain and last >= retain:
            safe = consumer.timeline.safe_step
            if safe is None or safe < last - retain:
                self._changes.log(self._release(consumer, last - retain))

    def _release(self, consumer: Consumer, step: int) -> asyncio.Future[int]:
        batch = self._changes.batch()
        released = consumer.timeline.declare_safe(step)
        entries = self._entries(released)
        acks = [(entries[seq], acked_step) for seq, acked_step in released if seq in entries]
        for entry, acked_step in acks:
            self._progress.note_safe(entry, consumer.name, acked_step)
        self._progress.put_consumer(batch, consumer)
        leaving = departure.leave_if_done(self._state, batch, list(entries.values()))

        def stored() -> int:
            departure.forget(self._state, leaving, departure.CONSUMED)
            return len(released)

        def failed(error: BaseException) -> None:
            # The step stays safe in memory: what it released leaves with the next release.
            consumer.timeline.restore(released)
            for entry, acked_step in acks:
                self._progress.note_unsafe(entry, consumer.name, acked_step)
            self._progress.note_behind(entries)
            departure.stay(self._state, leaving, departure.CONSUMED)

        return self._changes.submit(batch, stored, failed)

    def _entries(self, acks: Sequence[tuple[int, int]]) -> dict[int, Entry]:
        """The experiences of acknowledgements, each once; some may have been deleted since."""
        found = self._state.contents.by_seqs(dict.fromkeys(seq for seq, _ in acks))
        return {entry.record.seq: entry for entry in found}


def _times(
    consumer: Consumer, acks: Sequence[tuple[int, int]], entries: dict[int, Entry]
) -> dict[int, int]:
    """How often each unit was acknowledged: an ack of a group is one of each of its members."""
    times = Counter(seq for seq, _ in acks)
    return {key_of(consumer.settings, entry): times[seq] for seq, entry in entries.items()}

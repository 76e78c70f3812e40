# Generated from _async/batch.py by scripts/generate_sync.py; edit that file.
"""A batch that can be acknowledged, as the sync client delivers it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from experience_buffer._messages import delivery_calls
from experience_buffer._messages.batch_data import BatchData

if TYPE_CHECKING:
    from experience_buffer._sync.delivery_verbs import DeliveryVerbs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Batch(BatchData):
    """A delivered batch that can be acknowledged. It can be shared between threads.

    It iterates over its experiences; `batch[0]` and `batch[2:5]` are one of them and a list, in
    whichever format it came. Its tuples are parallel, one entry per experience, groups contiguous.
    It is falsy when it holds nothing; `shortfall` then says why. That isn't an error. Nor is a
    rank's part of a shared batch that has fewer units than there are ranks: it has a lease, and is
    acked like any other. The tuples of a packed batch are empty: `packed` has what they would hold.

    Pickled, or copied, it does in another process what it does here, by a client of its own: `ack`,
    `nack` and `extend` go by the lease, which has to be alive. That of a stream's batch ends with
    the stream, so keep the stream open until the other process has acknowledged.

    Attributes:
        buffer: The buffer's name.
        consumer: The consumer's name.
        lease_id: Names the lease; 0 when nothing was delivered.
        expire_time: When the lease expires, by `time.monotonic()`; infinity when nothing was
            delivered.
        rank: Whose part of a shared batch this is; None when it isn't shared.
        world_size: Ranks that share the batch and its lease; 0 when it isn't shared.
        uids: Each experience's name.
        groups: Each experience's group key; empty texts in ungrouped buffers.
        content: What `payloads` and `experiences` are made of.
        num_deliveries: How often each has been delivered to this consumer, this delivery included.
        staleness: Published policy version minus the version that began the experience; None when
            unknown.
        flags: What each one's advantages are like: "singleton" (nothing to compare with),
            "zero_variance" (all rewards of its group are equal), "masked" (and so its action mask
            was zeroed), "zero_mask" (no token counts), "bootstrapped" (a critic's value stands for
            what was cut off), "stale" (too stale by the consumer's settings, which ask for it all
            the same).
        probabilities: The probability with which each one's unit was chosen when it was; 1 where
            the order is fixed.
        times_sampled: How often each was delivered to this consumer and acknowledged before.
        generations: Each one's generation, for `update_priorities`: it changes with every update.
        columns: The content of a packed batch; see `packed`. None of others.
        num_bytes: Payload bytes.
        num_units: Units (experiences or groups) delivered.
        shortfall: Why there are fewer units than asked for; empty when there aren't.
        policy_version: The newest published policy version; None before the first.
        client: The client that it came by.
        settle: Acknowledges on the stream that delivered this and returns what waits for the
            answer, which is None when the stream ends before it; or returns None where the stream
            has ended already.
    """

    client: DeliveryVerbs
    settle: Callable[[int, int | None], Callable[[], int | None] | None] | None = field(
        default=None
    )

    def __getstate__(self) -> dict[str, Any]:
        state = {each.name: getattr(self, each.name) for each in fields(self)}
        # The stream stays here, and this clock may be none of the other machine's.
        expire_time = time.time() + self.expire_time - time.monotonic()
        return state | {"settle": None, "expire_time": expire_time}

    def __setstate__(self, state: dict[str, Any]) -> None:
        expire_time = time.monotonic() + state["expire_time"] - time.time()
        for name, value in (state | {"expire_time": expire_time}).items():
            object.__setattr__(self, name, value)

    def ack(self, step: int | None = None) -> int:
        """Say that the batch is consumed; returns after the server's commit. Idempotent.

        Args:
            step: The training step that used it, at least 0: `rewind` to an earlier one makes the
                experiences available again, and they are kept until `declare_safe`. None: they
                are consumed for good.

        Returns:
            Ranks that haven't acknowledged their parts of the batch; 0 when it isn't shared.

        Raises:
            LeaseNotFoundError: The lease has expired, or its stream broke: the experiences are
                delivered again.
            ExperienceBufferError: No answer, or another failure.
        """
        return self.begin_ack(step).result()

    def begin_ack(self, step: int | None = None) -> PendingAck:
        """Do what `ack` does without waiting for the server's commit: its `result` does that.

        So the commit goes on beside the next batch. The ack of a batch that no stream has delivered,
        or whose stream has broken, is sent by `result`.

        Args:
            step: As for `ack`.
        """
        settle = self.settle if self.lease_id else None
        return PendingAck(self, step, None if settle is None else settle(self.lease_id, step))

    def nack(self, reason: str = "") -> None:
        """Give the batch back: its experiences are offered again at once.

        A batch that ranks share goes back as a whole, the parts of the others too.

        Args:
            reason: Why; the server logs it.

        Raises:
            LeaseNotFoundError: The lease has ended before.
        """
        if self.lease_id:
            self.client.nack(self.lease_id, buffer=self.buffer, reason=reason)

    def extend(self, lease_seconds: float = 0.0) -> float:
        """Give the lease more time, never less than it has; `expire_time` moves with it.

        Args:
            lease_seconds: From now until it expires; 0: the buffer's default.

        Returns:
            Seconds until it expires; infinity when nothing was delivered.

        Raises:
            LeaseNotFoundError: The lease has ended before.
        """
        if not self.lease_id:
            return math.inf
        seconds = self.client.extend_lease(
            self.lease_id, buffer=self.buffer, lease_seconds=lease_seconds
        )
        # It is the one field that changes.
        object.__setattr__(self, "expire_time", time.monotonic() + seconds)
        return seconds


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PendingAck:
    """An ack that may be under way. It can be shared between threads.

    Pickled it asks the server again, which is fine: acks are idempotent.

    Attributes:
        batch: What is acknowledged.
        step: The training step that used it; None: consumed for good.
        wait: Waits for the answer on the batch's stream; None where there is none.
    """

    batch: Batch
    step: int | None
    wait: Callable[[], int | None] | None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.batch, self.step, None)

    def __repr__(self) -> str:
        step = "" if self.step is None else f" with step {self.step}"
        return f"<{type(self).__name__} of {self.batch!r}{step}>"

    def result(self) -> int:
        """Wait until the batch is consumed; see `Batch.ack` for what is returned and raised."""
        batch = self.batch
        if not batch.lease_id:
            return 0
        num_waiting = None if self.wait is None else self.wait()
        if num_waiting is not None:
            return num_waiting
        call = delivery_calls.ack(
            batch.lease_id, buffer=batch.buffer, step=self.step, rank=batch.rank
        )
        acked = batch.client._run(call)
        return acked.num_waiting_ranks

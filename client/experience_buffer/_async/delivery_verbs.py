"""The async client's verbs about delivery: leases, the training timeline, priorities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from experience_buffer._arguments import as_words
from experience_buffer._async.connection import AsyncConnection
from experience_buffer._async.listing import AsyncPages
from experience_buffer._messages import convert, delivery_calls, fields, timeline
from experience_buffer._messages.calls import number
from experience_buffer._messages.convert import reader_of
from experience_buffer._messages.delivery_calls import Priorities
from experience_buffer._transport.retry import Deadline
from experience_buffer.errors import InvalidRequestError
from experience_buffer.looking import LeaseInfo
from experience_buffer.values import PriorityResult, RewindResult, SafeResult


class AsyncDeliveryVerbs(AsyncConnection):
    """Verbs about what was delivered."""

    def _prepare(self) -> None:
        super()._prepare()
        self._parts: dict[tuple[str, str, int | None], int] = {}
        """By buffer, consumer and rank: the lease whose part was received last."""

    async def ack(
        self,
        lease_id: int,
        *,
        buffer: str = "default",
        step: int | None = None,
        rank: int | None = None,
    ) -> int:
        """End a lease: its experiences are consumed; how many these are. Idempotent.

        Args:
            lease_id: The lease.
            buffer: The buffer's name.
            step: The training step that used it, at least 0: `rewind` to an earlier one makes the
                experiences available again, and they are kept until `declare_safe`. None: they
                are consumed for good.
            rank: Of a shared lease, the rank whose part this is; the lease ends with the last one.

        Raises:
            LeaseNotFoundError: It expired or was given back.
        """
        call = delivery_calls.ack(lease_id, buffer=buffer, step=step, rank=rank)
        acked = await self._run(call)
        return acked.num_experiences

    async def nack(self, lease_id: int, *, buffer: str = "default", reason: str = "") -> int:
        """End a lease: its experiences are offered again; how many these are.

        Args:
            lease_id: The lease.
            buffer: The buffer's name.
            reason: Why; the server logs it.

        Raises:
            LeaseNotFoundError: It has ended before.
        """
        parse = number("num_experiences")
        reason = as_words("reason", reason)
        return await self._call("Nack", parse, buffer=buffer, lease_id=lease_id, reason=reason)

    async def extend_lease(
        self, lease_id: int, *, buffer: str = "default", lease_seconds: float = 0.0
    ) -> float:
        """Give a lease more time, never less than it has; seconds until it expires. Idempotent.

        Args:
            lease_id: The lease.
            buffer: The buffer's name.
            lease_seconds: From now until it expires; 0: the buffer's default.

        Raises:
            LeaseNotFoundError: It has ended before.
        """
        parse = attrgetter("lease.expires_in_seconds")
        seconds: float = await self._call(
            "ExtendLease", parse, buffer=buffer, lease_id=lease_id, lease_seconds=lease_seconds
        )
        return seconds

    def list_leases(
        self,
        *,
        buffer: str = "default",
        consumer: str = "",
        lease_id: int = 0,
        page_size: int = 100,
    ) -> AsyncPages[LeaseInfo]:
        """Iterate over open leases, oldest first: who holds what, since when, until when.

        Args:
            buffer: The buffer's name.
            consumer: Only those of this consumer; empty: of all.
            lease_id: Only this one, with its first 1,024 units; 0: all.
            page_size: Leases per call, at most 1,000.
        """
        return AsyncPages(
            self,
            "ListLeases",
            convert.page_of("leases"),
            buffer=buffer,
            consumer=consumer,
            lease_id=lease_id,
            page_size=page_size,
        )

    async def rewind(
        self, step: int, *, buffer: str = "default", consumer: str = "trainer"
    ) -> RewindResult:
        """Go back to a training step: what was acked after it is available again. Idempotent.

        Open leases of the consumer, of all its ranks, are returned too. `load_state_dict` does
        this with a checkpoint's state.

        Args:
            step: The last step that stays; -1: none.
            buffer: The buffer's name.
            consumer: The consumer's name.

        Raises:
            WrongStateError: It is before the safe training step.
        """
        parse = reader_of(RewindResult)
        result = await self._call("Rewind", parse, buffer=buffer, consumer=consumer, step=step)
        self._forget_parts(buffer, consumer)
        return result

    async def declare_safe(
        self, step: int, *, buffer: str = "default", consumer: str = "trainer"
    ) -> SafeResult:
        """Say that the consumer is never rewound before a training step: the checkpoint is on disk.

        What was acked up to it needn't be kept any longer. Idempotent.

        Args:
            step: The step of the oldest checkpoint that may be loaded, at least 0.
            buffer: The buffer's name.
            consumer: The consumer's name.
        """
        parse = reader_of(SafeResult)
        return await self._call("DeclareSafe", parse, buffer=buffer, consumer=consumer, step=step)

    def state_dict(
        self, step: int, *, buffer: str = "default", consumer: str = "trainer"
    ) -> dict[str, Any]:
        """Make what a checkpoint must hold for `load_state_dict`. Asks no server.

        Ack every batch with its training step before the checkpoint that has learned from it is written:
        a batch that isn't acked then is delivered again after `load_state_dict`.

        Args:
            step: The last training step that the checkpoint has learned from; -1: none.
            buffer: The buffer's name.
            consumer: The consumer's name.

        Returns:
            Plain data that JSON can hold: "version", "buffer", "consumer", "step".
        """
        return timeline.make_state(step, buffer=buffer, consumer=consumer)

    async def load_state_dict(self, state: Mapping[str, Any]) -> RewindResult:
        """Go on from a checkpoint: what was acked after its training step comes again.

        Call it before the first batch is sampled. It is enough that one rank does; where all do,
        each must have done so before any rank samples (a barrier), because it returns all open
        leases of the consumer: batches that a rank has sampled already would be delivered again.

        Args:
            state: What `state_dict` returned.

        Raises:
            InvalidRequestError: It is something else.
            WrongStateError: A later training step was declared safe: its checkpoint is the one to load.
        """
        step, buffer, consumer = timeline.read_state(state)
        return await self.rewind(step, buffer=buffer, consumer=consumer)

    async def release_quarantined(
        self,
        uids: str | Sequence[str] | None = None,
        *,
        buffer: str = "default",
        consumer: str = "trainer",
    ) -> int:
        """Offer quarantined experiences to a consumer again; how many units these are.

        Args:
            uids: Which, with the whole of their groups where it takes groups; None: all that are
                quarantined for it.
            buffer: The buffer's name.
            consumer: The consumer's name.

        Raises:
            ExperienceNotFoundError: A named one isn't quarantined; the others are offered again.
        """
        names = [] if uids is None else fields.texts("uids", uids)
        if uids is not None and not names:
            return 0
        parse = number("num_units")
        # Not repeated: what was released may have been delivered, and quarantined again, since.
        return await self._call(
            "ReleaseQuarantined",
            parse,
            idempotent=False,
            buffer=buffer,
            consumer=consumer,
            uids=names,
        )

    async def update_priorities(
        self,
        priorities: Priorities,
        *,
        buffer: str = "default",
        timeout: float | None = None,
    ) -> PriorityResult:
        """Set priorities, for the selectors that choose by them.

        More than 10,000 go in several requests. What can be set of a request is set in one commit.

        Args:
            priorities: By uid, or `(uid, priority, generation)` with the generation of the sampled
                experience, as in `zip(batch.uids, priorities, batch.generations)`: then it is set
                only if nobody has updated it since. Finite, at least 0; each uid once.
            buffer: The buffer's name.
            timeout: Seconds for all of it, retries included; None: the client's.

        Raises:
            InvalidRequestError: An entry is malformed, or a uid is given twice: nothing is set. Or a
                priority is NaN, infinite or below 0: all others are set.
        """
        deadline = Deadline(self._seconds(timeout))
        results: list[PriorityResult] = []
        refused: InvalidRequestError | None = None
        for call in delivery_calls.update_priorities(priorities, buffer=buffer):
            try:
                results.append(await self._run(call, deadline.remaining()))
            except InvalidRequestError as error:
                if error.subject != delivery_calls.BAD_PRIORITY:
                    raise
                refused = refused or error
        if refused is not None:
            raise refused
        return delivery_calls.join_priorities(results)

    def _forget_parts(self, buffer: str, consumer: str) -> None:
        """Forget which shared batches were received: the oldest one that is open comes next."""
        for part in list(self._parts):
            if part[:2] == (buffer, consumer):
                self._parts.pop(part, None)

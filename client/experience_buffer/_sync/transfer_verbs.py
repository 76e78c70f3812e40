# Generated from _async/transfer_verbs.py by scripts/generate_sync.py; edit that file.
"""The sync client's verbs that move experiences: push, writer, sample, stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from experience_buffer._arguments import Table, as_flag, as_text, check_whole, made
from experience_buffer._messages import delivery_calls
from experience_buffer._messages.names import FORMAT
from experience_buffer._messages.push_plan import Push
from experience_buffer._sync.batch import Batch
from experience_buffer._sync.delivery_verbs import DeliveryVerbs
from experience_buffer._sync.primitives import in_thread
from experience_buffer._sync.stream import SampleStream
from experience_buffer._sync.writer import Writer
from experience_buffer._transport.retry import Deadline
from experience_buffer._transport.sample_plan import StreamPlan
from experience_buffer.consumer_options import SampleFormat
from experience_buffer.errors import ExperienceBufferError
from experience_buffer.options import WriterOptions
from experience_buffer.outcomes import PushResult
from experience_buffer.values import Tombstone

if TYPE_CHECKING:
    from experience_buffer.experience import Experience


class TransferVerbs(DeliveryVerbs):
    """Verbs by which experiences go to the server and come from it."""

    def push(
        self,
        experiences: Sequence[Experience] | Sequence[bytes] | bytes,
        *,
        buffer: str = "default",
        tombstones: Sequence[Tombstone] = (),
        group_size: int = 0,
        raise_on_refused: bool = True,
        timeout: float | None = None,
    ) -> PushResult:
        """Store experiences; returns when all of them are durable. Idempotent.

        Long sequences go in several requests, and what the buffer, its limiters or the server take
        no more than a part of at once goes in smaller ones. An experience that can't be written, or
        is beyond a limit alone, is refused, and its neighbours are stored. After an error, what was
        sent before is stored: pushing the same again is safe.

        Args:
            experiences: To encode; or TRXP payloads of one experience each, or one of any number, which
                are sent as they are.
            buffer: The buffer's name.
            tombstones: Rollouts that failed; they complete their groups.
            group_size: Expected members of every group named here; 0: the buffer's default.
            raise_on_refused: False: return refused items in the result instead of raising.
            timeout: Seconds for all of it, retries included; None: the client's.

        Returns:
            One outcome per experience, then one per tombstone.

        Raises:
            PushRefusedError: Items were refused; all others are stored.
            InvalidRequestError: An argument is malformed; its text names it, and nothing is sent.
            MessageTooLargeError: A raw payload is over the message limit, and can't be read.
            BufferFullError: The buffer stayed full until the timeout.
        """
        as_flag("raise_on_refused", raise_on_refused)
        deadline = Deadline(self._seconds(timeout))
        push = Push(experiences, tombstones, self._options, buffer=buffer, group_size=group_size)
        while (call := in_thread(push.next_call)) is not None:
            try:
                push.answered(self._run(call, deadline.remaining()))
            except ExperienceBufferError as error:
                in_thread(push.failed, error)
        result = push.result()
        if raise_on_refused:
            result.raise_for_refused()
        return result

    def writer(
        self,
        *,
        buffer: str = "default",
        group_size: int = 0,
        options: WriterOptions | Table | None = None,
    ) -> Writer:
        """Make a writer that pushes in the background; use it as a context manager.

        Args:
            buffer: The buffer's name.
            group_size: Expected members of every group written; 0: the buffer's default.
            options: Bounds of its queue and of its requests.
        """
        return Writer(
            self,
            buffer=buffer,
            group_size=group_size,
            options=WriterOptions() if options is None else made(WriterOptions, options, "options"),
        )

    def sample(
        self,
        batch_size: int,
        *,
        buffer: str = "default",
        consumer: str = "trainer",
        min_batch_size: int = 0,
        lease_seconds: float = 0.0,
        rank: int | None = None,
        world_size: int | None = None,
        format: SampleFormat = "trxp",
        timeout: float | None = None,
    ) -> Batch:
        """Lease one batch, waiting for it.

        An empty batch is not an error: it is falsy, and its `shortfall` says what was missing. Of a
        call that is cancelled or interrupted nothing stays leased.

        Args:
            batch_size: Units wanted: experiences or groups, by the consumer's configuration.
            buffer: The buffer's name.
            consumer: The consumer's name.
            min_batch_size: Fewest units worth delivering at the timeout; 0: `batch_size`.
            lease_seconds: Until the lease expires; 0: the buffer's default.
            rank: With `world_size`, this rank's part of a batch that all ranks share: whole units,
                balanced by tokens, none where there are fewer units than ranks. All ranks ask for
                the same `batch_size`, which is the batch's. This client then asks for one shared
                batch after the other, one thread per rank; a new client, as after a crash, first
                gets the oldest part again that its rank hasn't acknowledged.
            world_size: How many ranks share each batch; None: nobody shares this one.
            format: "trxp": a payload per experience; "packed": the whole batch as columns, in
                `packed`, which is faster for large batches of short experiences.
            timeout: Seconds to wait for a full batch; 0: take what is there; None: the client's
                timeout. The call itself may take the client's timeout longer.

        Raises:
            ConsumerNotFoundError: The buffer has no such consumer.
        """
        wait_seconds = self._seconds(timeout)
        part = (as_text("buffer", buffer), as_text("consumer", consumer), rank)
        if rank is not None:
            check_whole("rank", rank, most=2**32 - 1)
        shared = delivery_calls.rank_of(rank, world_size, self._parts.get(part, 0))
        # Safe to repeat: a batch whose response was lost is offered again when the call comes again,
        # and a rank that asks again gets the same part.
        call, give_up = delivery_calls.sample(
            buffer=buffer,
            consumer=consumer,
            batch_size=batch_size,
            min_batch_size=min_batch_size,
            timeout_seconds=wait_seconds,
            lease_seconds=lease_seconds,
            format=FORMAT.number(format, "format"),
            holder=delivery_calls.holder_of(self._options),
            **delivery_calls.given(rank_of=shared),
        )
        fields = self._run_unless_given_up(call, give_up, wait_seconds + self._timeout)
        whose = shared.rank if shared else None
        batch = Batch(client=self, buffer=buffer, consumer=consumer, rank=whose, **fields)
        if batch.rank is not None and batch.lease_id:
            self._parts[part] = batch.lease_id
        return batch

    def stream(
        self,
        batch_size: int,
        *,
        buffer: str = "default",
        consumer: str = "trainer",
        prefetch: int = 2,
        max_bytes: int = 0,
        min_batch_size: int = 0,
        lease_seconds: float = 0.0,
        rank: int | None = None,
        world_size: int | None = None,
        format: SampleFormat = "trxp",
        timeout: float = 10.0,
        first_timeout: float | None = None,
    ) -> SampleStream:
        """Iterate over batches without end; use it as a context manager.

        Args:
            batch_size: Units wanted in each batch.
            buffer: The buffer's name.
            consumer: The consumer's name.
            prefetch: Batches that the server may send ahead; their leases run meanwhile.
            max_bytes: Payload bytes that it may send ahead; 0: any. One batch may exceed them.
            min_batch_size: Fewest units worth delivering after `timeout`; 0: `batch_size`.
            lease_seconds: Until a lease expires; 0: the buffer's default.
            rank: With `world_size`, this rank's parts of batches that all ranks share, as in
                `sample`; a new stream begins with the oldest part that isn't acknowledged.
            world_size: How many ranks share each batch; None: nobody shares these.
            format: "trxp": a payload per experience; "packed": each batch as columns, in `packed`.
            timeout: Seconds after which a smaller batch may come (0: ten), or else a note on what
                is waited for is logged and shown in `SampleStream.waiting`.
            first_timeout: Seconds that a call for the first batch waits before it raises
                `DeadlineExceededError`, which says what the server waits for; None: without end.
        """
        plan = StreamPlan(
            batch_size=batch_size,
            buffer=buffer,
            consumer=consumer,
            prefetch=prefetch,
            max_bytes=max_bytes,
            min_batch_size=min_batch_size,
            timeout_seconds=timeout,
            first_timeout=first_timeout,
            lease_seconds=lease_seconds,
            rank=rank,
            world_size=world_size,
            format=format,
            options=self._options,
        )
        return SampleStream(self, plan)

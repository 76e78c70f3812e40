"""The sync client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from experience_buffer import _annotate, _calls, _push
from experience_buffer._connection import Connection
from experience_buffer._retry import Deadline
from experience_buffer._sampling import StreamPlan
from experience_buffer._stream import Batch, SampleStream
from experience_buffer._writer import Writer
from experience_buffer.options import BufferChanges, BufferConfig, WriterOptions
from experience_buffer.outcomes import AnnotateOutcome, AnnotateResult, PushOutcome, PushResult
from experience_buffer.values import (
    BufferInfo,
    DeleteResult,
    ExperienceState,
    ExperienceSummary,
    SealedGroup,
    Stats,
    StoredExperience,
    Tombstone,
)

if TYPE_CHECKING:
    from experience_buffer.experience import Experience


class Client(Connection):
    """Talks to an experience buffer server.

    It can be shared between threads, pickled, and used after a fork: the connection is made
    when first needed, one per process.

    Args:
        address: "host", "host:port" (port 50051 unless given), "[v6 address]:port",
            "unix:path", or another gRPC target.
        token: Sent as `authorization: Bearer`; needs `tls` unless the server is on this machine.
        timeout: Seconds that a call may take, retries included, unless it says otherwise.
        tls: Encrypts the connection; None: plain.
        options: Limits, keepalive, retries.

    Every call raises `ExperienceBufferError` or one of its subclasses, never a gRPC error:
    `UnavailableError` when no server answers, `DeadlineExceededError` when one is too slow,
    `BufferNotFoundError`, and what the method names.
    """

    def push(
        self,
        experiences: Sequence[Experience] | bytes,
        *,
        buffer: str = "default",
        tombstones: Sequence[Tombstone] = (),
        group_size: int = 0,
        raise_on_refused: bool = True,
        timeout: float | None = None,
    ) -> PushResult:
        """Store experiences; returns when all of them are durable. Idempotent.

        Long sequences go in several requests. After an error, what was sent before is stored:
        pushing the same again is safe.

        Args:
            experiences: To encode, or one TRXP payload of any number, sent as it is.
            buffer: The buffer's name.
            tombstones: Rollouts that failed; they complete their groups.
            group_size: Expected members of every group named here; 0: the buffer's default.
            raise_on_refused: False: return refused items in the result instead of raising.
            timeout: Seconds for all of it, retries included; None: the client's.

        Returns:
            One outcome per experience, then one per tombstone.

        Raises:
            PushRefusedError: The server refused items; all others are stored.
            MessageTooLargeError: One experience, or the raw payload, is over the message limit.
            BufferFullError: The buffer stayed full until the timeout.
        """
        deadline = Deadline(self._timeout if timeout is None else timeout)
        outcomes: list[PushOutcome] = []
        response = None
        for chunk in _push.split(experiences, tombstones, self._options):
            request = chunk.request(buffer, group_size)
            response = self._run(_calls.push(request), deadline.remaining())
            outcomes.extend(chunk.outcomes(response))
        result = _push.join(outcomes, response)
        if raise_on_refused:
            result.raise_for_refused()
        return result

    def writer(
        self,
        *,
        buffer: str = "default",
        group_size: int = 0,
        options: WriterOptions | None = None,
    ) -> Writer:
        """Make a writer that pushes in the background; use it as a context manager.

        Args:
            buffer: The buffer's name.
            group_size: Expected members of every group written; 0: the buffer's default.
            options: Bounds of its queue and of its requests.
        """
        return Writer(
            self, buffer=buffer, group_size=group_size, options=options or WriterOptions()
        )

    def sample(
        self,
        batch_size: int,
        *,
        buffer: str = "default",
        consumer: str = "trainer",
        min_batch_size: int = 0,
        lease_seconds: float = 0.0,
        timeout: float | None = None,
    ) -> Batch:
        """Lease one batch, waiting for it.

        An empty batch is not an error: it is falsy, and its `shortfall` says what was missing.

        Args:
            batch_size: Units wanted: experiences or groups, by the consumer's configuration.
            buffer: The buffer's name.
            consumer: The consumer's name.
            min_batch_size: Fewest units worth delivering at the timeout; 0: `batch_size`.
            lease_seconds: Until the lease expires; 0: the buffer's default.
            timeout: Seconds to wait for a full batch; 0: take what is there; None: the client's
                timeout. The call itself may take the client's timeout longer.

        Raises:
            ConsumerNotFoundError: The buffer has no such consumer.
        """
        wait_seconds = self._timeout if timeout is None else timeout
        call = _calls.sample(
            batch_size,
            buffer=buffer,
            consumer=consumer,
            wait_seconds=wait_seconds,
            min_batch_size=min_batch_size,
            lease_seconds=lease_seconds,
        )
        return Batch(client=self, **self._run(call, wait_seconds + self._timeout))

    def stream(
        self,
        batch_size: int,
        *,
        buffer: str = "default",
        consumer: str = "trainer",
        prefetch: int = 2,
        min_batch_size: int = 0,
        lease_seconds: float = 0.0,
        timeout: float = 10.0,
    ) -> SampleStream:
        """Iterate over batches without end; use it as a context manager.

        Args:
            batch_size: Units wanted in each batch.
            buffer: The buffer's name.
            consumer: The consumer's name.
            prefetch: Batches that the server may send ahead; their leases run meanwhile.
            min_batch_size: Fewest units worth delivering after `timeout`; 0: `batch_size`.
            lease_seconds: Until a lease expires; 0: the buffer's default.
            timeout: Seconds after which a smaller batch may come, or else a note on what is
                waited for is logged and shown in `SampleStream.waiting`.
        """
        plan = StreamPlan(
            batch_size=batch_size,
            buffer=buffer,
            consumer=consumer,
            prefetch=prefetch,
            min_batch_size=min_batch_size,
            timeout_seconds=timeout,
            lease_seconds=lease_seconds,
        )
        return SampleStream(self, plan)

    def ack(self, lease_id: int, *, buffer: str = "default") -> int:
        """End a lease: its experiences are consumed; how many these are. Idempotent.

        Raises:
            LeaseNotFoundError: It expired or was given back.
        """
        return self._run(_calls.ack(lease_id, buffer=buffer))

    def nack(self, lease_id: int, *, buffer: str = "default", reason: str = "") -> int:
        """End a lease: its experiences are offered again; how many these are.

        Raises:
            LeaseNotFoundError: It has ended before.
        """
        return self._run(_calls.nack(lease_id, buffer=buffer, reason=reason))

    def seal_group(
        self, group: str, *, buffer: str = "default", group_size: int = 0
    ) -> SealedGroup:
        """Say that a group gets no more members than stated; 0: than it has now.

        Raises:
            GroupNotFoundError: The buffer knows no such group.
        """
        return self._run(_calls.seal_group(group, buffer=buffer, group_size=group_size))

    def drop_group(self, group: str, *, buffer: str = "default", reason: str = "") -> int:
        """Discard a group whose task was aborted; how many experiences go.

        Raises:
            GroupNotFoundError: The buffer knows no such group.
        """
        return self._run(_calls.drop_group(group, buffer=buffer, reason=reason))

    def get(self, uid: str, *, buffer: str = "default") -> StoredExperience:
        """Read one experience.

        Raises:
            ExperienceNotFoundError: It isn't there.
            DataLossError: Its record is damaged.
        """
        return self._run(_calls.get(uid, buffer=buffer))

    def annotate(
        self,
        annotations: Mapping[str, Mapping[str, Any]],
        *,
        buffer: str = "default",
        raise_on_refused: bool = True,
        timeout: float | None = None,
    ) -> AnnotateResult:
        """Add fields that came late to stored experiences; what depends on them is computed again.

        Returns when all are durable. Idempotent; many go in several requests, and after an error
        what was sent before is stored.

        Args:
            annotations: By uid what is added, by the names that `Experience` has for it:
                `reward`, `baseline_reward`, `env_state_hash` and `num_turns` as values; `values`,
                `ref_logprobs` and other tensors as lists (float32; `versions` int64), arrays or
                tensors of any dtype. Other numbers and texts become entries of `info`, as
                everything in `info` does, a dict of plain data.
            buffer: The buffer's name.
            raise_on_refused: False: return refused ones in the result instead of raising.
            timeout: Seconds for all of it, retries included; None: the client's.

        Returns:
            One outcome per annotation, in order.

        Raises:
            InvalidRequestError: An annotation holds what can't be sent; none is stored then.
            AnnotateRefusedError: The server refused some; all others are stored.
            MessageTooLargeError: One annotation is over the message limit.
        """
        deadline = Deadline(self._timeout if timeout is None else timeout)
        outcomes: list[AnnotateOutcome] = []
        requests = _annotate.requests(annotations, buffer=buffer, options=self._options)
        for request in requests:
            answer = self._run(_calls.annotate(request), deadline.remaining())
            outcomes.extend(answer)
        result = AnnotateResult(outcomes=tuple(outcomes))
        if raise_on_refused:
            result.raise_for_refused()
        return result

    def list(
        self,
        *,
        buffer: str = "default",
        tid: str = "",
        rid: str = "",
        sid: str = "",
        state: ExperienceState | None = None,
        page_size: int = 100,
    ) -> Iterator[ExperienceSummary]:
        """Iterate over summaries of stored experiences, oldest first, fetching page by page.

        Args:
            buffer: The buffer's name.
            tid: Only those of this task.
            rid: Only those of this run.
            sid: Only those of this step.
            state: Only those in this state.
            page_size: Summaries per call, at most 1,000.
        """
        where = _calls.make_filter(tid=tid, rid=rid, sid=sid, state=state)
        token, more = "", True
        while more:
            page, token = self._run(
                _calls.list_page(token, buffer=buffer, where=where, page_size=page_size)
            )
            yield from page
            more = bool(token)

    def delete(
        self,
        uids: str | Sequence[str] | None = None,
        *,
        buffer: str = "default",
        tid: str = "",
        rid: str = "",
        sid: str = "",
        state: ExperienceState | None = None,
    ) -> DeleteResult:
        """Remove experiences that aren't leased, by uids (at most 10,000) or by keys and state.

        Raises:
            InvalidRequestError: Both uids and keys, or neither, are given.
        """
        where = _calls.make_filter(tid=tid, rid=rid, sid=sid, state=state)
        call = _calls.delete(uids, buffer=buffer, where=where)
        return self._run(call) if call else _calls.NOTHING_DELETED

    def create_buffer(self, config: BufferConfig | str, *, exist_ok: bool = False) -> BufferInfo:
        """Create a buffer.

        Args:
            config: Its configuration, or just its name.
            exist_ok: True: answer with the one that exists if its configuration is the same.

        Raises:
            AlreadyExistsError: The name is taken.
        """
        return self._run(_calls.create_buffer(config, exist_ok=exist_ok))

    def update_buffer(self, name: str, **changes: Unpack[BufferChanges]) -> BufferInfo:
        """Change fields of a buffer's configuration, named as in `BufferConfig`.

        Raises:
            WrongStateError: `group_by` can't change while experiences are stored.
        """
        return self._run(_calls.update_buffer(BufferConfig(name, **changes)))

    def get_buffer(self, name: str) -> BufferInfo:
        """Read a buffer's configuration and size."""
        return self._run(_calls.get_buffer(name))

    def list_buffers(self) -> tuple[BufferInfo, ...]:
        """Read all buffers, by name."""
        return self._run(_calls.list_buffers())

    def delete_buffer(self, name: str, *, force: bool = False) -> int:
        """Remove a buffer; how many experiences were in it.

        Args:
            name: The buffer's name.
            force: True: also when experiences are stored in it.

        Raises:
            WrongStateError: Experiences are stored in it, and `force` is False.
        """
        return self._run(_calls.delete_buffer(name, force=force))

    def publish_policy_version(self, version: int, *, buffer: str = "default") -> int | None:
        """Say which policy the trainer has published; the version before, None if the first.

        Args:
            version: At least 0; may be lower than the last (a rollback).
            buffer: The buffer's name.
        """
        return self._run(_calls.publish_policy_version(version, buffer=buffer))

    def get_stats(self, buffer: str = "") -> Stats:
        """Read counts, depths and what is waited for, of one buffer or of all."""
        return self._run(_calls.get_stats(buffer))

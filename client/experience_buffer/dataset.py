"""A buffer as a torch dataset: batches of a consumer, with acks, ranks, workers and a state.

What is yielded is laid out by the functions in `collation.py`. Importing this module imports torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

from experience_buffer._dense.convert import require_torch

try:
    from torch.utils.data import IterableDataset, get_worker_info
except ModuleNotFoundError:
    require_torch("experience_buffer.dataset")
    raise

from experience_buffer import collation
from experience_buffer._arguments import check_whole, refused, shown
from experience_buffer._data import loader as _loader
from experience_buffer._data import token_budget as _token_budget
from experience_buffer._data.dataset_feed import Feed, LeasedBatch, LeaseTicket
from experience_buffer._messages import timeline
from experience_buffer.client import Client
from experience_buffer.collation import Collate
from experience_buffer.consumer_options import SampleFormat
from experience_buffer.errors import InvalidRequestError, LeaseNotFoundError
from experience_buffer.values import RewindResult, SafeResult

__all__ = ["AckPolicy", "ExperienceDataset", "LeaseTicket", "LeasedBatch"]
__dir__ = __all__.copy

AckPolicy: TypeAlias = Literal["auto", "manual"]
"""Who says that a batch is consumed: asking for the next one does, or the trainer."""


class ExperienceDataset(IterableDataset[Any]):
    """Batches of one consumer, without end or for a number of training steps.

    Iterate over it, or give it to a `DataLoader` with `batch_size=None`: its batches are whole
    already, and a loader that puts several together is refused. It can be pickled. Nothing is
    connected before the first batch is asked for, and then in the process that asks. One thread at a
    time uses it.

    With `ack="auto"` it yields what `collate` returns, and a batch is acknowledged, with `step`,
    when the next one is asked for, or by `state_dict`. With `ack="manual"` it yields
    `LeasedBatch(data, ticket)`, and the trainer calls `ack(ticket, step=...)`, in this process or
    in the one that has made the DataLoader. What isn't acknowledged is delivered again when the
    dataset or its process ends; a new iteration goes on where the last one stopped.

    With `num_workers` of a DataLoader each worker has a stream of its own, and the server gives each
    batch to one of them. Then acks are manual, `stop_after` is None, and with more than one worker
    there are no ranks and no token budget; other combinations are refused when they iterate.
    """

    def __init__(
        self,
        client: Client | str,
        *,
        batch_size: int,
        buffer: str = "default",
        consumer: str = "trainer",
        rank: int = 0,
        world_size: int = 1,
        format: SampleFormat = "packed",
        collate: Collate | None = None,
        token_budget: int | None = None,
        ack: AckPolicy = "auto",
        stop_after: int | None = None,
        prefetch: int = 2,
        max_bytes: int = 0,
        min_batch_size: int = 0,
        lease_seconds: float = 0.0,
        timeout: float = 10.0,
        first_timeout: float | None = None,
    ) -> None:
        """Set it up; connects to nothing.

        Args:
            client: The client, or the server's address.
            batch_size: Units (experiences or groups) of each delivered batch; with ranks, of the
                batch that all of them share.
            buffer: The buffer's name.
            consumer: The consumer's name.
            rank: Which of the data-parallel ranks this is.
            world_size: How many there are: each gets its part of every batch, whole units, balanced
                by tokens.
            format: How experiences travel: "trxp", a payload each, or "packed", which is faster.
            collate: Makes what is yielded of a `PackedBatch`, or of a list of `Experience` where
                `format` is "trxp"; None: yields these themselves. One of `collation.py`, or any
                function; for DataLoader workers one that can be pickled.
            token_budget: Most tokens of what is yielded at once: a delivered batch is split into
                micro-batches of whole experiences, with few of them as the aim. A longer experience
                is a micro-batch of its own and logs a warning. None: batches aren't split.
            ack: Who acknowledges: asking for the next batch does ("auto"), or `ack` ("manual").
            stop_after: Delivered batches, thus training steps, after which an iteration ends; None: never.
            prefetch: Batches that the server may send ahead; their leases run meanwhile.
            max_bytes: Payload bytes that it may send ahead; 0: any.
            min_batch_size: Fewest units worth delivering after `timeout`; 0: `batch_size`.
            lease_seconds: Until an unacknowledged batch is delivered again; 0: the buffer's
                default. Give more than read-ahead and a training step take.
            timeout: Seconds after which a smaller batch may come.
            first_timeout: Seconds after which waiting for the first batch raises
                `DeadlineExceededError`, which says what the server waits for; None: never.

        Raises:
            InvalidRequestError: A value is out of bounds, or values don't go together.
        """
        super().__init__()
        if not isinstance(client, (str, Client)):
            raise refused("client", client, "a Client, or the server's address as text")
        check_whole("batch_size", batch_size, least=1)
        check_whole("min_batch_size", min_batch_size)
        check_whole("rank", rank)
        check_whole("world_size", world_size, least=1)
        _check_ranks(rank, world_size, min_batch_size or batch_size)
        if not isinstance(ack, str) or ack not in ("auto", "manual"):
            raise refused("ack", ack, "'auto' or 'manual'")
        if stop_after is not None:
            check_whole("stop_after", stop_after, hint=", or None")
        if collate is not None:
            _check_collate(collate)
        if token_budget is not None:
            _token_budget.check(token_budget)
        self.client = Client(client) if isinstance(client, str) else client
        """The client, for all other verbs."""
        self.buffer, self.consumer = buffer, consumer
        self.rank, self.world_size = rank, world_size
        self.step = 0
        """The training step of the batch that is trained on, with which it is acknowledged. Counts
        delivered batches; set it where a training step takes several of them."""
        self._token_budget, self._stop_after = token_budget, stop_after
        self._num_iterations = 0
        self._is_auto = ack == "auto"
        options: dict[str, Any] = {
            "batch_size": batch_size,
            "buffer": buffer,
            "consumer": consumer,
            "prefetch": prefetch,
            "max_bytes": max_bytes,
            "min_batch_size": min_batch_size,
            "lease_seconds": lease_seconds,
            "rank": rank if world_size > 1 else None,
            "world_size": world_size if world_size > 1 else None,
            "format": format,
            "timeout": timeout,
            "first_timeout": first_timeout,
        }
        # Connects to nothing, but checks the values here and not in a worker.
        self.client.stream(**options)
        self._feed = Feed(self.client, options, collate=collate, token_budget=token_budget)
        self._finalizer = weakref.finalize(self, self._feed.close)

    def __repr__(self) -> str:
        rank = f", rank {self.rank} of {self.world_size}" if self.world_size > 1 else ""
        return (
            f"<ExperienceDataset of {self.consumer!r} on {self.buffer!r} at {self.client.address}: "
            f"step {self.step}{rank}>"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_finalizer"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._finalizer = weakref.finalize(self, self._feed.close)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over batches, or micro-batches.

        Raises:
            InvalidRequestError: For a DataLoader that asks for more than it hands out, with a
                `batch_size` or by reading ahead; in its worker, for a combination that workers can't
                have; or, with `ack="auto"`, by an iteration that is asked on after another one has
                begun.
        """
        _loader.check(is_auto=self._is_auto)
        worker = get_worker_info()
        if worker is not None:
            self._check_workers(worker.num_workers)
            self._feed.end_with_parent()
            # Of a persistent worker's last iteration the DataLoader has thrown away what was read
            # ahead: its leases are given back as if the worker had ended with it.
            self._feed.close()
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        num_steps, num_closings = 0, self._feed.num_closings
        self._num_iterations += 1
        number = self._num_iterations
        while self._feed.num_closings == num_closings:
            if self._is_auto and self._num_iterations != number:
                raise InvalidRequestError(
                    "another iteration over this dataset has begun, whose batch would be "
                    "acknowledged untrained by going on with this one: iterate once at a time, or "
                    "give ack='manual'",
                    subject="ack",
                )
            self._settle()
            if num_steps == self._stop_after:
                return
            leased = self._feed.take()
            if leased is None:
                return
            num_steps += leased.ticket.is_last
            yield leased.data if self._is_auto else leased

    def ack(self, ticket: LeaseTicket, *, step: int) -> None:
        """Say that a batch is consumed; returns after the server's commit. Idempotent.

        The micro-batches of a batch share its lease: the ack of the last one counts, others do
        nothing.

        Args:
            ticket: What came with the batch.
            step: The training step that used it, at least 0; `state_dict` goes by the last one.

        Raises:
            LeaseNotFoundError: The lease has expired or was given back: the experiences are
                delivered again.
        """
        _check_ticket(ticket)
        if not ticket.is_last:
            return
        check_whole("step", step)
        self.client.ack(ticket.lease_id, buffer=ticket.buffer, step=step, rank=ticket.rank)
        self.step = step + 1

    def nack(self, ticket: LeaseTicket, *, reason: str = "") -> None:
        """Give a batch back, all of its micro-batches, for all ranks: it is delivered again.

        Args:
            ticket: What came with the batch.
            reason: Why; the server logs it.

        Raises:
            LeaseNotFoundError: The lease has ended before.
        """
        _check_ticket(ticket)
        self._feed.drop(ticket.lease_id)
        self.client.nack(ticket.lease_id, buffer=ticket.buffer, reason=reason)

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Make what a checkpoint must hold for `load_state_dict`.

        With `ack="auto"` the batch yielded last is acknowledged: the checkpoint has learned from
        it. If micro-batches of it are left, it counts as not learned from, and comes again whole.

        Args:
            step: The last training step that the checkpoint has learned from; None: that of the
                last ack.

        Returns:
            What `Client.state_dict` returns, plain data.

        Raises:
            InvalidRequestError: In a DataLoader worker, which knows nothing of the training.
            LeaseNotFoundError: As for `ack`.
        """
        _refuse_worker("state_dict")
        self._settle()
        last = self.step - 1 if step is None else step
        return timeline.make_state(last, buffer=self.buffer, consumer=self.consumer)

    def load_state_dict(self, state: Mapping[str, Any]) -> RewindResult:
        """Go on from a checkpoint: what was acknowledged after its training step comes again.

        Ends the stream, and returns all open leases of the consumer. Of several ranks, one does it
        before any asks for batches, or all do and wait for each other (a barrier).

        Args:
            state: What `state_dict` returned.

        Raises:
            InvalidRequestError: It is something else, or of another buffer or consumer; or this is
                a DataLoader worker.
            WrongStateError: A later training step was declared safe: its checkpoint is the one to load.
        """
        _refuse_worker("load_state_dict")
        step, *place = timeline.read_state(state)
        if place != [self.buffer, self.consumer]:
            raise InvalidRequestError(
                f"the state is of consumer {shown(place[1])} of buffer {shown(place[0])}, the dataset reads as "
                f"{self.consumer!r} from {self.buffer!r}; load the state that was saved for it",
                subject="state",
            )
        self._feed.close()
        result = self.client.load_state_dict(state)
        self.step = step + 1
        return result

    def declare_safe(self, step: int) -> SafeResult:
        """Say that no checkpoint before a training step is ever loaded: what it kept is released.

        Args:
            step: The step of the oldest checkpoint that may be loaded, at least 0.
        """
        return self.client.declare_safe(step, buffer=self.buffer, consumer=self.consumer)

    def close(self) -> None:
        """End the stream, which gives back what isn't acknowledged, and all iterations.

        A new iteration opens a stream again.
        """
        self._feed.close()

    def _check_workers(self, num_workers: int) -> None:
        """Check that DataLoader workers can read it.

        Each worker has a stream of its own, which ends with the worker's process; the training and
        its acks are in another process.
        """
        problem = ""
        if self._is_auto:
            problem = "ack='auto', since workers read ahead of the training; give ack='manual'"
        elif self._stop_after is not None:
            problem = (
                "stop_after, since a worker that ends gives back what isn't acknowledged yet; leave "
                "it out and count steps where you iterate"
            )
        elif num_workers > 1 and self.world_size > 1:
            problem = (
                f"world_size = {self.world_size} with {num_workers} workers, which would all get "
                "this rank's parts of the same batches; use num_workers of 0 or 1"
            )
        elif num_workers > 1 and self._token_budget is not None:
            problem = (
                f"token_budget with {num_workers} workers, whose micro-batches would mix, so that "
                "no step trains on a whole batch; use num_workers of 0 or 1"
            )
        if problem:
            raise InvalidRequestError(
                f"a DataLoader with workers can't read a dataset with {problem}",
                subject="num_workers",
            )

    def _settle(self) -> None:
        """Acknowledge what was trained on, where asking for the next batch says so."""
        batch = self._feed.delivered
        if self._is_auto and batch is not None and self._feed.is_whole:
            try:
                batch.ack(self.step)
            except LeaseNotFoundError:
                # It comes again. Whoever goes on after this error must not meet it again.
                self._feed.delivered = None
                raise
            self._feed.delivered = None
            self.step += 1


def _check_ranks(rank: int, world_size: int, num_units: int) -> None:
    """Check that there is such a rank, and that each gets a part of the fewest units of a batch."""
    if not 0 <= rank < world_size:
        raise InvalidRequestError(
            f"rank {shown(rank)} of {shown(world_size)}: rank must be at least 0 and below world_size",
            subject="rank",
        )
    if num_units < world_size:
        raise InvalidRequestError(
            f"{shown(num_units)} units for {shown(world_size)} ranks would leave some without a batch; give "
            "batch_size, and min_batch_size if you give it, at least world_size",
            subject="batch_size",
        )


def _check_collate(collate: Any) -> None:
    """Check that it is a function, and not one of those that make one."""
    if not callable(collate):
        raise refused(
            "collate",
            collate,
            "a function of the experiences of a batch, such as "
            "collation.padded_collate(pad_token_id=0)",
        )
    name = getattr(collate, "__name__", "")
    if name.endswith("_collate") and collate is getattr(collation, name, None):
        raise InvalidRequestError(
            f"collate is {name} itself, which makes the function with what it is given: write "
            f"collate={name}(...)",
            subject="collate",
        )


def _check_ticket(ticket: Any) -> None:
    if not isinstance(ticket, LeaseTicket):
        raise refused("ticket", ticket, "the LeaseTicket that came with the batch")


def _refuse_worker(verb: str) -> None:
    if get_worker_info() is not None:
        raise InvalidRequestError(
            f"{verb} in a DataLoader worker: the state is that of the training; call it on the "
            "dataset in the process that trains, with a plain DataLoader",
            subject=verb,
        )

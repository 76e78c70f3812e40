"""Where a dataset's micro-batches come from: a sample stream, cut into what a trainer takes at once.

The state of an iteration, one per process; policies about acks, steps and workers are in
`dataset.py`. Imports no torch.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from experience_buffer._data import token_budget as _token_budget
from experience_buffer._packed import select
from experience_buffer._show import line, short
from experience_buffer.packed import PackedBatch

if TYPE_CHECKING:
    from experience_buffer._data.framework_collation import Collate
    from experience_buffer._sync.batch import Batch
    from experience_buffer._sync.stream import SampleStream
    from experience_buffer.client import Client
    from experience_buffer.experience import Experience

logger = logging.getLogger("experience_buffer")
_INHERITED: Final[list[Any]] = []
"""Streams of a parent process: never used here, and never finalised, which could hang."""

_END_SECONDS: Final = 5.0
"""For a worker to end by itself once the process that it works for has gone."""


class LeaseTicket(NamedTuple):
    """Names the lease of a batch. Plain data, so that any process can acknowledge it.

    Attributes:
        buffer: The buffer's name.
        consumer: The consumer's name.
        lease_id: Names the lease.
        rank: Whose part of a shared batch it is; None when it isn't shared.
        micro_batch: Which micro-batch of the delivered batch this is, from 0.
        num_micro_batches: How many the delivered batch has; they share the lease.
    """

    buffer: str
    consumer: str
    lease_id: int
    rank: int | None
    micro_batch: int
    num_micro_batches: int

    @property
    def is_last(self) -> bool:
        """Whether this is the last micro-batch of the delivered batch, and so ends a step."""
        return self.micro_batch == self.num_micro_batches - 1


class LeasedBatch(NamedTuple):
    """What a dataset yields whose trainer acknowledges: `for data, ticket in dataset`.

    Attributes:
        data: What the collation function made.
        ticket: For `ExperienceDataset.ack`.
    """

    data: Any
    ticket: LeaseTicket

    def __repr__(self) -> str:
        return line(f"LeasedBatch({short(self.data)}, {self.ticket})")


class Feed:
    """The stream of one dataset, and what it delivered last. Not thread-safe.

    It can be pickled, without its stream, and used after a fork: each process has its own.

    Args:
        client: Makes the stream.
        options: What `Client.stream` takes.
        collate: Makes what is yielded; None: the `PackedBatch`, or the list of experiences.
        token_budget: Most tokens of a micro-batch; None: delivered batches stay whole.
    """

    def __init__(
        self,
        client: Client,
        options: Mapping[str, Any],
        *,
        collate: Collate | None,
        token_budget: int | None,
    ) -> None:
        self.client = client
        self._options = dict(options)
        self._collate = collate
        self._token_budget = token_budget
        self.num_closings = 0
        """Grows with every `close`, which ends the iterations before it."""
        self._watching_pid = 0
        self._is_orphan = False
        """The process that this one works for has gone."""
        self._reset()

    def _reset(self) -> None:
        self.delivered: Batch | None = None
        """The batch that the last micro-batch taken was of, until it is acknowledged."""
        self._waiting: deque[tuple[PackedBatch | list[Experience], LeaseTicket]] = deque()
        self._stream: SampleStream | None = None
        self._pid = 0

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(Feed, collate=self._collate, token_budget=self._token_budget)
        return make, (self.client, self._options)

    @property
    def is_whole(self) -> bool:
        """Whether all micro-batches of the delivered batch were taken, in this process."""
        return not self._waiting and self._pid == os.getpid()

    def take(self) -> LeasedBatch | None:
        """Wait for the next micro-batch; None when the feed was closed meanwhile, or has no parent.

        Raises:
            ExperienceBufferError: As `SampleStream` says, or the collation function. Where that has
                ended the stream, the next call opens another.
            ValueError: The collation function can't lay the experiences out.
        """
        self._leave_parent()
        while not self._waiting:
            stream = self._open()
            if self._is_orphan:
                self.close()
                return None
            batch = next(stream, None)
            if batch is None:
                return None
            if not batch:
                # A rank's part of a shared batch that has fewer units than there are ranks.
                batch.ack()
                continue
            # First: what can't be read wasn't taken either.
            parts = self._split(batch)
            self.delivered = batch
            self._waiting.extend(parts)
        experiences, ticket = self._waiting[0]
        data = self._collate(experiences) if self._collate else experiences
        # Not before: what can't be laid out wasn't taken, and must not be acknowledged.
        self._waiting.popleft()
        return LeasedBatch(data, ticket)

    def end_with_parent(self) -> None:
        """Deliver nothing more once the process that started this one has gone. Idempotent.

        A worker that waits for a batch doesn't notice by itself, and its stream would keep what it
        has read ahead.
        """
        parent = multiprocessing.parent_process()
        if parent is None or self._watching_pid == os.getpid():
            return
        self._watching_pid = os.getpid()
        threading.Thread(
            target=self._watch,
            args=(parent.sentinel,),
            name="experience-buffer-parent",
            daemon=True,
        ).start()

    def _watch(self, sentinel: int) -> None:
        connection.wait([sentinel])
        # First: who opens a stream from now on looks at it.
        self._is_orphan = True
        stream = self._stream
        if stream is not None:
            logger.error("the process that this worker works for has gone: it ends")
            stream.close()
        # Torch ends its workers by themselves, but not those of a fork server, whose parent that is.
        time.sleep(_END_SECONDS)
        os._exit(1)

    def drop(self, lease_id: int) -> None:
        """Forget the micro-batches of a lease that were not taken yet."""
        self._waiting = deque(each for each in self._waiting if each[1].lease_id != lease_id)

    def close(self) -> None:
        """End the stream, which gives back what isn't acknowledged. Idempotent."""
        self.num_closings += 1
        stream, pid = self._stream, self._pid
        self._reset()
        if stream is not None and pid == os.getpid():
            stream.close()
        elif stream is not None:
            _INHERITED.append(stream)

    def _leave_parent(self) -> None:
        """In a process that was forked, begin anew."""
        if self._pid != os.getpid():
            if self._stream is not None:
                _INHERITED.append(self._stream)
            self._reset()
            self._pid = os.getpid()

    def _open(self) -> SampleStream:
        if self._stream is None or self._stream._is_over:
            self._stream = self.client.stream(**self._options)
        return self._stream

    def _split(self, batch: Batch) -> list[tuple[PackedBatch | list[Experience], LeaseTicket]]:
        content = batch.experiences if batch.columns is None else batch.packed
        parts = [content] if self._token_budget is None else self._micro_batches(content)
        place = (batch.buffer, batch.consumer, batch.lease_id, batch.rank)
        return [
            (part, LeaseTicket(*place, micro_batch=index, num_micro_batches=len(parts)))
            for index, part in enumerate(parts)
        ]

    def _micro_batches(
        self, content: PackedBatch | list[Experience]
    ) -> Sequence[PackedBatch | list[Experience]]:
        assert self._token_budget is not None
        lengths = _lengths(content)
        longest = max(lengths)
        if longest > self._token_budget:
            logger.warning(
                "an experience of %d tokens is above token_budget = %d and is a micro-batch of its "
                "own: raise the budget, or push shorter experiences",
                longest,
                self._token_budget,
            )
        parts = _token_budget.split(lengths, self._token_budget)
        if len(parts) == 1:
            return [content]
        if isinstance(content, PackedBatch):
            return [PackedBatch(select.select(content._table, part)) for part in parts]
        return [[content[index] for index in part] for part in parts]


def _lengths(content: PackedBatch | list[Experience]) -> list[int]:
    """Tokens of each experience, prompt and response."""
    if not isinstance(content, PackedBatch):
        return [len(experience.tokens) for experience in content]
    prompts, responses = content.column("prompt_length"), content.column("response_length")
    lengths: list[int] = (prompts + responses).tolist()
    return lengths

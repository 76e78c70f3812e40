"""The unary calls about delivery that have more to check: sampling, leases, priorities. Pure: no I/O."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from experience_buffer._arguments import as_number, as_text, as_whole, listed, pairs, refused, shown
from experience_buffer._codec import memory
from experience_buffer._messages import convert, sample_bytes
from experience_buffer._messages.calls import Call, build, call_of, number
from experience_buffer.errors import InvalidRequestError
from experience_buffer.options import ClientOptions
from experience_buffer.v1 import service_pb2 as pb
from experience_buffer.v1 import types_pb2
from experience_buffer.values import PriorityResult

BAD_PRIORITY: Final = "updates.priority"
"""What an error is about that refuses some priorities: all others are set."""
_MAX_GENERATION: Final = 2**64 - 1
MAX_UPDATES: Final = 10_000
"""Priorities in one request."""
Priorities: TypeAlias = Mapping[str, float] | Iterable[tuple[str, float] | tuple[str, float, int]]
"""New priorities by uid, or as (uid, priority) or (uid, priority, generation)."""
_ENTRIES: Final = (
    "{uid: priority}, or tuples (uid, priority) or (uid, priority, generation): uids are text, "
    "priorities numbers"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Acked:
    """What an ack did."""

    num_experiences: int
    num_waiting_ranks: int


def rank_of(
    rank: int | None, world_size: int | None, after_lease_id: int = 0
) -> types_pb2.RankOf | None:
    """The message that asks for a rank's part; None for a batch of its own.

    Raises:
        InvalidRequestError: Only one of `rank` and `world_size` is given, or one is negative.
    """
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise InvalidRequestError(
            f"rank is {shown(rank)} and world_size {shown(world_size)}: give both, or neither for batches that "
            "aren't shared",
            subject="rank" if rank is None else "world_size",
        )
    return build(types_pb2.RankOf, rank=rank, world_size=world_size, after_lease_id=after_lease_id)


def holder_of(options: ClientOptions) -> str:
    """What a client calls itself; in a process that was forked meanwhile, by that one's number."""
    return options.holder or f"{socket.gethostname()}:{os.getpid()}"


def given(**fields: Any) -> dict[str, Any]:
    """The fields that aren't None."""
    return {field: value for field, value in fields.items() if value is not None}


def sample(**fields: Any) -> tuple[Call[dict[str, Any]], Call[int]]:
    """A call that samples, and what tells the server that nobody waits for its answer any more.

    Raises:
        InvalidRequestError: A value has the wrong type or sign.
    """
    call_id = secrets.randbits(63) | 1
    call = call_of("Sample", sampled, call_id=call_id, **fields)
    parse = number("num_experiences")
    give_up = call_of("Nack", parse, buffer=fields["buffer"], call_id=call_id, unread=True)
    return call, give_up


def sampled(received: sample_bytes.Received[pb.SampleResponse]) -> dict[str, Any]:
    """The fields of a batch that a response states."""
    response = received.message
    return convert.batch_fields(
        response.experiences,
        response.lease if response.HasField("lease") else None,
        response,
        payloads=received.payloads,
        packed=memory.joined((received.packed,)),
        num_bytes=None,
        received_time=time.monotonic(),
    )


def ack(lease_id: int, *, buffer: str, step: int | None, rank: int | None) -> Call[Acked]:
    """End a lease successfully, or one rank's part of it."""
    parse = convert.reader_of(Acked)
    return call_of("Ack", parse, buffer=buffer, lease_id=lease_id, **given(step=step, rank=rank))


def update_priorities(priorities: Priorities, *, buffer: str) -> Iterator[Call[PriorityResult]]:
    """Set priorities, in requests of at most `MAX_UPDATES`.

    With generations a request isn't repeated: what its lost response had set would be reported as
    outdated.

    Raises:
        InvalidRequestError: An entry is malformed, or a uid is given twice; no request is made.
    """
    read: Any = pairs if isinstance(priorities, Mapping) else listed
    entries = read("priorities", priorities, _ENTRIES)
    updates = [_update(index, entry) for index, entry in enumerate(entries)]
    seen: set[str] = set()
    for update in updates:
        if update.uid in seen:
            raise InvalidRequestError(
                f"priorities has uid {update.uid!r} twice: give each uid once", subject=update.uid
            )
        seen.add(update.uid)
    return (
        _priorities_call(updates[start : start + MAX_UPDATES], buffer)
        for start in range(0, len(updates), MAX_UPDATES)
    )


def join_priorities(results: Iterable[PriorityResult]) -> PriorityResult:
    """Make one result of those of several requests."""
    parts = list(results)
    return PriorityResult(
        num_updated=sum(part.num_updated for part in parts),
        unknown_uids=tuple(uid for part in parts for uid in part.unknown_uids),
        outdated_uids=tuple(uid for part in parts for uid in part.outdated_uids),
    )


def _update(index: int, entry: Any) -> pb.PriorityUpdate:
    if type(entry) is tuple and 2 <= len(entry) <= 3:
        uid, priority, generation = (*entry, 0)[:3]
        kinds = (type(uid), type(priority), type(generation))
        if kinds == (str, float, int) and uid.isascii() and 0 <= generation <= _MAX_GENERATION:
            # As most are: nothing has to be said.
            return pb.PriorityUpdate(uid=uid, priority=priority, generation=generation)
    where = f"priorities[{index}]"
    parts = listed(where, entry, _ENTRIES)
    if not 2 <= len(parts) <= 3:
        raise refused(where, entry, _ENTRIES)
    uid, priority, generation = (*parts, 0)[:3]
    uid = as_text(f"{where}'s uid", uid, _ENTRIES)
    return pb.PriorityUpdate(
        uid=uid,
        # What is no priority is the server's to refuse: the others are set.
        priority=as_number(f"{where} of {shown(uid)}", priority, _ENTRIES, is_any=True),
        generation=as_whole(
            f"{where}'s generation", generation, least=0, most=_MAX_GENERATION, wanted=_ENTRIES
        ),
    )


def _priorities_call(updates: list[pb.PriorityUpdate], buffer: str) -> Call[PriorityResult]:
    return call_of(
        "UpdatePriorities",
        convert.reader_of(PriorityResult),
        idempotent=not any(update.generation for update in updates),
        buffer=buffer,
        updates=updates,
    )

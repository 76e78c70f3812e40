"""Splitting a push into requests below the limits, and joining their outcomes. Pure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from experience_buffer._codec.codec_error import trxp_error
from experience_buffer._messages import convert, push_bytes
from experience_buffer._messages.calls import Call
from experience_buffer._messages.push_bytes import Pieces
from experience_buffer.errors import InvalidRequestError, MessageTooLargeError, TrxpError
from experience_buffer.options import ClientOptions, WriterOptions
from experience_buffer.outcomes import PushResult
from experience_buffer.values import Tombstone

if TYPE_CHECKING:
    from experience_buffer.experience import Experience

ENVELOPE_BYTES: Final = 16 * 1024
"""Room in a message for everything but the payload: names, numbers, stream envelope."""


def encode(experiences: Sequence[Experience]) -> Pieces:
    """One TRXP payload of experiences; imports the codec, and so torch, when first called."""
    from experience_buffer import _torch

    return _torch.encode_pieces(experiences)


def writer_limits(
    writer: WriterOptions, options: ClientOptions
) -> tuple[WriterOptions, ClientOptions]:
    """A writer's options, with no larger requests than a message holds; by which it cuts."""
    num_bytes = min(writer.max_batch_bytes, max_payload_bytes(options))
    return (
        replace(writer, max_batch_bytes=num_bytes),
        replace(options, max_push_items=writer.max_batch_items, max_push_bytes=num_bytes),
    )


def split(
    experiences: Sequence[Experience] | bytes,
    tombstones: Sequence[Tombstone],
    options: ClientOptions,
    *,
    buffer: str,
    group_size: int,
) -> Iterator[Call[PushResult]]:
    """Divide a push into calls, encoding each one's share only when it is asked for.

    Args:
        experiences: To encode, or one TRXP payload that is sent as it is.
        tombstones: Sent after all experiences.
        options: The limits.
        buffer: Where to push.
        group_size: Expected members of every group pushed; 0: the buffer's default.

    Raises:
        InvalidRequestError: `experiences` is neither, such as a single one.
        MessageTooLargeError: One experience, or the raw payload, is over the message limit.
    """
    fields = functools.partial(push_bytes.push_fields, buffer=buffer, group_size=group_size)
    if isinstance(experiences, (bytes, bytearray, memoryview)):
        payload = bytes(experiences)
        check_size(len(payload), "the payload", options)
        yield _push(push_bytes.push_request(fields(tombstones=tombstones), [[payload]]), ())
        return
    if not hasattr(experiences, "__len__"):
        kind = type(experiences).__name__
        raise InvalidRequestError(
            f"push takes a list of experiences or one payload, not {kind}; give [experience]",
            subject="experiences",
        )
    alike = fields()
    for start, end, pieces in encode_pieces(experiences, options):
        yield _push(push_bytes.push_request(alike, [pieces]), range(start, end))
    for start in range(0, len(tombstones), options.max_push_items):
        part = tombstones[start : start + options.max_push_items]
        first = len(experiences) + start
        yield _push(fields(tombstones=part), range(first, first + len(part)))


def _push(request: bytes, positions: Sequence[int]) -> Call[PushResult]:
    """Push one request's share, whose items have these positions in what the caller pushed."""
    return Call("Push", request, functools.partial(convert.push_result, positions=positions))


def encode_pieces(
    experiences: Sequence[Experience],
    options: ClientOptions,
    *,
    encode: Callable[[Sequence[Experience]], Pieces] = encode,
) -> Iterator[tuple[int, int, Pieces]]:
    """Encode experiences as payloads below the limits: (start, end, payload) of each.

    A payload's pieces may be the experiences' own memory: to be copied before these change.

    Sizes are known only after encoding, so each payload's size guides how many experiences the
    next one takes, and one that came out too large is halved.

    Raises:
        MessageTooLargeError: One experience is over the message limit.
        TrxpError: One can't be written.
    """
    start, most = 0, options.max_push_items
    step = most
    while start < len(experiences):
        end = min(start + step, len(experiences))
        num_items = end - start
        try:
            pieces = encode(experiences[start:end])
        except TrxpError as error:
            if error.item is not None and start:
                raise _moved(error, error.item, start) from None
            if error.item is not None:
                raise
            if num_items == 1:
                where = f"items[{start}]"
                reason = f"it can't be written, though it is alone: {error}"
                raise trxp_error(reason, where=where, item=start) from None
            # Together they are beyond a limit, such as the number of values. Sizes don't tell of it:
            # those that follow would be, too.
            step = most = (num_items + 1) // 2
            continue
        num_bytes = sum(map(len, pieces))
        if num_bytes > max_payload_bytes(options) or (
            num_bytes > 2 * options.max_push_bytes and num_items > 1
        ):
            if num_items == 1:
                check_size(num_bytes, f"experience {start}", options)
            step = (num_items + 1) // 2
            continue
        yield start, end, pieces
        start = end
        fitting = options.max_push_bytes * num_items // max(num_bytes, 1)
        step = min(max(fitting, 1), most)


def _moved(error: TrxpError, item: int, start: int) -> TrxpError:
    """What is wrong with an experience, at its place in all that is pushed."""
    reason = str(error).removeprefix(f"{error.subject}: ")
    where = error.subject.replace(f"items[{item}]", f"items[{start + item}]", 1)
    return trxp_error(reason, where=where, item=start + item)


def max_payload_bytes(options: ClientOptions) -> int:
    """What a request may hold beside its envelope."""
    return options.max_message_bytes - ENVELOPE_BYTES


def check_size(num_bytes: int, what: str, options: ClientOptions) -> None:
    """Refuse what a message can't hold.

    Raises:
        MessageTooLargeError: It can't.
    """
    limit = max_payload_bytes(options)
    if num_bytes > limit:
        raise MessageTooLargeError(
            f"{what} takes {num_bytes} bytes; a message holds at most {limit}. Raise "
            "max_message_bytes in ClientOptions and on the server, or send less at once",
            subject=what,
        )

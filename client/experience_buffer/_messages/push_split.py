"""Cutting what is pushed into payloads below the limits, and further where less at once may go. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from experience_buffer._arguments import as_words, shown
from experience_buffer._codec import payload as _payload
from experience_buffer._codec.codec_error import trxp_error
from experience_buffer._messages.push_bytes import Payload, Pieces
from experience_buffer.errors import (
    ExperienceBufferError,
    InvalidRequestError,
    MessageTooLargeError,
    ResourceExhaustedError,
    TrxpError,
)
from experience_buffer.options import ClientOptions, WriterOptions
from experience_buffer.outcomes import PushOutcome

if TYPE_CHECKING:
    from experience_buffer.experience import Experience

ENVELOPE_BYTES: Final = 16 * 1024
"""Room in a message for everything but the payload: names, numbers, stream envelope."""


def encode(experiences: Sequence[Experience]) -> Pieces:
    """One TRXP payload of experiences; imports the codec when first called."""
    from experience_buffer import _payloads
    from experience_buffer.experience import Experience

    return _payloads.encode_pieces(experiences, Experience)


def writer_limits(
    writer: WriterOptions, options: ClientOptions
) -> tuple[WriterOptions, ClientOptions]:
    """A writer's options, with no larger requests than a message holds; by which it cuts."""
    num_bytes = min(writer.max_batch_bytes, max_payload_bytes(options))
    return (
        replace(writer, max_batch_bytes=num_bytes),
        replace(options, max_push_items=writer.max_batch_items, max_push_bytes=num_bytes),
    )


def encode_pieces(
    experiences: Sequence[Experience],
    options: ClientOptions,
    *,
    most: Callable[[], int] | None = None,
    encode: Callable[[Sequence[Experience]], Pieces] = encode,
) -> Iterator[tuple[int, int, Pieces] | PushOutcome]:
    """Encode experiences as payloads below the limits: (start, end, payload) of each.

    A payload's pieces may be the experiences' own memory: to be copied before these change.

    Sizes are known only after encoding, so each payload's size guides how many experiences the
    next one takes, and one that came out too large is halved.

    Args:
        experiences: What is pushed.
        options: The limits.
        most: Says how many may be in the next payload, where that is less than the options say.
        encode: Makes one payload.

    Returns:
        Between the payloads an outcome for each experience that can't be written, or is over the
        message limit alone: its neighbours go all the same.
    """
    start, few = 0, options.max_push_items
    step = few
    while start < len(experiences):
        end = min(start + step, len(experiences), start + (few if most is None else most()))
        num_items = end - start
        try:
            pieces = encode(experiences[start:end])
        except TrxpError as error:
            if error.item:
                step = error.item  # Those before it can be written.
            elif error.item == 0 or num_items == 1:
                yield _unwritten(error, experiences[start], start)
                start, step = start + 1, (num_items + 1) // 2
            else:
                # Together they are beyond a limit, such as the number of values. Sizes don't tell of
                # it: those that follow would be, too.
                step = few = (num_items + 1) // 2
            continue
        except Exception as error:  # The caller's own class, or what an attribute was set to.
            if num_items == 1:
                reason = f"it can't be read: {type(error).__name__}: {shown(error)}"
                unread = trxp_error(reason, where=f"items[{start}]")
                yield refused(start, unread, _uid_of(experiences[start]))
                start += 1
            step = (num_items + 1) // 2
            continue
        num_bytes = sum(map(len, pieces))
        if num_bytes > max_payload_bytes(options) or (
            num_bytes > 2 * options.max_push_bytes and num_items > 1
        ):
            if num_items == 1:
                larger = too_large(num_bytes, f"experience {start}", options)
                yield refused(start, larger, _uid_of(experiences[start]))
                start += 1
            step = (num_items + 1) // 2
            continue
        yield start, end, pieces
        start = end
        fitting = options.max_push_bytes * num_items // max(num_bytes, 1)
        step = min(max(fitting, 1), few)


def may_go_in_parts(error: ExperienceBufferError) -> bool:
    """Whether less at once may go where all of a push can't, however long it waits.

    So the server answers what is beyond a limit of a buffer, of a consumer's limiter, of the pacing
    or of its own: without a delay.
    """
    if error.retry_delay_seconds is not None:
        return False
    is_of_payload = isinstance(error, InvalidRequestError) and error.subject == "payload"
    return is_of_payload or isinstance(error, (ResourceExhaustedError, TrxpError))


def singles(payloads: Sequence[Payload], num_items: int | None) -> Sequence[Payload]:
    """The same experiences with a payload for each.

    Args:
        payloads: Of one or several experiences each.
        num_items: Experiences in all; None: as many as there are.

    Raises:
        TrxpError: They can't be taken apart.
    """
    if len(payloads) == num_items:
        return payloads
    return [single for payload in payloads for single in _payload.split(payload)]


def refused(position: int, error: ExperienceBufferError, uid: str) -> PushOutcome:
    """The outcome of an item that can't go in, not even alone.

    Args:
        position: Of the item in what was pushed.
        error: Why.
        uid: Its own; empty where it has none that can be read.
    """
    return PushOutcome(
        index=position, uid=uid, status="refused", reason="invalid", message=str(error)
    )


def uid_in(payload: Payload) -> str:
    """The uid of a payload's only experience; empty where it can't be read."""
    try:
        [item] = _payload.read(payload)
    except (TrxpError, ValueError):
        return ""
    return "" if isinstance(item, TrxpError) else item.eid.uid


def _uid_of(experience: Any) -> str:
    try:
        return as_words("uid", experience.eid.uid)
    except Exception:  # The caller's own class, or what the attribute was set to.
        return ""


def _unwritten(error: TrxpError, experience: Experience, position: int) -> PushOutcome:
    """What is wrong with an experience, at its place in all that is pushed."""
    reason, where = str(error), f"items[{position}]"
    if error.item is None:
        reason = f"it can't be written, though it is alone: {reason}"
    else:
        reason = reason.removeprefix(f"{error.subject}: ")
        where = error.subject.replace("items[0]", where, 1)
    return refused(position, trxp_error(reason, where=where), _uid_of(experience))


def max_payload_bytes(options: ClientOptions) -> int:
    """What a request may hold beside its envelope."""
    return options.max_message_bytes - ENVELOPE_BYTES


def too_large(num_bytes: int, what: str, options: ClientOptions) -> MessageTooLargeError:
    """Make the error of what a message can't hold."""
    return MessageTooLargeError(
        f"{what} takes {num_bytes} bytes; a message holds at most {max_payload_bytes(options)}. "
        "Raise max_message_bytes in ClientOptions and on the server, or send less at once",
        subject=what,
    )

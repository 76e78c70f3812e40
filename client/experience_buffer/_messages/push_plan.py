"""A push as calls, one after the other, and what became of its items. Pure."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from experience_buffer._arguments import is_list, refused
from experience_buffer._messages import convert, push_bytes, push_split
from experience_buffer._messages.calls import Call
from experience_buffer._messages.push_bytes import Payload, Pieces
from experience_buffer.errors import ExperienceBufferError, TrxpError
from experience_buffer.options import ClientOptions
from experience_buffer.outcomes import PushOutcome, PushResult
from experience_buffer.v1 import types_pb2
from experience_buffer.values import Tombstone

if TYPE_CHECKING:
    from experience_buffer.experience import Experience


@dataclass(frozen=True, slots=True)
class Share:
    """What one request holds of a push: experiences, and the tombstones that follow them."""

    start: int
    """Position of its first item in what is pushed."""
    payloads: Sequence[Pieces] = ()
    num_experiences: int | None = 0
    """In the payloads; None: nobody has counted them."""
    tombstones: Sequence[types_pb2.Tombstone] = ()

    @property
    def num_bytes(self) -> int:
        """Of the payloads."""
        return sum(len(piece) for pieces in self.payloads for piece in pieces)

    @property
    def uid(self) -> str:
        """Of its only item."""
        if self.tombstones:
            return convert.uid_of(self.tombstones[0].id)
        return push_split.uid_in(b"".join(self.payloads[0]))

    def halves(self) -> list[Share]:
        """The same items in two shares; in one where it has one item.

        Raises:
            TrxpError: The payload can't be taken apart.
        """
        if not self.payloads:
            middle = (len(self.tombstones) + 1) // 2
            parts = [
                replace(self, tombstones=self.tombstones[:middle]),
                Share(self.start + middle, tombstones=self.tombstones[middle:]),
            ]
        else:
            whole: list[Payload] = [b"".join(pieces) for pieces in self.payloads]
            each = [[single] for single in push_split.singles(whole, self.num_experiences)]
            middle = len(each) if self.tombstones else (len(each) + 1) // 2
            later = (each[middle:], len(each) - middle, self.tombstones)
            parts = [Share(self.start, each[:middle], middle), Share(self.start + middle, *later)]
        return [part for part in parts if part.payloads or part.tombstones]


def _is_payload(value: object) -> bool:
    return isinstance(value, (bytes, bytearray, memoryview))


class Push:
    """Says what to call next until every item has its outcome. One at a time may use it.

        next_call -> answered, or failed: the same items in smaller calls -> ... -> None: result

    Args:
        experiences: To encode; or TRXP payloads of one experience each, or one of any number, which are
            sent as they are.
        tombstones: Sent after all experiences.
        options: The limits.
        buffer: Where to push.
        group_size: Expected members of every group pushed; 0: the buffer's default.

    Raises:
        InvalidRequestError: An argument is malformed; its text names it.
    """

    def __init__(
        self,
        experiences: Sequence[Experience] | Sequence[bytes] | bytes,
        tombstones: Sequence[Tombstone],
        options: ClientOptions,
        *,
        buffer: str,
        group_size: int,
    ) -> None:
        self._fields = functools.partial(
            push_bytes.push_fields, buffer=buffer, group_size=group_size
        )
        self._without_tombstones = self._fields()
        self._options = options
        self._most = options.max_push_items
        """Items of the next requests; fewer than the options say once so many were too much."""
        self._outcomes: dict[int, PushOutcome] = {}
        self._version: int | None = None
        self._waiting: deque[Share] = deque()
        """Parts of what was too much at once."""
        self._under_way = Share(0)
        dead = convert.tombstones_to_messages(tombstones)
        self._shares: Iterator[Share | PushOutcome]
        if isinstance(experiences, (bytes, bytearray, memoryview)):
            self._shares = iter([Share(0, [[bytes(experiences)]], None, dead)])
        elif is_list(experiences) and all(map(_is_payload, experiences[:1])):
            self._shares = self._gather(experiences, dead)
        elif is_list(experiences):
            self._shares = self._cut(experiences, dead)
        else:
            wanted = "a list of experiences: [experience]; or one TRXP payload as bytes"
            raise refused("experiences", experiences, wanted)

    def _cut(
        self, experiences: Sequence[Any], dead: Sequence[types_pb2.Tombstone]
    ) -> Iterator[Share | PushOutcome]:
        """Encode each share only when it is asked for."""
        for found in push_split.encode_pieces(experiences, self._options, most=lambda: self._most):
            if isinstance(found, PushOutcome):
                yield found
            else:
                start, end, pieces = found
                yield Share(start, [pieces], end - start)
        yield from self._dead(len(experiences), dead)

    def _gather(
        self, payloads: Sequence[Any], dead: Sequence[types_pb2.Tombstone]
    ) -> Iterator[Share | PushOutcome]:
        """Put payloads together, as many as go into one request."""
        room = push_split.max_payload_bytes(self._options)
        taken: list[Pieces] = []
        num_bytes, start = 0, 0
        for place, payload in enumerate(payloads):
            if not _is_payload(payload):
                wanted = "TRXP payloads alone, as bytes, where the first one is"
                raise refused(f"experiences[{place}]", payload, wanted)
            if taken and (len(taken) >= self._most or num_bytes + len(payload) > room):
                yield Share(start, taken, len(taken))
                taken, num_bytes, start = [], 0, place
            taken.append([bytes(payload)])
            num_bytes += len(payload)
        if taken:
            yield Share(start, taken, len(taken))
        yield from self._dead(len(payloads), dead)

    def _dead(self, first: int, dead: Sequence[types_pb2.Tombstone]) -> Iterator[Share]:
        start = 0
        while start < len(dead):
            part = dead[start : start + self._most]
            yield Share(first + start, tombstones=part)
            start += len(part)

    def next_call(self) -> Call[PushResult] | None:
        """The call to make now; None when everything has its outcome. Encodes, which takes a while.

        Raises:
            MessageTooLargeError: A payload is over the message limit and can't be taken apart.
        """
        while True:
            share = self._waiting.popleft() if self._waiting else next(self._shares, None)
            if share is None:
                return None
            if isinstance(share, PushOutcome):
                self._outcomes[share.index] = share
            elif share.num_bytes > push_split.max_payload_bytes(self._options):
                what = "the payload"
                self._divide(share, push_split.too_large(share.num_bytes, what, self._options))
            else:
                self._under_way = share
                return self._call(share)

    def _call(self, share: Share) -> Call[PushResult]:
        fields = self._without_tombstones
        if share.tombstones:
            fields = self._fields(tombstones=share.tombstones)
        # Those of a payload that nobody has counted are the server's.
        positions = range(0)
        if share.num_experiences is not None:
            num_items = share.num_experiences + len(share.tombstones)
            positions = range(share.start, share.start + num_items)
        parse = functools.partial(convert.push_result, positions=positions)
        return Call("Push", push_bytes.push_request(fields, share.payloads), parse)

    def answered(self, part: PushResult) -> None:
        """Take in what the call returned."""
        self._outcomes |= {outcome.index: outcome for outcome in part.outcomes}
        self._version = part.policy_version

    def failed(self, error: ExperienceBufferError) -> None:
        """Do it in smaller calls; an item that is too much alone is refused, and the others go on.

        Raises:
            ExperienceBufferError: `error` itself, where that can't help.
        """
        if not push_split.may_go_in_parts(error):
            raise error
        self._divide(self._under_way, error)

    def _divide(self, share: Share, error: ExperienceBufferError) -> None:
        try:
            parts = share.halves()
        except TrxpError:
            raise error from None
        if not parts:
            raise error
        if len(parts) == 1:
            self._outcomes[share.start] = push_split.refused(share.start, error, share.uid)
            return
        self._most = max((part.num_experiences or 0) + len(part.tombstones) for part in parts)
        self._waiting.extendleft(reversed(parts))

    def result(self) -> PushResult:
        """What became of all items, in order."""
        outcomes = tuple(self._outcomes[index] for index in sorted(self._outcomes))
        return PushResult(outcomes=outcomes, policy_version=self._version)

"""One push on its way: its payload is joined once, where it is sent from. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from experience_buffer._messages import push_bytes
from experience_buffer._messages.push_bytes import Payload, Pieces

if TYPE_CHECKING:
    from experience_buffer._transport.push_memory import PushMemory


class PushBody:
    """What a `PushRequest` says. Belongs to one thread or event loop at a time.

    Args:
        fields: Of `push_bytes.push_fields`.
        pieces: The payload, if there is one. What they refer to may change once it is sent.
    """

    def __init__(self, fields: bytes, pieces: Pieces = ()) -> None:
        self.fields = fields
        self.num_bytes = len(fields) + sum(map(len, pieces))
        """Of the request, nearly."""
        self._pieces = pieces
        self._payload: Payload | None = None
        self._request: bytes | None = None

    def request(self) -> bytes:
        """The `PushRequest`; always the same bytes."""
        if self._request is None:
            pieces = self._pieces if self._payload is None else (self._payload,)
            self._request = push_bytes.push_request(self.fields, [pieces] if pieces else [])
        return self._request

    def payloads(self, memory: PushMemory | None) -> Sequence[Payload]:
        """The payload, if there is one; it is joined the first time, in the memory if that has room."""
        if not self._pieces:
            return ()
        if self._payload is None:
            pieces = self._pieces
            self._payload = memory.place(pieces, pending_bytes=0) if memory else b"".join(pieces)
        return (self._payload,)

    def keep(self) -> None:
        """It may have to be sent again, and its place in shared memory is about to be another's."""
        if self._payload is not None:
            self._payload = bytes(self._payload)

"""Reads payloads into candidates: by compiled code where that is there and knows them, else checked.

Belongs to the server's event loop; one for all buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from experience_buffer import trxp
from experience_buffer.errors import TrxpError
from experience_buffer.trxp import Limits
from experience_buffer_server.buffer.intake.admission import admit
from experience_buffer_server.buffer.state.candidate import Candidate, Reason, Refusal
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.settings.buffer import BufferSettings


class Compiled(Protocol):
    """A reader that knows most payloads; see `candidates`."""

    def candidates(
        self,
        payload: memoryview,
        settings: BufferSettings,
        *,
        published: int | None,
        is_lent: bool,
    ) -> list[Candidate] | None:
        """The payload's candidates; None if it has to be read by the checked reader."""


class PayloadReader:
    """Reads pushed payloads. Not thread-safe.

    Args:
        limits: Bounds on a payload.
        metrics: Counts them.
    """

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self.limits = limits
        self.compiled: Compiled | None = None
        """Asked first, once it is there."""
        self._metrics = metrics

    def read(
        self,
        payload: bytes | memoryview,
        settings: BufferSettings,
        *,
        published: int | None,
        is_lent: bool = False,
    ) -> tuple[int, Iterator[Candidate | Refusal]]:
        """Read a payload.

        Args:
            payload: One TRXP payload.
            settings: Of the buffer that it was pushed to.
            published: The published policy version, if there is one.
            is_lent: Whether the sender can still change it. Nothing is read twice then, or relied on,
                that wasn't copied first.

        Returns:
            How many experiences it holds, and for each a candidate, or the reason against it.

        Raises:
            TrxpError: The payload as a whole can't be read.
        """
        if self.compiled is not None:
            known = self.compiled.candidates(
                memoryview(payload), settings, published=published, is_lent=is_lent
            )
            if known is not None:
                self._metrics.payload_read("compiled")
                return len(known), iter(known)
        items = trxp.read(bytes(payload) if is_lent else payload, limits=self.limits)
        self._metrics.payload_read("checked")
        return len(items), _admitted(items, settings, published)


def _admitted(
    items: Sequence[trxp.Item | TrxpError], settings: BufferSettings, published: int | None
) -> Iterator[Candidate | Refusal]:
    for item in items:
        if isinstance(item, TrxpError):
            yield Refusal(Reason.INVALID, str(item))
        else:
            yield admit(item, settings, published=published)

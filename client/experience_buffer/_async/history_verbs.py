"""The async client's verbs about what has happened: trends, training steps, departures."""

from __future__ import annotations

from typing import Any

from experience_buffer._async.connection import AsyncConnection
from experience_buffer._messages import convert
from experience_buffer._messages.convert import reader_of
from experience_buffer._show import Rows
from experience_buffer.history import Departures, StepInfo, Trends


class AsyncHistoryVerbs(AsyncConnection):
    """Verbs about the past, as far as the server remembers it: since it started, and bounded."""

    async def get_trends(self, buffer: str = "default", *, seconds: float = 0.0) -> Trends:
        """Read the last minutes of a buffer: rates, depths, rewards, staleness.

        Args:
            buffer: The buffer's name.
            seconds: How far back; 0: fifteen minutes, which is the most.
        """
        return await self._call("GetTrends", reader_of(Trends), buffer=buffer, seconds=seconds)

    async def list_steps(
        self,
        consumer: str = "",
        *,
        buffer: str = "default",
        step: int | None = None,
        limit: int = 100,
    ) -> tuple[StepInfo, ...]:
        """Read what training steps have consumed, the newest first.

        The server remembers the last 1,000 steps of each consumer. A notebook shows a table.

        Args:
            consumer: The consumer's name; empty: all, one after the other.
            buffer: The buffer's name.
            step: Only this one; None: the newest ones.
            limit: Most steps, at most 1,000.

        Raises:
            ConsumerNotFoundError: The buffer has no such consumer.
        """
        given: dict[str, Any] = {} if step is None else {"step": step}
        return Rows(
            await self._call(
                "ListSteps", convert.steps, buffer=buffer, consumer=consumer, limit=limit, **given
            )
        )

    async def list_departures(
        self,
        reason: str = "",
        *,
        buffer: str = "default",
        unused_only: bool = False,
        limit: int = 100,
    ) -> Departures:
        """Read what left a buffer lately, the newest first, and how many left for which reason.

        Args:
            reason: Only for this reason, one of those of `Departure`; empty: for all.
            buffer: The buffer's name.
            unused_only: True: only what was never trained on.
            limit: Most departures, at most 1,000.
        """
        return await self._call(
            "ListDepartures",
            reader_of(Departures),
            buffer=buffer,
            reason=reason,
            unused_only=unused_only,
            limit=limit,
        )

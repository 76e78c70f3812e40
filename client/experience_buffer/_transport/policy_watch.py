"""What both clients know of a watched policy version: what was seen, and when to try again."""

from __future__ import annotations

import logging
from typing import Final

from experience_buffer._messages.build import build
from experience_buffer._transport.retry import Attempts
from experience_buffer.errors import ExperienceBufferError
from experience_buffer.options import RetryOptions
from experience_buffer.v1 import service_pb2 as pb

logger = logging.getLogger("experience_buffer")
METHOD: Final = "WatchPolicyVersion"


class WatchedVersions:
    """What was seen, and when to try again. Does no I/O.

    Args:
        buffer: The buffer's name.
        retry: For how long to reconnect.
    """

    def __init__(self, buffer: str, retry: RetryOptions) -> None:
        self.request: Final = build(pb.WatchPolicyVersionRequest, buffer=buffer)
        self._retry = retry
        self._attempts: Attempts | None = None
        self._seen = False
        self._last: int | None = None

    def is_news(self, response: pb.WatchPolicyVersionResponse) -> bool:
        """Take in a message; False when it repeats the last one, as after a reconnection."""
        self._attempts = None
        version = response.version if response.HasField("version") else None
        is_news = not self._seen or version != self._last
        self._seen, self._last = True, version
        return is_news

    @property
    def last(self) -> int | None:
        """The version last seen."""
        return self._last

    def delay_after(self, error: ExperienceBufferError) -> float:
        """Seconds to wait before reconnecting.

        Raises:
            ExperienceBufferError: `error` itself, when that can't help or comes too late.
        """
        self._attempts = self._attempts or Attempts(self._retry, self._retry.reconnect_seconds)
        delay = self._attempts.delay_after(error, idempotent=True)
        logger.info("policy version: %s; reconnecting in %.1f s", error, delay)
        return delay

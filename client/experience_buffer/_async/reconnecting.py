"""A stream that is opened again whenever it breaks: what all kinds of streams do alike."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc

from experience_buffer._transport.retry import Attempts
from experience_buffer.errors import ExperienceBufferError, UnavailableError

if TYPE_CHECKING:
    from experience_buffer._async.connection import AsyncConnection

logger = logging.getLogger("experience_buffer")


class AsyncReconnecting:
    """Why a stream ended, and when to open it again: for `reconnect_seconds` after its last message.

    Args:
        client: Whose stream it is.
        method: The RPC.
        what: The stream, in words.
    """

    def __init__(self, client: AsyncConnection, method: str, what: str) -> None:
        self._client = client
        self._method = method
        self._what = what
        self._attempts: Attempts | None = None

    async def hear(self, call: Any, receive: Callable[[Any], None]) -> ExperienceBufferError:
        """Take in what comes until the stream ends; why it did."""
        try:
            async for message in call:
                self.heard()
                receive(message)
            return self.ended()
        except grpc.RpcError as error:
            return self.broken(error)
        finally:
            call.cancel()

    def heard(self) -> None:
        """A message came: the server is there."""
        self._attempts = None
        self._client._outage.ended()

    def ended(self) -> ExperienceBufferError:
        """Why a stream that the server ended did."""
        return UnavailableError(f"the server ended the {self._what}")

    def broken(self, error: grpc.RpcError) -> ExperienceBufferError:
        """Why a stream that broke did."""
        return self._client._translate(error, self._method)

    def delay_after(self, error: ExperienceBufferError) -> float:
        """Seconds to wait before opening it again.

        Raises:
            ExperienceBufferError: `error` itself, when that can't help or comes too late.
        """
        retry = self._client.options.retry
        self._attempts = self._attempts or Attempts(retry, retry.reconnect_seconds)
        delay = self._client._delay_after(
            error, self._attempts, idempotent=True, what=f"a {self._what}"
        )
        logger.info("%s: %s; reconnecting in %.1f s", self._what, error, delay)
        return delay

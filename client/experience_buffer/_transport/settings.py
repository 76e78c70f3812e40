"""What both clients are made of beside a channel: address, token, deadline, options."""

from __future__ import annotations

from functools import partial
from typing import Any, Final, Never

import grpc

from experience_buffer import status
from experience_buffer._arguments import Table, as_number, as_text, check_number, made, refused
from experience_buffer._messages import fields
from experience_buffer._transport import channel
from experience_buffer._transport.outage import Outage
from experience_buffer._transport.retry import Attempts
from experience_buffer.errors import CallCancelledError, ExperienceBufferError, InvalidRequestError
from experience_buffer.options import ClientOptions, TlsOptions

_MOST_SECONDS: Final = 366 * 86_400.0
GIVE_UP_SECONDS: Final = 1.0
"""To let the server know of a call that nobody waits for any more."""


class ClientSettings:
    """The constructor that both clients share, and pickling: settings travel, channels don't."""

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        timeout: float = 30.0,
        tls: TlsOptions | Table | None = None,
        options: ClientOptions | Table | None = None,
    ) -> None:
        if not isinstance(address, str):
            raise refused("address", address, "'host:port' as text")
        if token is not None and not isinstance(token, str):
            # Its value isn't repeated.
            raise InvalidRequestError(
                f"token is of type {type(token).__name__}; give text", subject="token"
            )
        check_number("timeout", timeout, is_open=True)
        address = as_text("address", address)
        token = None if token is None else str.__str__(token)
        self._address = address
        self._target = channel.parse_address(address)
        self._token = token
        self._timeout = float(timeout)
        """As given; `_seconds` is what counts."""
        self._tls = None if tls is None else made(TlsOptions, tls, "tls")
        self._options = (
            ClientOptions() if options is None else made(ClientOptions, options, "options")
        )
        safe = tls is not None or channel.is_local(self._target)
        if token is not None and not safe and not self._options.allow_insecure_token:
            raise InvalidRequestError(
                f"the token would travel unencrypted to {address!r}: pass tls=TlsOptions(), or "
                "options=ClientOptions(allow_insecure_token=True) where the network is trusted",
                subject="token",
            )
        self._metadata = channel.metadata(token)
        self._outage = Outage(address)
        self._prepare()

    def _prepare(self) -> None:
        """Set up what doesn't travel in a pickle."""

    @property
    def _is_closed(self) -> bool:
        """Whether `close` was called, which cancels the calls under way."""
        raise NotImplementedError

    @property
    def address(self) -> str:
        """The address as given."""
        return self._address

    @property
    def timeout(self) -> float:
        """Seconds that a call may take, unless it says otherwise."""
        return self._timeout

    @property
    def options(self) -> ClientOptions:
        """The options."""
        return self._options

    def _seconds(self, timeout: float | None) -> float:
        """Seconds that a call may take that was given so many; None: the client's.

        Raises:
            InvalidRequestError: It is no number.
        """
        return bounded_seconds(self._timeout if timeout is None else timeout)

    def _translate(self, error: grpc.RpcError, method: str) -> ExperienceBufferError:
        """The error of a call that the caller didn't cancel, unless by closing this."""
        call: Any = error  # The stub doesn't say that it is a call.
        if self._is_closed and call.code() is grpc.StatusCode.CANCELLED:
            return closed_error("client")
        return status.from_rpc_error(
            error,
            doing=f"{fields.verb(method)} to {self._address}",
            is_stream=method.endswith("Stream") or method.startswith("Watch"),
        )

    def _delay_after(
        self, error: ExperienceBufferError, attempts: Attempts, *, idempotent: bool, what: str
    ) -> float:
        """Seconds to wait before the next attempt of a call or stream; who waits for long is told.

        Args:
            error: What the last attempt failed with.
            attempts: Those that there were.
            idempotent: See `Attempts.delay_after`.
            what: The verb, or the stream.

        Raises:
            ExperienceBufferError: `error` itself, when another attempt can't help or comes too late.
        """
        delay = attempts.delay_after(error, idempotent=idempotent)
        self._outage.waits(what, error, delay=delay, seconds_left=attempts.remaining())
        return delay

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._address!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(
            type(self),
            token=self._token,
            timeout=self._timeout,
            tls=self._tls,
            options=self._options,
        )
        return make, (self._address,)


class OfOneProcess:
    """What has a connection of its own, and so stays where it was made."""

    def __reduce__(self) -> Never:
        raise TypeError(
            f"a {type(self).__name__} can't be pickled or copied: it has a connection of this process. "
            "Pass the client, which can be, and make another there"
        )


def bounded_seconds(seconds: float, what: str = "timeout") -> float:
    """The seconds, or a year where they are more: clocks and locks can't count any number.

    Raises:
        InvalidRequestError: They are no number.
    """
    return min(as_number(what, seconds, "a number of seconds"), _MOST_SECONDS)


def closed_error(what: str) -> CallCancelledError:
    """Make the error of a call on something that was closed."""
    return CallCancelledError(f"the {what} is closed; make a new one")

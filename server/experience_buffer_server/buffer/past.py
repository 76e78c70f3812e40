"""What has happened in a buffer, as callers are told: trends, training steps, departures."""

from __future__ import annotations

from collections.abc import Iterator

from experience_buffer import errors
from experience_buffer.history import Departures, StepInfo, Trends
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.telemetry.departure_log import WINDOW_SECONDS
from experience_buffer_server.buffer.telemetry.trend_log import INTERVAL_SECONDS, KEPT_SECONDS
from experience_buffer_server.runtime import clock

_DEFAULT_LIMIT, _MAX_LIMIT = 100, 1000


def trends(buffer: Buffer, seconds: float) -> Trends:
    """The last so many seconds of a buffer; 0: as far back as it is known.

    Raises:
        InvalidRequestError: `seconds` is negative or not a number.
    """
    if not seconds >= 0:
        raise errors.InvalidRequestError(
            f"seconds {seconds} must be at least 0; 0: fifteen minutes", subject="seconds"
        )
    telemetry = buffer.state.telemetry
    since = clock.now() - min(seconds or KEPT_SECONDS, KEPT_SECONDS)
    spreads = telemetry.trends.spreads(since)
    return Trends(
        buffer=buffer.name,
        begin_time=telemetry.begin_time,
        interval_seconds=INTERVAL_SECONDS,
        points=tuple(telemetry.trends.points(since)),
        rewards=spreads.rewards.distribution(),
        advantages=spreads.advantages.distribution(),
        response_tokens=spreads.response_tokens.distribution(),
        staleness=spreads.staleness.distribution(),
        seconds_in_buffer=spreads.seconds_in_buffer.distribution(),
    )


def steps(buffer: Buffer, consumer: str, step: int | None, limit: int) -> Iterator[StepInfo]:
    """Training steps, the highest first, of one consumer, or of all, one after the other.

    Others may have their turn on the event loop between two of them.

    Raises:
        ConsumerNotFoundError: The buffer has no such consumer.
        InvalidRequestError: The limit is too high.
    """
    limit = _checked(limit)
    consumers = [buffer.consumer(consumer)] if consumer else list(buffer.state.consumers.values())
    return _steps(buffer, [each.name for each in consumers], step, limit)


def _steps(buffer: Buffer, names: list[str], step: int | None, limit: int) -> Iterator[StepInfo]:
    for name in names:
        reader = buffer.state.consumers.get(name)
        retained = () if reader is None else reader.timeline.steps
        for info in buffer.state.telemetry.steps.infos(name, retained, step=step, limit=limit):
            if limit <= 0:
                return
            limit -= 1
            yield info


def departures(buffer: Buffer, *, reason: str, unused_only: bool, limit: int) -> Departures:
    """What left lately; see `Departures`.

    Raises:
        InvalidRequestError: The limit is too high.
    """
    log = buffer.state.telemetry.departures
    left = log.departures(reason=reason, unused_only=unused_only, limit=_checked(limit))
    times = log.window_times(clock.now())
    return Departures(
        departures=tuple(left),
        counts=log.counts(times),
        begin_time=buffer.state.telemetry.begin_time,
        window_seconds=WINDOW_SECONDS,
        window_times=times,
    )


def _checked(limit: int) -> int:
    if limit > _MAX_LIMIT:
        raise errors.InvalidRequestError(
            f"limit {limit} is over {_MAX_LIMIT}: more isn't remembered", subject="limit"
        )
    return limit or _DEFAULT_LIMIT

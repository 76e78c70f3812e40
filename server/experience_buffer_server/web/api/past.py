"""What has happened: what training steps consumed, and what left."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Path, Query
from starlette.responses import Response

from experience_buffer import errors
from experience_buffer._messages import convert
from experience_buffer._messages.calls import Call, call_of
from experience_buffer._messages.convert import reader_of
from experience_buffer.history import Departures, StepInfo
from experience_buffer_server.web.api.describing import BufferName, add, listed
from experience_buffer_server.web.route import Calling, stands_for
from experience_buffer_server.web.schemas import Page

Limit = Annotated[int, Query(ge=1, le=1000, description="Most of them, 1 to 1,000.")]


def add_past(app: FastAPI) -> None:
    """Add the routes."""
    add(app, "/buffers/{buffer}/steps", list_steps, Page("steps", StepInfo, has_token=False))
    add(app, "/buffers/{buffer}/steps/{consumer}/{step}", get_step, StepInfo)
    add(app, "/buffers/{buffer}/departures", list_departures, Departures)


@stands_for("ListSteps")
async def list_steps(
    buffer: BufferName,
    call: Calling,
    consumer: Annotated[str, Query(description="Only those of this consumer.")] = "",
    limit: Limit = 100,
) -> Response:
    """What training steps have consumed, the newest first."""
    return await call.answer(_steps(buffer, consumer, limit=limit), listed("steps"))


@stands_for("ListSteps")
async def get_step(
    buffer: BufferName,
    call: Calling,
    consumer: Annotated[str, Path(description="The consumer's name.")],
    step: Annotated[int, Path(description="The training step.")],
) -> Response:
    """What one training step has consumed."""

    def only(steps: tuple[StepInfo, ...]) -> Any:
        if not steps:
            raise errors.NotFoundError(
                f"consumer {consumer!r} of buffer {buffer!r} has acknowledged nothing with step {step} "
                "that is still known",
                subject=str(step),
            )
        return steps[0].to_dict()

    return await call.answer(_steps(buffer, consumer, limit=1, step=step), only)


@stands_for("ListDepartures")
async def list_departures(
    buffer: BufferName,
    call: Calling,
    reason: Annotated[str, Query(description="Only for this reason, such as evicted.")] = "",
    unused_only: Annotated[bool, Query(description="Only what was never trained on.")] = False,
    limit: Limit = 100,
) -> Response:
    """What left lately, the newest first, and how many left for which reason."""
    asked = call_of(
        "ListDepartures",
        reader_of(Departures),
        buffer=buffer,
        reason=reason,
        unused_only=unused_only,
        limit=limit,
    )
    return await call.answer(asked)


def _steps(buffer: str, consumer: str, **given: Any) -> Call[tuple[StepInfo, ...]]:
    return call_of("ListSteps", convert.steps, buffer=buffer, consumer=consumer, **given)

"""One experience: what it is and holds, its tokens, its images, its payload."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import FastAPI, Query
from starlette.responses import Response

from experience_buffer import StoredExperience, TrxpError, errors, trxp
from experience_buffer._codec.item import Item
from experience_buffer._messages import convert
from experience_buffer._messages.calls import call_of
from experience_buffer._show import Shown
from experience_buffer_server.web.answers import json_answer
from experience_buffer_server.web.api.describing import BufferName, add, add_file
from experience_buffer_server.web.inside import columns
from experience_buffer_server.web.inside.bounded import DEFAULT_CHARS, MOST_CHARS
from experience_buffer_server.web.inside.columns import TokenColumns, TokenOverview
from experience_buffer_server.web.inside.content import ExperienceContent, content_of
from experience_buffer_server.web.inside.images import images_of
from experience_buffer_server.web.route import Calling, Serving, stands_for

_BASE: Final = "/buffers/{buffer}/experience"
_MANY: Final = 1 << 20
"""Payloads are always taken apart in a thread."""
_SLOWEST: Final = 250_000
"""Bytes per second of a line that has the time to carry a payload."""
Uid = Annotated[str, Query(description="The uid: batch/task/run/step/suffix.")]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ExperienceView(Shown):
    """One experience as people look at it.

    Attributes:
        stored: What the server knows of it: summary, computation, history.
        content: What its worker said; null of a failed rollout.
    """

    stored: StoredExperience
    content: ExperienceContent | None


def add_experiences(app: FastAPI) -> None:
    """Add the routes."""
    add(app, _BASE, get_experience, ExperienceView)
    add(app, f"{_BASE}/tokens", get_tokens, TokenColumns)
    add(app, f"{_BASE}/overview", get_token_overview, TokenOverview)
    add_file(app, f"{_BASE}/payload", get_payload, "application/octet-stream")
    add_file(app, f"{_BASE}/image", get_image, "image/png", "image/jpeg")


@stands_for("Get")
async def get_experience(
    buffer: BufferName,
    call: Calling,
    served: Serving,
    uid: Uid,
    chars: Annotated[
        int, Query(ge=0, le=MOST_CHARS, description="The most characters of any text.")
    ] = DEFAULT_CHARS,
) -> Response:
    """One experience: what the server knows of it, and what its worker said; long texts are cut."""
    stored = await _stored(call, buffer, uid)

    def view() -> dict[str, Any]:
        content = content_of(_item(stored), num_chars=chars) if stored.payload else None
        return ExperienceView(stored=stored, content=content).to_dict()

    return await call.aside(lambda: json_answer(view()), _MANY)


@stands_for("Get")
async def get_tokens(
    buffer: BufferName,
    call: Calling,
    served: Serving,
    uid: Uid,
    part: Annotated[columns.Part, Query(description="Which of its tokens.")] = "response",
    start: Annotated[int, Query(ge=0, description="The first one, from the part's beginning.")] = 0,
    count: Annotated[int, Query(ge=1, le=columns.MOST_TOKENS)] = 1024,
) -> Response:
    """A window of an experience's tokens: ids, texts, and every number that each has."""
    stored = await _stored(call, buffer, uid)

    def window() -> Response:
        found = columns.window(_item(stored), part, start, count, served.texts)
        return json_answer(found.to_dict())

    return await call.aside(window, _MANY)


@stands_for("Get")
async def get_token_overview(
    buffer: BufferName,
    call: Calling,
    served: Serving,
    uid: Uid,
    points: Annotated[int, Query(ge=1, le=columns.MOST_POINTS)] = 1024,
) -> Response:
    """A whole response in a bounded number of points, as a strip to jump by."""
    stored = await _stored(call, buffer, uid)

    def overview() -> Response:
        return json_answer(columns.overview(_item(stored), points).to_dict())

    return await call.aside(overview, _MANY)


@stands_for("Get")
async def get_payload(buffer: BufferName, call: Calling, uid: Uid) -> Response:
    """The TRXP payload of an experience, computed advantages in place, as a file."""
    stored = await _stored(call, buffer, uid)
    if not stored.payload:
        raise _without_payload(uid)
    call.give_time(len(stored.payload) / _SLOWEST)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", uid)[:100]
    return Response(
        stored.payload,
        headers={"Content-Disposition": f'attachment; filename="{name}.trxp"'},
        media_type="application/octet-stream",
    )


@stands_for("Get")
async def get_image(
    buffer: BufferName,
    call: Calling,
    served: Serving,
    uid: Uid,
    index: Annotated[int, Query(ge=0, description="Which, of the experience's `images`.")] = 0,
) -> Response:
    """An image of an experience: PNG or JPEG, by its content."""
    stored = await _stored(call, buffer, uid)
    found = await call.aside(lambda: images_of(_item(stored)), _MANY)
    if index >= len(found):
        raise errors.NotFoundError(
            f"experience {uid!r} has {len(found)} images; there is none with index {index}",
            subject="index",
        )
    info, data = found[index]
    call.give_time(len(data) / _SLOWEST)
    return Response(data, media_type=info.media_type)


async def _stored(call: Calling, buffer: str, uid: str) -> StoredExperience:
    asked = call_of("Get", convert.stored, buffer=buffer, uid=uid)
    # Its payload isn't copied: what is made of the rest is small.
    return asked.parse(await call.ask(asked))


def _item(stored: StoredExperience) -> Item:
    """What the payload holds, in a thread: nothing of it is copied."""
    if not stored.payload:
        raise _without_payload(stored.summary.uid)
    (item,) = trxp.read(stored.payload)
    if isinstance(item, TrxpError):
        raise item
    return item


def _without_payload(uid: str) -> errors.WrongStateError:
    return errors.WrongStateError(
        f"experience {uid!r} is a failed rollout and has no payload", subject=uid
    )

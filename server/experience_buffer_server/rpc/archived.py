"""What has left and is archived, as the contract says it: Get, List, Annotate and Delete of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from experience_buffer import errors
from experience_buffer._codec import payload as payload_codec
from experience_buffer.errors import TrxpError
from experience_buffer.history import Acknowledgement, Departure
from experience_buffer.scanned import ScannedExperience, delivered
from experience_buffer.trxp import read
from experience_buffer.v1 import looking_pb2, service_pb2, types_pb2
from experience_buffer.values import ExperienceSummary
from experience_buffer_server.archive.archivist import Archivist
from experience_buffer_server.buffer import departed
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.history import history_of_departed
from experience_buffer_server.buffer.intake.annotation import AnnotateOutcome, AnnotateReason
from experience_buffer_server.rpc import messages

_MOST_WORDS: Final = 200
"""Characters of what an annotation has added, in an event."""
_PAGE_TOKEN: Final = re.compile(r"([0-9]{1,12}\.[0-9]{1,12})-([0-9]{1,20})")
_NOT_OF_THESE: Final = ("state",)
"""Fields of a filter that say nothing of what has left."""


def has(archivist: Archivist, buffer: Buffer) -> bool:
    """Whether anything of a buffer may be archived."""
    is_on = buffer.settings.archive is not None or departed.count(buffer) > 0
    return archivist.has_place and (is_on or archivist.has_files(buffer.id))


async def get(archivist: Archivist, buffer: Buffer, uid: str) -> service_pb2.GetResponse | None:
    """What has left last under a uid; None where nothing is archived under it.

    Raises:
        ResourceExhaustedError: Too many look into the archive.
        UnavailableError: It can't be read.
    """
    if not has(archivist, buffer):
        return None
    row = await row_of(archivist, buffer, uid)
    return None if row is None else _response(buffer, row)


async def row_of(archivist: Archivist, buffer: Buffer, uid: str) -> Mapping[str, Any] | None:
    """What the archive has of what has left last under a uid, by column.

    Raises:
        ResourceExhaustedError: Too many look into the archive.
        UnavailableError: It can't be read.
    """
    answer = await archivist.read(
        {"kind": "get", "buffer": buffer.id, "uid": uid, "waiting": departed.find(buffer, uid)}
    )
    row: Mapping[str, Any] | None = answer["row"]
    return row


async def list_page(
    archivist: Archivist, buffer: Buffer, request: service_pb2.ListRequest, size: int
) -> service_pb2.ListResponse:
    """A page of what has left, the newest first.

    Raises:
        InvalidRequestError: The token isn't one, or the filter asks what can't be said of what has left.
        ResourceExhaustedError: Too many look into the archive.
        UnavailableError: It can't be read.
    """
    for name in _NOT_OF_THESE:
        if getattr(request.filter, name):
            raise errors.InvalidRequestError(
                f"{name} is of what is stored, what is archived has none; leave it out",
                subject=name,
            )
    before = None
    if request.page_token:
        token = _PAGE_TOKEN.fullmatch(request.page_token)
        if token is None:
            raise errors.InvalidRequestError(
                f"page_token {request.page_token[:80]!r} is not one that a page of the archive ended "
                "with",
                subject="page_token",
            )
        before = (float(token[1]), int(token[2]))
    if not has(archivist, buffer):
        return service_pb2.ListResponse()
    wanted = {
        field.name: list(value) if field.is_repeated else value
        for field, value in request.filter.ListFields()
    }
    answer = await archivist.read(
        {"kind": "list", "buffer": buffer.id, "filter": wanted, "size": size, "before": before}
    )
    response = service_pb2.ListResponse()
    response.experiences.extend(_summary(row) for row in answer["rows"])
    if answer["before"] is not None:
        time, seq = answer["before"]
        response.next_page_token = f"{time!r}-{seq}"
    return response


async def annotate(
    archivist: Archivist,
    buffer: Buffer,
    annotations: Sequence[service_pb2.Annotation],
    outcomes: list[AnnotateOutcome],
    now: float,
) -> None:
    """Append what is added to experiences that have left; their outcomes are put in place.

    Raises:
        UnavailableError: It can't be written; what is stored was annotated all the same.
    """
    if not has(archivist, buffer):
        return
    places = [
        place
        for place, outcome in enumerate(outcomes)
        if outcome.reason is AnnotateReason.UNKNOWN_UID
    ]
    findings: list[dict[str, Any]] = []
    for place in places:
        message = annotations[place]
        annotation = messages.annotation_from(message)
        if annotation.problem:
            outcomes[place] = AnnotateOutcome(
                message.uid, AnnotateReason.INVALID, annotation.problem
            )
            continue
        findings.append(
            {
                "uid": message.uid,
                "reward": annotation.reward,
                "info": json.dumps(dict(annotation.info)),
                "tensors": message.tensors,
            }
        )
    if not findings:
        return
    waiting = [one["uid"] for one in findings if departed.find(buffer, one["uid"]) is not None]
    answer = await archivist.change(
        {"kind": "later", "buffer": buffer.id, "name": buffer.name, "now": now}
        | {"findings": findings, "waiting": waiting}
    )
    known = set(answer["known"])
    for place in places:
        if annotations[place].uid in known:
            outcomes[place] = AnnotateOutcome(annotations[place].uid)


async def delete(
    archivist: Archivist, buffer: Buffer, response: service_pb2.DeleteResponse
) -> None:
    """Remove for good what has left under the uids that aren't stored.

    Raises:
        UnavailableError: It can't be removed; what is stored was removed all the same.
    """
    if not response.unknown_uids or not has(archivist, buffer):
        return
    uids = list(response.unknown_uids)
    waiting = {uid for uid in uids if departed.find(buffer, uid) is not None}
    await departed.forget(buffer, waiting)
    answer = await archivist.change(
        {"kind": "delete", "buffer": buffer.id, "name": buffer.name, "uids": uids}
    )
    archivist.note_files(buffer.id, answer["files"])
    gone = waiting.union(answer["deleted"])
    response.num_deleted += len(gone)
    del response.unknown_uids[:]
    response.unknown_uids.extend(uid for uid in uids if uid not in gone)


# --- rows to messages


def _summary(row: Mapping[str, Any]) -> types_pb2.ExperienceSummary:
    def text(name: str) -> str:
        return row[name] or ""

    truncated = row["truncated"]
    return types_pb2.ExperienceSummary(
        uid=row["uid"],
        tid=text("tid"),
        rid=text("rid"),
        sid="" if row["step"] is None else f"{row['tid']}/{row['step']}",
        state=types_pb2.EXPERIENCE_STATE_ARCHIVED,
        reward=row["reward"],
        response_tokens=row["response_length"] or 0,
        payload_bytes=row["payload_bytes"] or 0,
        min_policy_version=row["model_version"],
        max_policy_version=row["max_model_version"],
        push_time=row["push_time"] or 0.0,
        priority=1.0 if row["priority"] is None else row["priority"],
        group=text("group"),
        staleness=row["staleness"],
        truncated=None if truncated is None else truncated == "response_truncated",
        departure_reason=text("departure_reason"),
        departure_time=row["departure_time"],
        message=text("departure_message"),
    )


def fill_scanned(message: service_pb2.ScannedExperience, row: Mapping[str, Any]) -> None:
    """What a scan says of what is archived: as it was pushed, and what was computed."""
    message.summary.CopyFrom(_summary(row))
    message.payload = row["payload"] or b""
    message.flags.extend(row["flags"] or ())
    message.details = row["computation"] or ""
    message.times_sampled = len(row["acked_by"] or ())
    message.advantages = row["advantages"] or b""
    if row["returns"] != row["advantages"]:
        message.returns = row["returns"] or b""


def departure_of(row: Mapping[str, Any]) -> Departure:
    """How it has left."""
    acks = zip(
        row["acked_by"] or (), row["acked_steps"] or (), row["acked_times"] or (), strict=True
    )
    acked_by = tuple(Acknowledgement(consumer=c, step=s, time=t) for c, s, t in acks)
    return Departure(
        uid=row["uid"],
        group=row["group"] or "",
        reason=row["departure_reason"] or "",
        message=row["departure_message"] or "",
        time=row["departure_time"] or 0.0,
        reward=row["reward"],
        is_trained=bool(acked_by),
        acked_by=acked_by,
        is_archived=True,
    )


def _response(buffer: Buffer, row: Mapping[str, Any]) -> service_pb2.GetResponse:
    response = service_pb2.GetResponse(summary=_summary(row))
    departure = departure_of(row)
    response.departure.CopyFrom(messages.message_of(looking_pb2.Departure, departure))
    response.payload = _payload(row)
    computation = json.loads(row["computation"]) if row["computation"] else None
    if computation is not None:
        response.computation.update(computation)
    events = history_of_departed(
        departure,
        push_time=row["push_time"] or 0.0,
        computation=computation,
        later=[(one["time"], ", ".join(one["info"])[:_MOST_WORDS]) for one in row["later"]],
    )
    response.history.extend(messages.message_of(looking_pb2.HistoryEvent, one) for one in events)
    for finding in row["later"]:
        later = response.later.add(time=finding["time"], tensors=finding["tensors"])
        if finding["reward"] is not None:
            later.reward = finding["reward"]
        later.info.update(finding["info"])
    return response


def _payload(row: Mapping[str, Any]) -> bytes:
    """As a trainer got it, with what was found later where nothing was pushed; or as it was pushed."""
    payload: bytes = row["payload"] or b""
    scanned = ScannedExperience(
        summary=_EMPTY,
        payload=payload,
        flags=tuple(row["flags"] or ()),
        advantages=row["advantages"] or b"",
        returns=row["returns"] or b"",
        details=row["computation"] or "",
    )
    try:
        payload = delivered(scanned) if payload else b""
        for finding in row["later"] if payload else ():
            (item,) = read(payload)
            if isinstance(item, TrxpError):
                return payload
            tensors = payload_codec.read_tensors(finding["tensors"]) if finding["tensors"] else {}
            pushed = _pushed_names(row)
            fresh = {name: view for name, view in tensors.items() if name not in pushed}
            payload = payload_codec.with_tensors(payload, fresh) if fresh else payload
    except (TrxpError, ValueError):
        # What was refused may be anything.
        return row["payload"] or b""
    return payload


def _pushed_names(row: Mapping[str, Any]) -> set[str]:
    (item,) = read(row["payload"])
    if isinstance(item, TrxpError):
        return set()
    return {*item.tensors, "advantages", "returns"}


_EMPTY: Final = ExperienceSummary(
    uid="",
    tid="",
    rid="",
    sid="",
    state="archived",
    reward=None,
    response_tokens=0,
    payload_bytes=0,
    min_policy_version=None,
    max_policy_version=None,
    push_time=0.0,
    message="",
    priority=1.0,
    generation=0,
)

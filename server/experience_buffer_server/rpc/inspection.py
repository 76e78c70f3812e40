"""Looking at and removing single experiences: Get, List, Delete."""

from __future__ import annotations

import math
from typing import Any

from experience_buffer import errors
from experience_buffer._messages.names import GROUP_ORDER, GROUP_STATE, STATE
from experience_buffer.v1 import looking_pb2, service_pb2, types_pb2
from experience_buffer_server.buffer import present
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.delivery.read_ahead import fetched
from experience_buffer_server.buffer.history import history
from experience_buffer_server.buffer.inspection.glance import Glance
from experience_buffer_server.buffer.inspection.group_pages import GroupsWanted
from experience_buffer_server.buffer.inspection.pages import page_size
from experience_buffer_server.buffer.inspection.wanted import Wanted
from experience_buffer_server.rpc import messages
from experience_buffer_server.rpc.batch_assembly import read_payload
from experience_buffer_server.store.interface import Store
from experience_buffer_server.store.rows import FLAGS

_MAX_DELETE_UIDS = 10_000


async def get(store: Store, buffer: Buffer, uid: str) -> service_pb2.GetResponse:
    """One experience with its payload.

    Raises:
        ExperienceNotFoundError: Nothing is stored under this uid.
        DataLossError: Its payload is gone or damaged.
    """
    entry = buffer.stored(uid)
    if entry is None:
        raise errors.ExperienceNotFoundError(
            f"buffer {buffer.name!r} holds no experience {uid!r}", subject=uid
        )
    async with fetched(store, buffer.id, [entry]):
        # All of it at once: it may be annotated while the disk is read.
        response = service_pb2.GetResponse(summary=messages.summary_message(buffer, entry))
        details: dict[str, Any] | None = None
        if not entry.record.tombstone:
            response.payload, row = read_payload(store, buffer, entry)
            if row is not None:
                details = row.details
                response.computation.update(details)
        past = history(buffer, entry, details)
        response.history.extend(messages.message_of(looking_pb2.HistoryEvent, one) for one in past)
    return response


async def list_page(buffer: Buffer, request: service_pb2.ListRequest) -> service_pb2.ListResponse:
    """A page of summaries.

    Raises:
        InvalidRequestError: The page size or token is not valid, or a key isn't written as it is here.
    """
    found, token = await present.experience_page(
        buffer,
        wanted_of(request.filter),
        token=request.page_token,
        size=page_size(request.page_size),
        newest_first=request.newest_first,
    )
    response, glance = service_pb2.ListResponse(next_page_token=token), Glance()
    for entry in found:
        response.experiences.append(messages.summary_message(buffer, entry))
        await glance.breathe()
    return response


async def delete(buffer: Buffer, request: service_pb2.DeleteRequest) -> service_pb2.DeleteResponse:
    """Remove experiences that nobody holds; a removed uid can be pushed again.

    Many go part by part, with everybody else in between; of a group all go at once.

    Raises:
        InvalidRequestError: Neither uids nor a filter are given, or too many uids, or a key isn't
            written as it is here; nothing is removed.
        StoreFullError: The removal can't be stored; what came before that is removed.
        BufferNotFoundError: The buffer was deleted meanwhile.
    """
    response = service_pb2.DeleteResponse()
    if len(request.uids) > _MAX_DELETE_UIDS:
        raise errors.InvalidRequestError(
            f"{len(request.uids)} uids are over the limit of {_MAX_DELETE_UIDS}", subject="uids"
        )
    if request.uids:
        entries = []
        for uid in dict.fromkeys(request.uids):
            entry = buffer.stored(uid)
            if entry is None:
                response.unknown_uids.append(uid)
            else:
                entries.append(entry)
    elif request.filter == service_pb2.Filter():
        raise errors.InvalidRequestError(
            "give uids, or a filter, such as tid or state; to remove everything, use delete_buffer",
            subject="filter",
        )
    else:
        entries = await present.all_of(buffer, wanted_of(request.filter))
    held, response.num_deleted = await buffer.delete(entries)
    response.leased_uids.extend(entry.record.uid for entry in held)
    return response


def wanted_of(asked: service_pb2.Filter) -> Wanted:
    """Which experiences a filter asks for.

    Raises:
        InvalidRequestError: A state is none, or there are too many flags, or ones that there aren't, or
            it asks how something has left.
    """
    if asked.state not in types_pb2.ExperienceState.values():
        raise errors.InvalidRequestError(
            f"state {asked.state} is none of {types_pb2.ExperienceState.keys()}", subject="state"
        )
    for name in ("departure_reason", "min_departure_time", "max_departure_time"):
        is_given = (
            asked.departure_reason if name == "departure_reason" else asked.HasField(_field(name))
        )
        if is_given:
            raise errors.InvalidRequestError(
                f"{name} is of what has left; ask for what is archived with it", subject=name
            )
    # There may be millions.
    flags = tuple(dict.fromkeys(asked.flags))
    if not set(flags) <= set(FLAGS):
        raise errors.InvalidRequestError(f"flags must be of {list(FLAGS)}", subject="flags")
    names = ("reward", "response_tokens", "policy_version", "staleness", "push_time")
    return Wanted(
        tid=asked.tid,
        rid=asked.rid,
        sid=asked.sid,
        state=STATE.name(asked.state) or None,
        consumer=asked.consumer,
        step=asked.step if asked.HasField("step") else None,
        truncated=asked.truncated if asked.HasField("truncated") else None,
        uid_prefix=asked.uid_prefix,
        text=asked.text,
        flags=flags,
        **{name: bounds for name in names if (bounds := _bounds(asked, name))},
    )


def _bounds(asked: service_pb2.Filter, name: str) -> tuple[float, float] | None:
    ends = {"min": -math.inf, "max": math.inf}
    given = [end for end in ends if asked.HasField(_field(f"{end}_{name}"))]
    for end in given:
        number = getattr(asked, f"{end}_{name}")
        if math.isnan(number):
            raise errors.InvalidRequestError(f"{end}_{name} is NaN", subject=name)
        ends[end] = number
    return (ends["min"], ends["max"]) if given else None


def _field(name: str) -> Any:
    """The stubs name each field; here they are put together."""
    return name


def groups_wanted(request: looking_pb2.ListGroupsRequest) -> GroupsWanted:
    """Which groups a request asks for.

    Raises:
        InvalidRequestError: The page size is over the limit, or a state or an order is none.
    """
    orders = looking_pb2.GroupOrder.values()
    if request.order not in orders:
        raise errors.InvalidRequestError(
            f"order {request.order} is none of {looking_pb2.GroupOrder.keys()}", subject="order"
        )
    # There may be millions: all that there can be of them, once each, are looked at.
    states = {GROUP_STATE.name(number) for number in request.states if number}
    if "" in states:
        raise errors.InvalidRequestError(
            f"states must be of {looking_pb2.GroupState.keys()}", subject="states"
        )
    return GroupsWanted(
        states=frozenset(states),
        prefix=request.prefix,
        order=GROUP_ORDER.name(request.order, "stuck"),
        size=page_size(request.page_size),
        token=request.page_token,
    )

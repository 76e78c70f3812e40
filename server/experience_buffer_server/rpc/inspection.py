"""Looking at and removing single experiences: Get, List, Delete."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

from experience_buffer import errors
from experience_buffer._messages.names import GROUP_ORDER, GROUP_STATE
from experience_buffer.v1 import looking_pb2, service_pb2
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.delivery.read_ahead import fetched
from experience_buffer_server.buffer.history import history
from experience_buffer_server.buffer.inspection.group_pages import GroupsWanted
from experience_buffer_server.buffer.inspection.pages import page_size
from experience_buffer_server.buffer.state.entries import Entry
from experience_buffer_server.buffer.state.group_keys import namesake
from experience_buffer_server.rpc import messages
from experience_buffer_server.rpc.batch_assembly import read_payload
from experience_buffer_server.runtime.tuning import TUNING
from experience_buffer_server.store.interface import Store

_DEFAULT_PAGE, _MAX_PAGE = 100, 1000
_MAX_DELETE_UIDS = 10_000
_MAX_LOOKS = 20_000
"""Experiences that are looked at for one page: meanwhile nobody is answered."""
_PAGE_TOKEN = re.compile(r"[0-9]{1,20}")


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


def list_page(buffer: Buffer, request: service_pb2.ListRequest) -> service_pb2.ListResponse:
    """A page of summaries.

    Raises:
        InvalidRequestError: The page size or token is not valid, or a key isn't written as it is here.
    """
    size = request.page_size or _DEFAULT_PAGE
    if size > _MAX_PAGE:
        raise errors.InvalidRequestError(
            f"page_size {size} is over the limit of {_MAX_PAGE}", subject="page_size"
        )
    if request.page_token and not _PAGE_TOKEN.fullmatch(request.page_token):
        raise errors.InvalidRequestError(
            f"page_token {request.page_token!r} is not one that a page ended with",
            subject="page_token",
        )
    after = int(request.page_token or 0)
    looked = list(itertools.islice(buffer.since(after), _MAX_LOOKS + 1))
    found = matching(buffer, request.filter, looked[:_MAX_LOOKS])
    page = list(itertools.islice(found, size + 1))
    if len(page) > size:
        token = str(page[size - 1].record.seq)
    else:
        # Perhaps there is more beyond what was looked at.
        token = str(looked[_MAX_LOOKS - 1].record.seq) if len(looked) > _MAX_LOOKS else ""
    if not (page or token or request.page_token):
        _check_key(buffer, request.filter, looked)
    return service_pb2.ListResponse(
        experiences=[messages.summary_message(buffer, entry) for entry in page[:size]],
        next_page_token=token,
    )


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
            "give uids, or tid, rid, sid or state; to remove everything, use delete_buffer",
            subject="filter",
        )
    else:
        entries, after = [], 0
        while looked := list(itertools.islice(buffer.since(after), TUNING.looks_at_once)):
            entries += matching(buffer, request.filter, looked)
            after = looked[-1].record.seq
            await asyncio.sleep(0)  # Others are answered in between.
        if not entries:
            _check_key(buffer, request.filter, itertools.islice(buffer.since(0), _MAX_LOOKS))
    held, response.num_deleted = await buffer.delete(entries)
    response.leased_uids.extend(entry.record.uid for entry in held)
    return response


def _check_key(buffer: Buffer, wanted: service_pb2.Filter, entries: Iterable[Entry]) -> None:
    """Refuse a key under which nothing was found, where a task in it is only written otherwise.

    Raises:
        InvalidRequestError: One of these entries has it so; the error says how.
    """
    if wanted.state:
        return  # In another one there may be some with the key as it is.
    records = [entry.record for entry in entries]
    for name, group_by in {"tid": "task", "rid": "run", "sid": "step"}.items():
        if not (key := getattr(wanted, name)):
            continue
        here = {getattr(record, name) for record in records}
        if other := namesake(key, group_by, here.__contains__):
            raise errors.InvalidRequestError(
                f"buffer {buffer.name!r} holds nothing with {name} {key!r}{other}", subject=name
            )


def matching(
    buffer: Buffer, wanted: service_pb2.Filter, entries: Iterable[Entry]
) -> Iterator[Entry]:
    """Those of the entries that a filter lets pass: on disk, and not leaving."""
    tid, rid, sid = wanted.tid, wanted.rid, wanted.sid
    for entry in entries:
        record = entry.record
        if (
            entry.durable
            and not entry.leaving
            and (not tid or tid == record.tid)
            and (not rid or rid == record.rid)
            and (not sid or sid == record.sid)
            and (not wanted.state or wanted.state == messages.state_number(buffer.state_of(entry)))
        ):
            yield entry


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

"""Units that came back from a consumer too often without an acknowledgement.

They may be what kills it: it doesn't get them any more until somebody releases or deletes them.
Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Sequence
from typing import NamedTuple

from experience_buffer import errors
from experience_buffer_server.buffer.delivery.offers import Offers
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.entries import Entry, key_of
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.store.interface import WriteBatch

_log = logging.getLogger(__name__)

_MAX_UIDS = 10_000
"""Experiences that one call may name."""


class _Released(NamedTuple):
    """A unit that is to be offered again once that is on disk."""

    key: int
    entries: list[Entry]
    why: str
    num_deliveries: int


def blame(
    state: BufferState, batch: WriteBatch, consumer_name: str, unit: Unit, reason: str
) -> None:
    """A delivery ended badly: after `max_deliveries` of them the unit isn't offered any more."""
    consumer = state.consumers.get(consumer_name)
    most = 0 if consumer is None else consumer.settings.max_deliveries
    if consumer is None or not most or unit.num_deliveries < most or unit.gone:
        return
    text = (
        f"delivered {unit.num_deliveries} times to {consumer_name!r} without an "
        f"acknowledgement, the last one {reason.replace('_', ' ')}; release_quarantined offers "
        "it again"
    )
    state.progress.quarantine(batch, unit, consumer, text)
    state.metrics.unit_quarantined(state.name, consumer_name)
    uids = [entry.record.uid for entry in state.contents.by_seqs(unit.seqs)]
    _log.warning("buffer %r: quarantined %s: %s", state.name, uids[:3], text)


async def release(
    state: BufferState, offers: Offers, consumer: Consumer, uids: Sequence[str]
) -> int:
    """Offer quarantined units to their consumer again; none named: all. Returns how many.

    Raises:
        ExperienceNotFoundError: A named one isn't stored, or isn't quarantined; the others are offered.
        InvalidRequestError: Too many are named.
        WrongStateError: A named one is damaged; the others are offered.
        StoreFullError: It can't be stored; they stay quarantined.
    """
    if len(uids) > _MAX_UIDS:
        raise errors.InvalidRequestError(
            f"{len(uids)} uids are over the limit of {_MAX_UIDS}; split them", subject="uids"
        )
    keys, problems = set(consumer.quarantined), list[errors.ExperienceBufferError]()
    if uids:
        keys = set()
        for uid in uids:
            try:
                keys.add(_key(state, consumer, uid))
            except (errors.ExperienceNotFoundError, errors.WrongStateError) as problem:
                problems.append(problem)
    count = await _release(state, offers, consumer, sorted(keys)) if keys else 0
    if problems:
        first, others = problems[0], f"; {count} units of the others are offered again"
        raise type(first)(str(first) + others, subject=first.subject)
    return count


def _key(state: BufferState, consumer: Consumer, uid: str) -> int:
    entry = state.contents.by_uid(uid)
    if entry is not None and entry.damage:
        raise errors.WrongStateError(
            f"experience {uid!r:.200} of buffer {state.name!r} can't be offered again: "
            f"{entry.damage}",
            subject=uid,
        )
    key = 0 if entry is None else key_of(consumer.settings, entry)
    if key not in consumer.quarantined:
        raise errors.ExperienceNotFoundError(
            f"experience {uid!r:.200} of buffer {state.name!r} isn't quarantined for "
            f"consumer {consumer.name!r}",
            subject=uid,
        )
    return key


def _release(
    state: BufferState, offers: Offers, consumer: Consumer, keys: Sequence[int]
) -> Awaitable[int]:
    batch = state.changes.batch()
    units: list[_Released] = []
    for key in keys:
        entries = state.contents.members_of(consumer.settings, key)
        known = [state.progress.known(entry.record.seq) for entry in entries]
        whys = [row.quarantined.get(consumer.name, "") for row in known]
        if not any(whys):
            continue  # It is being released, or it is leaving.
        times = known[0].num_deliveries.get(consumer.name, 0)
        units.append(_Released(key, entries, max(whys), times))
        state.progress.release(batch, consumer.name, entries)

    def stored() -> int:
        # Until now they were kept: nothing else has offered them meanwhile.
        kept = [unit for unit in units if consumer.quarantined.pop(unit.key, "")]
        for unit in kept:
            staying = [entry for entry in unit.entries if entry.is_staying]
            if staying and not consumer.has(unit.key):
                offers.offer_units(consumer, [(unit.key, staying)])
        return len(kept)

    def failed(error: BaseException) -> None:
        for unit in units:
            state.progress.keep(consumer.name, unit.entries, unit.why, unit.num_deliveries)

    return state.changes.submit(batch, stored, failed)

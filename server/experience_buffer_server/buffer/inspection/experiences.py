"""Experiences page by page, by what they are: few are looked at where something leads to them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from experience_buffer import errors
from experience_buffer_server.buffer.inspection.glance import Glance
from experience_buffer_server.buffer.inspection.wanted import Wanted, sieve, with_flags
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.entries import Entry
from experience_buffer_server.buffer.state.group_keys import namesake

_AT_ONCE: Final = 64
"""Experiences between two looks at the time."""
_MOST_LED_TO: Final = 20_000
"""Where more are led to, all are gone through: they would have to be sorted."""
_MOST_NAMES: Final = 20_000
"""Experiences among which a task is looked for that may be meant."""
_TOKEN: Final = re.compile(r"-?[0-9]{1,20}")


async def experience_page(
    state: BufferState, wanted: Wanted, *, token: str, size: int, newest_first: bool
) -> tuple[list[Entry], str]:
    """Experiences that are wanted, and the next page's token; it is empty after the last.

    There may be fewer than asked for, even none, while there are more pages. What is pushed or leaves in
    between neither doubles nor hides the others.

    Raises:
        ConsumerNotFoundError: There is no such consumer.
        InvalidRequestError: The token is none of this order, or a key isn't written as it is here.
    """
    after = _after(token, newest_first)
    passing, glance = sieve(state, wanted), Glance()
    found: list[Entry] = []
    last = after
    for some in _parts(state, wanted, after, newest_first):
        passed = passing(some)
        if wanted.flags and passed:
            passed = await with_flags(state, passed, wanted.flags)
        if len(found) + len(passed) > size:
            found += passed[: size - len(found)]
            return found, _token(found[-1].record.seq, newest_first)
        found += passed
        last = some[-1].record.seq
        if glance.is_over:
            return found, _token(last, newest_first)
        await glance.breathe()
    if not (found or token):
        await _check_keys(state, wanted, glance)
    return found, ""


async def all_of(state: BufferState, wanted: Wanted) -> list[Entry]:
    """All experiences that are wanted, oldest first, however long it takes.

    Raises:
        ConsumerNotFoundError: There is no such consumer.
        InvalidRequestError: A key isn't written as it is here.
    """
    passing, glance = sieve(state, wanted), Glance()
    found: list[Entry] = []
    for some in _parts(state, wanted, 0, newest_first=False):
        passed = passing(some)
        found += (
            await with_flags(state, passed, wanted.flags) if wanted.flags and passed else passed
        )
        await glance.breathe()
    if not found:
        await _check_keys(state, wanted, glance)
    return found


def _after(token: str, newest_first: bool) -> int:
    """Behind which number a page begins."""
    if not token:
        return 1 << 63 if newest_first else 0
    if not _TOKEN.fullmatch(token) or token.startswith("-") != newest_first:
        raise errors.InvalidRequestError(
            f"page_token {token!r:.60} is not one that a page in this order ended with",
            subject="page_token",
        )
    return abs(int(token))


def _token(seq: int, newest_first: bool) -> str:
    return f"{'-' if newest_first else ''}{seq}"


def _parts(
    state: BufferState, wanted: Wanted, after: int, newest_first: bool
) -> Iterator[Sequence[Entry]]:
    """What may be wanted, some at a time, in order; between two parts anything may happen."""
    led = _led_to(state, wanted)
    if led is None:
        yield from state.contents.parts(after, newest_first=newest_first)
        return
    seqs = [seq for seq in led if (seq < after if newest_first else seq > after)]
    seqs.sort(reverse=newest_first)
    for start in range(0, len(seqs), _AT_ONCE):
        if some := state.contents.by_seqs(seqs[start : start + _AT_ONCE]):
            yield some


def _led_to(state: BufferState, wanted: Wanted) -> set[int] | None:
    """The seqs of all that may be wanted, where they are known without a look at all; else None."""
    key = {"task": wanted.tid, "run": wanted.rid, "step": wanted.sid}.get(state.settings.group_by)
    if not key and state.settings.group_by == "task":
        # Their last part is a number: what is before it is the task's key.
        key = (wanted.rid or wanted.sid).rpartition("/")[0]
    if key:
        groups = state.contents.groups.of_key(key)
        return {entry.record.seq for group in groups for entry in group.members}
    consumers = list(state.consumers.values())
    if wanted.consumer:
        consumers = [state.consumer(wanted.consumer)]
    if wanted.step is not None:
        return {seq for one in consumers for seq in one.timeline.at(wanted.step)}
    seqs: set[int] = set()
    for some in _of_state(state, wanted, consumers):
        if len(some) + len(seqs) > _MOST_LED_TO:
            return None
        seqs.update(some)
    return None if wanted.state not in _LEADING else seqs


_LEADING: Final = frozenset(("leased", "held", "quarantined", "waiting_for_fields"))
"""States of which it is known who is in them."""


def _of_state(
    state: BufferState, wanted: Wanted, consumers: Sequence[Consumer]
) -> Iterator[Sequence[int]]:
    contents = state.contents
    for consumer in consumers:
        if wanted.state == "leased":
            yield _seqs_of(state, consumer, consumer.out)
        elif wanted.state == "held":
            yield _seqs_of(state, consumer, consumer.held)
        elif wanted.state == "quarantined":
            yield _seqs_of(state, consumer, consumer.quarantined)
    if wanted.state == "quarantined":
        yield list(contents.quarantined)
        # Of a group that is set aside, its members are for those who take groups.
        groups = {id(e.group): e.group for e in contents.quarantined.values() if e.group}
        yield [entry.record.seq for group in groups.values() for entry in group.members]
    elif wanted.state == "waiting_for_fields":
        lacking = {id(e.group): e.group for e in contents.lacking.values() if e.group}
        yield list(contents.lacking)
        yield [entry.record.seq for group in lacking.values() for entry in group.members]


def _seqs_of(state: BufferState, consumer: Consumer, keys: Iterable[int]) -> list[int]:
    if consumer.settings.unit == "item":
        return list(keys)
    groups = (state.contents.groups.by_id(key) for key in keys)
    return [entry.record.seq for group in groups if group for entry in group.members]


async def _check_keys(state: BufferState, wanted: Wanted, glance: Glance) -> None:
    """Refuse a key under which nothing was found, where a task in it is only written otherwise.

    Raises:
        InvalidRequestError: One of the oldest experiences has it so; the error says how.
    """
    keys = {"tid": wanted.tid, "rid": wanted.rid, "sid": wanted.sid}
    if not any(keys.values()) or wanted.state is not None:
        return  # In another state there may be some with the key as it is.
    here: dict[str, set[str]] = {name: set() for name, key in keys.items() if key}
    num_looked = 0
    for some in state.contents.parts(0, newest_first=False):
        for name, known in here.items():
            known.update(getattr(entry.record, name) for entry in some)
        num_looked += len(some)
        if num_looked > _MOST_NAMES:
            break
        await glance.breathe()
    for name, group_by in {"tid": "task", "rid": "run", "sid": "step"}.items():
        if name in here and (other := namesake(keys[name], group_by, here[name].__contains__)):
            raise errors.InvalidRequestError(
                f"buffer {state.name!r} holds nothing with {name} {keys[name]!r}{other}",
                subject=name,
            )

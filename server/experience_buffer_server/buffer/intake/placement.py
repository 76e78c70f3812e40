"""Where the new experiences of a push would go: into which groups, and which of these are open.

Nothing is changed here. Belongs to one buffer and its event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.entries import Candidate
from experience_buffer_server.buffer.state.group_keys import group_key


@dataclass(frozen=True, slots=True)
class Forecast:
    """Where the new experiences of a push are going to go, as things are now."""

    fresh: Sequence[tuple[int, Candidate]]
    """These experiences, each with its index in the push."""
    keys: Sequence[str | None]
    """The key of each one's group; None where the buffer has no groups."""
    closed_before: Mapping[str, str]
    """How groups that aren't here any more were closed, by key."""
    joining: Sequence[Candidate]
    """Those that join a group, or need none; the others are going to be refused."""
    opening: Sequence[Candidate]
    """Of these, the ones in groups that the push opens; where there are no groups, all."""
    opened: Mapping[str, int]
    """How many groups the push opens, by key."""


def forecast(
    state: BufferState, fresh: Sequence[tuple[int, Candidate]], stated_size: int
) -> Forecast:
    """See where new candidates would go: what is to be refused needs no room, and no place."""
    candidates = [candidate for _, candidate in fresh]
    keys: list[str | None] = [None] * len(fresh)
    if (group_by := state.settings.group_by) != "none":
        keys = [group_key(candidate.eid, group_by) for candidate in candidates]
    closed_before = _closed_before(state, keys)
    by_key: dict[str, tuple[int, int, int]] = {}
    for key, count in Counter(keys).items():
        if key is not None:
            closed = closed_before.get(key, "")
            by_key[key] = state.contents.groups.forecast(
                key, count, stated_size, settings=state.settings, remembered=closed
            )
    opened = {key: num_opened for key, (_, _, num_opened) in by_key.items() if num_opened}
    if not by_key or sum(number for _, number, _ in by_key.values()) == len(candidates):
        # Mostly groups come whole, and all of them are new.
        return Forecast(fresh, keys, closed_before, candidates, candidates, opened)
    num_before: Counter[str | None] = Counter()
    joining, opening = [], []
    for candidate, key in zip(candidates, keys, strict=True):
        assert key is not None
        num_joining, num_opening, _ = by_key[key]
        place = num_before[key]
        num_before[key] = place + 1
        if place < num_joining + num_opening:
            joining.append(candidate)
            if place >= num_joining:
                opening.append(candidate)
    return Forecast(fresh, keys, closed_before, joining, opening, opened)


def _closed_before(state: BufferState, keys: Iterable[str | None]) -> Mapping[str, str]:
    """How groups that aren't here any more were closed, by key."""
    groups = state.contents.groups
    unknown = [key for key in dict.fromkeys(keys) if key is not None and groups.get(key) is None]
    if not unknown:
        return {}
    values = state.store.recall(state.id, "group", unknown)
    return {key: value.decode() for key, value in zip(unknown, values, strict=True) if value}


def completing(state: BufferState, forecast: Forecast) -> list[tuple[int, Candidate]]:
    """What of a push goes into open groups of a known size of which an experience is here.

    Before it comes, nothing of these groups is delivered: kept out for lack of room, it would keep
    the room from ever coming. It is bounded: by the size of a group for each experience that had room.

    Args:
        state: The buffer's.
        forecast: Where what is new in the push would go.
    """
    if not state.settings.waits_for_groups:
        return []
    joining = set(map(id, forecast.joining)).difference(map(id, forecast.opening))
    waits: dict[str | None, bool] = {}
    found = []
    for (index, candidate), key in zip(forecast.fresh, forecast.keys, strict=True):
        if id(candidate) not in joining:
            continue
        if key not in waits:
            group = None if key is None else state.contents.groups.get(key)
            waits[key] = group is not None and bool(group.row.size and group.votes)
        if waits[key]:
            found.append((index, candidate))
    return found

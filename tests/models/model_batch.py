"""What makes the next batch: its order and windows, what limiters count, whose part is whose."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from tests.models.model import Lease, Member, Model

# --- the units of a batch


def sample(model: Model, name: str, wanted: int) -> list[str]:
    """The units of the next batch; those found too stale on the way are set aside."""
    reader = model.places[name].reader
    leased = len(model.experiences(name, model.leased(name)))
    window, bound = reader.get("max_leased_experiences", 0), num_allowed(model, name, wanted)
    if leased and window:
        bound = min(bound, window - leased)
    chosen: list[str] = []
    stale: list[list[Member]] = []
    repeats = wanted if reader.get("with_replacement") else 1
    for unit, members in in_order(model, name) if bound > 0 else ():
        if is_future(model, members):
            continue
        if is_stale(model, name, members):
            stale.append(members)
            continue
        if window and (leased or chosen) and leased + len(members) > window:
            break
        leased += len(members)
        chosen += [unit] * min(repeats, bound - len(chosen))
        if len(chosen) == bound:
            break
    set_aside(model, name, stale)
    return chosen


def in_order(model: Model, name: str) -> list[tuple[str, list[Member]]]:
    """The earliest first; with a selector the highest priority, then the earliest."""
    units = list(model.available(name).items())
    if model.places[name].reader.get("selector"):
        units.sort(key=lambda unit: -sum(m.priority for m in unit[1]) / len(unit[1]))
    return units


def is_future(model: Model, members: list[Member]) -> bool:
    return model.published is not None and max(m.version for m in members) > model.published


def is_stale(model: Model, name: str, members: list[Member]) -> bool:
    window = model.places[name].reader.get("staleness")
    if not window or model.published is None:
        return False
    return bool(model.published - min(m.version for m in members) > window["max_lag"])


def set_aside(model: Model, name: str, stale: list[list[Member]]) -> None:
    """Passed over; dropped for everybody where nobody holds it and no rewind may bring it back.

    A single item isn't where it would leave a group torn that somebody takes, or that is incomplete.
    """
    place = model.places[name]
    drop = place.reader.get("staleness", {}).get("on_stale") == "drop"
    by_item = place.reader["unit"] == "item"
    kept = [
        unit
        for unit in stale
        if not drop or (by_item and is_needed(model, unit[0])) or is_wanted(model, name, unit)
    ]
    model.leave([m for unit in stale if unit not in kept for m in unit], "dropped")
    passed = {m.unit_of(place.reader["unit"]) for unit in kept for m in unit}
    # Nobody owes its limiter their samples.
    place.gone += [(model.times(name, unit), False) for unit in passed]
    place.given_up |= passed
    place.passed |= passed
    model.settle()


def is_needed(model: Model, member: Member) -> bool:
    """Its group is taken as one, or isn't whole yet where something is computed over it."""
    is_taken = any(place.reader["unit"] == "group" for place in model.places.values())
    return is_taken or (model.is_gated and not member.group.is_whole)


def is_wanted(model: Model, name: str, unit: list[Member]) -> bool:
    """Somebody holds any of it, a rewind may bring it back, or has for another consumer."""
    return any(
        model.is_held(m) or model.may_return(m) or model.was_rewound(m, but_for=name) for m in unit
    )


# --- the limiter's arithmetic, written out from the units that are stored and those that have left
#
# difference = inserts * samples_per_insert - samples; a sample may not take it below `min_diff`, an
# insert not above `max_diff`; below `min_size` nothing is sampled and everything is inserted. What was
# used up and stays counts as stored where it is sampled from, and not where there is more to come.


def counted(model: Model, name: str) -> set[str]:
    """Units that the limiter counts: also dropped ones that the consumer holds, or is done with.

    Not those that it has passed over.
    """
    dropped = [group for group in model.groups.values() if group.closed == "dropped"]
    units = {member.uid for group in dropped for member in group.live}
    units |= {group.key for group in dropped if group.was_whole}
    here = {*model.units(name), *(units & set(model.stored(name)))}
    return here - model.places[name].given_up


def difference(model: Model, name: str, num_stored: int) -> Fraction:
    """inserts * samples_per_insert - samples.

    What leaves fully used goes on counting; what leaves earlier is refunded.
    """
    place = model.places[name]
    ratio = Fraction(str(place.reader["limiter"]["samples_per_insert"]))
    gone = [times for times, was_used_up in place.gone if was_used_up or times > ratio]
    samples = sum(gone) + sum(model.times(name, unit) for unit in counted(model, name))
    return (num_stored + len(gone)) * ratio - samples


def num_allowed(model: Model, name: str, wanted: int) -> int:
    """How many samples the limiter lets go now."""
    limiter, num_stored = model.places[name].reader.get("limiter"), len(counted(model, name))
    if not limiter:
        return wanted
    room = difference(model, name, num_stored) - limiter["min_diff"]
    return 0 if num_stored < limiter["min_size"] else min(wanted, max(int(room // 1), 0))


def may_insert(model: Model, uids: Iterable[str], keys: Iterable[str]) -> bool:
    """Whether no limiter keeps a push of these new experiences and groups out."""
    num_new = {"item": len(set(uids)), "group": len(set(keys) - set(model.groups))}
    for name, place in model.places.items():
        limiter, kind = place.reader.get("limiter"), place.reader["unit"]
        new, stored = num_new[kind], _num_stored(model, name)
        if limiter and new and new > limiter["min_size"] - stored + _num_used_up(model, name):
            rise = new * Fraction(str(limiter["samples_per_insert"]))
            if difference(model, name, stored) + rise > limiter["max_diff"]:
                return False
    return True


def _num_stored(model: Model, name: str) -> int:
    """Units that are here or on their way, less those of dropped groups that only others hold."""
    place, groups = model.places[name], model.groups.values()
    if place.reader["unit"] == "item":
        return sum(m.uid not in place.given_up for group in groups for m in group.live)
    return sum(group.key not in place.given_up for group in groups)


def _num_used_up(model: Model, name: str) -> int:
    """Units that are here and were delivered as often as they may be."""
    place, leased = model.places[name], model.leased(name)
    return sum(place.consumed(unit) and unit not in leased for unit in counted(model, name))


# --- leases that ranks share: who asks gets its part again until it has acknowledged it


def world_size(model: Model, name: str) -> int:
    """Ranks that share what is open; 0: nothing is."""
    return max((len(lease.parts) for lease in model.leases_of(name).values()), default=0)


def due_to_rank(model: Model, name: str, rank: int, after_lease_id: int) -> int | None:
    """The open lease that a rank gets, before a new batch is formed for it."""
    leases = sorted(model.leases_of(name).items())
    return next((i for i, le in leases if i > after_lease_id and rank not in le.acked), None)


def part_of_rank(model: Model, lease: Lease, rank: int) -> list[list[str]]:
    """A rank's groups, member by member; a dropped one is delivered to the end of its lease."""
    start = sum(lease.parts[:rank])
    units = lease.units[start : start + lease.parts[rank]]
    return [[m.uid for m in model.groups[unit].live] for unit in units]


def reached(lease: Lease, step: int) -> bool:
    """Whether a rank has acknowledged its part with this step or a later one."""
    return any(given >= step for given in lease.acked.values() if given is not None)


def ack_as_rank(model: Model, lease_id: int, step: int | None, rank: int) -> None:
    """The lease ends with its last rank, at the latest of their steps; for good if it is safe by now."""
    lease = model.leases[lease_id]
    lease.acked[rank] = step
    if len(lease.acked) == len(lease.parts):
        safe = model.places[lease.consumer].safe
        last = max((given for given in lease.acked.values() if given is not None), default=None)
        is_safe = last is not None and safe is not None and last <= safe
        model.ack(lease_id, None if is_safe else last)

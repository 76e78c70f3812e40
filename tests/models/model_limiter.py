"""The limiter's arithmetic, written out from the units that are stored and those that have left.

difference = inserts * samples_per_insert - samples; a sample may not take it below `min_diff`, an
insert not above `max_diff`; below `min_size` nothing is sampled and everything is inserted. What was
used up and stays counts as stored where it is sampled from, and not where there is more to come.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from tests.models.model import Model


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

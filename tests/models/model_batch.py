"""Which units make the next batch: the order, the windows, and what is too old or too new for it."""

from __future__ import annotations

from tests.models.model import Model
from tests.models.model_limiter import num_allowed
from tests.models.model_stock import Member


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

"""The key of a group: whose members it has. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from experience_buffer.eid import EID, text_of_key
from experience_buffer_server.buffer.state.entries import Group, check_uid
from experience_buffer_server.store.interface import Record

_KEY_NAMES = {"task": "tid", "run": "rid", "step": "sid"}


def group_key(of: Record | EID, group_by: str) -> str:
    """The key of the group that an experience belongs to, by its record or its identity."""
    return str(getattr(of, _KEY_NAMES[group_by]))


def key_problem(eid: EID, group_by: str) -> str:
    """What keeps an experience from belonging to a group; empty when nothing does."""
    if eid.batch == "" == eid.task:
        return (
            "eid has neither batch nor task, so that all experiences without them would be one "
            "group; set eid = EID(batch=..., task=...), the same for the answers to one prompt and "
            'another for each prompt, or push to a buffer with group_by = "none"'
        )
    # Of another task it isn't longer than the uid, which was looked at.
    if (
        type(eid.task) is str
        and "/" in eid.task
        and (problem := check_uid(group_key(eid, group_by)))
    ):
        return f"the key of its group, in which each / of the task takes three bytes: {problem}"
    return ""


def namesake(key: str, groups: Iterable[Group]) -> str:
    """A word on a group that somebody may mean who says a key that there isn't; else empty."""
    for group in groups:
        if group.row.key != key and text_of_key(group.row.key) == key:
            return (
                f"; {group.row.key!r} is here, whose task has a / that is written %2F in keys: "
                "say EID(batch, task).tid"
            )
    return ""

"""The key of a group: whose members it has. Pure."""

from __future__ import annotations

from collections.abc import Callable

from experience_buffer.eid import EID, task_in_key
from experience_buffer_server.buffer.state.entries import check_uid
from experience_buffer_server.store.interface import Record

_KEY_NAMES = {"task": "tid", "run": "rid", "step": "sid"}
_SPELLED = {"task": "batch/task", "run": "batch/task/run", "step": "batch/task/step"}
_LEAST_SLASHES = {group_by: spelled.count("/") for group_by, spelled in _SPELLED.items()}
"""Old stores hold keys in which a batch or task has more of them."""


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


def wrong_key(key: str, group_by: str) -> str:
    """Why no group of a buffer can have a key; empty where one can."""
    if problem := check_uid(key) if key else "it is empty":
        return f"group key: {problem}"
    if key.count("/") < _LEAST_SLASHES.get(group_by, 0):
        name = _KEY_NAMES[group_by]
        return (
            f"group {key!r} can't be: keys of a buffer with group_by = {group_by!r} are "
            f"{_SPELLED[group_by]!r}, such as experience.eid.{name}"
        )
    return ""


def namesake(key: str, group_by: str, is_here: Callable[[str], object]) -> str:
    """A word on the key that somebody may mean who writes a task as it was given; else empty.

    Args:
        key: A key that isn't here.
        group_by: What it is of: a task, a run or a step.
        is_here: Whether there is something with a key.
    """
    if check_uid(key):
        return ""
    text, end = key, ""
    if group_by != "task":
        text, slash, number = key.rpartition("/")
        end = slash + number
    parts = text.split("/")
    for place in range(1, len(parts)):  # Each / may be what ends the batch.
        batch, task = "/".join(parts[:place]), "/".join(parts[place:])
        other = f"{batch}/{task_in_key(task)}{end}"
        if other != key and is_here(other):
            return (
                f"; {other!r} is here, whose task has a / that is written %2F in keys: "
                f"say EID(...).{_KEY_NAMES[group_by]}"
            )
    return ""

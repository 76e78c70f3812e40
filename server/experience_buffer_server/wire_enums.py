"""The words of the configuration and the enums of the contract that stand for them."""

from __future__ import annotations

from typing import Any, Final

from experience_buffer.v1 import config_pb2

_ENUMS: Final[dict[str, tuple[Any, str]]] = {
    "group_by": (config_pb2.GroupBy, "GROUP_BY_"),
    "on_group_deadline": (config_pb2.DeadlinePolicy, "DEADLINE_POLICY_"),
    "late_members": (config_pb2.LatePolicy, "LATE_POLICY_"),
    "on_bad_reward": (config_pb2.BadRewardPolicy, "BAD_REWARD_POLICY_"),
    "on_missing_field": (config_pb2.MissingFieldPolicy, "MISSING_FIELD_POLICY_"),
    "unit": (config_pb2.Unit, "UNIT_"),
}
CHOICES: Final = (
    "group_by",
    "on_group_deadline",
    "late_members",
    "on_bad_reward",
    "on_missing_field",
)
"""Settings of a buffer that are words."""


def enum_word(field: str, number: int) -> str:
    """GROUP_BY_TASK -> "task"; an unknown number stays visible in the error that follows."""
    enum, prefix = _ENUMS[field]
    try:
        name: str = enum.Name(number)
    except ValueError:
        return str(number)
    return name.removeprefix(prefix).lower()


def enum_number(field: str, word: str) -> Any:
    """The number that stands for a word, "task" -> GROUP_BY_TASK."""
    enum, prefix = _ENUMS[field]
    return enum.Value(prefix + word.upper())


__all__ = ["CHOICES", "enum_number", "enum_word"]

"""The texts that the client has for the contract's enums. Pure."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from experience_buffer._arguments import refused
from experience_buffer.v1 import config_pb2, looking_pb2, types_pb2


class Names:
    """The texts that stand for an enum's values: DEADLINE_POLICY_USE_PARTIAL is "use_partial"."""

    def __init__(self, enum: Any) -> None:
        prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
        values = [value for value in enum.values if value.number]
        self.by_number: Final = {
            value.number: value.name.removeprefix(prefix).lower() for value in values
        }
        self.by_name: Final = {name: number for number, name in self.by_number.items()}

    def name(self, number: int, default: str = "") -> Any:
        """The text; `default` for 0, and for values that a newer server added."""
        return self.by_number.get(number, default)

    def number(self, name: str, field: str) -> Any:
        """The enum's value.

        Raises:
            InvalidRequestError: No such name.
        """
        found = self.by_name.get(str.__str__(name)) if isinstance(name, str) else None
        if found is None:
            known = ", ".join(repr(known) for known in self.by_name)
            raise refused(field, name, f"one of {known}")
        return found


names_of = cache(Names)
"""The texts of an enum, by its descriptor."""
PUSH_STATUS: Final = names_of(types_pb2.PushStatus.DESCRIPTOR)
ANNOTATE_REFUSAL: Final = names_of(types_pb2.AnnotateRefusal.DESCRIPTOR)
REFUSAL_REASON: Final = names_of(types_pb2.RefusalReason.DESCRIPTOR)
STATE: Final = names_of(types_pb2.ExperienceState.DESCRIPTOR)
GROUP_STATE: Final = names_of(looking_pb2.GroupState.DESCRIPTOR)
GROUP_ORDER: Final = names_of(looking_pb2.GroupOrder.DESCRIPTOR)
FORMAT: Final = names_of(types_pb2.SampleFormat.DESCRIPTOR)
UNIT: Final = names_of(config_pb2.Unit.DESCRIPTOR)

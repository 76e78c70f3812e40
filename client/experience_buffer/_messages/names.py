"""The texts that the client has for the contract's enums. Pure."""

from __future__ import annotations

from typing import Any, Final

from experience_buffer.errors import InvalidRequestError
from experience_buffer.v1 import config_pb2, types_pb2


class Names:
    """The texts that stand for an enum's values: "USE_PARTIAL" of the wire is "use_partial"."""

    def __init__(self, enum: Any, prefix: str) -> None:
        values = [value for value in enum.DESCRIPTOR.values if value.number]
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
        try:
            return self.by_name[name]
        except (KeyError, TypeError):
            known = ", ".join(repr(known) for known in self.by_name)
            raise InvalidRequestError(
                f"{field} is {name!r}; give one of {known}", subject=field
            ) from None


PUSH_STATUS: Final = Names(types_pb2.PushStatus, "PUSH_STATUS_")
ANNOTATE_REFUSAL: Final = Names(types_pb2.AnnotateRefusal, "ANNOTATE_REFUSAL_")
REFUSAL_REASON: Final = Names(types_pb2.RefusalReason, "REFUSAL_REASON_")
STATE: Final = Names(types_pb2.ExperienceState, "EXPERIENCE_STATE_")
FORMAT: Final = Names(types_pb2.SampleFormat, "SAMPLE_FORMAT_")
UNIT: Final = Names(config_pb2.Unit, "UNIT_")
SELECTOR_KIND: Final = Names(config_pb2.SelectorKind, "SELECTOR_KIND_")
SELECTOR_KEY: Final = Names(config_pb2.SelectorKey, "SELECTOR_KEY_")
STALE_POLICY: Final = Names(config_pb2.StalePolicy, "STALE_POLICY_")
CONFIG_ENUMS: Final = {
    "group_by": Names(config_pb2.GroupBy, "GROUP_BY_"),
    "on_group_deadline": Names(config_pb2.DeadlinePolicy, "DEADLINE_POLICY_"),
    "late_members": Names(config_pb2.LatePolicy, "LATE_POLICY_"),
    "on_bad_reward": Names(config_pb2.BadRewardPolicy, "BAD_REWARD_POLICY_"),
    "on_missing_field": Names(config_pb2.MissingFieldPolicy, "MISSING_FIELD_POLICY_"),
    "on_full": Names(config_pb2.FullPolicy, "FULL_POLICY_"),
    "on_future_version": Names(config_pb2.FuturePolicy, "FUTURE_POLICY_"),
}
"""Those of a buffer's configuration, by field."""

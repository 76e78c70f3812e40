"""Which of what has left is wanted: by key, reward, length, version, consumer and step, reason.

A segment that can't hold any of it isn't opened; of others only the columns that are compared are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Self

import numpy as np

from experience_buffer_server.archive.layout import About
from experience_buffer_server.archive.segment import Segment

_RANGES: Final = {
    "reward": "reward",
    "response_tokens": "response_length",
    "staleness": "staleness",
    "push_time": "push_time",
    "departure_time": "departure_time",
}
"""By the name of a filter's lowest and highest value, the column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A filter; fields have the names of those of the contract, and what is empty or None isn't asked."""

    tid: str = ""
    rid: str = ""
    sid: str = ""
    uid_prefix: str = ""
    text: str = ""
    departure_reason: str = ""
    consumer: str = ""
    step: int | None = None
    truncated: bool | None = None
    flags: Sequence[str] = ()
    min_reward: float | None = None
    max_reward: float | None = None
    min_response_tokens: float | None = None
    max_response_tokens: float | None = None
    min_policy_version: int | None = None
    max_policy_version: int | None = None
    min_staleness: int | None = None
    max_staleness: int | None = None
    min_push_time: float | None = None
    max_push_time: float | None = None
    min_departure_time: float | None = None
    max_departure_time: float | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """From plain values."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    @property
    def columns(self) -> list[str]:
        """Those that are compared; none: everything is wanted."""
        names = [
            *(["tid"] if self.tid or self.sid else []),
            *(["step"] if self.sid else []),
            *(["rid"] if self.rid else []),
            *(["uid"] if self.uid_prefix or self.text else []),
            *(["departure_reason"] if self.departure_reason else []),
            *(["acked_by", "acked_steps"] if self.consumer or self.step is not None else []),
            *(["truncated"] if self.truncated is not None else []),
            *(["flags"] if self.flags else []),
            *(["model_version"] if self.min_policy_version is not None else []),
            *(["max_model_version"] if self.max_policy_version is not None else []),
        ]
        for name, column in _RANGES.items():
            if getattr(self, f"min_{name}") is not None or getattr(self, f"max_{name}") is not None:
                names.append(column)
        return names

    def may_be_in(self, about: About) -> bool:
        """Whether a segment may hold any of it."""
        if self.min_departure_time is not None and about.max_time < self.min_departure_time:
            return False
        if self.max_departure_time is not None and about.min_time > self.max_departure_time:
            return False
        if self.step is None:
            return True
        spans = [
            span for name, span in about.steps.items() if not self.consumer or name == self.consumer
        ]
        return any(low <= self.step <= high for low, high in spans)

    def matches(self, segment: Segment) -> Any:
        """A mask over a segment's rows; None: all match."""
        names = self.columns
        if not names:
            return None
        table = segment.read(names)
        mask = np.ones(table.num_rows, bool)
        numbers = ("step", "model_version", "max_model_version", *_RANGES.values())
        values: dict[str, Any] = {}
        for name in names:
            column = table.column(name)
            if name in numbers:
                # What is unknown is NaN, and lies in no range.
                values[name] = column.cast("float64").to_numpy(zero_copy_only=False)
            else:
                values[name] = column.to_pylist()
        for name, column in _RANGES.items():
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if low is not None:
                mask &= values[column] >= low
            if high is not None:
                mask &= values[column] <= high
        if self.min_policy_version is not None:
            mask &= values["model_version"] >= self.min_policy_version
        if self.max_policy_version is not None:
            mask &= values["max_model_version"] <= self.max_policy_version
        texts = [name for name in names if name not in numbers or name == "step"]
        for row in np.flatnonzero(mask) if texts else ():
            mask[row] = self._has_texts({name: values[name][row] for name in texts})
        return mask

    def matches_row(self, row: Mapping[str, Any]) -> bool:
        """Whether one that isn't in a segment yet matches; `row` is by column."""
        for name, column in _RANGES.items():
            low, high, value = (
                getattr(self, f"min_{name}"),
                getattr(self, f"max_{name}"),
                row[column],
            )
            if (low is not None or high is not None) and value is None:
                return False
            if (low is not None and value < low) or (high is not None and value > high):
                return False
        low, high = row["model_version"], row["max_model_version"]
        if self.min_policy_version is not None and (low is None or low < self.min_policy_version):
            return False
        if self.max_policy_version is not None and (high is None or high > self.max_policy_version):
            return False
        return self._has_texts(row)

    def _has_texts(self, row: Mapping[str, Any]) -> bool:
        return (
            (not self.tid or row["tid"] == self.tid)
            and (not self.rid or row["rid"] == self.rid)
            and (not self.sid or f"{row['tid']}/{_whole(row['step'])}" == self.sid)
            and (not self.uid_prefix or row["uid"].startswith(self.uid_prefix))
            and (not self.text or self.text in row["uid"])
            and (not self.departure_reason or row["departure_reason"] == self.departure_reason)
            and (self.truncated is None or self.truncated == _is_cut(row["truncated"]))
            and (not self.flags or set(self.flags) <= set(row["flags"] or ()))
            and self._was_acked(row)
        )

    def _was_acked(self, row: Mapping[str, Any]) -> bool:
        if not self.consumer and self.step is None:
            return True
        return any(
            (not self.consumer or consumer == self.consumer)
            and (self.step is None or step == self.step)
            for consumer, step in zip(row["acked_by"], row["acked_steps"], strict=True)
        )


def _whole(value: Any) -> Any:
    return int(value) if value is not None and value == value else value


def _is_cut(truncated: str | None) -> bool:
    return truncated == "response_truncated"

"""From rows back to what can be pushed. What a file says is not believed: each row is checked alone."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from experience_buffer._codec.limits import DEFAULT_LIMITS
from experience_buffer._codec.payload import read
from experience_buffer._show import Shown, cut
from experience_buffer._tables.schema import KINDS, NAMES
from experience_buffer.eid import EID
from experience_buffer.errors import ExperienceBufferError, InvalidRequestError, TrxpError
from experience_buffer.experience import Experience
from experience_buffer.scanned import ScannedExperience
from experience_buffer.values import ExperienceSummary, Tombstone

HEAD: Final = (
    *("uid", "batch", "task", "run", "step", "suffix"),
    *("reward", "tombstone", "reason", "payload"),
)
"""Columns that say what a row is; the others are read of rows without payload alone."""
_MOST_NUMBER_CHARS: Final = 18
_MOST_SHOWN: Final = 80


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TableRow(Shown):
    """One row of a file, as it can be pushed.

    Attributes:
        number: Its place in the file, from 0.
        uid: Name of the experience; empty where the row doesn't say.
        payload: Its TRXP payload; empty of a tombstone, and of a row that can't be read.
        tombstone: The failed rollout that it stands for; None for an experience.
        problem: Why it can't be pushed; empty where it can.
    """

    number: int
    uid: str = ""
    payload: bytes = field(default=b"", repr=False)
    tombstone: Tombstone | None = None
    problem: str = ""


def table_row(values: Mapping[str, Any], number: int) -> TableRow:
    """Check one row.

    Args:
        values: By column; what is missing counts as null.
        number: Its place in the file.
    """
    uid = values.get("uid")
    uid = uid if isinstance(uid, str) else ""
    try:
        if values.get("tombstone"):
            tombstone = Tombstone(_eid(values), str(values.get("reason") or "")[:1024])
            _check_uid(uid, tombstone.eid.uid)
            return TableRow(number=number, uid=tombstone.eid.uid, tombstone=tombstone)
        payload = values.get("payload")
        if payload is None:
            payload = _made(values).serialize()
        elif isinstance(payload, str):
            payload = base64.b64decode(payload, validate=True)
        found = _checked(payload, values, uid)
    except (ExperienceBufferError, TypeError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, binascii.Error):
            problem = f"its payload isn't base64: {error}"
        else:
            problem = str(error) or type(error).__name__
        return TableRow(number=number, uid=uid, problem=cut(problem, 500))
    return TableRow(number=number, uid=found, payload=payload)


def _checked(payload: bytes, values: Mapping[str, Any], uid: str) -> str:
    """The uid of a payload that holds one experience, the one that its row says."""
    if not isinstance(payload, bytes):
        raise InvalidRequestError(f"its payload is a {type(payload).__name__}, not bytes")
    if len(payload) > DEFAULT_LIMITS.max_message_bytes:
        raise InvalidRequestError(
            f"its payload of {len(payload)} bytes exceeds what a message may hold, "
            f"{DEFAULT_LIMITS.max_message_bytes} bytes"
        )
    items = read(payload)
    if len(items) != 1:
        raise InvalidRequestError(f"its payload holds {len(items)} experiences, not one")
    item = items[0]
    if isinstance(item, TrxpError):
        raise item
    _check_uid(uid, item.uid)
    said, held = values.get("reward"), item.meta.get("reward")
    if isinstance(said, (int, float)) and isinstance(held, (int, float)):
        is_same = said == held or (math.isnan(said) and math.isnan(held))
        if not is_same:
            raise InvalidRequestError(
                f"the row says reward {said!r}, its payload {held!r}; set the payload to null to "
                "import what the row's columns say"
            )
    return item.uid


def _check_uid(said: str, held: str) -> None:
    if said and said != held:
        raise InvalidRequestError(
            f"the row says uid {cut(said, _MOST_SHOWN)!r}, and holds {cut(held, _MOST_SHOWN)!r}"
        )


def _eid(values: Mapping[str, Any]) -> EID:
    parts: dict[str, Any] = {}
    for name in ("batch", "task", "run", "step", "suffix"):
        value = values.get(name)
        if value is None:
            if name in ("batch", "task"):
                raise InvalidRequestError(f"{name} is null, and without payload nothing says it")
            continue
        parts[name] = _part(value) if name in ("batch", "task") else value
    if "suffix" not in parts:
        return EID.fixed(**{name: parts[name] for name in parts})
    return EID(**parts)


def _part(value: Any) -> Any:
    """A batch or task: a number where its text is that of one, as most are."""
    if isinstance(value, str) and len(value) <= _MOST_NUMBER_CHARS:
        digits = value.removeprefix("-")
        if digits.isascii() and digits.isdigit() and str(int(value)) == value:
            return int(value)
    return value


def _made(values: Mapping[str, Any]) -> Experience:
    """An experience of what the columns say."""
    prompt, response = values.get("prompt_ids"), values.get("completion_ids")
    if prompt is None or response is None:
        raise InvalidRequestError(
            "it has neither a payload nor prompt_ids and completion_ids; export it with one of them"
        )
    reward = values.get("reward")
    given: dict[str, Any] = {
        "eid": _eid(values),
        "tokens": [*map(int, prompt), *map(int, response)],
        "prompt_length": len(prompt),
        "logprobs": _numbers(values.get("logprobs")),
        "reward": _WORDS.get(reward, reward) if isinstance(reward, str) else reward,
        "truncate_status": values.get("truncated"),
        "prompt_text": values.get("prompt"),
        "response_text": values.get("completion"),
        "chosen": values.get("chosen_ids"),
        "rejected": values.get("rejected_ids"),
    }
    if given["chosen"] is None:
        given["action_mask"] = values.get("completion_mask")
    if values.get("computation") is None:
        given |= {name: _numbers(values.get(name)) for name in ("advantages", "returns")}
    for name in ("messages", "tools", "chosen_messages", "rejected_messages", "info", "metrics"):
        given[name] = _plain(values.get(name))
    made = Experience(**{name: value for name, value in given.items() if value is not None})
    if values.get("suffix") is None and values.get("uid") is None:
        made.fix_suffix()
    return made


_WORDS: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _numbers(values: Any) -> list[float] | None:
    if values is None:
        return None
    return [float(_WORDS.get(each, each) if isinstance(each, str) else each) for each in values]


def _plain(value: Any) -> Any:
    """What a column of JSON says, given as text or as the value itself."""
    return json.loads(value) if isinstance(value, str) else value


def delivered_row(values: Mapping[str, Any], number: int) -> TableRow:
    """Check one row; its payload as a trainer got it.

    Args:
        values: By column, lists of numbers as arrays.
        number: Its place in the file.
    """
    row = table_row(values, number)
    if row.problem or row.tombstone is not None:
        return row
    try:
        return replace(row, payload=scanned(values).delivered)
    except (ExperienceBufferError, TypeError, ValueError) as error:
        return TableRow(number=number, uid=row.uid, problem=cut(str(error), 500))


def scanned(values: Mapping[str, Any]) -> ScannedExperience:
    """A row as what a scan reads, as `columns` was given it.

    Args:
        values: By column, lists of numbers as arrays.

    Raises:
        InvalidRequestError: It isn't one.
    """
    row = table_row(values, 0)
    if row.problem:
        raise InvalidRequestError(row.problem, subject=row.uid)
    state: Any = "tombstone" if row.tombstone is not None else values.get("state") or ""
    details = values.get("computation") or ""

    def number(name: str) -> Any:
        value = values.get(name)
        return 0 if value is None else value

    return ScannedExperience(
        summary=ExperienceSummary(
            uid=row.uid,
            tid=values.get("tid") or "",
            rid=values.get("rid") or "",
            sid=f"{values.get('tid') or ''}/{number('step')}",
            state=state,
            reward=values.get("reward"),
            response_tokens=number("response_length"),
            payload_bytes=len(row.payload),
            min_policy_version=values.get("model_version"),
            max_policy_version=values.get("max_model_version"),
            push_time=number("push_time"),
            message=values.get("reason") or "",
            priority=1.0 if values.get("priority") is None else values["priority"],
            generation=0,
            group=values.get("group") or "",
            staleness=values.get("staleness"),
        ),
        times_sampled=number("times_sampled"),
        flags=tuple(values.get("flags") or ()),
        payload=row.payload,
        advantages=_floats(values.get("advantages")) if details else b"",
        returns=_floats(values.get("returns")) if details else b"",
        details=details,
    )


def _floats(values: Any) -> bytes:
    import numpy as np

    return b"" if values is None else np.asarray(values, "<f4").tobytes()


def rows_of(batch: Any, names: tuple[str, ...] = NAMES) -> list[dict[str, Any]]:
    """The rows of a `pyarrow.RecordBatch` as values by column; lists of numbers as arrays."""
    columns = {}
    for name in names:
        if name not in batch.schema.names:
            continue
        column = batch.column(name)
        if KINDS[name].startswith("list<") and KINDS[name] != "list<string>":
            columns[name] = [
                None if each.values is None else each.values.to_numpy(zero_copy_only=False)
                for each in column
            ]
        else:
            columns[name] = column.to_pylist()
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]

"""An experience that was pushed and read, before it is stored; or why it is refused."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from experience_buffer.eid import EID
from experience_buffer_server.store.interface import MAX_KEY_BYTES, Payload


class Reason(StrEnum):
    """Why an item is refused; the wire has the same names."""

    INVALID = "invalid"
    CONFLICT = "conflict"
    LATE = "late"
    MISSING_FIELD = "missing_field"
    GROUP_SIZE = "group_size"
    FUTURE_VERSION = "future_version"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One item isn't stored; its neighbours are not affected."""

    reason: Reason
    message: str
    uid: str = ""


@dataclass(slots=True, kw_only=True)
class Candidate:
    """An experience or tombstone that may be stored; nobody changes it."""

    eid: EID
    uid: str
    payload: Payload
    """The canonical TRXP payload of this experience alone; empty for a tombstone."""
    digest: bytes
    reward: float | None
    response_tokens: int
    min_version: int | None
    max_version: int | None
    fields: int = 0
    """Which of an estimator's inputs it carries; see `experience_inputs.input_fields`."""
    priority: float = 1.0
    tombstone: bool = False
    note: str = ""


MAX_NOTE = 1024
"""Characters of a reason that a client gives; longer ones are cut."""

ORDINARY = 1 << 61
"""Bit of `Record.fields`: all tokens after the prompt are the response, and nothing was cut off."""
COUNTED = 1 << 62
"""Bit of `Record.fields`: the running moments have counted its reward before it was annotated."""


def check_uid(uid: str) -> str:
    """What keeps a uid from being a key of the store; empty when nothing does."""
    if uid.isascii() and len(uid) <= MAX_KEY_BYTES:
        return ""
    try:
        size = len(uid.encode())
    except UnicodeEncodeError as error:
        return f"uid {uid!a}: not valid Unicode at character {error.start}; send plain text"
    if size > MAX_KEY_BYTES:
        return (
            f"uid of {size} bytes is over the limit of {MAX_KEY_BYTES} bytes for a key of the "
            f"store; shorten batch, task or suffix ({uid[:60]!r}...)"
        )
    return ""

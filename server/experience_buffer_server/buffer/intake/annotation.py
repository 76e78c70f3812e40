"""Annotations: what is added to one experience, what may not be, and the experience with it.

Pure: no store, no clock; what is checked here concerns one experience alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from experience_buffer import errors, trxp
from experience_buffer.trxp import Item, Limits, TensorView
from experience_buffer_server import advantages
from experience_buffer_server.buffer.intake.admission import admit
from experience_buffer_server.buffer.state.entries import Candidate, Refusal
from experience_buffer_server.settings.buffer import BufferSettings

REPLACEABLE = frozenset(advantages.INPUT_FIELDS) | {"versions"}
"""Tensors that an annotation may put in place of pushed ones; others only where there is none."""


class AnnotateReason(StrEnum):
    """Why an annotation is refused; the wire has the same names."""

    UNKNOWN_UID = "unknown_uid"
    INVALID = "invalid"
    DELIVERED = "delivered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """What is added to one experience."""

    uid: str
    reward: float | None = None
    tensors: Mapping[str, TensorView] = dataclasses.field(default_factory=dict)
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    problem: str = ""
    """Why it can't be read; empty when it can."""


@dataclass(frozen=True, slots=True)
class AnnotateOutcome:
    """What became of one annotation."""

    uid: str
    reason: AnnotateReason | None = None
    message: str = ""


def admit_annotated(
    annotation: Annotation,
    payload: bytes,
    *,
    settings: BufferSettings,
    max_payload_bytes: int,
    limits: Limits = trxp.DEFAULT_LIMITS,
) -> Candidate | str:
    """The annotated experience, as if it had been pushed so; or why it can't be.

    Raises:
        TrxpError: It can't be written, or could not be read any more.
    """
    item = _first(payload)
    if problem := annotation.problem or _conflict(item, annotation):
        return problem
    # What it still lacks may come later.
    patient = settings.model_copy(
        update={"on_missing_field": "wait", "on_missing_version": "deliver"}
    )
    admitted = admit(_annotated(item, annotation), patient)
    if isinstance(admitted, Refusal):
        return admitted.message
    if admitted.tombstone:
        return admitted.note
    if len(admitted.payload) > max_payload_bytes:
        return (
            f"annotated it would take {len(admitted.payload)} bytes, more than a message may "
            f"hold ({max_payload_bytes} bytes, server.max_message_bytes)"
        )
    _first(bytes(admitted.payload), limits)
    return admitted


def _first(payload: bytes, limits: Limits = trxp.DEFAULT_LIMITS) -> Item:
    item = trxp.read(payload, limits=limits)[0]
    if isinstance(item, errors.TrxpError):
        raise item
    return item


def _conflict(item: Item, annotation: Annotation) -> str:
    """What an annotation would overwrite and must not; empty when nothing."""
    for name in annotation.tensors:
        if ":" in name or not name:
            return f"tensor {name!r}: a plain field name is expected; images can't be annotated"
        if name in ("advantages", "returns"):
            return f"{name} is computed by the server; annotate what it is computed from"
        if name in item.tensors and name not in REPLACEABLE:
            return (
                f"tensor {name} was pushed and stays as it is; only "
                f"{', '.join(sorted(REPLACEABLE))} can be replaced"
            )
    return ""


def _annotated(item: Item, annotation: Annotation) -> Item:
    """The experience with its annotation; what comes in one form replaces the other, too."""
    meta = dict(item.meta)
    if annotation.reward is not None:
        meta["reward"] = annotation.reward
    given = meta.get("info")
    info = dict(given) if isinstance(given, Mapping) else {}
    stale = info.keys() & annotation.tensors.keys()
    if annotation.info or stale:
        kept = {name: value for name, value in info.items() if name not in stale}
        meta["info"] = {**kept, **annotation.info}
    replaced = annotation.info.keys() & REPLACEABLE
    tensors = {name: view for name, view in item.tensors.items() if name not in replaced}
    return Item(item.index, item.eid, meta, {**tensors, **annotation.tensors}, item.keys)

"""From what has left to the rows of a segment: the columns of every table, and how each has left."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

from experience_buffer._tables.columns import Columns
from experience_buffer._tables.schema import KINDS, NAMES, arrow, arrow_schema
from experience_buffer.scanned import ScannedExperience
from experience_buffer.values import ExperienceSummary
from experience_buffer_server.archive.note import Note
from experience_buffer_server.store.interface import AdvantageRow, Departed, DepartedRow, Record
from experience_buffer_server.store.rows import FLAGS

SUMMARY: Final = (
    *("uid", "group", "tid", "rid", "step", "reward", "response_length", "model_version"),
    *("max_model_version", "push_time", "priority", "staleness", "truncated", "flags"),
    *("seq", "payload_bytes", "departure_reason", "departure_message", "departure_time"),
    *("acked_by", "acked_steps", "acked_times"),
)
"""Columns of what `List` says of each."""
WHOLE: Final = (*SUMMARY, "payload", "advantages", "returns", "computation", "completion_mask")
"""Columns of what `Get` says of one."""


class Ack(NamedTuple):
    """An acknowledgement of one experience."""

    consumer: str
    step: int | None
    time: float | None
    """Seconds since the Unix epoch; None: unknown."""


@cache
def schema() -> Any:
    """The columns of a segment, as a `pyarrow.Schema`."""
    pa = arrow()
    added = [
        ("seq", pa.int64()),
        ("payload_bytes", pa.int64()),
        ("departure_reason", pa.string()),
        ("departure_message", pa.string()),
        ("departure_time", pa.float64()),
        ("acked_by", pa.list_(pa.string())),
        ("acked_steps", pa.list_(pa.int64())),
        ("acked_times", pa.list_(pa.float64())),
    ]
    return pa.schema([*arrow_schema(), *(pa.field(name, kind) for name, kind in added)])


class Rows:
    """Rows that become one `pyarrow.RecordBatch`. Not thread-safe."""

    def __init__(self) -> None:
        self._columns = Columns()
        self._payloads: list[bytes | None] = []
        self._added: dict[str, list[Any]] = {
            name: [] for name in schema().names if name not in KINDS
        }
        self.uids: list[str] = []
        self.num_bytes = 0
        """Of payloads."""

    def __len__(self) -> int:
        return len(self.uids)

    def add(self, departed: Departed) -> None:
        """Add what has left; of what can't be read, the rest."""
        row, payload, computed = departed
        record, note = row.record, Note.decode(row.note)
        details = computed.details if isinstance(computed, AdvantageRow) else None
        scanned = ScannedExperience(
            summary=_summary(record, note),
            times_sampled=len(acks_of(row, note)),
            flags=tuple(name for name in FLAGS if details and details.get(name)),
            payload=payload if isinstance(payload, bytes) else b"",
            advantages=computed.advantages if isinstance(computed, AdvantageRow) else b"",
            returns=computed.returns if isinstance(computed, AdvantageRow) else b"",
            details=json.dumps(details) if details else "",
        )
        troubles = [str(one) for one in (payload, computed) if isinstance(one, Exception)]
        self._add(scanned, record.seq, note, acks_of(row, note), "; ".join(troubles))

    def add_refused(self, uid: str, reason: str, message: str, time: float, payload: bytes) -> None:
        """Add what was refused when it was pushed; its payload may be anything."""
        note = Note("refused", f"{reason}: {message}", time, "", None, "none", None)
        summary = ExperienceSummary(
            uid=uid, tid="", rid="", sid="", state="", reward=None, response_tokens=0,  # type: ignore[arg-type]
            payload_bytes=len(payload), min_policy_version=None, max_policy_version=None,
            push_time=time, message="", priority=1.0, generation=0,
        )  # fmt: skip
        self._add(ScannedExperience(summary=summary, payload=payload), 0, note, [], "")

    def _add(
        self, scanned: ScannedExperience, seq: int, note: Note, acks: Sequence[Ack], trouble: str
    ) -> None:
        payload = scanned.payload
        problem = self._columns.add(scanned)
        if problem:
            # The payload is kept as it is, and nothing is said of what is in it.
            bare = ScannedExperience(summary=scanned.summary)
            assert not self._columns.add(bare), problem
        self._payloads.append(payload or None)
        self.uids.append(scanned.summary.uid)
        self.num_bytes += len(payload)
        said = [note.message, trouble, problem if note.reason != "refused" else ""]
        for name, value in (
            ("seq", seq),
            ("payload_bytes", scanned.summary.payload_bytes),
            ("departure_reason", note.reason),
            ("departure_message", "; ".join(text for text in said if text)),
            ("departure_time", note.time),
            ("acked_by", [ack.consumer for ack in acks]),
            ("acked_steps", [ack.step for ack in acks]),
            ("acked_times", [ack.time for ack in acks]),
        ):
            self._added[name].append(value)

    def batch(self) -> Any:
        """The rows as a `pyarrow.RecordBatch`."""
        pa = arrow()
        made = self._columns.batch()
        arrays = [made.column(name) for name in NAMES]
        arrays[NAMES.index("payload")] = pa.array(self._payloads, pa.binary())
        for name, values in self._added.items():
            spoken = [v.encode(errors="replace").decode() if type(v) is str else v for v in values]
            arrays.append(pa.array(spoken, schema().field(name).type))
        return pa.RecordBatch.from_arrays(arrays, schema=schema())


def acks_of(row: DepartedRow, note: Note) -> list[Ack]:
    """Who has acknowledged it, the first one first."""
    progress = row.progress
    acks = [Ack(*one) for one in progress.trained] if progress is not None else []
    if note.consumer:
        acks.append(Ack(note.consumer, note.step, note.time))
    if progress is not None:
        # Before it had an archive nobody noted when.
        known = {ack.consumer for ack in acks}
        unknown = [n for n in progress.acked if n not in known | set(progress.passed_over)]
        acks[:0] = [Ack(name, None, None) for name in unknown]
    return acks


def plain(row: DepartedRow) -> dict[str, Any]:
    """What `List` says of what waits to be archived: by column, as a segment has it."""
    record, note = row.record, Note.decode(row.note)
    acks = acks_of(row, note)
    return {
        "uid": record.uid,
        "group": _group(record, note),
        "tid": record.tid,
        "rid": record.rid,
        "step": record.step,
        "reward": record.reward,
        "response_length": record.response_tokens,
        "model_version": record.min_version,
        "max_model_version": record.max_version,
        "push_time": record.push_time,
        "priority": record.priority,
        "staleness": _staleness(record, note),
        "truncated": None,
        "flags": None,
        "seq": record.seq,
        "payload_bytes": record.payload_bytes,
        "departure_reason": note.reason,
        "departure_message": note.message,
        "departure_time": note.time,
        "acked_by": [ack.consumer for ack in acks],
        "acked_steps": [ack.step for ack in acks],
        "acked_times": [ack.time for ack in acks],
    }


def steps_of(
    rows: Iterable[tuple[Sequence[str], Sequence[int | None]]],
) -> dict[str, tuple[int, int]]:
    """By consumer, the lowest and highest training step among acks."""
    found: dict[str, tuple[int, int]] = {}
    for consumers, steps in rows:
        for consumer, step in zip(consumers, steps, strict=True):
            if step is not None:
                low, high = found.get(consumer, (step, step))
                found[consumer] = (min(low, step), max(high, step))
    return found


def _staleness(record: Record, note: Note) -> int | None:
    if note.policy_version is None or record.min_version is None:
        return None
    return note.policy_version - record.min_version


def _group(record: Record, note: Note) -> str:
    """The key of its group; empty where there were none."""
    match note.group_by:
        case "task":
            return record.tid
        case "run":
            return record.rid
        case "step":
            return record.sid
        case _:
            return ""


def _summary(record: Record, note: Note) -> ExperienceSummary:
    return ExperienceSummary(
        uid=record.uid,
        tid=record.tid,
        rid=record.rid,
        sid=record.sid,
        state="",  # type: ignore[arg-type]
        reward=record.reward,
        response_tokens=record.response_tokens,
        payload_bytes=record.payload_bytes,
        min_policy_version=record.min_version,
        max_policy_version=record.max_version,
        push_time=record.push_time,
        message="",
        priority=record.priority,
        generation=0,
        group=_group(record, note),
        staleness=_staleness(record, note),
    )

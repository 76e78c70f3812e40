"""Later findings of what is archived: appended beside it, never written into it. Blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from experience_buffer._tables.schema import arrow
from experience_buffer_server.archive import segment
from experience_buffer_server.archive.folder import MERGED, Folder
from experience_buffer_server.archive.layout import SegmentName

_COLUMNS: Final = ("uid", "departure_time", "reward", "info", "tensors")


@cache
def schema() -> Any:
    """The columns of a segment of later findings, as a `pyarrow.Schema`."""
    pa = arrow()
    return pa.schema(
        [
            ("uid", pa.string()),
            ("seq", pa.int64()),
            ("departure_time", pa.float64()),
            ("reward", pa.float64()),
            ("info", pa.string()),
            ("tensors", pa.binary()),
        ]
    )


def write(path: Path, findings: Sequence[Mapping[str, Any]], *, buffer: str, time: float) -> None:
    """Append findings: of each `uid`, `reward` or None, `info` as JSON, and `tensors`, a safetensors file.

    Raises:
        OSError: They can't be written.
    """
    pa = arrow()
    folder = Folder(path, is_later=True)
    folder.refresh()
    number = folder.next_number
    columns = {
        "uid": [one["uid"] for one in findings],
        "seq": [number] * len(findings),
        "departure_time": [time] * len(findings),
        "reward": [one["reward"] for one in findings],
        "info": [one["info"] for one in findings],
        "tensors": [one["tensors"] or None for one in findings],
    }
    batch = pa.RecordBatch.from_pydict(columns, schema=schema())
    name = SegmentName(number, number, True)
    segment.write(path, name, [batch], buffer=buffer, arrow_schema=schema())
    folder.refresh(always=True)
    parts = folder.to_merge(max_span_seconds=float("inf"))
    if len(parts) == MERGED:
        folder.merge(parts, buffer=buffer)


def read(folder: Folder, uid: str) -> Iterator[dict[str, Any]]:
    """Findings of one experience, oldest first: `time`, `reward`, `info`, `tensors`."""
    found = []
    for one, row in folder.find(uid):
        (values,) = one.rows([row], _COLUMNS)
        if values["uid"] == uid:
            found.append(
                {
                    "time": values["departure_time"],
                    "reward": values["reward"],
                    "info": json.loads(values["info"] or "{}"),
                    "tensors": values["tensors"] or b"",
                }
            )
    return iter(sorted(found, key=lambda finding: float(finding["time"])))

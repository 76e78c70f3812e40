"""The process that writes archives: `python -m experience_buffer_server.archive.writer_process`.

It reads what has left from the store, and keeps nothing in memory that a new one wouldn't find on the
disk. What a request says is written when it is answered, or the answer says why it isn't.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from experience_buffer._codec import payload as payload_codec
from experience_buffer.errors import TrxpError
from experience_buffer_server.archive import later, segment
from experience_buffer_server.archive.folder import Folder
from experience_buffer_server.archive.layout import SegmentName, sync_folder
from experience_buffer_server.archive.rows import Rows
from experience_buffer_server.archive.segment import SegmentError
from experience_buffer_server.runtime.child_process import Parent
from experience_buffer_server.store.engines import open_reader
from experience_buffer_server.store.interface import StoreError, StoreReader

_NICENESS: Final = 19
"""Whatever is to be archived can wait: everything else comes first where there are too few cores."""
_READ_ROWS: Final = 64
"""Of the store, in one transaction: while it is open, no page that was removed is used again."""
_SPAN: Final = 0.1
"""A merged segment covers so much of the time for which anything is kept, at most."""


class Writer:
    """Writes the archives of one server. Not thread-safe.

    Args:
        root: The folder that they are in.
        reader: Reads the store.
    """

    def __init__(self, root: Path, reader: StoreReader) -> None:
        self._root = root
        self._reader = reader
        self._folders: dict[str, Folder] = {}

    def handle(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what is asked; `error` in the answer says why it can't be done."""
        try:
            match request["kind"]:
                case "write":
                    return self.write(request)
                case "later":
                    return self.note_later(request)
                case "delete":
                    return self.delete(request)
                case "remove_all":
                    return self.remove_all(_name_of(request))
                case kind:
                    return {"error": f"unknown request {kind!r}"}
        except (OSError, StoreError, SegmentError) as error:
            return {"error": str(error)}

    def _folder(self, name: str) -> Folder:
        folder = self._folders.get(name)
        if folder is None:
            folder = self._folders[name] = Folder(self._root / name)
            folder.refresh()
            folder.tidy()
        folder.refresh()
        return folder

    # --- what has left

    def write(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Write what has left and what was refused as one segment, and see to the others."""
        buffer_id, name, seqs = request["buffer"], request["name"], request["seqs"]
        folder = self._folder(_name_of(request))
        known = folder.archived(seqs)
        fresh = [seq for seq in seqs if seq not in known]
        if fresh or request["refused"]:
            self._make(folder.path)
            number = folder.next_number
            batches = iter(list(self._batches(buffer_id, fresh, request["refused"])))
            first = next(batches, None)
            if first is not None:
                again = (batch for part in ([first], batches) for batch in part)
                segment.write(folder.path, SegmentName(number, number), again, buffer=name)
                folder.refresh(always=True)
        max_age = request["max_age_seconds"]
        folder.expire(now=request["now"], max_age_seconds=max_age, max_bytes=request["max_bytes"])
        parts = folder.to_merge(max_span_seconds=max_age * _SPAN if max_age else float("inf"))
        if parts:
            folder.merge(parts, buffer=name)
        folder.close_some()
        return {"files": _files(folder)}

    def _make(self, path: Path) -> None:
        """Make the folder of a buffer, for this user alone, as the store's is."""
        if not path.exists():
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.mkdir(mode=0o700)
            sync_folder(path.parent)
            sync_folder(path.parent.parent)

    def _batches(
        self, buffer_id: int, seqs: Sequence[int], refused: Iterable[Sequence[Any]]
    ) -> Iterator[Any]:
        """What has left, by the time of that, and what was refused, as record batches."""
        rows = Rows()
        for start in range(0, len(seqs), _READ_ROWS):
            for departed in self._reader.departed(buffer_id, seqs[start : start + _READ_ROWS]):
                rows.add(departed)
                if len(rows) >= segment.GROUP_ROWS or rows.num_bytes >= segment.GROUP_BYTES:
                    yield rows.batch()
                    rows = Rows()
                # A push may wait for this processor.
                os.sched_yield()
        for uid, reason, message, time, payload, index in refused:
            rows.add_refused(uid, reason, message, time, _alone(payload, index))
            if len(rows) >= segment.GROUP_ROWS or rows.num_bytes >= segment.GROUP_BYTES:
                yield rows.batch()
                rows = Rows()
        if rows:
            yield rows.batch()

    # --- later findings

    def note_later(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Write later findings of what is archived, or about to be, as a segment of their own."""
        folder = self._folder(_name_of(request))
        known = [
            one
            for one in request["findings"]
            if one["uid"] in request["waiting"] or _has(folder, one["uid"])
        ]
        if known:
            self._make(folder.path)
            later.write(folder.path, known, buffer=request["name"], time=request["now"])
        return {"known": [one["uid"] for one in known]}

    # --- removing

    def delete(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Remove all that is archived under some uids, for good; which uids there were."""
        uids = request["uids"]
        found: set[str] = set()
        folder = self._folder(_name_of(request))
        others = Folder(folder.path, is_later=True)
        others.refresh()
        for each in (folder, others):
            for one in {s.name: s for uid in uids for s, _ in each.find(uid)}.values():
                gone = set(one.read(["uid"]).column("uid").to_pylist()).intersection(uids)
                if gone:
                    each.without(one, gone, buffer=request["name"])
                    found |= gone if each is folder else set()
        return {"deleted": sorted(found), "files": _files(folder)}

    def remove_all(self, name: str) -> dict[str, Any]:
        """Remove a buffer's archive."""
        self._folders.pop(name, None)
        path = self._root / name
        if path.exists():
            shutil.rmtree(path)
            sync_folder(self._root)
        return {}


def _name_of(request: Mapping[str, Any]) -> str:
    """The folder that a request is about."""
    return str(request.get("folder", request["buffer"]))


def _alone(payload: bytes, index: int) -> bytes:
    """The payload of one experience of several; as it is where it can't be taken apart."""
    try:
        parts = payload_codec.split(payload) if payload else []
    except TrxpError:
        return payload
    return parts[index] if index < len(parts) else payload


def _has(folder: Folder, uid: str) -> bool:
    return any(one.rows([row], ["uid"])[0]["uid"] == uid for one, row in folder.find(uid))


def _files(folder: Folder) -> dict[str, Any]:
    """What there is, as the server shows it."""
    found = folder.refresh()
    return {
        "num_segments": len(found),
        "num_rows": sum(one.index.about.num_rows for one in found),
        "num_bytes": folder.num_bytes,
        "oldest_time": min((one.index.about.min_time for one in found), default=0.0),
        "trouble": "; ".join(folder.damaged.values()),
    }


def main() -> None:
    """Serve until the server closes the socket."""
    descriptor, root, spec = sys.argv[1:]
    parent = Parent(int(descriptor))
    os.nice(_NICENESS)
    writer = Writer(Path(root), open_reader(spec))
    gc.freeze()
    parent.ready()
    while (request := parent.receive()) is not None:
        parent.answer(writer.handle(request))


if __name__ == "__main__":
    main()

"""Going through the experiences of a store at rest, also of one that is damaged.

The store is read by a process of its own (`rest_process`), since a damaged page may end the process that
reads it. It is started again, then, and reads one experience at a time until it is past what ended it.
So reading and whatever becomes of what was read also go on side by side.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from experience_buffer import errors
from experience_buffer._messages.scanned import scanned
from experience_buffer.scanned import ScannedExperience
from experience_buffer.v1 import service_pb2
from experience_buffer_server.store.interface import (
    BufferRow,
    StoreError,
    StoreFailedError,
    StoreFormatError,
)
from experience_buffer_server.store.lmdb.rest.rest_messages import check_filter
from experience_buffer_server.store.lmdb.rest.rest_process import HEAD_BYTES
from experience_buffer_server.store.lmdb.rest.rest_rows import Problem

_MODULE: Final = "experience_buffer_server.store.lmdb.rest.rest_process"
_OF_DAMAGE: Final = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
"""What ends a process that reads a damaged page; all others have other reasons."""
_CAREFUL_ROWS: Final = 256
"""Read one by one after the process was ended."""
_MOST_ENDS: Final = 1000


class RestBuffer(NamedTuple):
    """A buffer of a store at rest."""

    row: BufferRow
    last_seq: int


@dataclass
class RestScan:
    """The experiences of one buffer of a store at rest, oldest first; iterate once. Not thread-safe."""

    path: Path
    buffer: RestBuffer
    cursor: str = ""
    where: service_pb2.Filter = field(default_factory=service_pb2.Filter)
    with_payloads: bool = True
    problems: list[Problem] = field(default_factory=list)
    """What can't be read, as it is found; of single experiences, too."""
    delivered: tuple[str, int] | None = None
    """A consumer and a training step: what that has consumed, in the order of its delivery."""
    progress: float = 0.0
    _after: int = 0
    _has_lost: bool = False
    """Records can't be read: of some there may be payloads."""
    _end: str = ""
    """What ended the process last."""

    def __post_init__(self) -> None:
        check_filter(self.where)
        self._after = self.buffer.row.seq_of(self.cursor)

    def __iter__(self) -> Iterator[ScannedExperience]:
        """Iterate over what can be read.

        Raises:
            StoreError: Nothing can.
        """
        if self.delivered is not None:
            yield from self._at_once("what the step has consumed")
            return
        first, careful, num_ends = self._after, 0, 0
        while True:
            before = self._after
            yield from self._run(first, careful=careful)
            if not self._end:
                break
            num_ends += 1
            if num_ends > _MOST_ENDS:
                raise StoreFailedError(f"{self.path}: reading it ends the process again and again")
            if careful and self._after == before:
                # It stands before what ends it.
                self.problems.append(
                    Problem(f"record {before + 1}", f"reading it ended the process ({self._end})")
                )
                self._after = before + 1
                self._has_lost = True
            careful = _CAREFUL_ROWS
        if self._has_lost and not self.where.ByteSize() and not first:
            yield from self._at_once("payloads of lost records")
        self.progress = 1.0
        self.cursor = self.buffer.row.cursor(max(self._after, self.buffer.last_seq))

    def _run(self, first: int, *, careful: int) -> Iterator[ScannedExperience]:
        asked = {"after": self._after, "careful": careful, "orphans": False}
        self._end = ""
        for letter, said in _frames(self._command(asked), self.path):
            if letter == "P":
                yield from self._each(said)
            elif "problem" in said:
                self.problems.append(Problem(*said["problem"]))
            elif "after" in said:
                self._after = said["after"]
                self._has_lost = self._has_lost or bool(said["lost"])
                span = max(said["last"] - first, 1)
                self.progress = min((said["after"] - first) / span, 1.0)
            elif "ended" in said:
                self._end = said["ended"]

    def _at_once(self, what: str) -> Iterator[ScannedExperience]:
        asked = {"after": 0, "careful": 0, "orphans": self.delivered is None}
        for letter, said in _frames(self._command(asked), self.path):
            if letter == "P":
                yield from self._each(said)
            elif "problem" in said:
                self.problems.append(Problem(*said["problem"]))
            elif "ended" in said:
                self.problems.append(
                    Problem(what, f"reading them ended the process ({said['ended']})")
                )

    def _each(self, frame: service_pb2.ScanResponse) -> Iterator[ScannedExperience]:
        for message in frame.experiences:
            found = scanned(message)
            if found.problem:
                self.problems.append(Problem(found.summary.uid, found.problem))
                continue
            if found.cursor:
                self.cursor = found.cursor
            yield found

    def _command(self, asked: dict[str, Any]) -> dict[str, Any]:
        return asked | {
            "path": str(self.path),
            "buffer": self.buffer.row.name,
            "where": self.where.SerializeToString().hex(),
            "with_payloads": self.with_payloads,
            "delivered": self.delivered,
        }


def buffers_of(path: Path) -> tuple[dict[str, RestBuffer], list[Problem]]:
    """The buffers of a store, by name, and what of them can't be read.

    Raises:
        StoreError: There is no store, or it can't be opened.
    """
    if not (path / "data.mdb").exists():
        raise StoreError(f"there is no store at {path}: no data.mdb")
    found: dict[str, RestBuffer] = {}
    problems = []
    for _, said in _frames({"path": str(path), "buffer": None}, path):
        if "problem" in said:
            problems.append(Problem(*said["problem"]))
        elif "ended" in said:
            raise StoreFailedError(
                f"{path}: reading its buffers ended the process ({said['ended']})"
            )
        for name, facts in said.get("buffers", {}).items():
            row = BufferRow(
                facts["id"], name, facts["config"], facts["policy_version"], facts["create_time"]
            )
            found[name] = RestBuffer(row, facts["last_seq"])
    return found, problems


def buffer_of(path: Path, name: str) -> tuple[RestBuffer, list[Problem]]:
    """One buffer of a store: the only one where no name is given.

    Raises:
        StoreError: There is no store, or it can't be opened.
        BufferNotFoundError: There is no such buffer, or not just one.
    """
    found, problems = buffers_of(path)
    if not name and len(found) == 1:
        return next(iter(found.values())), problems
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        lost = "".join(f"; {what}: {reason}" for what, reason in problems)
        text = f"no buffer {name!r}" if name else "say which buffer"
        raise errors.BufferNotFoundError(f"{path}: {text}: there are {known}{lost}", subject=name)
    return found[name], problems


def _frames(asked: dict[str, Any], path: Path) -> Iterator[tuple[str, Any]]:
    """What the process says, and at last by which signal it was ended, if by damage.

    Raises:
        StoreError: It says that nothing can be read, or was ended for another reason.
    """
    command = [sys.executable, "-P", "-m", _MODULE, json.dumps(asked)]
    is_whole = False
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, bufsize=1 << 20
    ) as process:
        assert process.stdout is not None
        try:
            while len(head := process.stdout.read(HEAD_BYTES)) == HEAD_BYTES:
                length = int.from_bytes(head[1:], "big")
                if len(data := process.stdout.read(length)) < length:
                    break
                if head[:1] == b"P":
                    yield "P", service_pb2.ScanResponse.FromString(data)
                    continue
                said = json.loads(data)
                if "refused" in said:
                    raise StoreFormatError(said["refused"])
                if "failed" in said:
                    raise StoreFailedError(said["failed"])
                is_whole = is_whole or "end" in said
                yield "J", said
        except BaseException:
            process.kill()
            raise
    if is_whole:
        return
    status = process.returncode
    if -status in _OF_DAMAGE:
        yield "J", {"ended": signal.Signals(-status).name}
        return
    end = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    raise StoreFailedError(
        f"{path}: the process that reads it was ended {end}; this says nothing of the store. Run it "
        "again (SIGKILL: see whether memory ran out)"
    )

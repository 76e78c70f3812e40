"""Journals of uids, and the audit that compares them with what the server still holds.

A worker's has a uid per line. That of a trainer's rank has "STEP UID" for each experience that it
learned from, and "STEP resumed" where it went back to a checkpoint: what it learned after that step
until then isn't part of the policy any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

RESUMED: Final = "resumed"


class Journal:
    """Appends lines to a file; a context manager."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def append(self, lines: Iterable[str]) -> None:
        """Write lines; they survive the death of this process."""
        self._file.writelines(f"{line}\n" for line in lines)
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Where everything is that the server acknowledged."""

    num_acked: int
    """Experiences that the server said were stored."""
    num_trained: int
    """Experiences that the last policy has learned from."""
    num_undone: int
    """Experiences that the trainer had learned from after the checkpoint to which it went back."""
    num_in_buffer: int
    """Acknowledged experiences, not trained, that are in the buffer."""
    missing: tuple[str, ...]
    """Acknowledged, but neither trained nor in the buffer."""
    unknown: tuple[str, ...]
    """Trained or in the buffer, though no worker has an acknowledgement."""
    repeated: tuple[str, ...]
    """Trained more than once on the way to the last policy."""

    @property
    def is_clean(self) -> bool:
        """True when every acknowledged experience is accounted for, exactly once."""
        return not (self.missing or self.unknown or self.repeated)


def audit(acked: Iterable[Path], *, trained: Iterable[Path], in_buffer: Iterable[str]) -> Audit:
    """Compare the workers' journals with the trainer's and with what is in the buffer.

    Args:
        acked: The workers' journals, complete.
        trained: The journals of the trainer's ranks.
        in_buffer: The uids that the server lists.
    """
    acked_uids = {uid for path in acked for uid in _read(path)}
    counts: Counter[str] = Counter()
    num_undone = 0
    for path in trained:
        surviving, undone = _timeline(_read(path))
        counts.update(surviving)
        num_undone += undone
    trained_uids, stored_uids = set(counts), set(in_buffer)
    return Audit(
        num_acked=len(acked_uids),
        num_trained=len(trained_uids),
        num_undone=num_undone,
        num_in_buffer=len((stored_uids & acked_uids) - trained_uids),
        missing=tuple(sorted(acked_uids - trained_uids - stored_uids)),
        unknown=tuple(sorted((trained_uids | stored_uids) - acked_uids)),
        repeated=tuple(sorted(uid for uid, count in counts.items() if count > 1)),
    )


def _timeline(lines: Iterable[str]) -> tuple[list[str], int]:
    """The uids on a rank's surviving timeline, and how many went with those that were left."""
    learned: list[tuple[int, str]] = []
    num_undone = 0
    for line in lines:
        number, word = line.split(" ")
        step = int(number)
        if word == RESUMED:
            kept = [entry for entry in learned if entry[0] <= step]
            num_undone += len(learned) - len(kept)
            learned = kept
        else:
            learned.append((step, word))
    return [uid for _, uid in learned], num_undone


def _read(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()

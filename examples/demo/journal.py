"""Journals of uids, and the audit that compares them with what the server still holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self


class Journal:
    """Appends uids to a file, a line each; a context manager."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def append(self, uids: Iterable[str]) -> None:
        """Write uids; they survive the death of this process."""
        self._file.writelines(f"{uid}\n" for uid in uids)
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
    """Experiences that the trainer learned from."""
    num_in_buffer: int
    """Acknowledged experiences that wait in the buffer."""
    missing: tuple[str, ...]
    """Acknowledged, but neither trained nor in the buffer."""
    unknown: tuple[str, ...]
    """Trained or in the buffer, though no worker has an acknowledgement."""
    repeated: tuple[str, ...]
    """Trained more than once."""

    @property
    def is_clean(self) -> bool:
        """True when every acknowledged experience is accounted for, exactly once."""
        return not (self.missing or self.unknown or self.repeated)


def audit(acked: Iterable[Path], *, trained: Path, in_buffer: Iterable[str]) -> Audit:
    """Compare the workers' journals with the trainer's and with what is in the buffer.

    Args:
        acked: The workers' journals, complete.
        trained: The trainer's journal.
        in_buffer: The uids that the server lists.
    """
    acked_uids = {uid for path in acked for uid in _read(path)}
    counts = Counter(_read(trained))
    trained_uids, stored_uids = set(counts), set(in_buffer)
    return Audit(
        num_acked=len(acked_uids),
        num_trained=len(trained_uids),
        num_in_buffer=len((stored_uids & acked_uids) - trained_uids),
        missing=tuple(sorted(acked_uids - trained_uids - stored_uids)),
        unknown=tuple(sorted((trained_uids | stored_uids) - acked_uids)),
        repeated=tuple(sorted(uid for uid, count in counts.items() if count > 1)),
    )


def _read(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()

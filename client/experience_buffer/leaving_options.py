"""What leaves a buffer by itself, and what stays readable after it has left. Without I/O or rules."""

from __future__ import annotations

from dataclasses import dataclass

from experience_buffer._show import Shown

__all__ = ["Archive", "Retention"]
__dir__ = __all__.copy


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Retention(Shown):
    """What leaves a buffer by itself, in whole units; never what is leased or kept for a rewind.

    Attributes:
        max_age_seconds: Most seconds since the push of a unit's oldest member; None: any.
        max_lag: Most policy versions behind the published one, by a unit's lowest version; None:
            any.
    """

    max_age_seconds: float | None = None
    max_lag: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Archive(Shown):
    """What stays readable after it has left a buffer: compressed files beside the store.

    None takes the server's default; `Archive()` is an archive with all of them. It needs a store on
    a disk.

    Attributes:
        consumed: Whether it keeps what every consumer has done with; by default it does.
        dropped: What was dropped, evicted, too old or too stale; by default it does.
        deleted: What was deleted by `delete`; by default it doesn't.
        refused: What was refused when it was pushed, as much of it as there is room for; by default
            it does.
        max_age_seconds: Most seconds since it left, 0: any; 7 days by default. The oldest files go
            first.
        max_bytes: Most bytes of the files on disk; 10 GiB by default. The oldest go first.
        max_pending_bytes: Most payload bytes that have left and aren't in a file yet; 1 GiB by
            default. The oldest go without being archived, and are counted.
        segment_seconds: What has left is in a file after so many seconds, at the latest; 10 by
            default.
    """

    consumed: bool | None = None
    dropped: bool | None = None
    deleted: bool | None = None
    refused: bool | None = None
    max_age_seconds: float | None = None
    max_bytes: int | None = None
    max_pending_bytes: int | None = None
    segment_seconds: float | None = None

"""What became of pushed items and of annotations, one by one, and the errors that hold refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from experience_buffer import _show
from experience_buffer._error_base import ExperienceBufferError
from experience_buffer._show import Shown

__all__ = [
    "AnnotateOutcome",
    "AnnotateRefusalReason",
    "AnnotateRefusedError",
    "AnnotateResult",
    "PushOutcome",
    "PushRefusedError",
    "PushResult",
    "PushStatus",
    "RefusalReason",
]
__dir__ = __all__.copy

PushStatus: TypeAlias = Literal["stored", "duplicate", "refused"]
"""What became of one pushed item."""
RefusalReason: TypeAlias = Literal[
    "", "invalid", "conflict", "late", "missing_field", "group_size", "future_version"
]
"""Why an item was refused: damaged, uid taken by other content, group closed, a field lacks that
the estimator needs, group size contradicts an earlier one, policy version newer than the published
one. Empty when it wasn't."""
AnnotateRefusalReason: TypeAlias = Literal["", "unknown_uid", "invalid", "delivered"]
"""Why an annotation was refused: nothing is stored under the uid, it is damaged or doesn't fit,
the advantages it would change are with a consumer. Empty when it wasn't."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PushOutcome(Shown):
    """What became of one experience or tombstone.

    Attributes:
        index: Position in what was pushed; tombstones follow the experiences.
        uid: Empty when the item is too damaged to have one.
        status: "stored", "duplicate" (stored before, with the same content) or "refused".
        reason: Why it was refused: "invalid" (damaged, or of an identity, a value or a shape that
            can't be), "conflict" (its uid has other content), "late" (its group is closed),
            "missing_field" (the estimator, or a window of versions, needs it), "group_size"
            (contradicts an earlier one), "future_version" (of a policy version that isn't published yet); empty when it wasn't.
        message: What was wrong, where, and what to do; empty when stored.
    """

    index: int
    uid: str
    status: PushStatus
    reason: RefusalReason = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PushResult(Shown):
    """What became of a push. Everything not refused is durable.

    Attributes:
        outcomes: One per experience, then one per tombstone, in order.
        policy_version: The newest published policy version; None before the first.
    """

    outcomes: tuple[PushOutcome, ...]
    policy_version: int | None

    @property
    def num_stored(self) -> int:
        """Items stored by this push."""
        return sum(outcome.status == "stored" for outcome in self.outcomes)

    @property
    def num_duplicates(self) -> int:
        """Items that were stored already, with the same content."""
        return sum(outcome.status == "duplicate" for outcome in self.outcomes)

    @property
    def stored(self) -> tuple[PushOutcome, ...]:
        """Items that are new."""
        return tuple(outcome for outcome in self.outcomes if outcome.status == "stored")

    @property
    def duplicates(self) -> tuple[PushOutcome, ...]:
        """Items that were there already, or were consumed, with the same content."""
        return tuple(outcome for outcome in self.outcomes if outcome.status == "duplicate")

    @property
    def refused(self) -> tuple[PushOutcome, ...]:
        """Items that are not stored."""
        return tuple(outcome for outcome in self.outcomes if outcome.status == "refused")

    def __repr__(self) -> str:
        counts = [f"{self.num_stored} stored"]
        if self.num_duplicates:
            counts.append(_show.counted(self.num_duplicates, "duplicate"))
        return _with_refused("PushResult", counts, self.refused)

    def _repr_html_(self) -> str:
        return _html(repr(self), self.refused)

    def raise_for_refused(self) -> None:
        """Do nothing when every item is stored.

        Raises:
            PushRefusedError: Items were refused; its `result` is this.
        """
        if self.refused:
            raise refusal(self)


class PushRefusedError(ExperienceBufferError, ValueError):
    """The server refused some items of a push; all others are stored.

    Raised by the client alone: on the wire a refusal is an outcome, not an error.

    Attributes:
        result: Every outcome of the push, the stored ones included.
    """

    __module__ = "experience_buffer.errors"

    status = "INVALID_ARGUMENT"
    reason = "PUSH_REFUSED"

    result: PushResult


def refusal(result: PushResult) -> PushRefusedError:
    """Make the error that reports the refused items of a result."""
    refused = result.refused
    shown = [
        f"item {outcome.index} ({outcome.uid or 'no uid'}): {outcome.reason}: {outcome.message}"
        for outcome in refused
    ]
    error = PushRefusedError(
        f"{_show.counted(len(refused), 'item')} refused, all others are stored: {_first(shown)}. "
        "The error's result.refused lists them; raise_on_refused=False counts without raising"
    )
    error.result = result
    return error


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AnnotateOutcome(Shown):
    """What became of one annotation.

    Attributes:
        uid: Of the experience that was to be annotated.
        status: "stored" or "refused"; a refused annotation changed nothing.
        reason: Why it was refused: "unknown_uid" (nothing is stored under it), "invalid" (damaged,
            or it doesn't fit), "delivered" (advantages that it would change are with a consumer);
            empty when it wasn't.
        message: What was wrong and what to do; empty when stored.
    """

    uid: str
    status: Literal["stored", "refused"]
    reason: AnnotateRefusalReason = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AnnotateResult(Shown):
    """What became of annotations. Everything not refused is durable.

    Attributes:
        outcomes: One per annotation, in order.
    """

    outcomes: tuple[AnnotateOutcome, ...]

    @property
    def num_stored(self) -> int:
        """Annotations that are stored."""
        return sum(outcome.status == "stored" for outcome in self.outcomes)

    @property
    def refused(self) -> tuple[AnnotateOutcome, ...]:
        """Annotations that changed nothing."""
        return tuple(outcome for outcome in self.outcomes if outcome.status == "refused")

    def __repr__(self) -> str:
        return _with_refused("AnnotateResult", [f"{self.num_stored} stored"], self.refused)

    def _repr_html_(self) -> str:
        return _html(repr(self), self.refused)

    def raise_for_refused(self) -> None:
        """Do nothing when every annotation is stored.

        Raises:
            AnnotateRefusedError: Annotations were refused; its `result` is this.
        """
        refused = self.refused
        if not refused:
            return
        shown = [f"{outcome.uid}: {outcome.reason}: {outcome.message}" for outcome in refused]
        error = AnnotateRefusedError(
            f"{_show.counted(len(refused), 'annotation')} refused, all others are stored: {_first(shown)}. "
            "The error's result.refused lists them; raise_on_refused=False returns them instead"
        )
        error.result = self
        raise error


class AnnotateRefusedError(ExperienceBufferError, ValueError):
    """The server refused some annotations; all others are stored.

    Raised by the client alone: on the wire a refusal is an outcome, not an error.

    Attributes:
        result: Every outcome of the call, the stored ones included.
    """

    __module__ = "experience_buffer.errors"

    status = "INVALID_ARGUMENT"
    reason = "ANNOTATE_REFUSED"

    result: AnnotateResult


def _first(texts: list[str]) -> str:
    """The first few of a list, and how many more there are."""
    more = f"; and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more


def _with_refused(
    name: str, counts: list[str], refused: Sequence[PushOutcome | AnnotateOutcome]
) -> str:
    """Counts, and why the first one was refused."""
    if refused:
        first = refused[0]
        place = f"item {first.index} " if isinstance(first, PushOutcome) else ""
        counts.append(
            f"{len(refused)} refused; {place}({first.uid or 'no uid'}): {first.reason}: "
            f"{first.message}"
        )
    return _show.line(f"<{name}: {', '.join(counts)}>")


def _html(text: str, refused: Sequence[PushOutcome | AnnotateOutcome]) -> str:
    return _show.html_lines([text]) + (_show.html_of_values(refused) if refused else "")

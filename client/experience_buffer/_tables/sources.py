"""What becomes rows: experiences at hand, and batches, as a scan would have brought them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from experience_buffer._messages.batch_data import BatchData
from experience_buffer.experience import Experience
from experience_buffer.scanned import ScannedExperience
from experience_buffer.values import ExperienceSummary

if TYPE_CHECKING:
    from experience_buffer.packed import PackedBatch


def scanned_of(
    experiences: Iterable[Experience | ScannedExperience] | BatchData,
) -> Iterator[ScannedExperience]:
    """Experiences at hand as `scan` would have brought them, for a `TableWriter`.

    Args:
        experiences: A batch, experiences, or what `scan` brought, which stays as it is.

    Raises:
        TrxpError: An experience can't be written as a payload.
    """
    if isinstance(experiences, BatchData):
        yield from _of_batch(experiences)
        return
    for each in experiences:
        yield each if isinstance(each, ScannedExperience) else _of(each, each.serialize())


def _of_batch(batch: BatchData) -> Iterator[ScannedExperience]:
    if batch.columns is None:
        experiences, groups, flags = batch.experiences, batch.groups, batch.flags
        staleness, times_sampled = batch.staleness, batch.times_sampled
    else:
        packed = batch.packed
        experiences, groups, flags = list(packed), tuple(packed.groups), tuple(packed.flags)
        known = zip(_numbers(packed, "staleness"), _numbers(packed, "has_staleness"), strict=True)
        staleness = tuple(each if is_known else None for each, is_known in known)
        times_sampled = tuple(_numbers(packed, "times_sampled"))
    found = zip(experiences, groups, staleness, times_sampled, flags, strict=True)
    for experience, group, lag, times, words in found:
        yield _of(
            experience,
            experience.serialize(),
            state="leased",
            group=group,
            staleness=lag,
            times_sampled=times,
            flags=tuple(words),
        )


def _numbers(packed: PackedBatch, name: str) -> list[int]:
    found: list[int] = packed.column(name).tolist()
    return found


def _of(
    experience: Experience,
    payload: bytes,
    *,
    state: Any = "",
    group: str = "",
    staleness: int | None = None,
    **facts: Any,
) -> ScannedExperience:
    eid = experience.eid
    low, high = _versions(experience)
    return ScannedExperience(
        summary=ExperienceSummary(
            uid=eid.uid,
            tid=eid.tid,
            rid=eid.rid,
            sid=eid.sid,
            state=state,
            reward=None if experience.reward is None else float(experience.reward),
            response_tokens=0,
            payload_bytes=len(payload),
            min_policy_version=low,
            max_policy_version=high,
            push_time=0.0,
            message="",
            priority=1.0,
            generation=0,
            group=group,
            staleness=staleness,
        ),
        payload=payload,
        **facts,
    )


def _versions(experience: Experience) -> tuple[int | None, int | None]:
    """As a server reads them: per token where each has one, else of `info`."""
    tokens = experience.extra.get("versions") if experience.extra else None
    if tokens is not None:
        known = [int(each) for each in tokens.tolist() if each >= 0]
        return (min(known), max(known)) if known else (None, None)
    info = experience.info
    first = info.get("version_start", info.get("model_version"))
    last = info.get("version_end", first)
    versions = [each for each in (first, last) if type(each) is int and 0 <= each < 2**63]
    return (min(versions), max(versions)) if versions else (None, None)

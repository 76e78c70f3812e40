"""What collation functions take, as the one form that they lay out: a packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from experience_buffer import trxp
from experience_buffer._messages.batch_data import BatchData
from experience_buffer.experience import Experience
from experience_buffer.packed import PackedBatch, PackedRow, pack

Experiences: TypeAlias = PackedBatch | BatchData | Sequence[Experience]
"""What a collation function takes: a batch, packed or not, or a list of experiences."""


def as_packed(experiences: Experiences) -> PackedBatch:
    """Pack experiences, unless they are packed already.

    Raises:
        TypeError: They are something else.
        ValueError: An experience can't be encoded.
    """
    if isinstance(experiences, PackedBatch):
        return experiences
    if isinstance(experiences, BatchData):
        return _of_batch(experiences)
    check(experiences)
    rows = [
        PackedRow(uid=each.eid.uid, payload=trxp.encode([each]), tensors={}) for each in experiences
    ]
    return PackedBatch.parse(bytearray().join(pack(rows)))


def _of_batch(batch: BatchData) -> PackedBatch:
    if batch.columns is not None:
        return batch.packed
    rows = [
        PackedRow(
            uid=batch.uids[index],
            group=batch.groups[index],
            payload=payload,
            tensors={},
            num_deliveries=batch.num_deliveries[index],
            staleness=batch.staleness[index],
            flags=batch.flags[index],
            probability=batch.probabilities[index],
            times_sampled=batch.times_sampled[index],
            generation=batch.generations[index],
        )
        for index, payload in enumerate(batch.content.views)
    ]
    return PackedBatch.parse(bytearray().join(pack(rows)))


def check(experiences: Any) -> None:
    """Check that what isn't a batch is a list of experiences.

    Raises:
        TypeError: It is something else.
    """
    expected = "a collation function takes a batch, a PackedBatch, or a list of Experience"
    if hasattr(experiences, "eid"):
        raise TypeError(f"{expected}; this is one Experience: put it into a list")
    if not isinstance(experiences, Sequence) or isinstance(experiences, str | bytes):
        raise TypeError(f"{expected}; this is a {type(experiences).__name__}")
    for index, each in enumerate(experiences):
        if isinstance(each, PackedBatch | BatchData | Sequence):
            raise TypeError(
                f"{expected}; element {index} of the list is a {type(each).__name__}, which is a "
                "whole batch: give it by itself (with a DataLoader: batch_size=None)"
            )
        if not hasattr(each, "eid") or not hasattr(each, "tokens"):
            raise TypeError(f"{expected}; element {index} of the list is a {type(each).__name__}")

"""One experience on its way into a packed batch, and what columns say of it. No torch.

The classes aren't frozen, since making frozen ones takes three times as long; nobody changes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, TypeAlias

from experience_buffer._codec import safetensors
from experience_buffer._codec.codec_error import trxp_error
from experience_buffer._codec.frame import split_frame
from experience_buffer._codec.item import MULTI_MODAL_PREFIX, Item
from experience_buffer._codec.limits import DEFAULT_LIMITS
from experience_buffer._codec.payload import read
from experience_buffer._codec.safetensors import TensorView
from experience_buffer._show import line, sparse
from experience_buffer.errors import DataLossError, TrxpError

FormKey: TypeAlias = tuple[str, str, tuple[int, ...] | None, bool]
"""What tensors have in common that are concatenated: field, dtype, sizes but the first (None: they
are scalars), and whether they are too odd to be concatenated."""

_VAST: Final = 2**32


@dataclass(slots=True, kw_only=True)
class Facts:
    """What the columns repeat of an experience's metadata.

    Attributes:
        response_length: Tokens that aren't the prompt's; 0 for dpo, whose tokens are all prompt.
        reward: Its scalar reward.
        truncate_status: None, `"prompt_truncated"`, `"response_truncated"`, or another text.
        run: The rollout of the task; 64 bits.
        step: The step within the run; 64 bits.
    """

    response_length: int
    reward: float | None
    truncate_status: str | None
    run: int
    step: int

    @classmethod
    def of(cls, item: Item) -> Facts:
        """Read them off an experience, as its constructor would.

        Args:
            item: The experience as it lies in its payload.
        """
        meta, tensors = item.meta, item.tensors
        response_length: int = tensors["tokens"].shape[0] - meta.get("prompt_length", 1)
        if "action_mask" not in tensors and "chosen" in tensors and "rejected" in tensors:
            response_length = 0
        return cls(
            response_length=response_length,
            reward=meta.get("reward"),
            truncate_status=meta.get("truncate_status"),
            run=item.eid.run,
            step=item.eid.step,
        )


@dataclass(slots=True, kw_only=True)
class PackedRow:
    """One experience that is to travel in a packed batch, and how it was chosen.

    Attributes:
        uid: Its name.
        group: Key of its group; empty without one.
        payload: The TRXP payload of this experience alone, as stored; a view is of bytes.
        tensors: Computed tensors by field, which replace or extend those of the payload; may be
            empty.
        num_deliveries: How often it was delivered, this time included.
        staleness: Current policy version minus the experience's; None where either is unknown.
        flags: Details of its advantages, such as `"zero_variance"`; words without whitespace.
        probability: Chance with which the selector drew it.
        times_sampled: How often it was delivered and acknowledged before, this time not counted.
        generation: Generation of its priority.
        facts: What its metadata says, if that is known: then the metadata isn't read, which saves
            more than half of the time. None: it's read.
    """

    uid: str
    group: str = ""
    payload: bytes | memoryview
    tensors: Mapping[str, TensorView]
    num_deliveries: int = 1
    staleness: int | None = None
    flags: Sequence[str] = ()
    probability: float = 1.0
    times_sampled: int = 0
    generation: int = 0
    facts: Facts | None = None

    def __repr__(self) -> str:
        return line(sparse(self))


def facts_of(row: PackedRow) -> Facts:
    """What a row's metadata says.

    Raises:
        DataLossError: The payload is damaged; the text and `subject` name the uid.
        ValueError: A computed tensor is named like a multi-modal input.
    """
    for name in row.tensors:
        if name.startswith(MULTI_MODAL_PREFIX):
            raise ValueError(f"{name!r} can't be added: its key is part of the metadata")
    if row.facts is not None:
        return row.facts
    try:
        items = read(row.payload)
        if len(items) != 1:
            raise trxp_error(f"{len(items)} experiences, not 1", where="metadata")
        (item,) = items
        if isinstance(item, TrxpError):
            raise item
    except TrxpError as error:
        raise _damaged(row, error) from None
    item.tensors.update(row.tensors)
    return Facts.of(item)


def read_row(row: PackedRow) -> tuple[memoryview, dict[str, TensorView]]:
    """The metadata as it lies in a row's payload, and its tensors by field; one of them is `tokens`.

    Raises:
        DataLossError: The payload is damaged; the text and `subject` name the uid.
    """
    try:
        metadata, section = split_frame(row.payload, limits=DEFAULT_LIMITS)
        return metadata, _tensors(section)
    except TrxpError as error:
        raise _damaged(row, error) from None


def _damaged(row: PackedRow, error: TrxpError) -> DataLossError:
    return DataLossError(
        f"the stored payload of {row.uid!r} is damaged: {error}; delete the experience",
        subject=row.uid,
    )


def form_of(field: str, view: TensorView) -> FormKey:
    """What a tensor is concatenated with."""
    shape = view.shape
    if not shape:
        return field, view.dtype, None, False
    # Sizes that take no bytes may add up to more than a tensor may have.
    is_odd = not len(view.data) and prod(filter(None, shape)) > _VAST
    return field, view.dtype, shape[1:], is_odd


def _tensors(section: memoryview) -> dict[str, TensorView]:
    tensors = {}
    for name, view in safetensors.read(section, max_header_bytes=DEFAULT_LIMITS.max_header_bytes):
        if not name.startswith("0:") or name[2:] in tensors:
            raise trxp_error("of another experience, or twice", where=f"tensor table {name!r:.200}")
        tensors[name[2:]] = view
    if "tokens" not in tensors or not tensors["tokens"].shape:
        raise trxp_error("no tokens", where="tensor table")
    return tensors

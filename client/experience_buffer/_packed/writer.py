"""Writes the packed format: one safetensors file of a batch. Bytes only, no torch.

Nothing here looks at a token: tensors are memoryviews that end up in the file as they are. The
layout is described in docs/packed.md; `table` reads it.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import sub
from typing import Final

from experience_buffer._codec.limits import DEFAULT_LIMITS
from experience_buffer._codec.safetensors import ITEM_BYTES
from experience_buffer._packed.fields import Fields, Form
from experience_buffer._packed.row import Facts, PackedRow, facts_of
from experience_buffer.errors import DataLossError, InvalidRequestError

FORMAT_VERSION: Final = 1
TRUNCATE_CODES: Final = {None: 0, "prompt_truncated": 1, "response_truncated": 2}
"""What column `truncate_status` holds; 3 is any other text, which the metadata spells."""

_RANKS: Final = {code: rank for rank, code in enumerate(ITEM_BYTES)}
_Pieces = list[bytes | memoryview]


def pack(rows: Sequence[PackedRow]) -> list[bytes | memoryview]:
    """Write a batch as one safetensors file.

    The pieces are in order; joined, they are the file. Most are views on the rows' payloads, so
    that the one copy is made by whoever sends them: `b"".join(pieces)`, or `frames`.
    Thread-safe.

    Args:
        rows: The experiences, in the batch's order.

    Returns:
        Pieces of the file.

    Raises:
        DataLossError: A payload is damaged; the text and `subject` name its uid.
        InvalidRequestError: The fields are too many, or their names too long, for one file.
        ValueError: A flag isn't a word, or a computed tensor is named like a multi-modal input.
    """
    facts = [*map(facts_of, rows)]
    forms, num_tokens, metadata = Fields(rows).read()
    table = Entries()
    table.add("format", "I64", (2,), array("q", [FORMAT_VERSION, len(rows)]).tobytes())
    _add_columns(table, rows, facts, num_tokens)
    table.add_texts("uid", [row.uid.encode() for row in rows])
    table.add_texts("group", [row.group.encode() for row in rows])
    table.add_texts("flags", [_words(row.flags) for row in rows])
    table.add_bytes("meta", metadata)
    _add_fields(table, forms)
    return table.pieces()


def frames(pieces: Sequence[bytes | memoryview], *, frame_bytes: int) -> Iterator[bytes]:
    """Cut a file that comes in pieces into frames; joined, they are the file.

    Args:
        pieces: What `pack` returned.
        frame_bytes: Size of each frame but the last, 1 or more.
    """
    return map(b"".join, cut(pieces, frame_bytes=frame_bytes))


def cut(
    pieces: Sequence[bytes | memoryview], *, frame_bytes: int
) -> Iterator[list[bytes | memoryview]]:
    """Do what `frames` does, without joining: each frame in pieces.

    Args:
        pieces: What `pack` returned.
        frame_bytes: Size of each frame but the last.
    """
    ends = list(accumulate(map(len, pieces)))
    num_bytes = ends[-1] if ends else 0
    first = 0
    for begin in range(0, num_bytes, frame_bytes):
        end = min(begin + frame_bytes, num_bytes)
        last = bisect_left(ends, end, first)
        frame = list(pieces[first : last + 1])
        if ends[last] > end:
            frame[-1] = memoryview(frame[-1])[: end - ends[last]]
        skipped = begin - (ends[first] - len(pieces[first]))
        if skipped:
            frame[0] = memoryview(frame[0])[skipped:]
        yield frame
        first = last if ends[last] > end else last + 1


class Entries:
    """Entries of the file in the making."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, str, tuple[int, ...], int, _Pieces]] = []

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: bytes | memoryview) -> None:
        """Add a tensor whose elements are in one piece."""
        self._entries.append((name, dtype, shape, len(data), [data]))

    def add_parts(
        self, name: str, dtype: str, shape: tuple[int, ...], parts: Sequence[bytes | memoryview]
    ) -> None:
        self._entries.append((name, dtype, shape, sum(map(len, parts)), list(parts)))

    def add_offsets(self, name: str, lengths: Sequence[int]) -> int:
        """Add the offsets of spans of these lengths; return where the last one ends."""
        offsets = array("q", accumulate(lengths, initial=0))
        self.add(name, "I64", (len(offsets),), offsets.tobytes())
        return offsets[-1]

    def add_bytes(self, name: str, values: Sequence[bytes | memoryview]) -> None:
        num_bytes = self.add_offsets(f"byte_offsets/{name}", list(map(len, values)))
        self.add_parts(f"bytes/{name}", "U8", (num_bytes,), values)

    def add_texts(self, name: str, values: Sequence[bytes]) -> None:
        """Do what `add_bytes` does, with short values: in one piece."""
        num_bytes = self.add_offsets(f"byte_offsets/{name}", list(map(len, values)))
        self.add(f"bytes/{name}", "U8", (num_bytes,), b"".join(values))

    def pieces(self) -> list[bytes | memoryview]:
        """Sort by element size, so that everything is aligned as the file is, and by name."""
        self._entries.sort(key=lambda entry: (_RANKS[entry[1]], entry[0]))
        header, data, end = {}, [], 0
        for name, dtype, shape, num_bytes, parts in self._entries:
            begin, end = end, end + num_bytes
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
            data += parts
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        padded_bytes = -(-len(text) // 8) * 8
        if padded_bytes > DEFAULT_LIMITS.max_header_bytes:
            raise InvalidRequestError(
                f"the names of {len(header)} tensors take {padded_bytes} bytes, over the limit of "
                f"{DEFAULT_LIMITS.max_header_bytes}; ask for TRXP payloads, or smaller batches"
            )
        return [padded_bytes.to_bytes(8, "little") + text.ljust(padded_bytes), *data]


def _words(flags: Sequence[str]) -> bytes:
    if not flags:
        return b""
    text = " ".join(flags)
    if text.split() != list(flags):
        raise ValueError(f"flags {list(flags)!r:.200}: a flag is a word without whitespace")
    return text.encode()


def _add_columns(
    table: Entries, rows: Sequence[PackedRow], facts: Sequence[Facts], num_tokens: Sequence[int]
) -> None:
    response_lengths = [fact.response_length for fact in facts]
    integers: dict[str, list[int]] = {
        "prompt_length": [*map(sub, num_tokens, response_lengths)],
        "response_length": response_lengths,
        "run": [fact.run for fact in facts],
        "step": [fact.step for fact in facts],
        "num_deliveries": [row.num_deliveries for row in rows],
        "staleness": [row.staleness or 0 for row in rows],
        "times_sampled": [row.times_sampled for row in rows],
        "generation": [row.generation for row in rows],
    }
    shape = (len(rows),)
    for name, values in integers.items():
        table.add(f"columns/{name}", "I64", shape, _integers(name, values, rows))
    numbers = {
        "reward": [_number(fact.reward) for fact in facts],
        "probability": [row.probability for row in rows],
    }
    for name, floats in numbers.items():
        table.add(f"columns/{name}", "F64", shape, array("d", floats).tobytes())
    codes = [TRUNCATE_CODES.get(fact.truncate_status, len(TRUNCATE_CODES)) for fact in facts]
    table.add("columns/truncate_status", "U8", shape, bytes(codes))
    has_reward = bytes(fact.reward is not None for fact in facts)
    table.add("columns/has_reward", "BOOL", shape, has_reward)
    has_staleness = bytes(row.staleness is not None for row in rows)
    table.add("columns/has_staleness", "BOOL", shape, has_staleness)


def _number(reward: float | None) -> float:
    if reward is None:
        return float("nan")
    try:
        return float(reward)
    except OverflowError:
        return float("inf") if reward > 0 else float("-inf")


def _integers(name: str, values: list[int], rows: Sequence[PackedRow]) -> bytes:
    try:
        return array("q", values).tobytes()
    except OverflowError:
        uid = next(
            row.uid
            for row, value in zip(rows, values, strict=True)
            if not -(2**63) <= value < 2**63
        )
        raise DataLossError(
            f"{name} of {uid!r} doesn't fit into 64 bits; delete the experience", subject=uid
        ) from None


def _add_fields(table: Entries, fields: Iterable[Form]) -> None:
    counts: dict[str, int] = {}
    for form in fields:
        name = form.name
        number = counts.get(name, 0)
        counts[name] = number + 1
        tail = f"/{name}" if number == 0 else f".{number}/{name}"
        num_elements = table.add_offsets(f"offsets{tail}", form.lengths)
        kind = "scalars" if form.is_scalar else "fields"
        shape = (num_elements, *form.trailing)
        table.add_parts(f"{kind}{tail}", form.dtype, shape, form.parts)
        if not all(form.present):
            table.add(f"present{tail}", "BOOL", (len(form.present),), bytes(form.present))

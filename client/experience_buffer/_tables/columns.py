"""From experiences to columns: a batch at a time, without making tensors or objects of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from experience_buffer._codec.item import Item
from experience_buffer._codec.payload import read
from experience_buffer._codec.safetensors import TensorView
from experience_buffer._tables import json_text
from experience_buffer._tables.lists import Lists, masked_means
from experience_buffer._tables.schema import (
    KINDS,
    LISTS,
    NAMES,
    arrow,
    arrow_schema,
    arrow_type,
)
from experience_buffer.eid import EID
from experience_buffer.errors import TrxpError
from experience_buffer.scanned import ScannedExperience

_LENGTH_OF_METADATA: Final = slice(5, 13)
_PLAIN: Final = tuple(name for name in NAMES if name not in LISTS)


class Columns:
    """Rows that become one `pyarrow.RecordBatch`. Not thread-safe.

    Args:
        with_payloads: Whether payloads are kept; without, the column holds nothing.
        with_tokens: Whether the columns of lists are filled.
    """

    def __init__(self, *, with_payloads: bool = True, with_tokens: bool = True) -> None:
        self._with_payloads = with_payloads
        self._with_tokens = with_tokens
        self._plain: dict[str, list[Any]] = {name: [] for name in _PLAIN}
        self._lists = {name: Lists(KINDS[name]) for name in LISTS}
        self._adders: list[tuple[str, Callable[[Any], None]]] = [
            (name, values.append) for name, values in self._plain.items()
        ]
        self.num_rows = 0
        self.num_bytes = 0
        """About as much as they take."""

    def add(self, row: ScannedExperience) -> str:
        """Add an experience.

        Returns:
            What is wrong with it: it wasn't added then. Empty where nothing is.
        """
        item: Item | None = None
        if row.problem:
            return row.problem
        if row.payload:
            try:
                items = read(row.payload)
            except TrxpError as error:
                return f"its payload is damaged: {error}"
            if len(items) != 1:
                return f"its payload holds {len(items)} experiences, not one"
            if isinstance(items[0], TrxpError):
                return f"its payload is damaged: {items[0]}"
            item = items[0]
        plain = self._facts(row)
        if item is not None:
            self._add_content(row, item, plain)
        else:
            for name in LISTS:
                self._lists[name].add(None)
            if not plain["uid"].count("/") < 4:
                self._add_parts(plain)
        for name, append in self._adders:
            append(plain.get(name))
        self.num_rows += 1
        self.num_bytes += 2 * len(row.payload) + 2 * len(row.advantages) + 500
        return ""

    def _facts(self, row: ScannedExperience) -> dict[str, Any]:
        summary = row.summary
        is_tombstone = summary.state == "tombstone"
        return {
            "uid": summary.uid,
            "group": summary.group,
            "tid": summary.tid,
            "rid": summary.rid,
            "reward": summary.reward,
            "model_version": summary.min_policy_version,
            "max_model_version": summary.max_policy_version,
            "staleness": summary.staleness,
            "times_sampled": row.times_sampled,
            "flags": list(row.flags),
            "state": summary.state or None,
            "tombstone": is_tombstone,
            "reason": summary.message or ("" if is_tombstone else None),
            "priority": summary.priority,
            "push_time": summary.push_time or None,
            "computation": row.details or None,
            "response_length": None if is_tombstone else summary.response_tokens,
            "payload": row.payload if self._with_payloads and row.payload else None,
        }

    def _add_parts(self, plain: dict[str, Any]) -> None:
        """The parts of an identity, of a row without payload: its keys say where they end."""
        uid, tid, rid = plain["uid"], plain["tid"], plain["rid"]
        run = rid[len(tid) + 1 :]
        cut = tid.rfind("/")
        batch = tid[:cut]
        rest = uid[len(batch) + 1 :]
        # A task may hold a slash, the run and the step don't; a suffix may hold any number.
        marker = f"/{run}/"
        end = next(
            (
                place
                for place in _places(rest, marker)
                if EID(batch, rest[:place], 0, 0, "").tid == tid
            ),
            -1,
        )
        if end < 0 or not run.lstrip("-").isdigit():
            return
        step, _, suffix = rest[end + len(marker) :].partition("/")
        if step.lstrip("-").isdigit():
            plain.update(
                batch=batch, task=rest[:end], run=_int(int(run)), step=_int(int(step)),
                suffix=suffix,
            )  # fmt: skip

    def _add_content(self, row: ScannedExperience, item: Item, plain: dict[str, Any]) -> None:
        meta, tensors, eid = item.meta, item.tensors, item.eid
        metadata_bytes = int.from_bytes(row.payload[_LENGTH_OF_METADATA], "little")

        def text(name: str, otherwise: Any = None) -> str | None:
            value = meta.get(name)
            return json_text.encoded(value or otherwise, metadata_bytes=metadata_bytes)

        tokens = tensors["tokens"]
        num_tokens, prompt_length = tokens.shape[0], meta.get("prompt_length", 1)
        prompt_length = min(max(prompt_length, 0), num_tokens)
        plain.update(
            batch=str(eid.batch),
            task=str(eid.task),
            run=_int(eid.run),
            step=_int(eid.step),
            suffix=eid.suffix,
            prompt=_text(meta.get("prompt_text")),
            completion=_text(meta.get("response_text")),
            messages=text("messages"),
            tools=text("tools"),
            chosen_messages=text("chosen_messages"),
            rejected_messages=text("rejected_messages"),
            truncated=meta.get("truncate_status"),
            prompt_length=prompt_length,
            response_length=num_tokens - prompt_length,
            metrics=text("metrics", {}),
            info=text("info", {}),
        )
        lists = self._lists
        lists["prompt_ids"].add(tokens, 0, prompt_length)
        lists["completion_ids"].add(tokens, prompt_length)
        lists["chosen_ids"].add(tensors.get("chosen"))
        lists["rejected_ids"].add(tensors.get("rejected"))
        lists["logprobs"].add(tensors.get("logprobs"))
        if row.details:
            lists["advantages"].add(_computed(row.advantages))
            lists["returns"].add(_computed(row.returns))
        else:
            lists["advantages"].add(tensors.get("advantages"))
            lists["returns"].add(tensors.get("returns"))
        mask = tensors.get("action_mask")
        if "masked" in row.flags:
            lists["completion_mask"].add_zeros(len(row.advantages) // 4)
        elif mask is None and "chosen" not in tensors:
            self._add_implied_mask(item, num_tokens - prompt_length)
        else:
            lists["completion_mask"].add(mask)

    def _add_implied_mask(self, item: Item, num_response_tokens: int) -> None:
        """That of a single turn: ones, or of a truncated prompt zeros; see `Experience`."""
        if item.meta.get("truncate_status") == "prompt_truncated":
            logprobs = item.tensors.get("logprobs")
            length = logprobs.shape[0] if logprobs is not None and logprobs.shape else 0
            self._lists["completion_mask"].add_zeros(length)
        else:
            ones = memoryview(b"\1" * num_response_tokens)
            view = TensorView("BOOL", (num_response_tokens,), ones)
            self._lists["completion_mask"].add(view)

    def batch(self) -> Any:
        """The rows as a `pyarrow.RecordBatch`."""
        pa = arrow()
        numbers = self._lists["advantages"].values()
        self._plain["advantage"] = masked_means(
            self._lists["advantages"], self._lists["completion_mask"], numbers
        )
        arrays = []
        for name in NAMES:
            kind = arrow_type(KINDS[name])
            if name in self._plain:
                arrays.append(_array(self._plain[name], kind))
            elif self._with_tokens:
                values = numbers if name == "advantages" else None
                arrays.append(self._lists[name].array(values))
            else:
                arrays.append(pa.nulls(self.num_rows, kind))
        return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema())


def record_batch(
    rows: Iterable[ScannedExperience], *, with_payloads: bool = True, with_tokens: bool = True
) -> tuple[Any, list[tuple[str, str]]]:
    """Rows as one `pyarrow.RecordBatch`.

    Returns:
        The batch, and the uid and reason of each experience that can't be a row.
    """
    columns = Columns(with_payloads=with_payloads, with_tokens=with_tokens)
    problems = []
    for row in rows:
        if problem := columns.add(row):
            problems.append((row.summary.uid, problem))
    return columns.batch(), problems


def _array(values: Sequence[Any], kind: Any) -> Any:
    pa = arrow()
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        # A text may hold half of a surrogate pair; the payload has it as it was.
        spoken = [v.encode(errors="replace").decode() if type(v) is str else v for v in values]
        return pa.array(spoken, kind)


def _computed(data: bytes) -> TensorView:
    return TensorView("F32", (len(data) // 4,), memoryview(data))


def _text(value: Any) -> str | None:
    return value if type(value) is str else None


def _int(value: int) -> int | None:
    return value if -(2**63) <= value < 2**63 else None


def _places(text: str, marker: str) -> Iterable[int]:
    place = text.find(marker)
    while place >= 0:
        yield place
        place = text.find(marker, place + 1)

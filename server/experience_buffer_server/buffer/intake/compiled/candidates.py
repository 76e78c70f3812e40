"""Candidates of payloads that the compiled reader knows, for a third of the time.

They are what `trxp.read` and `admission.admit` would make of the payload. Where something isn't
known here, or wrong, there are none, and those two have to look at it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import xxhash

from experience_buffer._codec.frame import head_of
from experience_buffer._codec.safetensors import ITEM_BYTES
from experience_buffer.eid import EID
from experience_buffer.trxp import DEFAULT_LIMITS, Limits, TensorView
from experience_buffer_server.advantages.arrays.values import WHOLE_DTYPES
from experience_buffer_server.advantages.experience_inputs import INPUT_BITS, Needs
from experience_buffer_server.advantages.plan.specs import COLUMNS
from experience_buffer_server.advantages.tensor_inputs import is_all_ones, unreadable
from experience_buffer_server.buffer.intake.admission import (
    check_priority,
    check_reward,
)
from experience_buffer_server.buffer.intake.compiled import workspace as ws
from experience_buffer_server.buffer.intake.compiled.scan import Scanner
from experience_buffer_server.buffer.intake.policy_versions import is_future, tensor_versions
from experience_buffer_server.buffer.state.entries import CUT_OFF, ORDINARY, Candidate, check_uid
from experience_buffer_server.runtime.memory_arena import Buffer
from experience_buffer_server.settings.buffer import BufferSettings
from experience_buffer_server.store.payload import (
    LARGE_PAYLOAD_BYTES,
    Payload,
    Scattered,
    checksum_of_digest,
)

_MARGIN_NODES: Final = 1024
"""What an experience written alone may take more than its part of a payload: keys of its own."""
_MAX_DEPTH: Final = 16
"""What is deeper is rare, and not worth knowing."""
_NO_VERSIONS: Final = (None, None)
_PLACES: Final = {name: place for place, name in enumerate(ws.TENSOR_NAMES)}
_TOKENS: Final = _PLACES["tokens"]
_MASK: Final = _PLACES["action_mask"]
_VERSIONS: Final = _PLACES["versions"]
_ROUTES_DTYPE: Final = ws.PLACES + 3 * _PLACES["routed_experts"]
_ROUTES: Final = frozenset({-1, *map(ws.DTYPES.index, WHOLE_DTYPES)})
"""Dtypes of routes, or none."""
_PLAIN_MASKS: Final = {-1, ws.DTYPES.index("BOOL")}
"""Dtypes of masks of which every element is 0 or 1."""
_pack_bits = struct.Struct("<q").pack
_unpack_float = struct.Struct("<d").unpack


class CompiledReader:
    """Reads payloads. Not thread-safe: what it works in is asked for once.

    Args:
        limits: Bounds on a payload.

    Raises:
        RuntimeError: It was compiled without checks of its indices.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._scanner = Scanner(
            ws.Bounds(
                max_metadata_bytes=limits.max_metadata_bytes,
                max_header_bytes=limits.max_header_bytes,
                max_tensors=limits.max_tensors,
                # Of what comes close `Item.encode` has to decide whether it can be read alone.
                max_nodes=min(limits.max_nodes, DEFAULT_LIMITS.max_nodes - _MARGIN_NODES),
                max_depth=min(limits.max_depth, _MAX_DEPTH),
            )
        )
        self._work = self._scanner.work
        self._facts = self._work[ws.FACTS :].reshape(ws.MAX_ITEMS, ws.NUM_FACTS)
        self._written = self._scanner.out.data

    def candidates(
        self,
        payload: memoryview,
        settings: BufferSettings,
        *,
        published: int | None,
        is_lent: bool = False,
    ) -> list[Candidate] | None:
        """Do what `admission.admit` does, for all experiences of a payload.

        Args:
            payload: One TRXP payload.
            settings: The buffer's settings.
            published: The published policy version, if there is one.
            is_lent: Whether others can change it meanwhile. What says how to read it is copied first,
                and so are the tensors' bytes before they are hashed.

        Returns:
            The candidates; None if the payload has to be read by `trxp.read`.
        """
        head = head_of(payload, self._limits) if is_lent else payload
        work, num_items = self._work, self._scanner.scan(head, len(payload))
        if not 0 < num_items <= self._limits.max_items:
            return None
        # Where neither refuses it nor makes it a tombstone, an experience may lack anything.
        may_lack = settings.on_missing_field == "wait" and settings.on_bad_reward != "tombstone"
        needs = settings.advantage.needs
        newest = published if settings.on_future_version == "refuse" else None
        may_lack_version = not settings.version_window
        spans = work[ws.SPANS_TABLE : work[ws.SPAN]].tolist()
        columns: Sequence[str] = () if needs is None else needs.columns
        found = []
        for fact in self._facts[:num_items].tolist():
            if fact[_ROUTES_DTYPE] not in _ROUTES or _unreadable(payload, fact, columns):
                return None
            candidate = self._candidate(
                head, payload, fact, spans, None if may_lack else needs, newest, is_lent=is_lent
            )
            if candidate is None or (candidate.min_version is None and not may_lack_version):
                return None
            found.append(candidate)
        return found

    def _candidate(
        self,
        head: memoryview,
        payload: memoryview,
        fact: list[int],
        spans: list[int],
        needs: Needs | None,
        newest: int | None,
        *,
        is_lent: bool,
    ) -> Candidate | None:
        # In the order of the columns.
        (
            begin, end, first_span, last_span,
            batch_kind, batch, batch_bytes, task_kind, task, task_bytes,
            run, step, suffix, suffix_bytes, reward_kind, reward_number,
            length, tensors, is_ordinary, min_version, max_version, priority_kind, priority_number,
            *_,
        ) = fact  # fmt: skip
        eid = EID(
            _text(head, batch, batch_bytes) if batch_kind == ws.TEXT else batch,
            _text(head, task, task_bytes) if task_kind == ws.TEXT else task,
            run,
            step,
            _text(head, suffix, suffix_bytes),
        )
        uid = eid.uid
        if check_uid(uid):
            return None
        reward = None
        if reward_kind != ws.NONE:
            number = _number(reward_kind, reward_number)
            if check_reward(number):
                return None
            reward = float(number)
        priority: float | str = 1.0
        if priority_kind != ws.ABSENT:
            priority = check_priority(_number(priority_kind, priority_number))
        versions: tuple[int | None, int | None] | str = _NO_VERSIONS
        if (found := _elements(payload, fact, _VERSIONS)) is not None:
            versions = tensor_versions(TensorView(found[0], (), found[1]))
        elif min_version >= 0:
            versions = min_version, max_version
        fields = _fields(tensors, reward is not None)
        if (
            isinstance(versions, str)
            or isinstance(priority, str)
            or (newest is not None and is_future(versions[1], newest))
            or (needs is not None and needs.missing(fields))
        ):
            return None
        pieces = [self._written[begin:end]]
        for span in range(first_span - ws.SPANS_TABLE, last_span - ws.SPANS_TABLE, 2):
            pieces.append(payload[spans[span] : spans[span + 1]])
        canonical, digest = _canonical(pieces, is_lent=is_lent)
        return Candidate(
            eid=eid,
            uid=uid,
            payload=canonical,
            digest=digest,
            reward=reward,
            response_tokens=length,
            min_version=versions[0],
            max_version=versions[1],
            fields=fields | (ORDINARY if is_ordinary else CUT_OFF),
            priority=priority,
            trains_all=_trains_all(payload, fact, length),
        )


def _elements(payload: memoryview, fact: list[int], name: int) -> tuple[str, memoryview] | None:
    """Dtype and elements of a tensor, by its place in `TENSOR_NAMES`; None where there is none."""
    dtype, begin, end = fact[ws.PLACES + 3 * name : ws.PLACES + 3 * name + 3]
    return None if dtype < 0 else (ws.DTYPES[dtype], payload[begin:end])


def _unreadable(payload: memoryview, fact: list[int], columns: Sequence[str]) -> str:
    """What `admission` would say of the mask, and of columns that the estimator reads; or empty."""
    tensors = {}
    for name in columns:
        found = _elements(payload, fact, _PLACES[name])
        if found is not None and len(found[1]):
            tensors[name] = found
    if not tensors and fact[ws.PLACES + 3 * _MASK] in _PLAIN_MASKS:
        return ""
    return unreadable(
        columns,
        mask=_elements(payload, fact, _MASK),
        tensors=tensors,
        lists={},
        is_truncated=bool(fact[ws.IS_CUT_OFF]),
    )


def _trains_all(payload: memoryview, fact: list[int], length: int) -> bool:
    """What `admission` says: all tokens but the first are the response, and none of them is masked."""
    dtype, begin, end = fact[ws.PLACES + 3 * _TOKENS : ws.PLACES + 3 * _TOKENS + 3]
    if end - begin != (length + 1) * ITEM_BYTES[ws.DTYPES[dtype]]:
        return False
    mask = _elements(payload, fact, _MASK)
    return mask is None or is_all_ones(*mask)


def _canonical(pieces: list[memoryview], *, is_lent: bool) -> tuple[Payload, bytes]:
    """The payload, and its digest; a large one isn't joined here, since the store does so.

    Unless it is lent: what is hashed must be what is stored, whatever its sender writes meanwhile.
    """
    if sum(map(len, pieces)) < LARGE_PAYLOAD_BYTES:
        payload = b"".join(pieces)
        return payload, xxhash.xxh3_128_digest(payload)
    # What the reader has written, it writes over with the next payload.
    parts: list[Buffer] = [b"".join(pieces)] if is_lent else [bytes(pieces[0]), *pieces[1:]]
    hashed = xxhash.xxh3_128()
    for part in parts:
        hashed.update(part)
    digest = hashed.digest()
    return Scattered(parts, checksum_of_digest(digest)), digest


def _text(head: memoryview, start: int, num_bytes: int) -> str:
    return str(head[start : start + num_bytes], "utf-8")


def _number(kind: int, number: int) -> float:
    """The number that is meant; it may be an integer."""
    if kind == ws.INT:
        return number
    value: float = _unpack_float(_pack_bits(number))[0]
    return value


@lru_cache(maxsize=4096)
def _fields(tensors: int, has_reward: bool) -> int:
    """What `experience_inputs.input_fields` says."""
    fields = INPUT_BITS["reward"] if has_reward else 0
    for place, name in enumerate(ws.TENSOR_NAMES):
        if tensors >> place & 1 and name in COLUMNS:
            fields |= INPUT_BITS[name]
    return fields

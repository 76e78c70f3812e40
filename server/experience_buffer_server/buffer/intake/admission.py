"""Admission: from the items of a payload to candidates for storage, or the reasons against them.

No store, no groups, no clock. What is checked here concerns one experience alone. Payloads are read by
compiled code where that is there and knows them, else checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import xxhash

from experience_buffer import trxp
from experience_buffer._codec.codec_error import shown
from experience_buffer.eid import EID
from experience_buffer.errors import TrxpError
from experience_buffer.trxp import Item, Limits, TensorView
from experience_buffer_server.advantages.arrays.values import WHOLE_DTYPES
from experience_buffer_server.advantages.experience_inputs import (
    BOOTSTRAPPING,
    Needs,
    column_tensor,
    explain_missing,
    fits_float32,
    info_of,
    input_fields,
    input_problem,
    response_tokens,
)
from experience_buffer_server.advantages.tensor_inputs import (
    is_all_ones,
    mask_problem,
    unreadable,
)
from experience_buffer_server.buffer.intake.policy_versions import (
    explain_unversioned,
    is_begun_by_nobody,
    is_future,
    policy_versions,
)
from experience_buffer_server.buffer.state.entries import (
    CUT_OFF,
    MAX_NOTE,
    ORDINARY,
    Candidate,
    Reason,
    Refusal,
    check_uid,
)
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.settings.buffer import BufferSettings
from experience_buffer_server.store.interface import MAX_PRIORITY, OTHER_DIGEST

RESPONSE_FIELDS = (
    "action_mask",
    "logprobs",
    "token_level_reward",
    "advantages",
    "returns",
    "teacher_logprobs",
    "ref_logprobs",
    "versions",
)
"""Tensors with one value per response token; `logprobs` may also be empty."""
_VECTORS = ("tokens", "chosen", "rejected", *RESPONSE_FIELDS)
"""Tensors of one dimension."""

_STATUSES = ("prompt_truncated", BOOTSTRAPPING)
"""What may be said to be cut off."""
_LENGTH_CHECKED = frozenset({*RESPONSE_FIELDS, "values"})


def admit(
    item: Item, settings: BufferSettings, *, published: int | None = None
) -> Candidate | Refusal:
    """Check one experience and compute what the index needs of it.

    Args:
        item: The experience.
        settings: The buffer's settings.
        published: The published policy version, if there is one.
    """
    uid = item.uid
    if problem := check_uid(uid):
        # The answer repeats no text that would be too long for a key.
        return Refusal(Reason.INVALID, problem)
    problem = _check_numbers(item.eid) or _check_shapes(item)
    if problem:
        return Refusal(Reason.INVALID, problem, uid)
    reward = item.meta.get("reward")
    problem = check_reward(reward)
    if problem and settings.on_bad_reward == "tombstone":
        return entomb(item.eid, problem)
    if problem:
        return Refusal(Reason.INVALID, problem, uid)
    length = response_tokens(item)
    fields = input_fields(item) | _looks(item, length)
    unusable = _check_inputs(item, fields, settings)
    if unusable is not None:
        return unusable
    versions = policy_versions(item)
    if isinstance(versions, str):
        return Refusal(Reason.INVALID, versions, uid)
    if (window := settings.version_window) and (versions[0] is None or is_begun_by_nobody(item)):
        return Refusal(Reason.MISSING_FIELD, explain_unversioned(item, window), uid)
    if settings.on_future_version == "refuse" and is_future(versions[1], published):
        return Refusal(
            Reason.FUTURE_VERSION,
            f"policy version {versions[1]} is newer than the published version {published}; "
            "publish it first, or generate with the published one",
            uid,
        )
    priority = check_priority(info_of(item).get("priority", 1.0))
    if isinstance(priority, str):
        return Refusal(Reason.INVALID, priority, uid)
    try:
        payload = item.encode()
        other = item.orderless()
    except TrxpError as error:
        return Refusal(Reason.INVALID, str(error), uid)
    return Candidate(
        eid=item.eid,
        uid=uid,
        payload=payload,
        digest=xxhash.xxh3_128_digest(payload if other is None else other),
        reward=None if reward is None else float(reward),
        response_tokens=length,
        min_version=versions[0],
        max_version=versions[1],
        # Of a set each process has an order of its own, and so of the payload that is pushed again.
        fields=fields if other is None else fields | OTHER_DIGEST,
        priority=priority,
        trains_all=_trains_all(item, length),
    )


def _trains_all(item: Item, length: int) -> bool:
    """Whether all tokens but the first are the response, and none of them is masked."""
    mask = item.tensors.get("action_mask")
    if "chosen" in item.tensors or not 0 < length == item.tensors["tokens"].shape[0] - 1:
        return False
    return mask is None or is_all_ones(mask.dtype, mask.data)


def _looks(item: Item, length: int) -> int:
    """Bits: what is true of nearly all, so that the record says what a packed batch repeats of metadata."""
    status = item.meta.get("truncate_status")
    if status is not None or "chosen" in item.tensors:
        return CUT_OFF if status == BOOTSTRAPPING else 0
    rest = item.tensors["tokens"].shape[0] - item.meta.get("prompt_length", 1)
    return ORDINARY if length == rest else 0


def _check_inputs(item: Item, fields: int, settings: BufferSettings) -> Candidate | Refusal | None:
    """What becomes of an experience that the buffer's estimator can't use; None if it can."""
    needs, estimator = settings.advantage.needs, settings.advantage.estimator
    if needs is None:
        # Nobody computes with it here, but a mask that isn't one can't be laid out either.
        mask = item.tensors.get("action_mask")
        problem = "" if mask is None else mask_problem(mask.dtype, mask.data)
        return Refusal(Reason.INVALID, problem, item.uid) if problem else None
    if "chosen" in item.tensors:
        problem = "a dpo experience has no response tokens that could have advantages"
        return Refusal(
            Reason.MISSING_FIELD, f"{problem}; push it to a buffer without estimator", item.uid
        )
    if problem := input_problem(item, needs.read) or _unreadable(item, needs):
        return Refusal(Reason.INVALID, problem, item.uid)
    missing = needs.missing(fields)
    if not missing:
        return None
    problem = explain_missing(missing, estimator, num_tokens=response_tokens(item))
    lacks_reward = all("reward" in need.split("|") for need in missing)
    if settings.on_bad_reward == "tombstone" and lacks_reward:
        return entomb(item.eid, problem)
    if settings.on_missing_field == "refuse":
        return Refusal(Reason.MISSING_FIELD, problem, item.uid)
    return None


def _unreadable(item: Item, needs: Needs) -> str:
    """What the estimator can't read of the numbers in tensors and lists; empty when nothing."""
    found = {name: column_tensor(item, name) for name in needs.columns}
    mask = item.tensors.get("action_mask")
    return unreadable(
        needs.columns,
        mask=None if mask is None else (mask.dtype, mask.data),
        tensors={n: (view.dtype, view.data) for n, view in found.items() if view is not None},
        lists={n: v for n in needs.columns if (v := info_of(item).get(n)) is not None},
        is_truncated=item.meta.get("truncate_status") == BOOTSTRAPPING,
    )


def entomb(eid: EID, reason: str) -> Candidate | Refusal:
    """The candidate for a failed rollout."""
    problem = check_uid(eid.uid)
    if problem:
        return Refusal(Reason.INVALID, problem)
    return Candidate(
        eid=eid,
        uid=eid.uid,
        payload=b"",
        digest=xxhash.xxh3_128_digest(b"tombstone"),
        reward=None,
        response_tokens=0,
        min_version=None,
        max_version=None,
        tombstone=True,
        note=reason[:MAX_NOTE],
    )


def _check_numbers(eid: EID) -> str:
    if -(2**63) <= eid.run < 2**63 and -(2**63) <= eid.step < 2**63:
        return ""
    for name, number in (("run", eid.run), ("step", eid.step)):
        if not -(2**63) <= number < 2**63:
            return f"eid: {name} is {number}; it must fit into 64 bits"
    return ""


def _check_shapes(item: Item) -> str:
    """Mismatched lengths, or routes or a status that are none, in words; empty when all agree."""
    tensors = item.tensors
    tokens = tensors.get("tokens")
    if tokens is None:
        return "tensor tokens is missing; every experience needs its token ids"
    if {len(tensor.shape) for tensor in tensors.values()} != {1}:
        for name in _VECTORS:
            if name in tensors and len(shape := tensors[name].shape) != 1:
                return f"tensor {name} has shape {list(shape)}; one dimension is expected"
    prompt_length = item.meta.get("prompt_length", 1)
    if isinstance(prompt_length, bool) or not isinstance(prompt_length, int) or prompt_length < 0:
        return f"prompt_length is {shown(prompt_length)}; a number of tokens >= 0 is expected"
    if prompt_length > tokens.shape[0]:
        return f"prompt_length {prompt_length} exceeds the {tokens.shape[0]} tokens"
    status = item.meta.get("truncate_status")
    if status and status not in _STATUSES:
        known = " or ".join(map(repr, _STATUSES))
        return f"truncate_status is {shown(status)}; None, {known} is expected"
    routes = tensors.get("routed_experts")
    if routes is not None and (not routes.shape or routes.shape[0] > tokens.shape[0]):
        return (
            f"routed_experts has shape {list(routes.shape)} for {tokens.shape[0]} tokens; send a row "
            "for each token but the last"
        )
    if routes is not None and routes.dtype not in WHOLE_DTYPES:
        return (
            f"routed_experts has dtype {routes.dtype}; experts are whole numbers: send one of "
            f"{', '.join(WHOLE_DTYPES)}"
        )
    if "chosen" in tensors or "rejected" in tensors:
        return ""
    length = response_tokens(item)
    rest = tokens.shape[0] - prompt_length
    if length != rest and item.meta.get("truncate_status") != "prompt_truncated":
        return (
            f"action_mask has {length} values but {tokens.shape[0]} tokens with prompt_length "
            f"{prompt_length} leave a response of {rest}"
        )
    return _check_lengths(tensors, length)


def _check_lengths(tensors: Mapping[str, TensorView], length: int) -> str:
    expected = (length,)
    odd = [name for name, tensor in tensors.items() if tensor.shape != expected]
    if _LENGTH_CHECKED.isdisjoint(odd):
        return ""
    for name in RESPONSE_FIELDS:
        tensor = tensors.get(name)
        if tensor is None or tensor.shape[0] == length:
            continue
        if name == "logprobs" and tensor.shape[0] == 0:
            continue
        return f"{name} has {tensor.shape[0]} values but the response has {length} tokens"
    values = tensors.get("values")
    if values is not None and values.shape not in ((length,), (length + 1,)):
        return (
            f"values has shape {list(values.shape)} but the response has {length} tokens; "
            f"send {length}, or {length + 1} with the bootstrap value last"
        )
    return ""


def check_reward(reward: Any) -> str:
    """What keeps a reward from being one; empty when nothing does."""
    if reward is None:
        return ""
    if not isinstance(reward, int | float):
        return f"reward is a {type(reward).__name__}; send float(reward)"
    if fits_float32(reward):
        return ""
    if isinstance(reward, float):
        problem = f"{reward!r}, beyond float32" if math.isfinite(reward) else repr(reward)
    else:
        problem = f"an integer of {reward.bit_length()} bits, beyond float32"
    return f"reward is {problem}; send a finite number or a tombstone"


def check_priority(value: Any) -> float | str:
    """The priority that a value of `info` is, or what is wrong with it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        return f"info: priority is {shown(value)}; a finite number of at least 0 is expected"
    # An integer may be beyond all floats.
    return float(min(value, MAX_PRIORITY))


class Compiled(Protocol):
    """A reader that knows most payloads; see `candidates`."""

    def candidates(
        self,
        payload: memoryview,
        settings: BufferSettings,
        *,
        published: int | None,
        is_lent: bool,
    ) -> list[Candidate] | None:
        """The payload's candidates; None if it has to be read by the checked reader."""


class PayloadReader:
    """Reads pushed payloads. Not thread-safe.

    Args:
        limits: Bounds on a payload.
        metrics: Counts them.
    """

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self.limits = limits
        self.compiled: Compiled | None = None
        """Asked first, once it is there."""
        self._metrics = metrics

    def read(
        self,
        payload: bytes | memoryview,
        settings: BufferSettings,
        *,
        published: int | None,
        is_lent: bool = False,
    ) -> tuple[int, Iterator[Candidate | Refusal]]:
        """Read a payload.

        Args:
            payload: One TRXP payload.
            settings: Of the buffer that it was pushed to.
            published: The published policy version, if there is one.
            is_lent: Whether the sender can still change it. Nothing is read twice then, or relied on,
                that wasn't copied first.

        Returns:
            How many experiences it holds, and for each a candidate, or the reason against it.

        Raises:
            TrxpError: The payload as a whole can't be read.
        """
        if self.compiled is not None:
            known = self.compiled.candidates(
                memoryview(payload), settings, published=published, is_lent=is_lent
            )
            if known is not None:
                self._metrics.payload_read("compiled")
                return len(known), iter(known)
        items = trxp.read(bytes(payload) if is_lent else payload, limits=self.limits)
        self._metrics.payload_read("checked")
        return len(items), _admitted(items, settings, published)


def _admitted(
    items: Sequence[Item | TrxpError], settings: BufferSettings, published: int | None
) -> Iterator[Candidate | Refusal]:
    for item in items:
        if isinstance(item, TrxpError):
            yield Refusal(Reason.INVALID, str(item))
        else:
            yield admit(item, settings, published=published)

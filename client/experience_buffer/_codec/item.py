"""One experience of a payload, and the checks that let a reader rely on its shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

from experience_buffer._codec import safetensors
from experience_buffer._codec.codec_error import shown, trxp_error
from experience_buffer._codec.frame import KEYS, frame_pieces
from experience_buffer._codec.orderless import orderless
from experience_buffer._codec.plain_values import Normaliser
from experience_buffer._codec.safetensors import TensorView
from experience_buffer._show import line, short
from experience_buffer.eid import EID
from experience_buffer.errors import TrxpError

TENSOR_FIELDS: Final = (
    "tokens",
    "logprobs",
    "token_level_reward",
    "advantages",
    "returns",
    "action_mask",
    "chosen",
    "rejected",
    "teacher_logprobs",
    "routed_experts",
)
"""Tensors that `Experience` has attributes for; others but multi-modal inputs are `extra`."""
META_FIELDS: Final = (
    "eid",
    "reward",
    "truncate_status",
    "info",
    "metrics",
    "prompt_length",
    "response_text",
    "prompt_text",
    "messages",
    "tools",
    "chosen_messages",
    "rejected_messages",
)
"""Metadata that is an attribute of `Experience` as it is (`eid`: its dict), in wire order."""
MULTI_MODAL_PREFIX: Final = "multi_modal_inputs:"
DTYPE_NAMES: Final = frozenset(
    {
        "torch.bfloat16",
        "torch.bool",
        "torch.complex32",
        "torch.complex64",
        "torch.complex128",
        "torch.float16",
        "torch.float32",
        "torch.float64",
        "torch.float8_e4m3fn",
        "torch.float8_e4m3fnuz",
        "torch.float8_e5m2",
        "torch.float8_e5m2fnuz",
        "torch.float8_e8m0fnu",
        "torch.int8",
        "torch.int16",
        "torch.int32",
        "torch.int64",
        "torch.uint8",
        "torch.uint16",
        "torch.uint32",
        "torch.uint64",
    }
)
"""Texts a custom field's `data_type` may have; the only attributes of torch ever looked up."""

_KEYS: Final = (*META_FIELDS, "custom_fields", "multi_modal_input_keys")
_EID_KEYS: Final = {"batch", "task", "run", "step", "suffix"}
_CUSTOM_KEYS: Final = {"source_field", "destination_field", "data_type"}
_MAX_EID_CHARS: Final = 4096
"""Size of batch, task and suffix each: uids are made of them, and shared texts would multiply."""
_NO_IMAGES: Final = frozenset(TENSOR_FIELDS)
_NONE: Final = type(None)
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "reward": (_NONE, float, int, bool),
    "truncate_status": (_NONE, str),
    "info": (_NONE, dict),
    "metrics": (_NONE, dict),
    "prompt_length": (int,),
    "custom_fields": (_NONE, list),
    "multi_modal_input_keys": (_NONE, list),
}
_SOUND_TYPES: Final = frozenset(product(*_TYPES.values()))
"""All that the values of these may have together."""


@dataclass(slots=True, eq=False)
class Item:
    """One experience as it lies in a payload: identity, metadata, and views of its tensors.

    Attributes:
        index: Its place in the payload.
        eid: Its identity, checked: all five parts are there, and its uid is valid Unicode.
        meta: Its metadata as on the wire. Parts may be shared with other items: not to be changed.
        tensors: Its tensors by field; a multi-modal input is `"multi_modal_inputs:key"`.
        keys: The metadata's outermost keys: the very objects that the item's own texts may share.
        is_suspect: Whether the metadata may hold sets, or share containers.
    """

    index: int
    eid: EID
    meta: dict[str, Any]
    tensors: dict[str, TensorView]
    keys: tuple[str, ...] = field(default=KEYS, repr=False)
    is_suspect: bool = field(default=False, repr=False)

    def __repr__(self) -> str:
        return line(f"<Item {self.uid}: {short(self.tensors)}>")

    @property
    def uid(self) -> str:
        """Name of the experience."""
        return self.eid.uid

    def encode(self) -> bytes:
        """Write the payload of this experience alone, as its producer would have written it.

        The metadata is written anew, so whatever reads it unpickles nothing a sender made; the
        tensors are copied bit for bit.

        Raises:
            TrxpError: Written so it couldn't be read: it has more values than readers take.
        """
        return self._encoded(self.meta)

    def orderless(self) -> bytes | None:
        """Write what is the same for equal experiences, where the payload isn't: with sets in order.

        Returns:
            Bytes to compare, of no format; None where no set is in the metadata.
        """
        meta = orderless(self.meta) if self.is_suspect else self.meta
        return None if meta is self.meta else b"orderless " + self._encoded(meta)

    def _encoded(self, meta: dict[str, Any]) -> bytes:
        fields, views = tuple(self.tensors), list(self.tensors.values())
        section = safetensors.write_fields(fields, views, prefix="0:")
        return b"".join(frame_pieces([meta], section, keys=self.keys))


class _ItemError(Exception):
    """What is wrong with an item, and at which of its fields."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason


def read_item(
    index: int,
    meta: Any,
    tensors: dict[str, TensorView],
    *,
    keys: tuple[str, ...],
    normaliser: Normaliser | None,
) -> Item | TrxpError:
    """Check one experience.

    Args:
        index: Its place in the payload.
        meta: Its metadata, as read.
        tensors: Its tensors by field.
        keys: The very objects that are the metadata's own keys.
        normaliser: Given if the metadata is suspect.

    Returns:
        The item, or what is wrong with it.

    Raises:
        TrxpError: The metadata of all items together is too large.
    """
    try:
        if normaliser is not None:
            meta = normaliser.normal(meta, index=index)
        eid = _checked_meta(meta, tensors)
        return Item(index, eid, meta, tensors, keys, is_suspect=normaliser is not None)
    except _ItemError as error:
        return trxp_error(error.reason, where=f"items[{index}]{error.path}", item=index)
    except TrxpError as error:
        if error.item is None:
            raise
        return error


def _checked_meta(meta: Any, tensors: dict[str, TensorView]) -> EID:
    if type(meta) is not dict:
        raise _ItemError("", f"a {type(meta).__name__}, not a dict")
    if tuple(meta) != _KEYS and not all(type(key) is str for key in meta):
        raise _ItemError("", "a key isn't text")
    if tuple(map(type, map(meta.get, _TYPES))) not in _SOUND_TYPES:
        _check_types(meta)
    if meta.get("custom_fields"):
        _check_custom_fields(meta["custom_fields"])
    _check_multi_modal(meta.get("multi_modal_input_keys") or [], tensors)
    _check_constructible(meta, tensors)
    return _checked_eid(meta.get("eid"))


def _check_types(meta: dict[str, Any]) -> None:
    for name, types in _TYPES.items():
        if name in meta and type(meta[name]) not in types:
            expected = " or ".join(kind.__name__ for kind in types if kind is not _NONE)
            raise _ItemError(f".{name}", f"a {type(meta[name]).__name__}; send {expected}")


def _checked_eid(parts: Any) -> EID:
    if type(parts) is not dict or parts.keys() != _EID_KEYS:
        raise _ItemError(".eid", f"not a dict of {', '.join(sorted(_EID_KEYS))}; send EID(...)")
    batch, task, run = parts["batch"], parts["task"], parts["run"]
    step, suffix = parts["step"], parts["suffix"]
    if type(batch) not in (int, str) or type(task) not in (int, str):
        raise _ItemError(".eid", "batch and task are int or str")
    if type(run) is not int or type(step) is not int or type(suffix) is not str:
        raise _ItemError(".eid", "run and step are int, suffix is str")
    is_ascii = suffix.isascii()
    if len(suffix) > _MAX_EID_CHARS or type(batch) is str or type(task) is str:
        for name, part in (("batch", batch), ("task", task), ("suffix", suffix)):
            if type(part) is str:
                is_ascii = is_ascii and part.isascii()
                if len(part) > _MAX_EID_CHARS:
                    reason = f"{len(part)} characters exceed {_MAX_EID_CHARS}"
                    raise _ItemError(f".eid.{name}", reason)
    eid = EID(batch, task, run, step, suffix)
    if not is_ascii:
        try:
            eid.uid.encode()
        except UnicodeEncodeError:
            raise _ItemError(".eid", "a text holds half of a surrogate pair") from None
    return eid


def _check_custom_fields(fields: list[Any]) -> None:
    for position, entry in enumerate(fields):
        path = f".custom_fields[{position}]"
        if type(entry) is not dict or entry.keys() != _CUSTOM_KEYS:
            raise _ItemError(path, "not a dict of source_field, destination_field and data_type")
        if not all(type(value) is str for value in entry.values()):
            raise _ItemError(path, "a value isn't text")
        if entry["data_type"] not in DTYPE_NAMES:
            raise _ItemError(f"{path}.data_type", f"{shown(entry['data_type'])} is no dtype")


def _check_multi_modal(keys: list[Any], tensors: dict[str, TensorView]) -> None:
    if not keys and _NO_IMAGES.issuperset(tensors):
        return
    images = [name for name in tensors if name.startswith(MULTI_MODAL_PREFIX)]
    if not keys and not images:
        return
    if not all(type(key) in (str, int) for key in keys):
        raise _ItemError(".multi_modal_input_keys", "a key isn't text")
    if any(type(key) is int and key.bit_length() > 64 for key in keys):
        raise _ItemError(".multi_modal_input_keys", "a key is an integer of more than 64 bits")
    # One long text may be named many times: nothing is made of it.
    named = {str(key) for key in keys}
    start = len(MULTI_MODAL_PREFIX)
    present = {name[start:] for name in images}
    if named != present:
        first = shown(MULTI_MODAL_PREFIX + min(named ^ present)[:_MAX_EID_CHARS])
        raise _ItemError(
            ".multi_modal_input_keys",
            f"keys and tensors disagree about {len(named ^ present)}, such as {first}",
        )


def _check_constructible(meta: dict[str, Any], tensors: dict[str, TensorView]) -> None:
    """Check what the constructor of an experience would otherwise refuse at the trainer's."""
    tokens = tensors.get("tokens")
    if tokens is None or not tokens.shape:
        raise _ItemError(".tokens", "missing or a scalar; send the token ids, shape [seq]")
    if "action_mask" in tensors or ("chosen" in tensors and "rejected" in tensors):
        return
    prompt_length = meta.get("prompt_length", 1)
    if prompt_length <= 0:
        raise _ItemError(".prompt_length", f"{prompt_length}; without action_mask it is positive")
    if meta.get("truncate_status") != "prompt_truncated":
        if tokens.shape[0] <= prompt_length:
            raise _ItemError(
                ".tokens", f"{tokens.shape[0]} tokens, but a prompt of {prompt_length}"
            )
    elif "logprobs" not in tensors or not tensors["logprobs"].shape:
        raise _ItemError(".logprobs", "missing; a truncated prompt has logprobs or action_mask")


def share_keys(metas: list[Any], *, keys: tuple[str, ...], texts: dict[str, str]) -> None:
    """Let equal dict keys be one object, across all calls with the same `texts`.

    What was one object within a payload stays one: a key that is also used as a value, say.
    Changes the dicts and lists in place; tuples and sets keep the texts they have.

    Args:
        metas: Metadata of one payload's items.
        keys: The outermost keys of that payload.
        texts: The one object for each key so far.
    """
    shared = {id(key): texts.setdefault(key, key) for key in keys}
    containers: dict[int, Any] = {}
    pending: list[Any] = [metas]
    while pending:
        container = pending.pop()
        if id(container) in containers:
            continue
        containers[id(container)] = container
        values = container
        if type(container) is dict:
            values = container.values()
            shared.update((id(k), texts.setdefault(k, k)) for k in container if type(k) is str)
        pending += [value for value in values if type(value) in (dict, list)]
    for container in containers.values():
        if type(container) is dict:
            pairs = [(shared.get(id(k), k), shared.get(id(v), v)) for k, v in container.items()]
            container.clear()
            container.update(pairs)
        else:
            container[:] = [shared.get(id(value), value) for value in container]
